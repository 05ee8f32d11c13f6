"""Learned factors: what is used, what is kept, what is forgotten, and how much there can be."""

import json
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scorer.calibrate import BOUND, FLEET, MIN_SAMPLES, MOST_FACTORS, Calibration, Factor, Part
from scorer.kind import EngineKind
from scorer.types import ChangeKind, WorkerChange
from tests.support.fleets import W, add, fleet, prompt

H200 = EngineKind(model="/models/m", kv_cache_dtype="auto", block_size=16, kv_blocks=40_000)


def teach(calibration: Calibration, part: Part, subject: str, ratio: float, n: int = 2 * MIN_SAMPLES) -> None:
    for _ in range(n):
        calibration.add(part, subject, 1.0, ratio)


def saved(calibration: Calibration) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(calibration.state()))


samples = st.lists(
    st.tuples(
        st.sampled_from(list(Part)),
        st.sampled_from(["a", "b", "a>b", "ünï\n", ""]),
        st.floats(1e-6, 1e6),
        st.floats(1e-6, 1e6),
    ),
    max_size=80,
)


@given(samples, samples)
def test_what_was_saved_goes_on_as_if_nothing_had_happened(before: list[Any], after: list[Any]) -> None:
    kept, other = Calibration(), Calibration()
    for each in before:
        kept.add(*each)
    assert other.load(saved(kept)) == 0
    for each in after:
        kept.add(*each)
        other.add(*each)
    for part in Part:
        for subject in ("a", "b", "a>b", "ünï\n", "", "new"):
            assert other.value(part, subject) == kept.value(part, subject)
            assert other.spread(part, subject, 0.3) == kept.spread(part, subject, 0.3)


@given(st.lists(st.tuples(st.floats(), st.floats())))
@example([(1e300, 1e-300), (1e308, 5e-324), (5e-324, 1e308), (math.nan, 1.0), (1.0, math.inf), (-1.0, 1.0)])
def test_no_observation_breaks_a_factor_or_takes_it_beyond_its_bound(seen: list[tuple[float, float]]) -> None:
    factor = Factor()
    for predicted, observed in seen * (2 * MIN_SAMPLES):
        factor.add(predicted, observed)
    assert 1 / BOUND <= factor.value <= BOUND * (1 + 1e-12)
    assert Factor.of_state(factor.state()).value == factor.value


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text() | st.sampled_from(["work", "a"]), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["factors", "engines", "other"]), junk))
def test_no_content_of_a_file_breaks_anything(state: dict[str, Any]) -> None:
    calibration = Calibration()
    assert calibration.load(state) >= 0
    for part in Part:
        for subject in ("a", FLEET):
            calibration.add(part, subject, 1.0, 2.0)
            assert 1 / BOUND <= calibration.value(part, subject) <= BOUND


@pytest.mark.parametrize(
    "entry",
    [
        None, 7, "no", [], [0.1, 40, 10, 0.1], [9.0, 40, 10, 0.1, 0.2], [math.nan, 40, 10, 0.1, 0.2],
        [0.1, 10, 40, 0.1, 0.2], [0.1, 40, -1, 0.1, 0.2], [0.1, 40, 10, -0.1, 0.2], [0.1, math.inf, 10, 0.1, 0.2],
        [0.1, 10**400, 10, 0.1, 0.2], [0.1, 40, 10, "x", 0.2],
    ],
)  # fmt: skip
def test_entries_that_cannot_be_are_left_out_and_their_neighbours_count(entry: Any) -> None:
    calibration, source = Calibration(), Calibration()
    teach(source, Part.WORK, "good", 2.0)
    state = saved(source)
    state["factors"]["work"]["bad"] = entry
    assert calibration.load(state) == 1
    assert calibration.value(Part.WORK, "good") == pytest.approx(2.0)
    assert (Part.WORK, "bad") not in calibration.factors()


def test_unknown_parts_and_kinds_are_counted_and_left_out() -> None:
    calibration = Calibration()
    assert (
        calibration.load({"factors": {"luck": {"a": Factor().state()}}, "engines": {"a": 3, "b": {"weight": "x"}}}) == 3
    )
    assert not calibration.factors()


