"""How a kind of KV connector names the two legs of a handoff to its engines. One small class each.

`NixlPull` is the one that is built. The interface was cut so that two others fit:

NIXL push. `concurrent`: both legs go out at once, and the prefill worker writes into the decode worker's blocks. The
decode leg has no answer to wait for (`answer` is None); its params name the prefill engine (`remote_engine_id`, which
must be configured there, `remote_host`, `remote_port`, `tp_size`, `pp_size`), `remote_request_id` = `Legs.request_id`
and `Legs.transfer_id`, which the prefill params carry too. A transfer id is for one dispatch: every try makes new
`Legs`.

Mooncake. `concurrent` too. Both params carry `transfer_id`; the decode's add `remote_bootstrap_addr` and the
`remote_engine_id` which the prefill worker's bootstrap server (GET /query, port 8998) tells for each rank. A connector
object is made with such tables, by worker name; the object is asked, it does no I/O. With `concurrent` a prefill leg
that fails must end the decode leg, which would wait for it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any, Protocol

import msgspec

from gateway.handoff.answer import BadParams, PrefillAnswer, check_params


class Legs(msgspec.Struct, frozen=True, kw_only=True):
    """One try. The side channel of the prefill worker may be at `prefill_hosts` and `prefill_ports` (None: any port);
    `block_size` is in tokens; `prompt_tokens` is None where only the answer can tell.
    """

    request_id: str
    prefill_worker: str
    decode_worker: str
    prefill_hosts: Collection[str]
    prefill_ports: Collection[int] | None
    block_size: int
    prompt_tokens: int | None
    transfer_id: str

    @classmethod
    def new(
        cls,
        *,
        request_id: str,
        prefill_worker: str,
        decode_worker: str,
        prefill_hosts: Collection[str],
        prefill_ports: Collection[int] | None,
        block_size: int,
        prompt_tokens: int | None = None,
    ) -> Legs:
        """With a transfer id that was never used."""
        return cls(
            request_id=request_id,
            prefill_worker=prefill_worker,
            decode_worker=decode_worker,
            prefill_hosts=prefill_hosts,
            prefill_ports=prefill_ports,
            block_size=block_size,
            prompt_tokens=prompt_tokens,
            transfer_id=f"xfer-{uuid.uuid4()}",
        )


class Connector(Protocol):
    @property
    def name(self) -> str:
        """As in `pd.connector`."""
        ...

    @property
    def concurrent(self) -> bool:
        """Whether both legs go out at once; else the decode leg waits for the prefill's answer."""
        ...

    def prefill_params(self, legs: Legs) -> dict[str, Any]: ...

    def decode_params(self, legs: Legs, answer: PrefillAnswer | None) -> dict[str, Any]:
        """For one decode request. Raises BadParams when no engine may see what the answer brought."""
        ...


class NixlPull:
    """vLLM's NixlConnector: the decode worker reads the blocks that the prefill worker's answer names."""

    name = "nixl"
    concurrent = False

    def prefill_params(self, legs: Legs) -> dict[str, Any]:
        """As llm-d's sidecar and vLLM's own proxy send them."""
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode_params(self, legs: Legs, answer: PrefillAnswer | None) -> dict[str, Any]:
        """The answer's own, byte for byte."""
        if answer is None or answer.params is None or answer.raw_params is None:
            raise BadParams("there are no transfer params")
        prompt_tokens = answer.prompt_tokens if answer.prompt_tokens is not None else legs.prompt_tokens
        if prompt_tokens is None:
            raise BadParams("the answer does not tell how long the prompt is")
        check_params(
            answer.params,
            prompt_tokens=prompt_tokens,
            block_size=legs.block_size,
            hosts=legs.prefill_hosts,
            ports=legs.prefill_ports,
        )
        return dict(answer.raw_params)
