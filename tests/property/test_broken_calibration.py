"""Whatever was saved: the planner takes it or leaves it, prices stay finite, and on a worker that is as the constants
say its predictions come back to what that worker takes.
"""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from scorer.calibrate import FLEET, MIN_SAMPLES, Part
from scorer.types import OutcomeKind
from tests.support.fleets import W, fleet

numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1.0, 30.0, 1e6, math.log(4), -math.log(4), math.log(64), 1e300]),
)
believed = st.builds(
    lambda log, n, error: [log, 4.0 * n, float(n), error, error + 1.0],
    st.floats(-math.log(4), math.log(4)),
    st.integers(30, 10**9),
    st.floats(0.0, 0.1),
)
rows = st.one_of(believed, st.lists(numbers, min_size=5, max_size=5))
states = st.dictionaries(
    st.sampled_from([part.value for part in Part]),
    st.dictionaries(st.sampled_from(["a", "m", "a>b", FLEET]), rows, max_size=4),
)
N_TOKENS = 8000


@example({"front": {"a": [math.log(4), 120.0, 30.0, 0.0, 1.0]}})  # Cold prompts alone do not show the front.
@given(states)
def test_predictions_come_back_to_what_a_worker_takes(factors: dict[str, dict[str, list[float]]]) -> None:
    rig = fleet(W("a", kv_blocks=100_000))
    planner, cost = rig.planner, rig.planner.cost
    planner.calibration.load({"factors": factors})
    planner.configure_worker("a")
    ttft_s = cost.front_s(N_TOKENS, text=True) + cost.comp_s(N_TOKENS, 0)
    for _ in range(4 * MIN_SAMPLES):
        plan = rig.route(N_TOKENS, streaming=True, max_output_tokens=1)
        price = plan.chosen.price
        assert all(
            math.isfinite(getattr(price, name)) and getattr(price, name) >= 0 for name in price.__struct_fields__
        )
        rig.now_s = plan.decided_at_s + ttft_s
        rig.observe(plan, OutcomeKind.FIRST_TOKEN)
        rig.observe(plan, OutcomeKind.END)
        rig.now_s += 5
    price = rig.route(N_TOKENS, streaming=True).chosen.price
    assert 0.75 * ttft_s < price.ttft_s < 1.35 * ttft_s