def test_a_factor_of_yesterday_that_is_wrong_today_is_soon_out_of_use() -> None:
    yesterday, today = Calibration(), Calibration()
    teach(yesterday, Part.WORK, "a", 4.0, 1000)
    today.load(saved(yesterday))
    assert today.value(Part.WORK, "a") == pytest.approx(4.0)
    rng = random.Random(1)
    for _ in range(60):
        today.add(Part.WORK, "a", 1.0, math.exp(rng.gauss(0.0, 0.1)))
    assert today.value(Part.WORK, "a") == pytest.approx(1.0, abs=0.25)


def test_names_that_come_and_go_take_bounded_room_and_those_in_use_stay() -> None:
    calibration = Calibration()
    for i in range(MOST_FACTORS + 500):
        calibration.meet(f"pod-{i}", H200)
        calibration.add(Part.WORK, f"pod-{i}", 1.0, 2.0)
        calibration.add(Part.WORK, "old", 1.0, 2.0)
    assert len(calibration.factors()) == MOST_FACTORS
    assert {(Part.WORK, "old"), (Part.WORK, FLEET), (Part.WORK, f"pod-{i}")} <= set(calibration.factors())
    assert (Part.WORK, "pod-0") not in calibration.factors()
    assert len(calibration.state()["engines"]) == MOST_FACTORS
    full = Calibration()
    full.load({"factors": {"work": {str(i): Factor().state() for i in range(MOST_FACTORS + 10)}}})
    assert len(full.factors()) == MOST_FACTORS


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        ({}, True),
        ({"kv_blocks": 38_000}, True),  # The same card, with a little more of its memory taken.
        ({"kv_blocks": 20_000}, False),
        ({"kv_blocks": None, "kv_cache_dtype": None}, True),
        ({"model": "/models/other"}, False),
        ({"block_size": 32}, False),
        ({"kv_cache_dtype": "fp8"}, False),
        ({"weight": 2.0}, False),
    ],
)
def test_another_kind_of_engine_under_the_name_is_learned_anew(other: dict[str, Any], alike: bool) -> None:
    before, calibration = Calibration(), Calibration()
    before.meet("a", H200)
    for part, subject in (
        (Part.FLOOR, "a"),
        (Part.WORK, "b"),
        (Part.PULL, "a>b"),
        (Part.PULL, "b>a"),
        (Part.OUTPUT, "a"),
    ):
        teach(before, part, subject, 2.0)
    calibration.load(saved(before))
    kind = msgspec.structs.replace(H200, **other)
    assert calibration.meet("a", kind) is not alike
    assert not calibration.meet("a", kind)
    left = {key for key in calibration.factors() if key[1] != FLEET}
    kept = {(Part.WORK, "b"), (Part.OUTPUT, "a")}  # The model of that name is no worker.
    assert left == kept | ({(Part.FLOOR, "a"), (Part.PULL, "a>b"), (Part.PULL, "b>a")} if alike else set())


def test_the_fleet_is_forgotten_with_the_last_worker_it_was_learned_from() -> None:
    calibration = Calibration()
    for worker in ("a", "b"):
        calibration.meet(worker, H200)
        teach(calibration, Part.WORK, worker, 3.0)
    other = msgspec.structs.replace(H200, model="/models/other")
    assert calibration.meet("a", other)
    assert calibration.value(Part.WORK, "a") == pytest.approx(3.0)
    assert calibration.meet("b", other)
    assert calibration.value(Part.WORK, "a") == calibration.value(Part.WORK, "b") == 1.0


def test_a_worker_that_appears_has_what_is_known_of_it_or_of_the_fleet() -> None:
    rig = fleet(W("a"))
    teach(rig.planner.calibration, Part.FLOOR, "a", 3.0)
    teach(rig.planner.calibration, Part.STEP, "b", 2.0)
    plain = rig.route(prompt(100)).chosen.price.comp_s
    rig.planner.configure_worker("a")
    worker = rig.planner.fleet.workers["a"]
    assert (worker.floor_factor, worker.work_factor) == (pytest.approx(3.0), 1.0)
    assert worker.step_factor == pytest.approx(2.0)
    assert rig.route(prompt(100, seed=2)).chosen.price.comp_s == pytest.approx(3 * plain)


def test_a_worker_that_leaves_and_returns_keeps_its_factors() -> None:
    rig = fleet(W("a"))
    teach(rig.planner.calibration, Part.WORK, "a", 2.0)
    rig.planner.fleet.apply(WorkerChange(kind=ChangeKind.REMOVED, worker="a"))
    rig.planner.configure_worker("a")
    add(rig, W("a"))
    assert rig.planner.fleet.workers["a"].work_factor == pytest.approx(2.0)
