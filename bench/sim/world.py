"""One run: engines, the way of each request through them, and the router that decides. Simulated time throughout.

A request's way: the router places it, the core books it -> the prefill engine computes the prompt and holds its KV ->
hop -> the decode engine admits it and pulls what it does not hold -> first token, tokens, end. Without a prefill engine
it begins at the decode engine. Whoever was on an engine that dies is tried once more elsewhere if it had no token yet.
"""

from __future__ import annotations

import random
from dataclasses import replace

from bench.engine.events import Event
from bench.engine.request import Admitted, Pull, Request
from bench.sim.clock import Clock
from bench.sim.engine import REPORT_TOKENS, SimEngine
from bench.sim.faults import set_fault
from bench.sim.fleet import FleetSpec, Server
from bench.sim.flight import Flight, Run
from bench.sim.load import Ask, Workload
from bench.sim.record import Record, bin_of
from bench.sim.router import Factory, Setup, SimRequest, WorkerView
from bench.sim.senses import Senses
from bench.sim.transfers import Transfers
from bench.sim.view import Clairvoyance, Knowledge
from indexer import PrefixIndex
from scorer.fleet import Fleet
from scorer.types import Outcome, OutcomeKind

__all__ = ["Run", "World"]

_FIRST_TOKEN = Outcome(kind=OutcomeKind.FIRST_TOKEN)
_FAILED = Outcome(kind=OutcomeKind.ERROR, worker_failed=True, reason="reset")


