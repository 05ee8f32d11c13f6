"""The arms of a comparison decide as their originals do: the published worked numbers, and what each looks at."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from bench.sim.arms import clairvoyant, conductor, dynamo, edpp, kv_aware, llmd, lmetric, ppd
from bench.sim.arms.choosing import Ruled, by_prefix
from bench.sim.peers import PeerPlacement
from bench.sim.router import BookedPrefill, Placement, Router, Setup, SimRequest, WorkerView
from indexer import PrefixIndex
from scorer.cost import Constants, CostModel
from scorer.fleet import Fleet
from scorer.types import Outcome, OutcomeKind, Role

BLOCK = 64


@dataclass
class Sight:
    """A view that says what it is told."""

    decoders: Sequence[WorkerView]
    prefillers: Sequence[WorkerView] = ()
    held: dict[str, int] = field(default_factory=dict)
    constants: Constants = field(default_factory=Constants)

    def worker(self, name: str) -> WorkerView:
        return next(worker for worker in (*self.decoders, *self.prefillers) if worker.name == name)

    def cached_tokens(self, request: SimRequest, *, optimistic: bool = True) -> Mapping[str, int]:
        return self.held


def worker(
    name: str, *, fresh: Sequence[int] = (), streams: int = 0, kv: int = 0, role: Role = Role.BOTH
) -> WorkerView:
    """A worker with prompts of these uncached lengths booked at second 0, and running answers."""
    view = WorkerView(name, role, 1.0, BLOCK, 8000)
    for i, tokens in enumerate(fresh):
        view.booked.prefills[f"p{i}"] = BookedPrefill(f"p{i}", tokens, 0, 0.0)
        view.booked.uncached_tokens += tokens
    view.booked.streams = {f"s{i}": kv // streams for i in range(streams)}
    view.booked.kv_tokens = kv
    return view


def request(n: int, *, turn: int = 0, name: str = "r", seed: int = 1) -> SimRequest:
    rng = random.Random(seed)
    tokens = array("I", [rng.randrange(1 << 20) for _ in range(n)]).tobytes()
    return SimRequest(name, tokens, n, 0.0, turn=turn)


def setup(*workers: WorkerView) -> Setup:
    return Setup(Fleet(), PrefixIndex(), Constants(), workers)


def place(router: Router, asked: SimRequest, sight: Sight, now_s: float = 0.0, seed: int = 0) -> Placement:
    placed = router.place(asked, sight, now_s, random.Random(seed))
    return Placement(placed.decode, placed.prefill)


# ---- Dynamo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("track_prefill", "cost"), [(True, 7.0), (False, 5.0)])
def test_dynamo_cost_clamps_the_credit_at_the_prompt(track_prefill: bool, cost: float) -> None:
    """Case 1: 64 tokens in blocks of 16, 16 active prefill tokens, decode 2 + 3, overlap of 6 blocks, scale 2."""
    assert (
        dynamo.cost_blocks(
            isl_blocks=64 / 16,
            active_prefill_blocks=16 / 16,
            decode_blocks=2 + 3,
            device_overlap_blocks=6,
            prefill_load_scale=2,
            track_prefill=track_prefill,
        )
        == cost
    )


@pytest.mark.parametrize(("weight", "cost"), [(0.0, 100.0), (32.0, 228.0)])
def test_dynamo_charge_per_request(weight: float, cost: float) -> None:
    """Case 2."""
    charged = dynamo.cost_blocks(
        isl_blocks=0, active_prefill_blocks=0, decode_blocks=100, request_weight=weight, active_requests=4
    )
    assert charged == cost


def test_dynamo_scale_and_credit_turn_the_choice() -> None:
    """Cases 4 and 5."""

    def cost(isl: int, decode: float, overlap: float, **knobs: float) -> float:
        return dynamo.cost_blocks(
            isl_blocks=isl / 16,
            active_prefill_blocks=0,
            decode_blocks=decode,
            device_overlap_blocks=overlap,
            **knobs,  # type: ignore[arg-type]
        )

    assert (cost(64, 3, 2, prefill_load_scale=2), cost(64, 0, 0, prefill_load_scale=2)) == (7, 8)
    assert (cost(128, 5, 4), cost(128, 0, 0)) == (9, 8)
    assert cost(128, 5, 4, overlap_credit=1.5) == 7


def test_dynamo_shared_cache_counts_beyond_the_device() -> None:
    """Case 7."""
    costs = [
        dynamo.cost_blocks(
            isl_blocks=4,
            active_prefill_blocks=0,
            decode_blocks=0,
            device_overlap_blocks=overlap,
            shared_overlap_blocks=4,
        )
        for overlap in (2, 0)
    ]
    assert costs == [1.0, 2.0]


@pytest.mark.parametrize(
    ("isl", "cached", "local"),
    [
        (1000, 14 * 64, True),
        (100_000, 64_000, False),
        (200, 0, False),
        (10_000, 10_000 - 2048, False),
        (10_000, 10_000 - 2047, True),
        (0, 0, True),
        (100, 160, True),
    ],
)
def test_dynamo_conditional_disaggregation(isl: int, cached: int, local: bool) -> None:
    """Case 13, isl_bounding with its defaults 2048 and 0.7."""
    assert dynamo.is_local(isl, cached) is local


def test_dynamo_spreads_ties() -> None:
    """Case 11: at temperature 0 equals are drawn at random."""
    sight = Sight([worker("a"), worker("b")])
    names = {place(dynamo.Dynamo("d"), request(640), sight, seed=seed).decode for seed in range(20)}
    assert names == {"a", "b"}


def test_dynamo_counts_blocks_of_a_shared_prompt_once_until_its_last_user_ends() -> None:
    active = dynamo.ActiveBlocks()
    active.add("r1", "a", [1, 2, 3])
    active.add("r2", "a", [1, 2, 4])
    assert active.with_prompt("a", [1, 2, 5]) == 5
    active.drop("r1")
    assert active.with_prompt("a", []) == 3
    active.drop("r2")
    active.drop("r2")
    assert active.with_prompt("a", [7]) == 1


# ---- llm-d -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "cached", "remote"),
    [(0, 5, False), (5, 5, True), (5, 8, False), (3, 2, True), (1, 10, False), (5, 0, True), (20, 0, False)],
)
def test_llm_d_decider(threshold: int, cached: int, remote: bool) -> None:
    """Case 71: a prompt of 10 tokens."""
    assert llmd.is_remote(10, cached, least_fresh_tokens=threshold) is remote


@pytest.mark.parametrize(("least_prompt", "remote"), [(20, False), (10, True)])
def test_llm_d_decider_and_the_prompt_s_length(least_prompt: int, remote: bool) -> None:
    """Case 71, promptTokens."""
    assert llmd.is_remote(10, 5, least_fresh_tokens=5, least_prompt_tokens=least_prompt) is remote


def test_llm_d_queue_scores_are_relative() -> None:
    assert llmd.queue_scores([0, 1]) == llmd.queue_scores([0, 100]) == [1.0, 0.0]
    assert llmd.queue_scores([7, 7]) == [1.0, 1.0]
    assert llmd.queue_scores([0, 1, 4]) == [1.0, 0.75, 0.0]


def test_llm_d_weights_turn_the_choice() -> None:
    """Half of the prompt cached behind one waiting request: 0.5 against 1 with equal weights, 1.5 against 2 with 3:2:2
    still not, three quarters do.
    """
    sight = Sight([worker("warm", fresh=[100]), worker("idle")], held={"warm": 32 * BLOCK})
    asked = request(64 * BLOCK)
    assert place(Ruled("x", llmd.weighted(1, 1, 1)), asked, sight).decode == "idle"
    assert place(Ruled("x", llmd.weighted(3, 2, 2)), asked, sight).decode == "idle"
    sight.held = {"warm": 48 * BLOCK}
    assert place(Ruled("x", llmd.weighted(1, 1, 1)), asked, sight).decode == "idle"
    assert place(Ruled("x", llmd.weighted(3, 2, 2)), asked, sight).decode == "warm"


@pytest.mark.parametrize(
    ("shares", "in_flight", "kept"),
    [
        ([0.9, 0.5], [286_720, 0], [0]),
        ([0.9, 0.5], [286_721, 0], [0, 1]),
        ([0.79, 0.5], [0, 0], [0, 1]),
        ([0.8, 0.9, 0.0], [400_000, 100, 0], [0, 1]),
        ([0.9, 0.9], [400_000, 0], [0, 1]),
    ],
)
def test_sticky_until_saturated(shares: list[float], in_flight: list[float], kept: list[int]) -> None:
    """tau = 20,480 tokens/s x 14 s."""
    assert llmd.sticky(shares, in_flight, saturated_tokens=20_480 * 14) == kept


def test_threshold_arms_split_by_fresh_tokens() -> None:
    sight = Sight([worker("d")], [worker("p", role=Role.PREFILL)], held={"d": 1920})
    near = llmd.ARMS["threshold-16"](setup())
    far = llmd.ARMS["threshold-1024"](setup())
    asked = request(2000)
    assert place(near, asked, sight) == Placement("d", "p")
    assert place(far, asked, sight) == Placement("d")


# ---- the others ------------------------------------------------------------------------------------------------------


def test_lmetric_multiplies_work_and_batch() -> None:
    assert lmetric.score(1000, 0, 0) == 1000
    assert lmetric.score(1000, 500, 3) == 6000
    sight = Sight([worker("warm", streams=3, kv=4000), worker("idle")], held={"warm": 896})
    assert place(lmetric.ARMS["lmetric"](setup()), request(1000), sight).decode == "warm"  # 104 x 4 < 1000 x 1
    sight.held = {"warm": 704}
    assert place(lmetric.ARMS["lmetric"](setup()), request(1000), sight).decode == "idle"  # 296 x 4 > 1000 x 1


def test_kv_aware_does_not_credit_the_last_block_of_a_full_match() -> None:
    """As its log has it: 64 tokens, all four blocks of 16 held, 16 to compute."""
    assert kv_aware.new_prefill_tokens(64, 64, 16) == 16
    assert kv_aware.new_prefill_tokens(65, 64, 16) == 1


def test_kv_aware_sends_idle_equals_to_the_first() -> None:
    sight = Sight([worker("a"), worker("b"), worker("c")])
    arm = kv_aware.ARMS["kv-aware"](setup())
    assert Counter(place(arm, request(100), sight, seed=seed).decode for seed in range(10)) == {"a": 10}


def test_longest_prefix_ignores_the_queue() -> None:
    sight = Sight([worker("warm", fresh=[100_000] * 9), worker("idle")], held={"warm": 64})
    assert place(Ruled("x", by_prefix), request(4000), sight).decode == "warm"


def test_conductor_takes_the_lowest_predicted_ttft() -> None:
    """16k held against a queue: until the queue takes longer than computing what is held elsewhere."""
    cost = CostModel()
    saved_s = cost.comp_s(16_000, 0) - cost.comp_s(16_000, 12_800)
    short, long = int(8000 * 0.5), 16_000
    assert cost.comp_s(short, 0) < saved_s < cost.comp_s(long, 0)
    for queued, chosen in ((short, "warm"), (long, "idle")):
        sight = Sight([worker("warm", fresh=[queued]), worker("idle")], held={"warm": 12_800})
        assert place(conductor.Conductor(setup()), request(16_000), sight).decode == chosen


def test_conductor_counts_off_what_the_head_of_the_queue_has_had() -> None:
    arm = conductor.Conductor(setup())
    booked = worker("a", fresh=[8000, 8000])
    comp_s = CostModel().comp_s(8000, 0)
    assert arm.queue_s(booked, 0.05) == pytest.approx(2 * comp_s - 0.05)
    assert arm.queue_s(booked, 60.0) == pytest.approx(comp_s)


def test_ppd_score_weighs_relative_gain_and_loss() -> None:
    assert ppd.prefers_local(1.0, 0.5, 0.010, 0.012)
    assert not ppd.prefers_local(1.0, 0.9, 0.010, 0.012)
    assert ppd.prefers_local(1.0, 0.9, 0.010, 0.012, tpot_weight=0.4)


def test_ppd_first_turns_go_remote_and_short_appends_stay() -> None:
    sight = Sight([worker("d"), worker("e")], [worker("p", role=Role.PREFILL)], held={"d": 1920})
    arm = ppd.Ppd(setup())
    assert place(arm, request(2000), sight) == Placement("d", "p")
    assert place(arm, request(2000, turn=1), sight) == Placement("d")


def test_edpp_work() -> None:
    """1,000 cold tokens at 6 us and 0.001 us a pair: 6,000 + 500 us; a decode of 10 steps behind 100 tokens."""
    c = Constants(comp_per_token_s=6e-6, comp_per_attention_s=1e-9, step_per_stream_s=100e-6, step_per_kv_token_s=1e-6)
    assert edpp.prefill_work_s(1000, 1000, c) == pytest.approx(6.5e-3)
    assert edpp.prefill_work_s(200, 1000, c) == pytest.approx(200 * 6e-6 + 1e-9 * 200 * 900)
    assert edpp.decode_work_s(100, 10, c) == pytest.approx(10 * 100e-6 + 10 * 1e-6 * 104.5)


def test_edpp_rule_follows_the_backlogs_and_the_deficits() -> None:
    def remote(**changes: float) -> bool:
        values: dict[str, float] = {
            "work_s": 0.2,
            "decode_backlog_s": 0.0,
            "prefill_backlog_s": 0.0,
            "decode_capacity_s": 0.5,
            "prefill_capacity_s": 0.5,
            "ttft_remote_s": 0.3,
            "ttft_local_s": 0.3,
            "chunk_s": 0.17,
            **changes,
        }
        return edpp.is_remote(**values)  # type: ignore[arg-type]

    assert not remote()  # the transfer costs, nothing speaks for it
    assert remote(decode_backlog_s=0.1)
    assert not remote(decode_backlog_s=0.1, prefill_backlog_s=0.1)
    assert remote(itl_deficit_s=0.05)
    assert not remote(itl_deficit_s=0.05, ttft_deficit_s=5.0, ttft_remote_s=0.6)
    assert remote(ttft_deficit_s=5.0, ttft_remote_s=0.2)


def test_edpp_late_requests_count_before_their_first_token() -> None:
    arm = edpp.Edpp(setup())
    sight = Sight([worker("d")], [worker("p", role=Role.PREFILL)])
    place(arm, request(2000, name="late"), sight)
    place(arm, request(2000, name="next"), sight, now_s=3.0)
    assert arm._ttft_deficit_s == pytest.approx(2.5)
    arm.observe("late", Outcome(kind=OutcomeKind.FIRST_TOKEN), 3.2)
    assert arm._ttft_deficit_s == pytest.approx(2.7)
    arm.observe("next", Outcome(kind=OutcomeKind.FIRST_TOKEN), 3.1)
    assert arm._ttft_deficit_s == pytest.approx(2.7 - 0.4)


# ---- the clairvoyant -------------------------------------------------------------------------------------------------


@dataclass
class Inside:
    """An engine of whom everything is known."""

    name: str
    held: int = 0
    line: Sequence[tuple[str, int]] = ()
    answers: Sequence[tuple[str, int, int]] = ()
    free: int = 8000
    cost: CostModel = field(default_factory=CostModel)

    def waiting(self) -> Sequence[tuple[str, int]]:
        return self.line

    def running(self) -> Sequence[tuple[str, int, int]]:
        return self.answers

    def cached_tokens(self, request: SimRequest) -> int:
        return self.held

    def prefill_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        return self.cost.comp_s(prompt_tokens, cached_tokens)

    def step_s(self, streams: int, kv_tokens: int) -> float:
        return self.cost.step_s(streams, kv_tokens)

    def front_s(self, prompt_tokens: int) -> float:
        return self.cost.front_s(prompt_tokens)

    def free_blocks(self) -> int:
        return self.free


@dataclass
class Everything(Sight):
    engines: dict[str, Inside] = field(default_factory=dict)

    def engine(self, name: str) -> Inside:
        return self.engines[name]

    def output_tokens(self, request_id: str) -> int:
        return 100

    def transfer_s(self, prefill: str, decode: str, tokens: int) -> float:
        return 0.02


def everything(*engines: Inside, prefill: Inside | None = None) -> Everything:
    known = {engine.name: engine for engine in (*engines, *([prefill] if prefill else []))}
    prefillers = [worker(prefill.name, role=Role.PREFILL)] if prefill else []
    return Everything([worker(engine.name) for engine in engines], prefillers, engines=known)


def test_clairvoyant_sees_what_the_engine_holds_not_what_was_announced() -> None:
    sight = everything(Inside("a"), Inside("b", held=6400))
    sight.held = {"a": 6400}
    assert place(clairvoyant.Clairvoyant("c"), request(8000), sight).decode == "b"


def test_clairvoyant_leaves_an_engine_whose_answers_hold_the_memory() -> None:
    busy = [(f"s{i}", 6400, 2000) for i in range(4)]
    sight = everything(Inside("full", held=6400, answers=busy, free=10), Inside("cold"))
    assert place(clairvoyant.Clairvoyant("c"), request(8000), sight).decode == "cold"


def test_clairvoyant_sends_a_long_prompt_away_from_running_answers() -> None:
    busy = [(f"s{i}", 2000, 500) for i in range(16)]
    sight = everything(Inside("d", answers=busy), prefill=Inside("p"))
    assert place(clairvoyant.Clairvoyant("c"), request(8000), sight) == Placement("d", "p")
    assert place(clairvoyant.Clairvoyant("c", transfers=False), request(8000), sight) == Placement("d")
    idle = everything(Inside("d"), prefill=Inside("p"))
    assert place(clairvoyant.Clairvoyant("c"), request(8000), idle) == Placement("d")


def test_clairvoyant_moves_the_kv_of_a_busy_worker_to_an_idle_one() -> None:
    busy = [(f"s{i}", 100_000, 2000) for i in range(8)]
    sight = everything(Inside("warm", held=31_936, answers=busy), Inside("idle"))
    asked = request(32_000)
    moved = clairvoyant.Clairvoyant("c").place(asked, sight, 0.0, random.Random(0))
    assert isinstance(moved, PeerPlacement)
    assert (moved.decode, moved.prefill, moved.source, moved.source_tokens) == ("idle", None, "warm", 31_936)
    assert place(clairvoyant.Clairvoyant("c", transfers=False), asked, sight) == Placement("idle")
