"""What replicas write for each other, what they make of Redis's errors, and what they take over."""

from __future__ import annotations

import logging
import math
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from gateway.config.schema import RedisConfig
from gateway.errors import UserError
from gateway.replicas import codec
from gateway.replicas.link import FAILURES, Link, Password, clients, failure
from gateway.replicas.schema import Keys
from scorer import journal
from scorer.calibrate import FLEET, Calibration, Part
from scorer.journal import Arrival, Journal, SessionAt
from scorer.kind import EngineKind
from scorer.ledger import InFlight

NAME = st.text(max_size=20)
HOLDER = st.tuples(NAME, st.integers(0, 8))
COMP_S = st.floats(0, 1000)
LOAD = st.builds(InFlight, st.integers(0, 99), COMP_S, st.just(0.0), st.integers(0, 99), st.integers(0, 1 << 30))
KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=20)
NEWS = st.builds(
    codec.News,
    number=st.integers(0, 1 << 40),
    loads=st.dictionaries(HOLDER, LOAD, max_size=5),
    arrivals=st.lists(st.builds(Arrival, st.integers(0, 1 << 30), HOLDER, KEYS), max_size=4),
    over=st.dictionaries(st.integers(0, 1 << 30), st.booleans(), max_size=4),
    sessions=st.lists(st.builds(SessionAt, st.binary(max_size=16), HOLDER, st.integers(0, 1 << 30)), max_size=4),
    responses=st.lists(st.tuples(NAME, NAME, st.none() | st.integers(0, 8), st.none() | NAME), max_size=4),
    bye=st.booleans(),
)


@given(NEWS)
def test_news_are_read_as_written(news: codec.News) -> None:
    assert codec.read_news(codec.news(news)) == news


@given(st.integers(0, 1 << 40), st.dictionaries(HOLDER, LOAD, max_size=5))
def test_a_whole_is_read_as_written(number: int, loads: dict[Any, InFlight]) -> None:
    assert codec.read_whole(codec.whole(number, loads)) == (number, loads)


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"\x01" + tail))
def test_junk_is_bad_and_no_more(data: bytes) -> None:
    for read in (codec.read_news, codec.read_whole, codec.read_sessions, codec.read_learned):
        try:
            read(data)
        except codec.Bad:
            continue


@pytest.mark.parametrize(
    "load",
    [
        ["a", 0, -1, 0.0, 0.0, 0, 0],
        ["a", 0, 0, -1.0, 0.0, 0, 0],
        ["a", 0, 0, math.nan, 0.0, 0, 0],
        ["a", 0, 0, math.inf, 0.0, 0, 0],
        ["a", 0, 0, 0.0, 0.0, 0, 1 << 50],
        ["a" * 600, 0, 0, 0.0, 0.0, 0, 0],
        ["a", 1 << 20, 0, 0.0, 0.0, 0, 0],
    ],
)
def test_impossible_loads_are_bad(load: list[Any]) -> None:
    with pytest.raises(codec.Bad):
        codec.read_whole(b"\x01" + msgspec.msgpack.encode([1, [load]]))


def test_fields_that_were_added_are_skipped_and_other_versions_told() -> None:
    later = b"\x01" + msgspec.msgpack.encode([1, [["a", 0, 1, 2.0, 1.0, 3, 4, 5.0, 6.0, "new"]], "new"])
    assert codec.read_whole(later) == (1, {("a", 0): InFlight(1, 2.0, 1.0, 3, 4, 5.0, 6.0)})
    with pytest.raises(codec.OtherVersion):
        codec.read_whole(b"\x02" + later[1:])


def test_a_long_prompt_is_told_as_far_as_it_fits() -> None:
    arrivals = [Arrival(i, ("a", 0), list(range(n))) for i, n in enumerate([5000, 5000, 20_000, 10])]
    parts = codec.parted(arrivals)
    assert [[each.number for each in part] for part in parts] == [[0], [1], [2], [3]]
    assert max(len(each.keys) for part in parts for each in part) == codec.MOST_BLOCKS
    for part in parts:
        codec.read_news(codec.news(codec.News(number=1, arrivals=part)))


def test_keys_of_a_fleet_are_in_one_slot() -> None:
    keys = Keys("warmroute", "chat")
    names = [keys.news, keys.writers, keys.load("w"), keys.learned("w"), keys.sessions("w")]
    assert {name[: name.index("}") + 1] for name in names} == {"{warmroute:chat}"}
    assert len(set(names)) == 5


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.ConnectionError("Error 111 connecting"), "unreachable"),
        (ConnectionResetError(), "unreachable"),
        (exceptions.TimeoutError("Timeout reading"), "slow"),
        (TimeoutError(), "slow"),
        (exceptions.AuthenticationError("WRONGPASS"), "auth"),
        (exceptions.ResponseError("NOAUTH Authentication required."), "auth"),
        (exceptions.NoPermissionError("xadd"), "no_permission"),
        (exceptions.OutOfMemoryError("command not allowed"), "full"),
        (exceptions.ReadOnlyError("You can't write"), "readonly"),
        (exceptions.ResponseError("MISCONF Redis is configured to"), "readonly"),
        (exceptions.BusyLoadingError("Redis is loading"), "loading"),
        (exceptions.MovedError("1 127.0.0.1:7000"), "cluster"),
        (exceptions.ClusterDownError("The cluster is down"), "cluster_down"),
        (MasterNotFoundError("No master found"), "no_master"),
        (exceptions.ResponseError("WRONGTYPE Operation against a key holding"), "wrong_type"),
        (exceptions.InvalidResponse("Protocol error, got 'H' as reply type byte"), "protocol"),
        (exceptions.ResponseError("ERR unknown command"), "refused"),
        (
            RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"),
            "unreachable",
        ),
        (RuntimeError("?"), "misread"),
        (ValueError("?"), "misread"),
    ],
)
def test_errors_have_kinds(error: Exception, kind: str) -> None:
    assert failure(error) == kind
    assert kind in FAILURES


