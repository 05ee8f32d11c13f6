"""What the gateway's side of a simulation knows: bookings, scrapes and the index, as `bench.sim.router.View`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from bench.engine.request import Request
from bench.sim.engine import SimEngine
from bench.sim.router import BookedPrefill, SimRequest, WorkerView
from indexer import ApproximateIndex, PrefixIndex, Prompt
from scorer.cost import Constants
from scorer.types import Role

MODEL = "sim"


class Knowledge:
    """A `View`. Blocks of what was routed are assumed to come until `optimistic_ttl_s` is over or events say so."""

    def __init__(
        self, workers: Sequence[WorkerView], index: PrefixIndex, constants: Constants, optimistic_ttl_s: float
    ) -> None:
        self.constants = constants
        self.workers = {worker.name: worker for worker in workers}
        self.down: set[str] = set()
        self.now_s = 0.0
        self._index = index
        self._routed = ApproximateIndex(ttl_s=optimistic_ttl_s, capacity_blocks=1 << 20)
        for worker in workers:
            self._routed.set_worker(worker.name, models=[MODEL], block_size=worker.block_size)
        self._decoders: list[WorkerView] = []
        self._prefillers: list[WorkerView] = []
        self._sort()

    def _sort(self) -> None:
        up = [worker for worker in self.workers.values() if worker.name not in self.down]
        self._decoders = [worker for worker in up if worker.role is not Role.PREFILL]
        self._prefillers = [worker for worker in up if worker.role is Role.PREFILL]

    def set_down(self, name: str, down: bool) -> None:
        if down:
            self.down.add(name)
            self._routed.clear(name)
        else:
            self.down.discard(name)
        self._sort()

    @property
    def decoders(self) -> Sequence[WorkerView]:
        return self._decoders

    @property
    def prefillers(self) -> Sequence[WorkerView]:
        return self._prefillers

    def worker(self, name: str) -> WorkerView:
        return self.workers[name]

    def cached_tokens(self, request: SimRequest, *, optimistic: bool = True) -> Mapping[str, int]:
        prompt = _prompt(request)
        most = {
            worker.name: (request.prompt_tokens - 1) // worker.block_size * worker.block_size for worker in up(self)
        }
        found: dict[str, int] = {}
        for (name, _), match in self._index.match(prompt, model=MODEL).items():
            if name in most:
                found[name] = min(match.reach_tokens, most[name])
        if optimistic:
            for (name, _), match in self._routed.match(prompt, now_s=self.now_s, model=MODEL).items():
                if name in most:
                    found[name] = max(found.get(name, 0), min(match.reach_tokens, most[name]))
        return found

    # ---- bookkeeping of the core -------------------------------------------------------------------------------------

    def book(self, worker: str, request: SimRequest, cached_tokens: int) -> None:
        booked = self.workers[worker].booked
        prefill = BookedPrefill(request.request_id, request.prompt_tokens, cached_tokens, self.now_s)
        booked.prefills[request.request_id] = prefill
        booked.uncached_tokens += prefill.uncached_tokens
        booked.kv_tokens += request.prompt_tokens

    def assume(self, worker: str, request: SimRequest) -> None:
        self._routed.assume(worker, 0, _prompt(request), self.now_s, model=MODEL)

    def prefilled(self, worker: str, request_id: str) -> None:
        """Its first token is here."""
        booked = self.workers[worker].booked
        prefill = booked.prefills.pop(request_id, None)
        if prefill is not None:
            booked.uncached_tokens -= prefill.uncached_tokens
            booked.streams[request_id] = prefill.prompt_tokens

    def grown(self, worker: str, request_id: str, n_tokens: int) -> None:
        booked = self.workers[worker].booked
        if request_id in booked.streams:
            booked.streams[request_id] += n_tokens
            booked.kv_tokens += n_tokens

    def settle(self, worker: str, request_id: str) -> None:
        """It is over there, however it ended."""
        booked = self.workers[worker].booked
        prefill = booked.prefills.pop(request_id, None)
        if prefill is not None:
            booked.uncached_tokens -= prefill.uncached_tokens
            booked.kv_tokens -= prefill.prompt_tokens
        else:
            booked.kv_tokens -= booked.streams.pop(request_id, 0)


def up(view: Knowledge) -> list[WorkerView]:
    return [*view.decoders, *view.prefillers]


def _prompt(request: SimRequest) -> Prompt:
    if request.prompt is None:
        request.prompt = Prompt(request.tokens)
    return request.prompt


class Clairvoyance(Knowledge):
    """A `ClairvoyantView`: it sees the engines, the length of an answer by request id, and the seconds of a transfer by
    (prefill worker, decode worker, tokens).
    """

    def __init__(
        self,
        workers: Sequence[WorkerView],
        index: PrefixIndex,
        constants: Constants,
        optimistic_ttl_s: float,
        engines: Mapping[str, SimEngine],
        output_tokens: Callable[[str], int],
        transfer_s: Callable[[str, str, int], float],
    ) -> None:
        super().__init__(workers, index, constants, optimistic_ttl_s)
        self._engines = engines
        self._output_tokens = output_tokens
        self._transfer_s = transfer_s

    def engine(self, name: str) -> Inside:
        return Inside(self._engines[name], self._output_tokens)

    def output_tokens(self, request_id: str) -> int:
        return self._output_tokens(request_id)

    def transfer_s(self, prefill: str, decode: str, tokens: int) -> float:
        return self._transfer_s(prefill, decode, tokens)


class Inside:
    """An `EngineState`."""

    def __init__(self, sim: SimEngine, output_tokens: Callable[[str], int]) -> None:
        self.name = sim.name
        self._engine = sim.engine
        self._timing = sim.engine.config.timing
        self._output_tokens = output_tokens

    def waiting(self) -> Sequence[tuple[str, int]]:
        return self._engine.prefilling()

    def running(self) -> Sequence[tuple[str, int, int]]:
        return [
            (request_id, kv_tokens, max(0, self._output_tokens(request_id) - done))
            for request_id, kv_tokens, done in self._engine.decoding()
        ]

    def cached_tokens(self, request: SimRequest) -> int:
        tokens = array("I", request.tokens)
        hashes = self._engine.block_hashes(Request(request_id="", prompt_token_ids=tokens, max_tokens=1))
        size = self._engine.config.block_size
        return size * len(self._engine.pool.lookup(hashes, (request.prompt_tokens - 1) // size))

    def prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        chunk = self._engine.config.max_num_batched_tokens
        took_s, at = 0.0, cached_tokens
        while at < prompt_tokens:
            end = min(prompt_tokens, at + chunk)
            took_s += self._timing.step_s(0, 0, end - at, (end * end - at * at) / 2)
            at = end
        return took_s

    def step_s(self, streams: int, kv_tokens: int) -> float:
        return self._timing.step_s(streams, kv_tokens, 0, 0.0)

    def front_s(self, prompt_tokens: int) -> float:
        return self._timing.front_s(prompt_tokens)

    def free_blocks(self) -> int:
        return self._engine.pool.num_free
