"""One index, several threads: appliers, a reader, one who clears. In the end it answers as if there had been one."""

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from indexer import PrefixIndex
from tests.support.kv_feed import SIZE, Feed, prompt

ROUNDS = 60


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_all(*targets: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors


@pytest.mark.parametrize("budget_bytes", [1 << 20, 1 << 30], ids=["tight", "ample"])
def test_apply_match_and_clear_at_once(budget_bytes: int) -> None:
    feed = Feed(PrefixIndex(budget_bytes=budget_bytes))
    prompts = [prompt(200, 2000 * i) for i in range(8)]
    done = threading.Event()

    def apply(worker: str) -> Callable[[], None]:
        events = [feed.event(worker, tokens) for tokens in prompts]
        backwards = [feed.event(worker, tokens, 100) for tokens in prompts]

        def run() -> None:
            try:
                for i in range(ROUNDS):
                    k = i % len(prompts)
                    feed.apply(worker, backwards[k], events[k])
                    feed.remove(worker, prompts[k], *range(150, 200))
            finally:
                if worker == "w0":
                    done.set()

        return run

    def match() -> None:
        while not done.is_set():
            for tokens in prompts:
                for match in feed.match(tokens).values():
                    assert 0 < match.gpu_tokens <= 200 * SIZE
                    assert match.gpu_tokens % SIZE == 0

    def clear() -> None:
        while not done.is_set():
            feed.index.clear("w0")
            feed.index.remove_worker("w1")
            feed.index.sweep(500)
            feed.index.stats()
            feed.index.set_worker("w0", removal_mode="physical")

    run_all(apply("w0"), apply("w1"), match, match, clear)

    for worker in ("w0", "w1"):
        feed.index.clear(worker)
        feed.store(worker, prompts[0])
    feed.index.sweep(1 << 20)
    assert {m.gpu_tokens for m in feed.match(prompts[0]).values()} == {800}
    assert len(feed.match(prompts[0])) == 2
    for tokens in prompts[1:]:
        assert feed.match(tokens) == {}
    for worker in ("w0", "w1"):
        feed.remove(worker, prompts[0], *reversed(range(200)))
    feed.index.sweep(1 << 20)
    stats = feed.index.stats()
    assert stats["entries"] == stats["orphan_blocks"] == stats["retired_holders"] == 0
    assert not any(stats["keys"].values())
    assert all(not any(plane.links) and not plane.open for plane in feed.index._table.planes)


def test_each_workers_events_are_its_own_whatever_the_interleaving() -> None:
    feed = Feed()
    tokens = prompt(300)

    def work(worker: str, n: int) -> Callable[[], None]:
        def run() -> None:
            for start in range(n - 1, -1, -1):
                feed.store(worker, tokens, start, start + 1)

        return run

    run_all(*[work(f"w{i}", 100 + 50 * i) for i in range(5)])
    assert {w: m.gpu_tokens // SIZE for (w, _), m in feed.match(tokens).items()} == {
        f"w{i}": 100 + 50 * i for i in range(5)
    }
