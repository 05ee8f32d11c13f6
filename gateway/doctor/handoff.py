"""A random prompt computed by a prefill worker and answered by a decode worker, as the gateway would have it done.

Nothing tells better whether two engines pair: the prefill's answer says where its side channel is, the decode worker
connects there, compares and fetches. The prompt is the probe's, some hundred random token ids with one token of output.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.doctor.catalogue import finding
from gateway.doctor.fetch import Answer, Fault, Http
from gateway.doctor.findings import Finding
from gateway.doctor.identity import Identity
from gateway.doctor.probe import error_text, probe_length, random_ids
from gateway.engine.transfers import NixlCounts, parse_nixl
from gateway.handoff.answer import BadAnswer, BadParams, PrefillAnswer, read_answer
from gateway.handoff.connector import Legs, NixlPull

MOST_PAIRS = 64
_PATH = "/v1/completions"
_PATIENCE = 3.0
"""A decode engine gives up on a peer it does not find after 5 s, which is our time-out for anything else."""
_COUNTED_S = 2.0
_POLL_S = 0.05
_CONNECTOR = NixlPull()


class Handoffs:
    """`https`: by URL."""

    def __init__(self, https: Mapping[str, Http], rng: random.Random) -> None:
        self.found: list[Finding] = []
        self._https = https
        self._rng = rng
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One handoff at a time for each decode worker, so that its counts can be read."""

    async def run(self, pairs: Sequence[tuple[Identity, Identity]]) -> None:
        """Try each pair, those of one prefill worker one after the other."""
        chosen = spread(pairs, MOST_PAIRS)
        if len(chosen) < len(pairs):
            said = f"{len(chosen)} of {len(pairs)} pairs were tried"
            shown = {"tried": len(chosen), "pairs": len(pairs)}
            self.found.append(finding("handoff-skipped", "", said, evidence=shown))
        by_prefill: defaultdict[str, list[tuple[Identity, Identity]]] = defaultdict(list)
        for pair in chosen:
            by_prefill[pair[0].url].append(pair)
        await asyncio.gather(*map(self._all_of, by_prefill.values()))

    async def _all_of(self, pairs: Sequence[tuple[Identity, Identity]]) -> None:
        for prefill, decode in pairs:
            if not await self._one(prefill, decode):
                return

    async def _one(self, prefill: Identity, decode: Identity) -> bool:
        """Whether its prefills are any good."""
        ids = self._ids(prefill, decode)
        if ids is None:
            return True
        async with self._turns[decode.url]:
            got = await self._prefill(prefill, ids)
            if isinstance(got, Finding):
                self.found.append(got)
                return False
            self.found.append(await self._decode(prefill, decode, ids, got))
        return True

    def _ids(self, prefill: Identity, decode: Identity) -> list[int] | None:
        size = None if prefill.stats is None else prefill.stats.block_size
        lengths = [me.models.max_model_len for me in (prefill, decode) if me.models and me.models.max_model_len]
        n_tokens = probe_length(size, min(lengths, default=None))
        return None if n_tokens is None else random_ids(self._rng, n_tokens)

    async def _prefill(self, me: Identity, ids: list[int]) -> dict[str, Any] | Finding:
        """The transfer params of a prefill, checked as the gateway does but for the address, which is judged apart."""
        legs = _legs(me, ids, "")
        body = _body(me, ids, _CONNECTOR.prefill_params(legs))
        answer = await self._https[me.url].post(_PATH, body)
        if isinstance(answer, Fault) or answer.status != 200:
            said = f"a prefill for another worker failed: {_why(answer)}"
            return finding("handoff-failed", me.url, said)
        try:
            read = read_answer(answer.body, "completions")
            if read.params is None:
                said = "it computed a prompt for another worker, and named no blocks"
                return finding("handoff-no-params", me.url, said)
            params = _checked(me, ids, read)
        except (BadAnswer, BadParams) as error:
            return finding("handoff-bad-params", me.url, f"the gateway refuses what a prefill told: {error}")
        me.announced = str(read.params["remote_host"]), int(read.params["remote_port"])
        return params

    async def _decode(self, prefill: Identity, decode: Identity, ids: list[int], params: dict[str, Any]) -> Finding:
        http = self._https[decode.url]
        before = await self._counts(http)
        answer = await http.post(_PATH, _body(decode, ids, params), timeout_s=_PATIENCE * http.timeout_s)
        shown: dict[str, Any] = {"prefill": prefill.url, "decode": decode.url}
        if isinstance(answer, Fault) or answer.status != 200:
            said = f"{decode.url} could not answer a prompt that {prefill.url} had computed: {_why(answer)}"
            return finding("handoff-failed", "", said, evidence=shown)
        moved = await self._moved(http, before)
        if moved.failed:
            said = f"{decode.url} computed a prompt itself that it should have fetched from {prefill.url}"
            return finding("handoff-failed", "", said, evidence={**shown, "failed": moved.failed})
        said = f"a prompt of {len(ids)} tokens went from {prefill.url} to {decode.url}"
        if not moved.transfers:
            return finding("handoff-unseen", "", f"{said}, and no transfer was counted", evidence=shown)
        shown |= {"bytes": moved.n_bytes, "ms": round(moved.seconds * 1e3, 2)}
        said += f": {moved.n_bytes / 1e6:.3g} MB in {moved.seconds * 1e3:.1f} ms"
        return finding("handoff", "", said, evidence=shown)

    async def _moved(self, http: Http, before: NixlCounts | None) -> NixlCounts:
        """What was fetched since, once the engine has counted it, which it does with one of its next steps."""
        deadline_s = time.monotonic() + _COUNTED_S
        while before is not None:
            now = await self._counts(http)
            moved = NixlCounts() if now is None else now.since(before)
            if moved.transfers or moved.failed or time.monotonic() >= deadline_s:
                return moved
            await asyncio.sleep(_POLL_S)
        return NixlCounts()

    async def _counts(self, http: Http) -> NixlCounts | None:
        answer = await http.get("/metrics")
        return parse_nixl(answer.body.decode(errors="replace")) if isinstance(answer, Answer) else None


def _legs(me: Identity, ids: Sequence[int], host: str) -> Legs:
    return Legs.new(
        request_id="doctor",
        prefill_worker=me.url,
        decode_worker="",
        prefill_hosts=(host,),
        prefill_ports=None,
        block_size=(me.stats and me.stats.block_size) or 1,
        prompt_tokens=len(ids),
    )


def _checked(me: Identity, ids: Sequence[int], read: PrefillAnswer) -> dict[str, Any]:
    assert read.params is not None  # noqa: S101 - the caller has looked
    return _CONNECTOR.decode_params(_legs(me, ids, str(read.params.get("remote_host"))), read)


def _body(me: Identity, ids: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
    assert me.models is not None  # noqa: S101 - who serves nothing is in no pair
    model = me.models.models[0]
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}


def _why(answer: Answer | Fault) -> str:
    return answer.sentence if isinstance(answer, Fault) else f"status {answer.status}{error_text(answer.body)}"


def spread(pairs: Sequence[tuple[Identity, Identity]], most: int) -> list[tuple[Identity, Identity]]:
    """At most so many, everybody in at least one where that is possible."""
    if len(pairs) <= most:
        return list(pairs)
    met: set[str] = set()
    first = []
    for pair in pairs:
        if not {pair[0].url, pair[1].url} <= met:
            first.append(pair)
            met |= {pair[0].url, pair[1].url}
    rest = [pair for pair in pairs if pair not in first]
    return (first + rest)[:most]
