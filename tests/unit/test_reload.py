"""A configuration read again: what is taken, what waits for a restart, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from gateway.config import Config, load_config
from gateway.config.keys import leaves
from gateway.config.schema import Worker
from gateway.config.show import default_yaml
from gateway.debug.metrics import Metrics
from gateway.discovery import NameClashError, RenewedList
from gateway.errors import UserError
from gateway.reload import LIVE, KeyPath, Reloading, Source, with_keys
from scorer.types import ChangeKind


class Kept:
    """A process that takes configurations from a file."""

    def __init__(self, path: Path, text: str, *, foreign: tuple[str, ...] = ()) -> None:
        self.path = path
        self.metrics = Metrics("warmroute")
        self.refusal: UserError | None = None
        self.write(text)
        self.config = load_config(str(path))
        self.taken: list[frozenset[KeyPath]] = []
        source = Source(read=lambda: load_config(str(path)), file=str(path))
        self.reloading = Reloading(self.config, source, self._take, self.metrics, foreign=foreign)

    def write(self, text: str) -> None:
        self.path.write_text(text)

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
    return Kept(tmp_path / "warmroute.yaml", "scorer: {slo_ttft_ms: 500}\n", foreign=("sidecar",))


def test_live_keys_are_in_force_and_others_wait_by_name(kept: Kept) -> None:
    kept.write(
        "scorer: {slo_ttft_ms: 900}\nindex: {budget_bytes: 1GiB}\nqueue: {max_requests: 7}\nsidecar: {port: 1}\n"
    )
    kept.reloading.reload()
    assert kept.config.scorer.slo_ttft_ms == 900
    assert kept.config.queue.max_requests == 7
    assert kept.config.index == Config().index
    assert kept.taken == [{("scorer", "slo_ttft_ms"), ("queue", "max_requests")}]
    assert kept.told == {"config_needs_restart": "changed, and in force after a restart: index.budget_bytes"}
    kept.write("scorer: {slo_ttft_ms: 900}\n")
    kept.reloading.reload()
    assert kept.config.queue == Config().queue  # A key that left the file has its default again.
    assert kept.told == {}
    assert (kept.count("taken"), kept.count("rejected")) == (2, 0)


@pytest.mark.parametrize("text", ["scorer: {slo_ttft_ms: -1}\n", "scorer: [\n", "scorre: {}\n"])
def test_a_bad_one_keeps_the_old_one_and_says_so(kept: Kept, text: str) -> None:
    kept.write(text)
    kept.reloading.reload()
    assert kept.config.scorer.slo_ttft_ms == 500
    assert kept.taken == []
    assert kept.told["config_rejected"].startswith("the configuration as it is now cannot be used")
    assert str(kept.path) in kept.told["config_rejected"]
    kept.write("scorer: {slo_ttft_ms: 600}\n")
    kept.reloading.reload()
    assert kept.told == {}
    assert kept.config.scorer.slo_ttft_ms == 600
    assert (kept.count("taken"), kept.count("rejected")) == (1, 1)


def test_one_that_cannot_be_put_in_force_is_refused_whole(kept: Kept) -> None:
    kept.refusal = UserError("two workers are called a")
    kept.write("scorer: {slo_ttft_ms: 600}\n")
    kept.reloading.reload()
    assert kept.config.scorer.slo_ttft_ms == 500
    assert kept.told["config_rejected"].endswith("two workers are called a")
    kept.refusal = None
    kept.reloading.reload()
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


async def test_a_bad_file_is_told_once_and_a_vanished_one_changes_nothing(kept: Kept) -> None:
    kept.write("scorer: {slo_ttft_ms: -1}\n")
    for _ in range(4):
        await kept.reloading.look()
    assert kept.count("rejected") == 1
    kept.path.unlink()
    for _ in range(3):
        await kept.reloading.look()
    assert kept.count("rejected") == 1
    kept.write("scorer: {slo_ttft_ms: 500}\n")
    for _ in range(2):
        await kept.reloading.look()
    assert kept.told == {}


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
