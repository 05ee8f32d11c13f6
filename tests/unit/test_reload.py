"""A configuration read again: what is taken, what waits for a restart, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gateway.config import Config, load_config
from gateway.config.keys import leaves
from gateway.config.read import MOST_BYTES
from gateway.config.schema import Worker
from gateway.config.show import default_yaml
from gateway.debug.metrics import Metrics
from gateway.discovery import NameClashError, RenewedList
from gateway.errors import UserError
from gateway.reload import LIVE, KeyPath, Reloading, Source, with_keys
from scorer.types import ChangeKind


class Kept:
    """A process that takes configurations from a file."""

    def __init__(self, path: Path, *, foreign: tuple[str, ...] = ()) -> None:
        self.path = path
        self.metrics = Metrics("warmroute")
        self.refusal: Exception | None = None
        self.config = load_config(str(path))
        self.taken: list[frozenset[KeyPath]] = []
        source = Source(read=lambda: load_config(str(path)), file=str(path))
        self.reloading = Reloading(self.config, source, self._take, self.metrics, foreign=foreign)

    def write(self, text: str | bytes) -> None:
        self.path.write_bytes(text.encode() if isinstance(text, str) else text)

    def _take(self, new: Config, changed: frozenset[KeyPath]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.config = with_keys(self.config, new, changed)
        self.taken.append(changed)

    @property
    def told(self) -> dict[str, str]:
        return dict(self.reloading.degraded())

    def count(self, outcome: str) -> float:
        return self.metrics.registry.get_sample_value("warmroute_config_reloads_total", {"outcome": outcome}) or 0.0


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    path = tmp_path / "warmroute.yaml"
    path.write_text("scorer: {slo_ttft_ms: 500}\n")
    return Kept(path, foreign=("sidecar",))


async def test_live_keys_are_in_force_and_others_wait_by_name(kept: Kept) -> None:
    kept.write(
        "scorer: {slo_ttft_ms: 900}\nindex: {budget_bytes: 1GiB}\nqueue: {max_requests: 7}\nsidecar: {port: 1}\n"
    )
    await kept.reloading.reload()
    assert kept.config.scorer.slo_ttft_ms == 900
    assert kept.config.queue.max_requests == 7
    assert kept.config.index == Config().index
    assert kept.taken == [{("scorer", "slo_ttft_ms"), ("queue", "max_requests")}]
    assert kept.told == {"config_needs_restart": "changed, and in force after a restart: index.budget_bytes"}
    kept.write("scorer: {slo_ttft_ms: 900}\n")
    await kept.reloading.reload()
    assert kept.config.queue == Config().queue  # A key that left the file has its default again.
    assert kept.told == {}
    assert (kept.count("taken"), kept.count("rejected")) == (2, 0)


@pytest.mark.parametrize(
    "text",
    [
        "scorer: {slo_ttft_ms: -1}\n",
        "scorer: [\n",
        "scorre: {}\n",
        "",
        " \n",
        "- a list\n",
        b"logging: {level: '\xff'}\n",
        'logging: {level: "\\ud800"}\n',
        '"\\ud800": 1\n',
        'logging: {level: "\\UFFFFFFFF"}\n',
        "logging: {level: !!timestamp soon}\n",
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghij")),
        "#" * (MOST_BYTES + 1),
    ],
)
async def test_a_bad_one_keeps_the_old_one_and_says_so(kept: Kept, text: str | bytes) -> None:
    kept.write(text)
    await kept.reloading.reload()
    assert kept.config.scorer.slo_ttft_ms == 500
    assert kept.taken == []
    assert kept.told["config_rejected"].startswith("the configuration as it is now cannot be used")
    assert str(kept.path) in kept.told["config_rejected"]
    kept.write("scorer: {slo_ttft_ms: 600}\n")
    await kept.reloading.reload()
    assert kept.told == {}
    assert kept.config.scorer.slo_ttft_ms == 600
    assert (kept.count("taken"), kept.count("rejected")) == (1, 1)


async def test_one_that_cannot_be_put_in_force_is_refused_whole(kept: Kept) -> None:
    kept.refusal = UserError("two workers are called a")
    kept.write("scorer: {slo_ttft_ms: 600}\n")
    await kept.reloading.reload()
    assert kept.config.scorer.slo_ttft_ms == 500
    assert kept.told["config_rejected"].endswith("two workers are called a")
    kept.refusal = None
    await kept.reloading.reload()
    assert kept.taken == [{("scorer", "slo_ttft_ms")}]


async def test_the_file_is_watched_but_not_taken_half_written(kept: Kept) -> None:
    await kept.reloading.look()
    assert kept.taken == []
    kept.write("scorer: {slo_ttft_ms: 6")
    await kept.reloading.look()
    kept.write("scorer: {slo_ttft_ms: 600}\n")
    await kept.reloading.look()
    assert kept.taken == []
    assert kept.told == {}
    await kept.reloading.look()
    assert kept.taken == [{("scorer", "slo_ttft_ms")}]
    await kept.reloading.look()
    assert len(kept.taken) == 1


async def test_a_bad_file_is_told_once(kept: Kept) -> None:
    kept.write("scorer: {slo_ttft_ms: -1}\n")
    for _ in range(4):
        await kept.reloading.look()
    assert kept.count("rejected") == 1


def unlink(path: Path) -> None:
    path.unlink()


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def to_dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone"))


@pytest.mark.parametrize("spoil", [unlink, to_folder, to_pipe, to_endless, to_dangling])
async def test_a_file_that_is_gone_is_told_once_it_stays_away(kept: Kept, spoil: Callable[[Path], None]) -> None:
    spoil(kept.path)
    await kept.reloading.look()
    assert kept.told == {}  # It may be on its way to be replaced.
    for _ in range(3):
        await kept.reloading.look()
    assert str(kept.path) in kept.told["config_rejected"]
    assert kept.count("rejected") == 1
    assert kept.config.scorer.slo_ttft_ms == 500
    await kept.reloading.reload()
    assert (kept.taken, kept.config.scorer.slo_ttft_ms) == ([], 500)
    kept.path.rmdir() if kept.path.is_dir() else kept.path.unlink(missing_ok=True)
    kept.write("scorer: {slo_ttft_ms: 500}\n")
    for _ in range(2):
        await kept.reloading.look()
    assert kept.told == {}


async def test_a_folder_of_a_configmap_is_swapped_under_it(tmp_path: Path) -> None:
    """As kubelet does it: the file is a link into `..data`, which is a link to the folder in force."""

    def swapped(name: str, text: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "warmroute.yaml").write_text(text)
        (tmp_path / "..tmp").symlink_to(name)
        (tmp_path / "..tmp").rename(tmp_path / "..data")

    swapped("..1", "scorer: {slo_ttft_ms: 500}\n")
    (tmp_path / "warmroute.yaml").symlink_to("..data/warmroute.yaml")
    kept = Kept(tmp_path / "warmroute.yaml")
    swapped("..2", "scorer: {slo_ttft_ms: 700}\n")
    (tmp_path / "..1" / "warmroute.yaml").unlink()
    for _ in range(2):
        await kept.reloading.look()
    assert (kept.config.scorer.slo_ttft_ms, kept.told) == (700, {})


async def test_what_goes_wrong_unforeseen_is_told_too(kept: Kept) -> None:
    kept.refusal = ZeroDivisionError()
    kept.write("scorer: {slo_ttft_ms: 600}\n")
    for _ in range(4):
        await kept.reloading.look()
    assert "ZeroDivisionError" in kept.told["config_rejected"]
    assert kept.count("rejected") == 1


async def test_answers_go_on_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "warmroute.yaml"
    path.write_text("{}\n")
    begun, go_on = threading.Event(), threading.Event()

    def read() -> Config:
        begun.set()
        assert go_on.wait(60)
        return Config()

    source = Source(read=read, file=str(path))
    reloading = Reloading(Config(), source, lambda new, changed: None, Metrics("warmroute"))
    task = asyncio.create_task(reloading.reload())
    await asyncio.to_thread(begun.wait, 60)
    assert not task.done()
    go_on.set()
    await task
    assert reloading.problem is None


async def test_without_a_file_nothing_is_watched(tmp_path: Path) -> None:
    metrics = Metrics("warmroute")
    reloading = Reloading(Config(), Source(read=Config, file=None), lambda new, changed: None, metrics)
    for _ in range(3):
        await reloading.look()
    assert metrics.registry.get_sample_value("warmroute_config_reloads_total", {"outcome": "taken"}) == 0


def test_which_keys_are_live_is_shown_where_they_are_explained() -> None:
    assert {("workers",), ("logging", "level"), ("scorer", "slo_ttft_ms"), ("queue", "max_requests")} <= LIVE
    assert ("gateway", "port") not in LIVE
    assert " ".join(default_yaml().replace("#", "").split()).count("; live)") == len(LIVE)
    assert {path for path, _ in leaves()} >= LIVE


def test_keys_are_replaced_one_by_one() -> None:
    new = msgspec.convert({"scorer": {"slo_ttft_ms": 5.0, "slo_tpot_ms": 6.0}}, Config)
    mixed = with_keys(Config(), new, [("scorer", "slo_ttft_ms")])
    assert (mixed.scorer.slo_ttft_ms, mixed.scorer.slo_tpot_ms) == (5.0, None)
    assert with_keys(Config(), new, []) == Config()


async def test_a_renewed_list_is_the_difference() -> None:
    a, b, c = (Worker(url=f"http://{name}:1", name=name) for name in "abc")
    slower = msgspec.structs.replace(b, weight=0.5)
    told = [(each.kind, each.worker) async for each in RenewedList([a, b], [slower, c]).changes()]
    assert sorted(told, key=str) == sorted(
        [(ChangeKind.DRAINING, "a"), (ChangeKind.CHANGED, "b"), (ChangeKind.ADDED, "c")], key=str
    )
    with pytest.raises(NameClashError):
        RenewedList([], [a, msgspec.structs.replace(b, name="a")])


def test_the_documented_keys_are_the_live_ones() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    listed = page.partition("<!-- live keys -->")[2].partition("<!-- end -->")[0]
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)`", listed))
    assert named == {".".join(path) for path in LIVE}
