"""Cells, sweeps and targets: what is compared, how often it is run, and what is said about it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.sim import grid, targets
from bench.sim.arms import arms
from bench.sim.fleet import FleetSpec, servers
from bench.sim.sweep import Sweep
from bench.sim.tables import arms_table
from bench.sim.workloads.generated import Mixed
from bench.sim.workloads.traces import Row
from scorer.types import Role


def small(rate: float = 4.0, *, seeds: int = 1) -> grid.Cell:
    return grid.Cell(
        f"small {rate:g}/s",
        FleetSpec(servers("h200-7b", prefill=1, decode=1), pd_policy=grid.PD_POLICY),
        lambda seed: Mixed(seed, rate=rate, duration_s=4.0),
        ("warmroute", "least-load", "clairvoyant"),
        ("warmroute", "least-load", "clairvoyant", "random"),
        seeds,
        2,
    )


def test_every_arm_of_every_cell_exists() -> None:
    traces = grid.Traces()
    cells = [*grid.all_cells(traces), grid.azure(traces, 1, 3, 10.0), grid.robust("slow told")]
    named = {name for cell in cells for name in (*cell.arms, *cell.all_arms)}
    assert named <= set(arms())
    assert all(set(cell.arms) <= set(cell.all_arms) for cell in cells)
    assert len({cell.name for cell in cells}) == len(cells)


def test_every_published_rule_of_the_issue_is_an_arm() -> None:
    assert {
        "round-robin", "random", "least-load", "longest-prefix", "aggregated", "local", "always-remote",
        "threshold-16", "threshold-1024", "isl-2048-0.7", "isl-ratio-4096-0.6", "llm-d-111", "llm-d-322", "sticky",
        "dynamo", "dynamo-2", "kv-aware", "lmetric", "conductor", "ppd", "edpp", "warmroute", "clairvoyant",
    } <= set(arms())  # fmt: skip


def test_an_aggregated_fleet_has_the_same_servers_in_another_role() -> None:
    spec = grid.mixed(9).spec
    whole = grid.aggregated(spec)
    assert [server.name for server in whole.servers] == [server.name for server in spec.servers]
    assert {server.role for server in whole.servers} == {Role.BOTH}


def test_a_sweep_runs_each_cell_arm_and_seed_once() -> None:
    sweep = Sweep()
    cell = small(seeds=2)
    first = sweep.figure(cell, "least-load", "ttft_mean_ms")
    assert sweep.figure(cell, "least-load", "ttft_mean_ms") == first > 0
    assert sweep.made == 2
    assert len(Sweep(full=True).arms(cell)) == 4
    assert sweep.rivals(cell) == ["least-load"]  # nobody is asked to beat the clairvoyant one


def test_the_cell_s_metric_is_latency_where_all_keep_their_objectives() -> None:
    sweep = Sweep()
    easy, hard = small(1.0), small(14.0)
    assert sweep.keeps_slo(easy)
    assert sweep.score(easy, "warmroute") == pytest.approx(1000 / sweep.figure(easy, "warmroute", "e2e_mean_ms"))
    assert not sweep.keeps_slo(hard)
    assert sweep.score(hard, "least-load") == sweep.figure(hard, "least-load", "slo_share") < 0.99


def test_goodput_is_the_highest_rate_that_keeps_nine_in_ten() -> None:
    class Known(Sweep):
        def figure(self, cell: grid.Cell, arm: str, *path: str) -> float:
            return 1.0 if float(cell.name.split()[1][:-2]) <= 33.0 else 0.5

    for guess in (5.0, 33.0, 200.0):
        found = targets.goodput(Known(), small, "warmroute", guess)
        assert 33.0 / targets.FINE - 0.2 <= found <= 33.0


def test_goals_do_not_bend() -> None:
    assert targets.at_least("x", 1.7, 1.7, "ratio").met
    assert not targets.at_least("x", 1.7, 1.69, "ratio").met
    assert targets.at_most("x", 1.1, 1.1, "ratio").met
    assert not targets.at_most("x", 1.1, 1.11, "ratio").met


def test_targets_end_in_one_json_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(grid, "appends", lambda whole_kv=False: _with_turns(whole_kv))
    monkeypatch.setattr(targets, "judged", lambda jobs: [])
    page = tmp_path / "tables.md"
    assert targets.main(["--only", "4", "--json", "--markdown", str(page)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["targets"]
    assert [set(each) >= {"name", "goal", "measured", "met"} for each in found] == [True] * 4
    assert [line[:4] for line in lines[:4]] == ["met " if each["met"] else "MISS" for each in found]
    text = page.read_text()
    assert "| always-remote |" in text
    assert "| least-load |" in text
    assert found[0]["name"] in text


def _with_turns(whole_kv: bool) -> grid.Cell:
    cell = grid.sessions("chat", grid.CHAT, 1.0)
    spec = replace(cell.spec, whole_kv=whole_kv)
    return grid.Cell(
        f"a few chats {whole_kv}",
        spec,
        lambda seed: grid.Sessions(seed, grid.CHAT, rate=1.0, duration_s=3.0),
        ("warmroute",),
    )


def test_a_ceiling_is_what_engines_do_that_never_pause() -> None:
    class Alike(grid.Traces):
        def lengths(self, seed: int, n: int) -> list[Row]:
            return [Row(0.0, 1000, 128, None)] * 3

    # H200, 7B: 21 ms and 0.5 ms of attention; 128 steps of 5.04 ms shared by 128 answers, and each one's own part.
    prefill_s = 1000 * 21e-6 + 1e-9 * 1000**2 / 2
    decode_s = 128 * (5.04e-3 / 128 + 0.0116e-3 + 3.31e-8 * 1064)
    whole, split = grid.azure_ceiling(Alike(), 1, 3)
    assert whole == pytest.approx(4 / (prefill_s + decode_s))
    assert split == pytest.approx(1 / prefill_s)
    assert grid.azure_ceiling(Alike(), 3, 1)[1] == pytest.approx(1 / decode_s)


def test_nothing_is_sooner_than_with_the_fleet_to_itself() -> None:
    """The bound that says a goal is out of reach: no arm, at a rate at which others are there too, goes below it."""
    alone = Sweep().figure(_short(grid.appends_alone()), "local", "groups", "later turns", "ttft_mean_ms")
    cell = _short(grid.appends())
    for arm in ("warmroute", "clairvoyant", "aggregated", "ppd"):
        assert Sweep().figure(cell, arm, "groups", "later turns", "ttft_mean_ms") >= alone


def _short(cell: grid.Cell) -> grid.Cell:
    """A twentieth of it."""
    rate = 0.05 if "alone" in cell.name else 4.0
    return replace(cell, load=lambda seed: grid.Sessions(seed, grid._ppd_chat, rate=rate, duration_s=48.0 / rate))


def test_least_load_is_shown_wherever_arms_are_compared() -> None:
    cells = grid.all_cells(grid.Traces())
    assert all("least-load" in cell.all_arms for cell in cells)
    assert "least-load" in grid.SPLIT
    assert {cell.name: cell.seeds for cell in cells if cell.seeds > 1} == {
        "chat 4/s": 3, "code 0.2/s": 3, "code 0.25/s": 6,
    }  # fmt: skip


def test_an_unknown_target_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        targets.main(["--only", "9"])
    assert "no target '9'" in capsys.readouterr().err


def test_tables_show_the_spread_over_seeds() -> None:
    sweep = Sweep()
    cell = small(seeds=2)
    sweep.runs(cell, "least-load")
    assert " ± " in "\n".join(arms_table(sweep, cell))
