"""When a decode leg with transfer params is given up while it is on its way."""

import asyncio
import time

import pytest

from gateway.handoff import watch as module
from gateway.handoff.watch import LegWatch, Verdict
from gateway.proxy.timed import TimedBody


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "LEAVE_S", 0.1)
    monkeypatch.setattr(module, "GIVE_UP_S", 0.2)


async def judged(
    *,
    heard: bool,
    begun: bool = False,
    written: bool = False,
    asks: bool = True,
    replaceable: bool = False,
    deadline_s: float = 60.0,
    lease_ends_s: float = 70.0,
) -> Verdict | None:
    """The verdict on a leg; None when there is none within half a second. Times are from now."""
    now_s = time.monotonic()
    body = TimedBody(b"x", now_s + deadline_s)
    body.begun = begun or written
    body.written_s = now_s if written else None
    watch: LegWatch | None = None
    try:
        async with asyncio.timeout(0.5) as limit:
            watch = LegWatch(
                limit,
                body,
                asks=asks,
                replaceable=replaceable,
                deadline_s=now_s + deadline_s,
                lease_ends_s=now_s + lease_ends_s,
                heard_since=lambda since_s: heard,
            )
            await asyncio.Event().wait()
    except TimeoutError:
        pass
    assert watch is not None
    watch.stop()
    return watch.verdict


async def test_who_lives_and_never_asks_for_the_body_cannot() -> None:
    assert await judged(heard=True) is Verdict.DEAF
    assert await judged(heard=True, asks=False) is None, "it was not waited for"
    assert await judged(heard=True, begun=True) is None, "it has asked"


async def test_who_answers_nothing_is_left_soon_if_another_can_take_it() -> None:
    assert await judged(heard=False, replaceable=True) is Verdict.SILENT
    assert await judged(heard=False, replaceable=False) is None
    assert await judged(heard=False, replaceable=True, begun=True) is None


async def test_at_the_deadline_a_body_not_written_is_given_up() -> None:
    assert await judged(heard=False, deadline_s=0.05) is Verdict.SILENT
    assert await judged(heard=False, deadline_s=0.05, begun=True) is Verdict.SILENT
    assert await judged(heard=True, deadline_s=0.05) is Verdict.LATE
    assert await judged(heard=True, deadline_s=0.05, begun=True) is Verdict.LATE


async def test_once_it_is_written_only_a_silent_lease_end_ends_it() -> None:
    assert await judged(heard=False, written=True, deadline_s=0.05, lease_ends_s=0.1) is Verdict.SILENT
    assert await judged(heard=True, written=True, deadline_s=0.05, lease_ends_s=0.1) is None
    assert await judged(heard=False, written=True, deadline_s=0.05) is None
