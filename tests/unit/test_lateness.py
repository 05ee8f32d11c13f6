"""When predicted times to the first token are good enough to refuse requests by."""

import pytest

from scorer.lateness import MIN_SAMPLES, MOST_ERROR, Lateness


def test_armed_from_fifty_samples_under_thirty_percent() -> None:
    lateness = Lateness()
    for i in range(MIN_SAMPLES - 1):
        lateness.note(1.2, 1.0, float(i))
    assert not lateness.armed(60.0)
    lateness.note(1.2, 1.0, 60.0)
    assert lateness.armed(60.0)
    assert lateness.error(60.0) == pytest.approx(0.2)


@pytest.mark.parametrize("predicted_s", [1 - MOST_ERROR - 0.01, 1 + MOST_ERROR + 0.01])
def test_wrong_predictions_never_arm(predicted_s: float) -> None:
    lateness = Lateness()
    for i in range(300):
        lateness.note(predicted_s, 1.0, float(i))
    assert not lateness.armed(300.0)


def test_it_is_disarmed_by_what_is_wrong_lately_and_by_silence() -> None:
    lateness = Lateness()
    for i in range(200):
        lateness.note(1.0, 1.0, float(i))
    assert lateness.armed(200.0)
    for i in range(100):
        lateness.note(2.0, 1.0, 200.0 + i)
    assert not lateness.armed(300.0)
    assert lateness.samples(1000.0) == 0
    assert lateness.error(1000.0) is None
    assert not lateness.armed(1000.0)


def test_one_absurd_sample_does_not_count_without_bound() -> None:
    lateness = Lateness()
    lateness.note(1000.0, 0.0, 0.0)
    assert lateness.error(0.0) == 10.0