class World:
    """Build it, `run` it once. `seed` decides every chance that is not the workload's."""

    def __init__(self, spec: FleetSpec, factory: Factory, workload: Workload, *, seed: int = 0) -> None:
        self.spec = spec
        self.clock = Clock()
        self.fleet = Fleet()
        self.index = PrefixIndex()
        self.transfers = Transfers(spec.link, {(prefill, decode): link for prefill, decode, link in spec.links})
        self.records: list[Record] = []
        self._workload = workload
        self._seed = seed
        self._rng = random.Random(f"router {seed}")
        self._servers: dict[str, Server] = {server.name: server for server in spec.servers}
        self._flights: dict[str, Flight] = {}
        self._asked = self._decisions = 0
        self._first_s: float | None = None
        self._end_s = 0.0
        self._decoding: dict[str, dict[str, Flight]] = {name: {} for name in self._servers}
        views = [WorkerView(s.name, s.role, s.weight, s.block_size, s.kv_blocks) for s in spec.servers]
        priors = spec.priors()
        self.senses = Senses(spec, self.clock, self.fleet, self.index, seed)
        self.router = factory(Setup(self.fleet, self.index, priors, views, spec.pd_policy))
        self.engines = {name: self._engine(server) for name, server in self._servers.items()}
        self.view = Knowledge(views, self.index, priors, spec.optimistic_ttl_s)
        if self.router.clairvoyant:
            self.view = Clairvoyance(
                views, self.index, priors, spec.optimistic_ttl_s, self.engines, self._output_tokens, self._transfer_s
            )
        self.senses.start(self.router, self.engines, self.view)
        for fault in spec.faults:
            set_fault(self, fault)

    def run(self, until_s: float = float("inf")) -> Run:
        self._workload.start(self)
        self.clock.run(until_s)
        first_s = self._first_s or 0.0
        return Run(
            self.router.name, self.records, self._end_s - first_s, self.engines, self.senses.feeds, self.transfers,
            self.clock.actions, self._decisions,
        )  # fmt: skip

    # ---- for workloads -----------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    def submit(self, at_s: float, ask: Ask) -> None:
        self.clock.at(at_s, lambda: self._arrive(ask))

    # ---- a request's way ---------------------------------------------------------------------------------------------

    def _arrive(self, ask: Ask) -> None:
        now_s = self.clock.now_s
        if self._first_s is None:
            self._first_s = now_s
        request_id = f"r{self._asked}"
        self._asked += 1
        tokens = ask.tokens()
        n = len(tokens) // 4
        request = SimRequest(
            request_id, tokens, n, now_s, ask.max_output_tokens, ask.slo_ttft_s, ask.slo_tpot_s, ask.session, ask.turn,
            ask.group,
        )  # fmt: skip
        record = Record(request_id, ask.group, ask.session, ask.turn, now_s, n, ask.slo_ttft_s, ask.slo_tpot_s)
        self.records.append(record)
        self._send(Flight(ask, request, record))

    def _send(self, flight: Flight) -> None:
        view, request, record = self.view, flight.request, flight.record
        now_s = view.now_s = self.clock.now_s
        if not view.decoders:
            self._end(flight, ok=False)
            return
        self.senses.drain()
        self._decisions += 1
        # A clairvoyant arm asks for the length of an answer while it decides.
        self._flights[request.request_id] = flight
        placement = flight.placement = self.router.place(request, view, now_s, self._rng)
        flight.sent_s = now_s
        cached, prefill_cached = placement.cached_tokens, placement.prefill_cached_tokens
        if cached is None or (placement.prefill is not None and prefill_cached is None):
            held = view.cached_tokens(request)
            cached = held.get(placement.decode, 0) if cached is None else cached
            prefill_cached = held.get(placement.prefill or "", 0) if prefill_cached is None else prefill_cached
        record.decode, record.prefill = placement.decode, placement.prefill
        record.predicted_tokens = cached
        names = [placement.decode] if placement.prefill is None else [placement.decode, placement.prefill]
        if not self.router.own_books:
            for name in names:
                view.assume(name, request)
        if placement.prefill is None:
            view.book(placement.decode, request, cached)
            self.engines[placement.decode].submit(self._request(flight, remote_tokens=0))
            return
        view.book(placement.decode, request, request.prompt_tokens)
        view.book(placement.prefill, request, prefill_cached or 0)
        flight.prefilling = True
        self.engines[placement.prefill].submit(
            Request(
                request_id=request.request_id,
                prompt_token_ids=flight.tokens,
                max_tokens=1,
                seed=flight.ask.seed,
                hold_blocks=True,
            )
        )

    def _request(self, flight: Flight, remote_tokens: int) -> Request:
        ask = flight.ask
        return Request(
            request_id=flight.request.request_id,
            prompt_token_ids=flight.tokens,
            max_tokens=ask.max_output_tokens or ask.output_tokens,
            stop_after=ask.output_tokens,
            seed=ask.seed,
            remote_tokens=remote_tokens,
        )

    def _prefilled(self, flight: Flight, source: SimEngine) -> None:
        """The prefill engine has answered and holds the KV."""
        now_s, spec = self.clock.now_s, self.spec
        request_id = flight.request.request_id
        flight.prefilling, flight.source = False, source
        flight.lease_s = now_s + spec.lease_s
        prefill_s = flight.record.prefill_s = now_s - flight.sent_s
        self.view.settle(source.name, request_id)
        self.router.observe(request_id, Outcome(kind=OutcomeKind.PREFILL_DONE, prefill_s=prefill_s), now_s)
        self.clock.at(flight.lease_s, lambda: self._lapse(source, request_id), background=True)
        self.clock.after(spec.link.hop_s, lambda: self._hand_over(flight))

    @staticmethod
    def _lapse(source: SimEngine, request_id: str) -> None:
        source.release(request_id)

    def _hand_over(self, flight: Flight) -> None:
        if self._flights.get(flight.request.request_id) is not flight:
            return  # Its decode engine died meanwhile.
        self.engines[flight.placement.decode].submit(self._request(flight, flight.request.prompt_tokens))

    def _release(self, flight: Flight) -> None:
        source, flight.source = flight.source, None
        if source is not None:
            source.release(flight.request.request_id)

    def _end(self, flight: Flight, *, ok: bool) -> None:
        record = flight.record
        record.ok = ok
        record.last_s = self._end_s = self.clock.now_s
        self._flights.pop(flight.request.request_id, None)
        self._workload.ended(flight.ask, record, self)

    # ---- what engines say --------------------------------------------------------------------------------------------

    def admitted(self, engine: SimEngine, admitted: Admitted) -> None:
        flight = self._flights[admitted.request_id]
        flight.scheduled_s = self.clock.now_s
        if flight.prefilling:
            flight.record.prefill_cached_tokens = admitted.cached_tokens
            return
        flight.record.cached_tokens = admitted.cached_tokens

    def pull(self, engine: SimEngine, pull: Pull) -> float:
        flight, source = self._flights[pull.request_id], self._flights[pull.request_id].source
        if source is None or source.dead or self.clock.now_s >= flight.lease_s:
            self.clock.at(self.clock.now_s, lambda: self._pulled(flight, engine, ok=False))
            return 0.0
        server = self._servers[engine.name]
        hw = server.hardware
        tokens, blocks = pull.num_tokens, pull.num_blocks
        if self.spec.whole_kv:
            tokens = flight.request.prompt_tokens
            blocks = -(-tokens // server.block_size)
        moved = self.transfers.begin(
            source.name, engine.name, tokens * hw.kv_bytes_per_token, blocks * hw.layers, self.clock.now_s
        )
        self.clock.at(moved.done_s, lambda: self._pulled(flight, engine, ok=True))
        return moved.post_s

    def _pulled(self, flight: Flight, engine: SimEngine, *, ok: bool) -> None:
        ok = ok and flight.source is not None and not flight.source.dead
        flight.record.pull_failed = not ok
        self._release(flight)
        if not engine.dead:
            engine.pull_done(flight.request.request_id, ok)

    def token(self, engine: SimEngine, request_id: str, position: int, ended: bool) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        record, now_s = flight.record, self.clock.now_s
        if position == 0:
            self.senses.prefill_times[engine.name].add(now_s - flight.scheduled_s)
            if flight.prefilling:
                self._prefilled(flight, engine)
                return
            record.first_s = now_s
            record.output_tokens = 1
            self.senses.drain()
            self.view.prefilled(engine.name, request_id)
            self.router.observe(request_id, _FIRST_TOKEN, now_s)
        elif flight.decoding_from is None:  # It had been preempted.
            gap_s = now_s - flight.last_s
            record.add_gaps([gap_s], [bin_of(gap_s)])
        if not ended:
            if flight.decoding_from is None:
                flight.decoding_from = flight.reported = len(engine.pace)
                self._decoding[engine.name][request_id] = flight
            return
        self._stop_decoding(flight, engine)
        self.senses.drain()
        self.view.settle(engine.name, request_id)
        cached = Outcome(kind=OutcomeKind.CACHED_TOKENS, n_tokens=record.cached_tokens)
        self.router.observe(request_id, cached, now_s)
        self.router.observe(request_id, Outcome(kind=OutcomeKind.END, n_tokens=record.output_tokens), now_s)
        self._end(flight, ok=True)

    def preempted(self, engine: SimEngine, request_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is not None and flight.decoding_from is not None:
            self._stop_decoding(flight, engine)
            flight.last_s = self.clock.now_s

    def _stop_decoding(self, flight: Flight, engine: SimEngine) -> None:
        """Its tokens since it began to decode came one with each of the engine's steps."""
        start, flight.decoding_from = flight.decoding_from, None
        if start is not None:
            pace = engine.pace
            flight.record.add_gaps(pace.steps_s[start:], pace.bins[start:])
            del self._decoding[engine.name][flight.request.request_id]

    def lot(self, engine: SimEngine) -> None:
        done, now_s = len(engine.pace), self.clock.now_s
        for request_id, flight in self._decoding[engine.name].items():
            n = done - flight.reported
            if n >= REPORT_TOKENS:
                gap_s = max(engine.pace.steps_s[flight.reported : done])
                flight.reported = done
                self.view.grown(engine.name, request_id, n)
                self.router.observe(request_id, Outcome(kind=OutcomeKind.TOKEN, n_tokens=n, longest_gap_s=gap_s), now_s)

    def published(self, engine: SimEngine, events: list[Event]) -> None:
        self.senses.published(engine.name, events)

    # ---- engines that come and go ------------------------------------------------------------------------------------

    def killed(self, name: str) -> None:
        """Its process is gone, and everybody who talked to it knows."""
        self.engines[name].kill()
        self.transfers.forget(name)
        self.senses.died(name)
        for flight in list(self._flights.values()):
            at_decode = flight.placement.decode == name
            if at_decode or (flight.prefilling and flight.placement.prefill == name):
                self._break_off(flight)

    def _break_off(self, flight: Flight) -> None:
        request, record = flight.request, flight.record
        del self._flights[request.request_id]
        self._stop_decoding(flight, self.engines[flight.placement.decode])
        self.router.observe(request.request_id, _FAILED, self.clock.now_s)
        for name in (flight.placement.decode, flight.placement.prefill):
            if name is not None:
                self.view.settle(name, request.request_id)
                if not self.engines[name].dead:
                    self.engines[name].abort(request.request_id)
        if record.first_s is not None or record.retries:
            self._end(flight, ok=False)
            return
        record.retries = 1
        again = replace(request, request_id=request.request_id + "/2")
        self._send(Flight(flight.ask, again, record))

    def born_again(self, name: str) -> None:
        """A new process under the same name."""
        self.engines[name] = self._engine(self._servers[name])
        self.senses.back(name)

    def _engine(self, server: Server) -> SimEngine:
        number = list(self._servers).index(server.name)
        return SimEngine(
            server.name,
            server.engine(self._seed * 1000 + number),
            self.clock,
            self,
            enter_s=self.spec.link.enter_s,
            late_sharing=server.late_sharing,
        )

    # ---- for clairvoyant arms ----------------------------------------------------------------------------------------

    def _output_tokens(self, request_id: str) -> int:
        flight = self._flights.get(request_id)
        return 0 if flight is None else flight.ask.output_tokens

    def _transfer_s(self, prefill: str, decode: str, tokens: int) -> float:
        server = self._servers[decode]
        blocks = -(-tokens // server.block_size)
        hw = server.hardware
        return self.transfers.link(prefill, decode).transfer_s(tokens * hw.kv_bytes_per_token, blocks * hw.layers)
