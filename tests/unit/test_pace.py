"""Percentiles by second, in bounded memory."""

import math
import random

from gateway.debug.pace import KEPT_S, Series


def nearest(values: list[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def close(found: tuple[float, ...] | None, expected: list[float], within: float) -> bool:
    pairs = zip(found or (math.nan, math.nan), (nearest(expected, 0.5), nearest(expected, 0.95)), strict=True)
    return all(abs(a - b) <= within for a, b in pairs)


def test_each_second_has_its_own() -> None:
    series = Series()
    for value in (0.3, 0.1, 0.2):
        series.add(value, 1000.2)
    series.add(0.9, 1002.9)
    found = series.percentiles(1003.0)
    assert len(found) == KEPT_S
    assert close(found[-3], [0.3, 0.1, 0.2], 1e-6)
    assert found[-2] is None
    assert close(found[-1], [0.9], 1e-6)
    assert [each for each in found[:-3] if each is not None] == []


def test_the_second_under_way_is_not_shown_yet() -> None:
    series = Series()
    series.add(0.1, 50.5)
    assert set(series.percentiles(50.9)) == {None}
    series.add(0.3, 50.95)
    assert close(series.percentiles(51.0)[-1], [0.1, 0.3], 1e-6)


def test_seconds_long_ago_are_gone() -> None:
    series = Series()
    series.add(0.1, 10.0)
    assert series.percentiles(10.0 + KEPT_S)[0] is not None
    assert set(series.percentiles(11.0 + KEPT_S)) == {None}
    assert set(series.percentiles(10.0 + 10 * KEPT_S)) == {None}


def test_a_busy_second_takes_bounded_room_and_stays_true() -> None:
    rng, series, values = random.Random(4), Series(), []
    for _ in range(50_000):
        values.append(rng.expovariate(10.0))
        series.add(values[-1], 7.5)
    (second,) = series._seconds
    assert len(second._values) <= 256
    found = series.percentiles(8.0)[-1]
    assert close(found, values, 0.25 * nearest(values, 0.95))


def test_many_seconds_take_bounded_room() -> None:
    series = Series()
    for at_s in range(10 * KEPT_S):
        series.add(1.0, float(at_s))
    assert len(series._seconds) == KEPT_S
