"""Close frames that one side of a realtime session sent, as the other side is told."""

import pytest

from gateway.proxy.realtime import ending


@pytest.mark.parametrize(
    ("came", "goes"), [(1000, 1000), (4999, 4999), (5000, 1000), (57005, 1000), (0, 1000), (1006, 1000)]
)
def test_a_code_that_is_none_is_not_passed_on(came: int, goes: int) -> None:
    assert ending.as_sent(ending.Close(came, "bye")) == (goes, b"bye")


@pytest.mark.parametrize("reason", ["é" * 60 + "x", "x" + "é" * 61, "模" * 41, "\U0001f600" * 31, "x" * 123])
def test_a_reason_is_not_cut_within_a_character(reason: str) -> None:
    said = ending.as_sent(ending.Close(1000, reason))[1]
    assert 100 < len(said) <= 120
    assert reason.startswith(said.decode())
