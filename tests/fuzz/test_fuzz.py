"""Each target's seeds, and some mutations of them: the same ones in every run."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.fuzz.mutate import LONGEST_BYTES, mutations
from tests.fuzz.run import NAMES, TooSlow, main, target, timed
from tests.support import IN_CI

_INPUTS = 5000 if IN_CI else 1000
"""For each target: 20 s of CPU time altogether in CI."""


def test_targets_are_found() -> None:
    assert {"kv_events", "ext_proc", "answers", "http_requests", "http_answers", "bodies", "transfer_params"} <= set(
        NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_seeds(name: str) -> None:
    module = target(name)
    assert module.SEEDS
    for seed in module.SEEDS:
        timed(module.fuzz_one, seed)
    timed(module.fuzz_one, b"")


@pytest.mark.parametrize("name", NAMES)
def test_mutations(name: str) -> None:
    module = target(name)
    for data in islice(mutations(module.SEEDS, module.WORDS, 1), _INPUTS):
        timed(module.fuzz_one, data)


def test_mutations_are_the_same_for_the_same_number_and_no_longer_than_allowed() -> None:
    module = target("kv_events")
    one, other = ([*islice(mutations(module.SEEDS, module.WORDS, 7), 300)] for _ in range(2))
    assert one == other
    assert len(set(one)) > 200
    assert max(map(len, one)) <= LONGEST_BYTES


def test_what_is_slow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.run.LONGEST_S", 0.0)
    with pytest.raises(TooSlow):
        timed(lambda data: sum(range(10_000)) and None, b"")


def test_a_found_input_is_kept_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(data: bytes) -> None:
        raise KeyError("a fault")

    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setattr("logging.disable", lambda level: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(target("metrics"), "fuzz_one", broken)
    assert main(["--target", "metrics", "--seconds", "1", "--number", "1"]) == 1
    said = capsys.readouterr().err
    assert "fuzz: found: python -m tests.fuzz.run --target metrics .fuzz/found/metrics-" in said
    assert "KeyError" in said
