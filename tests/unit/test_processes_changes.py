"""What is said again to processes that come later."""

from __future__ import annotations

from gateway.config import Config
from gateway.config.schema import RedisConfig
from gateway.processes.assignment import Assignment, decode, encode
from gateway.processes.changes import Change, Changes, is_for_all
from gateway.processes.derived import of_data, share
from gateway.processes.hub import board_of
from gateway.replicas.schema import Keys


def noted(*steps: tuple[str, str, bytes]) -> list[tuple[str, str]]:
    changes = Changes()
    for method, target, answer in steps:
        changes.note(Change(method, target, b"{}"), answer)
    return [(each.method, each.target) for each in changes.all()]


def test_of_a_worker_that_came_and_went_nothing_is_said() -> None:
    added = ("POST", "/admin/workers", b'{"name": "a"}')
    drained = ("POST", "/admin/workers/a/drain", b'{"name": "a"}')
    gone = ("DELETE", "/admin/workers/a?timeout_s=3", b'{"name": "a"}')
    assert noted(added, drained) == [("POST", "/admin/workers"), ("POST", "/admin/workers/a/drain")]
    assert noted(added, drained, added) == [("POST", "/admin/workers"), ("POST", "/admin/workers/a/drain")]
    assert noted(added, drained, gone) == []
    assert noted(added, drained, gone, added) == [("POST", "/admin/workers")]


def test_one_of_the_configuration_that_went_goes_again_and_may_come_back() -> None:
    gone = ("DELETE", "/admin/workers/a", b'{"name": "a"}')
    assert noted(gone) == [("DELETE", "/admin/workers/a?force=true")]
    assert noted(gone, ("POST", "/admin/workers", b'{"name": "a"}')) == [("POST", "/admin/workers")]


def test_what_no_longer_holds_is_not_said() -> None:
    changes = Changes()
    for name in "ab":
        changes.note(Change("DELETE", f"/admin/workers/{name}", b""), b"{}")
    changes.forget(changes.all()[0])
    assert [each.target for each in changes.all()] == ["/admin/workers/b?force=true"]


def test_the_last_word_counts() -> None:
    up, down = ("POST", "/admin/workers/a%2Fb/undrain", b"{}"), ("POST", "/admin/workers/a%2Fb/drain", b"{}")
    assert noted(down, up) == [up[:2]]
    level = ("PUT", "/admin/log-level", b"")
    assert noted(level, level) == [level[:2]]


def test_what_is_only_looked_at_is_asked_of_one() -> None:
    assert is_for_all("POST", "/admin/workers")
    assert is_for_all("DELETE", "/admin/workers/a")
    assert is_for_all("PUT", "/admin/log-level")
    assert not is_for_all("GET", "/admin/workers")
    assert not is_for_all("POST", "/debug/explain")
    assert not is_for_all("POST", "/sleep")


def assignment(number: int, of: int) -> Assignment:
    return Assignment(kind="data", number=number, of=of, seat=0, folder="/f", control_fd=3, table_fd=4)


def test_shares_make_up_the_whole() -> None:
    for of in (1, 2, 3, 7):
        for whole in (0, 1, 2, 5, 2048):
            assert sum(share(whole, assignment(number, of)) for number in range(of)) == whole


def test_processes_and_their_board_name_the_same_keys() -> None:
    given = Config(redis=RedisConfig(prefix="mine", fleet="east"))  # Of a Redis that is not used.
    redis = of_data(given, assignment(0, 2)).redis
    board = board_of(given, assignment(0, 2))
    assert board is not None
    assert board._keys.news == Keys(redis.prefix, redis.fleet).news


def test_an_assignment_goes_by_an_argument() -> None:
    assert decode(encode(assignment(1, 2))) == assignment(1, 2)
