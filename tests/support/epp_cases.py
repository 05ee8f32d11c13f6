"""Cases of llm-d's integration tests and of GAIE's reference picker, to be decided in memory and through a real Envoy.

Numbers are those of the cases in their lists; pods are told by their number, subsets too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.config.schema import EppConfig
from tests.support.epp_world import P, Request, get, request
from tests.support.fleets import prompt

LORA = "sql-lora-1fdg2"


@dataclass(frozen=True)
class Case:
    """`route`: to which pod it goes (a tuple: to one of these); None: it is refused with `status` and `dropped`.
    `model`: what its body asks for then; None: not a byte of it changes. `among`: pods of the subset hint, texts as
    they are.
    """

    name: str
    pods: tuple[P, ...]
    request: Request
    route: int | tuple[int, ...] | None = None
    model: str | None = None
    status: int = 200
    dropped: str | None = None
    among: tuple[int | str, ...] | None = None
    epp: EppConfig = field(default_factory=EppConfig)

    @property
    def routes(self) -> tuple[int, ...]:
        return self.route if isinstance(self.route, tuple) else () if self.route is None else (self.route,)


def rewritten(model: str, target: str, **kwargs: Any) -> Request:
    return request(model=model, headers={"x-gateway-model-name-rewrite": target}, **kwargs)


_BUSY = P(queue=3, kv=0.2), P(queue=0, kv=0.1), P(queue=10, kv=0.2)
_ADAPTERS = P(kv=0.2, adapters=("bar",)), P(kv=0.1, adapters=(LORA,)), P(queue=10, kv=0.2, adapters=("bar",))
_SUBSET = P(kv=0.2), P(kv=0.1, adapters=(LORA,)), P(queue=10, kv=0.2)
_NO_ENDPOINTS = "rejected-no-endpoints"

CASES = (
    Case("1: the least busy, by the model it is rewritten to", _BUSY, rewritten("my-model", "foo"), 1, "foo"),
    Case("1b: llm-d's spelling of the same", _BUSY,
         request(model="my-model", headers={"x-llm-d-model-name-rewrite": "foo"}), 1, "foo"),
    Case("1c: of both spellings llm-d's counts", _BUSY,
         request(model="m", headers={"x-llm-d-model-name-rewrite": "foo", "x-gateway-model-name-rewrite": "no"}), 1,
         "foo"),
    Case("2: where the adapter is", _ADAPTERS, rewritten("sql-lora", LORA), 1, LORA),
    Case("4: where the adapter is, in spite of its queue",
         (P(queue=6, kv=0.2, adapters=("bar", LORA)), P(kv=0.85), P(queue=10, kv=0.9)),
         rewritten("sql-lora", LORA), 0, LORA),
    Case("5: a body and a path nobody knows, by load", _BUSY,
         request(raw=b"passthrough-parser", path="/unknown", headers={"x-gateway-inference-objective": "x"}), 1),
    Case("5b: of a path nobody knows, the model is looked at", _ADAPTERS,
         request(model=LORA, path="/unknown/api"), 1),
    Case("7: of equal queues, where the prompt has room",
         (P(queue=4, kv=0.85, kv_blocks=256), P(queue=4, kv=0.2, kv_blocks=256)), request(prompt(2000)), 1),
    Case("7b: where there is room either way, either", (P(queue=4, kv=0.2), P(queue=4, kv=0.85)), request(), (0, 1)),
    Case("8: no body, no pods", (), get("/v1/models"), status=503, dropped=_NO_ENDPOINTS),
    Case("8b: no pods", (), request(), status=503, dropped=_NO_ENDPOINTS),
    Case("8c: no body, any ready pod by load", _BUSY, get("/v1/models"), 1),
    Case("8d: no body, and a subset", _BUSY, get("/v1/models"), 2, among=(2,)),
    Case("10: of the subset the best", _SUBSET, request(model=LORA), 1, among=(0, 1, 2)),
    Case("11: of the subset, in spite of load", _SUBSET, request(), 2, among=(2,)),
    Case("12: a subset with nobody of ours", _SUBSET, request(), status=503, dropped=_NO_ENDPOINTS,
         among=("192.0.2.7:8000",)),
    Case("12b: a subset that does not serve the model", _SUBSET, request(model=LORA), status=503,
         dropped=_NO_ENDPOINTS, among=(0, 2)),
    Case("13: an objective nobody has declared", _BUSY, request(headers={"x-llm-d-inference-objective": "new"}), 1),
    Case("14: rewritten by a rule", _BUSY, request(model="model-to-be-rewritten"), 1, "foo",
         epp=EppConfig(rewrites=("model-to-be-rewritten=foo",))),
    Case("28: the one that the list names", (P(), P(), P()), request(), 2, among=(2,)),
    Case("29: one of those that it names", (P(), P(), P()), request(), (1, 2), among=(1, 2)),
    Case("31: another port of the same address is another endpoint", (P(), P()), request(), status=503,
         dropped=_NO_ENDPOINTS, among=("192.168.1.1:3000",)),
    Case("not JSON", _BUSY, request(raw=b'{"model":'), status=400),
    Case("a model that nobody serves", _BUSY, request(model="nobody"), status=404),
    Case("below a prefix of the route", _BUSY, request(path="/llama/v1/completions?x=1"), 1),
    Case("a chat", _BUSY, request(path="/v1/chat/completions", messages=[{"role": "user", "content": "hello"}]), 1),
    Case("responses", _BUSY, request(path="/v1/responses", input="hello"), 1),
    Case("messages", _BUSY, request(path="/v1/messages", messages=[{"role": "user", "content": "hello"}]), 1),
)  # fmt: skip
