"""Loads: read from traces, made like them, in stages, in a closed loop; and the figures made of what came of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.sim.arms import arm
from bench.sim.catalog import WORKLOADS, Options, cell
from bench.sim.fleet import FleetSpec, servers
from bench.sim.prompts import blocks, unique
from bench.sim.record import Record, bin_of, gap_of
from bench.sim.report import gap_percentiles, percentile, summarise
from bench.sim.workloads.shared import Hotspot, Ladder
from bench.sim.workloads.traces import Replay, hit_bound, like_azure, like_mooncake, read_azure, read_mooncake
from bench.sim.world import World

DATA = Path(__file__).resolve().parents[1] / "data" / "traces"
ROOT = Path(__file__).resolve().parents[2]


def test_mooncake_lines_become_requests_with_shared_blocks() -> None:
    rows = read_mooncake(DATA / "mooncake_conversation.jsonl")
    assert len(rows) == 120
    assert rows[0].input_tokens == 6758
    assert rows[0].hash_ids == list(range(14))
    assert 0 < hit_bound(rows) < 1
    assert len(read_mooncake(DATA / "mooncake_conversation.jsonl", 7)) == 7


def test_rows_have_block_sizes_of_their_own_and_come_by_their_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 20, "input_length": 128, "output_length": 1, "hash_ids": [0, 1], "block_size": 64},
        {"timestamp": 10, "input_length": 100, "output_length": 0, "hash_ids": [0, 2], "block_size": 64, "model": 0},
        {"timestamp": 10, "input_length": 100, "output_length": 3, "hash_ids": None, "block_size": 64},
        {"timestamp": 15, "input_length": 100, "output_length": 3, "hash_ids": [0]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read_mooncake(path)
    assert [(row.at_s, row.output_tokens, row.block_tokens) for row in rows] == [
        (0.01, 1, 64), (0.01, 3, 64), (0.015, 3, 512), (0.02, 1, 64),
    ]  # fmt: skip
    replay = Replay(rows)
    first, alone, _, last = (replay._ask(number, row).tokens() for number, row in enumerate(rows))
    assert [len(text) for text in (first, alone, last)] == [400, 400, 512]
    assert first[:256] == last[:256] != alone[:256]
    # a request without ids is no block's text, whatever its number
    assert len({alone[:4], *(text[at : at + 4] for text in (first, last) for at in (0, 256))}) == 4


def test_azure_lines_become_requests() -> None:
    rows = read_azure(DATA / "azure_conv.csv")
    assert len(rows) == 120
    assert (rows[0].at_s, rows[0].input_tokens, rows[0].output_tokens) == (0.0, 374, 44)
    assert rows[1].at_s == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nonsense", "line 2"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "600 tokens in 1 blocks"),
        ('{"timestamp": 1, "input_length": 600}', "line 2"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 2: lengths must be above 0"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1], "block_size": 8}', "9 tokens in 1"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, why: str) -> None:
    good = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=why):
        read_mooncake(path)


def test_a_csv_line_that_is_no_request_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    head, good = "TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:15:46.6805900,374,44\n"
    for line in ("2023-11-16 18:15:46.6805900,many,44", f'"{"x" * 200_000}",3,4'):
        path.write_text(head + good + line + "\n")
        with pytest.raises(ValueError, match=r"line [23]: not a request"):
            read_azure(path)
    path.write_text("\ufeff" + head + good, encoding="utf-8")  # As spreadsheets write it.
    assert [row.input_tokens for row in read_azure(path)] == [374]


def test_ids_that_are_hashes_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ids = [[-1, 5], [-1, 1 << 70], None, [1 << 63, 5]]
    lines = [{"timestamp": i, "input_length": 600, "output_length": 1, "hash_ids": it} for i, it in enumerate(ids)]
    path.write_text("\n".join(map(json.dumps, lines)))
    rows = read_mooncake(path)
    assert [row.hash_ids for row in rows] == [[0, 1], [0, 2], None, [3, 1]]
    assert all(len(Replay(rows)._ask(i, row).tokens()) == 4 * 600 for i, row in enumerate(rows))


def test_a_block_longer_than_the_prompt_takes_no_more_room_than_it() -> None:
    assert blocks([7], 1 << 62, 100) == blocks([7, 8], 100, 100)


def test_traffic_like_mooncakes_has_its_published_figures() -> None:
    rows = like_mooncake(1, 12_000)
    mean = sum(row.input_tokens for row in rows) / len(rows)
    half = percentile(sorted(row.input_tokens for row in rows), 0.5)
    assert mean == pytest.approx(12_035, rel=0.1)
    assert half == pytest.approx(6909, rel=0.15)
    assert sum(row.output_tokens for row in rows) / len(rows) == pytest.approx(343, rel=0.1)
    assert len(rows) / rows[-1].at_s == pytest.approx(3.4, rel=0.05)
    assert hit_bound(rows) == pytest.approx(0.366, abs=0.03)
    assert {(row.hash_ids or [None])[0] for row in rows} == {0}


def test_traffic_like_azures_has_its_published_figures() -> None:
    rows = like_azure(1, 19_000)
    assert sum(row.input_tokens for row in rows) / len(rows) == pytest.approx(1155, rel=0.1)
    assert percentile(sorted(row.input_tokens for row in rows), 0.5) == pytest.approx(1020, rel=0.3)
    assert sum(row.output_tokens for row in rows) / len(rows) == pytest.approx(211, rel=0.1)
    assert percentile(sorted(row.output_tokens for row in rows), 0.5) == pytest.approx(129, rel=0.1)


def test_equal_stretches_have_equal_tokens() -> None:
    assert blocks([1, 2], 8, 12) == blocks([1, 2, 3], 8, 12) == unique(1, 8) + unique(2, 4)
    assert blocks([1, 3], 8, 12) != blocks([1, 2], 8, 12)


def test_a_stage_of_a_ladder_begins_when_the_one_before_has_drained() -> None:
    load = Ladder(1, groups=4, members=2, shared_tokens=640, own_tokens=64, output_tokens=40, stages=((5, 2), (9, 2)))
    run = World(FleetSpec(servers("h200-7b", both=2)), arm("round-robin"), load).run()
    first = [record for record in run.records if record.group == "warm-up"]
    second = [record for record in run.records if record.group == "9/s"]
    assert (len(first), len(second)) == (10, 18)
    assert max(record.last_s for record in first) <= min(record.arrival_s for record in second)


def test_the_hot_prefix_is_hot_and_another_one_later() -> None:
    load = Hotspot(1, rate=50.0, duration_s=60.0, hot_share=0.5, shift_s=30.0)
    hottest: list[int] = []
    for start_s, end_s in ((0, 30), (30, 60)):
        prefixes = [prefix for at_s, prefix in load._asks if start_s <= at_s < end_s]
        hottest.append(max(set(prefixes), key=prefixes.count))
        assert prefixes.count(hottest[-1]) / len(prefixes) == pytest.approx(0.5, abs=0.05)
    assert hottest[0] != hottest[1]


def test_every_named_workload_can_be_built() -> None:
    for name, build in WORKLOADS.items():
        assert build.__doc__
        trace = DATA / "mooncake_conversation.jsonl" if name == "recorded" else None
        assert cell(name, Options(requests=10, trace=trace)).spec.servers
    with pytest.raises(ValueError, match="ladder"):
        cell("laddr", Options())


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_percentiles_are_by_nearest_rank() -> None:
    assert [percentile([1, 2, 3, 4], share) for share in (0, 0.25, 0.5, 0.51, 1)] == [1, 1, 2, 3, 4]
    assert percentile([], 0.5) == 0
    assert percentile(list(range(1, 101)), 0.99) == 99


@pytest.mark.parametrize("gap_s", [1e-6, 0.0051, 0.042, 3.0])
def test_a_bin_stands_for_its_gaps_within_half_a_per_cent(gap_s: float) -> None:
    assert gap_of(bin_of(gap_s)) == pytest.approx(gap_s, rel=0.005)


def record(ttft_s: float, tpot_s: float, *, ok: bool = True, group: str = "") -> Record:
    made = Record("r", group, None, 0, 10.0, 100, 1.0, 0.02)
    made.first_s, made.ok = 10.0 + ttft_s, ok
    made.output_tokens = 1
    made.add_gaps([tpot_s] * 10, [bin_of(tpot_s)] * 10)
    made.last_s = made.first_s + 10 * tpot_s
    return made


def test_an_slo_is_met_by_first_token_and_pace_together() -> None:
    cases = [record(0.9, 0.019), record(1.1, 0.019), record(0.9, 0.021), record(0.1, 0.01, ok=False)]
    assert [it.met() for it in cases] == [True, False, False, False]
    cases[1].slo_ttft_s = None
    assert cases[1].met()
    assert not cases[1].met(1.0)


def test_gap_percentiles_are_over_all_tokens() -> None:
    records = [record(0.1, 0.01) for _ in range(9)] + [record(0.1, 0.1)]
    p50, p89, p95 = gap_percentiles(records, (0.5, 0.89, 0.95))
    assert (p50, p89, p95) == pytest.approx((0.01, 0.01, 0.1), rel=0.01)


def test_a_summary_is_json_and_adds_up() -> None:
    built = cell("mixed", Options(rate=4.0, duration_s=5.0))
    run = World(built.spec, arm("always-remote"), built.workload).run()
    figures = json.loads(json.dumps(summarise(run)))
    assert figures["remote_share"] == 1
    assert figures["groups"]["long"]["requests"] + figures["groups"]["short"]["requests"] == figures["requests"]
    assert figures["slo_share"] == sum(it.met() for it in run.records) / len(run.records)
    assert figures["transferred_bytes"] > 0


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_figures_and_ends_with_json() -> None:
    command = [sys.executable, "-m", "bench", "trace", "run", "--workload", "mixed", "--rate", "4", "--duration-s", "4"]
    done = subprocess.run(
        [*command, "--arm", "local", "--arm", "always-remote", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert [it["arm"] for it in last["arms"]] == ["local", "always-remote"]


@pytest.mark.parametrize(
    "args",
    [
        ["--workload", "nope"],
        ["--workload", "mooncake", "--trace", "/nonexistent"],
        ["--workload", "recorded"],
        ["--workload", "mixed", "--arm", "nope"],
        ["--workload", "mixed", "--rate", "-1"],
        ["--workload", "mixed", "--duration-s", "0"],
        ["--workload", "mooncake", "--requests", "0"],
        ["--workload", "mooncake", "--speed", "nan"],
        ["--workload", "chat", "--both", "4"],
        ["--workload", "hotspot", "--prefill", "1"],
        ["--workload", "azure", "--prefill", "2", "--requests", "10"],
        ["--workload", "chat", "--trace", "/nonexistent"],
    ],
)
def test_a_wrong_word_is_an_error_and_no_traceback(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from bench.trace import main

    assert main(["run", *args]) == 2
    assert "error:" in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_an_error_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.trace import main

    assert main(["targets", "--only", "1", "--mooncake", "/nonexistent"]) == 2
    assert capsys.readouterr().err.endswith("error: /nonexistent: No such file or directory\n")
