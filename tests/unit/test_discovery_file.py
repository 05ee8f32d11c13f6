"""A watched workers file: what is read, when, and what a bad one does."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.config.schema import Worker
from gateway.discovery import FileDiscovery
from gateway.discovery.lines import LinesError, is_lines, read_lines

POLL_S = 0.02


class Watch:
    """Follows a FileDiscovery and remembers who is in."""

    def __init__(self, path: Path, *, drain: bool = True) -> None:
        self.path = path
        self.discovery = FileDiscovery(str(path), poll_s=POLL_S, drain=drain)
        self.seen: list[str] = []
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for change in self.discovery.changes():
            self.seen.append(f"{change.kind.value} {change.worker} {change.role.value}")

    def replace(self, text: str) -> None:
        """Atomically, as editors and config management do."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not true():  # noqa: ASYNC110 - the condition is somebody else's
                await asyncio.sleep(0.002)


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Watch]:
    watch = Watch(tmp_path / "workers.yaml")
    yield watch
    watch.task.cancel()


async def test_a_file_that_appears_changes_and_goes(watch: Watch) -> None:
    await watch.until(lambda: watch.discovery.problem)
    assert "No such file" in str(watch.discovery.problem)
    watch.replace("- http://a:1\n- {url: http://b:1, role: prefill}\n")
    await watch.until(lambda: len(watch.seen) == 2)
    assert watch.seen == ["added a:1 both", "added b:1 prefill"]
    assert watch.discovery.problem is None
    watch.replace("- {url: http://b:1, role: decode}\n- http://c:1\n")
    await watch.until(lambda: len(watch.seen) == 5)
    assert watch.seen[2:] == ["draining a:1 both", "changed b:1 decode", "added c:1 both"]
    watch.path.unlink()
    await watch.until(lambda: watch.discovery.problem)
    watch.replace("[]")
    await watch.until(lambda: len(watch.seen) == 7)
    assert watch.seen[5:] == ["draining b:1 decode", "draining c:1 both"]


async def test_a_worker_that_comes_back_is_added_again(watch: Watch) -> None:
    for text in ("- http://a:1\n", "[]\n", "- http://a:1\n"):
        before = len(watch.seen)
        watch.replace(text)
        await watch.until(lambda before=before: len(watch.seen) > before)
    assert watch.seen == ["added a:1 both", "draining a:1 both", "added a:1 both"]


async def test_without_draining_the_vanished_are_removed(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "workers", drain=False)
    watch.replace("- http://a:1\n")
    await watch.until(lambda: watch.seen)
    watch.replace("[]")
    await watch.until(lambda: len(watch.seen) == 2)
    assert watch.seen[1] == "removed a:1 both"
    watch.task.cancel()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("- http://a:1\n- {url: ftp://b}\n", "http:// or https://"),
        ("- [unclosed", "not valid YAML"),
        ("- http://a:1\n- {url: http://b:1, name: 'a:1'}\n", "two workers are called a:1"),
        ("", "is empty"),
        ("http://a:1\nhttp://b:1 role=boss\n", "workers.yaml:2"),
        ("42", "expected a list"),
    ],
)
async def test_a_bad_file_keeps_the_last_good_list_and_says_so_once(
    watch: Watch, bad: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch.replace("- http://a:1\n- http://z:1\n")
    await watch.until(lambda: len(watch.seen) == 2)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        watch.replace(bad)
        await watch.until(lambda: watch.discovery.problem)
        assert says in str(watch.discovery.problem)
        looks = watch.discovery._look
        count = 0

        def counting() -> object:
            nonlocal count
            count += 1
            return looks()

        watch.discovery._look = counting  # type: ignore[method-assign,assignment]
        await watch.until(lambda: count > 5)
        assert len(caplog.records) == 1
    assert len(watch.seen) == 2
    watch.replace("- http://a:1\n")
    await watch.until(lambda: len(watch.seen) == 3)
    assert watch.seen[2] == "draining z:1 both"
    assert watch.discovery.problem is None


def test_half_a_list_is_not_taken_for_the_list(tmp_path: Path) -> None:
    """A file written in place, seen between two writes, is valid YAML with workers missing."""
    path = tmp_path / "workers"
    path.write_text("- http://a:1\n- http://b:1\n")
    os.utime(path, (1, 1))
    discovery = FileDiscovery(str(path), poll_s=1000.0)
    assert list(discovery._look() or {}) == ["a:1", "b:1"]
    path.write_text("- http://a:1\n")
    assert discovery._look() is None
    path.write_text("- http://a:1\n- http://b:1\n- http://c:1\n")
    assert discovery._look() is None
    assert list(discovery._look() or {}) == ["a:1", "b:1", "c:1"]
    assert discovery._look() is None


async def test_json_is_yaml(watch: Watch) -> None:
    watch.replace(json.dumps(["http://a:1", {"url": "http://b:1", "role": "decode", "name": "bee"}]))
    await watch.until(lambda: len(watch.seen) == 2)
    assert watch.seen == ["added a:1 both", "added bee decode"]


async def test_lines(watch: Watch) -> None:
    watch.replace("# the fleet\n\nhttp://a:1\nhttp://b:1 role=prefill name=bee # the fast one\n")
    await watch.until(lambda: len(watch.seen) == 2)
    assert watch.seen == ["added a:1 both", "added bee prefill"]


def test_lines_are_told_from_yaml() -> None:
    assert is_lines("# x\nhttp://a:1\n")
    assert not is_lines("- http://a:1\n")
    assert not is_lines('["http://a:1"]')
    assert not is_lines("")


def test_all_bad_lines_are_named() -> None:
    with pytest.raises(LinesError) as caught:
        read_lines("http://a:1 colour=red\nhttp://b:1\nhttp://c:1?q=1 events=nowhere\n", "f")
    problems = str(caught.value).splitlines()
    assert [problem.split(" ")[0] for problem in problems] == ["f:1:", "f:3:"]
    assert read_lines("http://a:1 events=tcp://a:2\n", "f") == (Worker(url="http://a:1", events="tcp://a:2"),)


@pytest.mark.parametrize("bad", ["http://h:99999", "http://h:abc", "http://[::1", "- url: http://h:99999"])
async def test_an_impossible_address_is_a_problem_and_not_the_end(watch: Watch, bad: str) -> None:
    watch.replace("- http://a:1\n")
    await watch.until(lambda: watch.seen)
    watch.replace(bad + "\n")
    await watch.until(lambda: watch.discovery.problem)
    assert not watch.task.done()
    watch.replace("- http://a:1\n- http://b:2\n")
    await watch.until(lambda: len(watch.seen) == 2)
    assert watch.discovery.problem is None