def test_every_kind_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| kind \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(FAILURES)


def test_attempts_get_rarer_and_begin_anew() -> None:
    counted: list[str] = []
    link = Link("testing", "single", counted.append)
    waits = [link.fails(exceptions.ConnectionError(), random.Random(1)) for _ in range(8)]
    assert 0.12 <= waits[0] <= 0.25
    assert max(waits) <= 5.0
    assert waits[-1] > 2.0
    assert not link.is_up
    link.works()
    assert link.is_up
    assert link.problem is None
    assert link.fails(exceptions.ConnectionError(), random.Random(1)) <= 0.25
    assert counted == ["unreachable"] * 9


def test_what_starts_at_the_same_time_may_not_be_there_yet(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1)

    def logged(*happens: Exception | None) -> list[str]:
        link = Link("testing", "single", lambda kind: None, patience=2)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="gateway.replicas.link"):
            for exc in happens:
                link.works() if exc is None else link.fails(exc, rng)
        return [record.getMessage() for record in caplog.records]

    absent, slow = exceptions.ConnectionError(), exceptions.TimeoutError()
    fails, works = "testing fails: no connection", "testing works again"
    assert logged(absent, absent, None) == []
    assert logged(absent, absent, absent, absent, None) == [fails, works]
    assert logged(None, absent, absent, None, absent, None) == []
    assert logged(None, absent, absent, absent, None, absent) == [fails, works]
    assert logged(absent, slow, None) == ["testing fails: no answer in redis.op_timeout_ms", works]
    unseen = Link("testing", "single", lambda kind: None, patience=2)
    unseen.fails(absent, rng)
    assert unseen.problem == "unreachable", "it is told where it is asked"


@pytest.mark.parametrize(
    "config",
    [
        RedisConfig(url="redis://a,b"),
        RedisConfig(url="redis://a/1", mode="cluster"),
        RedisConfig(url="unix:///x", mode="sentinel"),
    ],
)
def test_what_does_not_go_together_is_told(config: RedisConfig) -> None:
    with pytest.raises(UserError, match=r"redis\."):
        clients(config, lambda: None)


def test_a_journal_is_bounded_and_tells_each_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_BLOCKS", 10)
    woken: list[int] = []
    it = Journal(lambda: woken.append(1))
    for _ in range(3):
        it.booked(("a", 0))
    first = it.assumed(("a", 0), [1, 2, 3, 4, 5, 6])
    assert it.assumed(("b", 0), [1, 2, 3, 4, 5, 6]) == 0
    it.left(first, prefilled=False)  # Before anybody was told: there is nothing to tell.
    second = it.assumed(("b", 0), [7, 8])
    it.left(second, prefilled=True)
    told = it.take()
    assert told.loads == {("a", 0)}
    assert [each.number for each in told.arrivals] == [second]
    assert told.over == {second: True}
    assert it.left_out == 1
    assert woken
    assert not it.take()


def test_growth_wakes_nobody() -> None:
    woken: list[int] = []
    it = Journal(lambda: woken.append(1))
    it.observed(("a", 0), is_growth=True)
    assert not woken
    assert it.take().loads == {("a", 0)}


def learned(factor: float, n: int, part: Part = Part.WORK, name: str = "a") -> Calibration:
    calibration = Calibration()
    for _ in range(n):
        calibration.add(part, name, 1.0, factor)
    return calibration


def test_factors_are_taken_over_weighted_by_samples() -> None:
    own = Calibration()
    assert own.adopt([learned(2.0, 400).state(), learned(1.0, 13).state()]) == 2
    # The first counts as 40, what it has not forgotten of its samples.
    assert math.log(own.value(Part.WORK, "a")) == pytest.approx(math.log(2.0) * 40 / 53, rel=0.01)
    assert (Part.WORK, FLEET) in own.factors()


def test_own_factors_stay_and_nonsense_is_left_out() -> None:
    own = learned(3.0, 60)
    assert own.adopt([learned(1.5, 400).state(), {"factors": {"work": {"a": ["x"]}, "?": 1}}, {}]) == 0
    assert own.value(Part.WORK, "a") == pytest.approx(3.0)


def test_a_worker_of_another_kind_is_not_taken_over() -> None:
    kinds = [EngineKind(model=name, kv_cache_dtype="auto", block_size=16, kv_blocks=9, weight=1.0) for name in "xy"]
    there, here = learned(2.0, 60), Calibration()
    there.meet("a", kinds[0])
    here.meet("a", kinds[1])
    here.adopt([there.state()])
    assert (Part.WORK, "a") not in here.factors()
    unmet = Calibration()
    unmet.adopt([there.state()])
    assert unmet.value(Part.WORK, "a") == pytest.approx(2.0)
    assert unmet.meet("a", kinds[1])  # It turns out later.
    assert (Part.WORK, "a") not in unmet.factors()


def test_a_password_is_no_part_of_the_url_and_not_shown() -> None:
    from gateway.config import load_config
    from gateway.config.load import ConfigError

    with pytest.raises(ConfigError) as told:
        load_config(env={"WARMROUTE_REDIS__URL": "redis://user:sesam@host:6379/0"})
    assert "redis.password_env" in str(told.value)
    assert "sesam" not in str(told.value)


async def test_a_password_is_given_without_a_warning_at_each_connection(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert await Password(None, lambda: "secret").get_credentials_async() == ("secret",)
    assert await Password("user", lambda: "secret").get_credentials_async() == ("user", "secret")
    assert not caplog.records
