"""`warmroute advise`: a trace in, an answer out."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.advise.advice import affordable
from bench.advise.errors import InputError
from bench.advise.gpu import GPUS
from bench.advise.splits import Fleet, Outcome, candidates
from bench.advise.traffic import Traffic, read_trace
from bench.advise.verdict import judge
from bench.plots import blank
from bench.sim.workloads.traces import Row
from gateway import cli

DATA = Path(__file__).resolve().parents[1] / "data" / "traces"
SMALL = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 32000, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    return file


def mixed(path: Path, n: int, rate: float, long_share: float, out: int = 128) -> Path:
    """Prompts of 6k..12k among short ones, nothing shared."""
    rng, at_s, ids = random.Random(1), 0.0, iter(range(1 << 30))
    with path.open("w") as file:
        for _ in range(n):
            length = rng.randint(6000, 12_000) if rng.random() < long_share else rng.randint(64, 1000)
            hash_ids = [next(ids) for _ in range(-(-length // 512))]
            line = {"timestamp": 1000 * at_s, "input_length": length, "output_length": out, "hash_ids": hash_ids}
            file.write(json.dumps(line) + "\n")
            at_s += rng.expovariate(rate)
    return path


def advise(config: Path, trace: Path, *more: str) -> int:
    args = ["--model-config", str(config), "--gpu", "h200", "--trace", str(trace), *more]
    return cli.main(["advise", *args])


def answer(shown: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return found


def test_it_pays_where_long_prompts_hold_up_answers(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = mixed(tmp_path / "trace.jsonl", 300, 12, 0.4)
    goals = ("--slo-ttft-ms", "1000", "--slo-tpot-ms", "15", "--network-gbps", "nvlink", "--servers", "3")
    assert advise(config, trace, *goals, "--json", "--seed", "1") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("The split pays: take 2 prefill and 1 decode servers. 2P + 1D keeps the objectives of ")
    told = answer(shown)
    assert told["pays"] is True
    assert told["choice"] | {"prefill": 2, "decode": 1, "aggregated": 0} == told["choice"]
    kept = {fleet["name"]: fleet["met"] for fleet in told["fleets"]}
    assert list(kept) == ["3 aggregated", "3 aggregated, chunks of 2,048", "1P + 2D", "2P + 1D"]
    assert kept["2P + 1D"] > kept["3 aggregated"] + 0.05
    gaps = {fleet["name"]: fleet["itl_p99_ms"] for fleet in told["fleets"]}
    assert gaps["2P + 1D"] < gaps["3 aggregated"] / 3
    assert told["block_size"]["recommended"] == 128
    for heading in ("Network", "KV capacity", "Block size", "Assumptions"):
        assert f"\n{heading}\n" in shown
    assert "step times: measured" in shown
    assert "--pd-policy cost, 2 times --prefill URL and 1 times --decode URL" in " ".join(shown.split())
    assert "NIXL over plain TCP is for tests only" in shown


def test_it_does_not_pay_where_whole_servers_keep_the_objectives(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = mixed(tmp_path / "trace.jsonl", 150, 2, 0.0)
    assert advise(config, trace, "--servers", "2", "--json", "--kv-tokens", "504768") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("The split does not pay: take 2 aggregated servers.")
    told = answer(shown)
    assert (told["pays"], told["enough_servers"]) == (False, True)
    assert not any(fleet["overloaded"] for fleet in told["fleets"])
    assert told["choice"]["aggregated"] == 2
    assert told["growth"][-1]["times_the_rate"] == 4
    assert "It would not pay at 4 times the rate either" in " ".join(shown.split())
    assert told["capacity"]["conversations_per_server"] == 12
    assert told["capacity"]["conversations"] == {
        "2 aggregated": 24, "2 aggregated, chunks of 2,048": 24, "1P + 1D": 12,
    }  # fmt: skip
    assert told["network"]["kv_bytes_per_token"] == 147_456
    assert "the network was not given" in shown


def test_the_same_question_has_the_same_answer(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = mixed(tmp_path / "trace.jsonl", 60, 4, 0.4)
    shown = []
    for _ in range(2):
        assert advise(config, trace, "--servers", "2", "--json", "--seed", "3") == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_one_server_cannot_be_split(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise(config, DATA / "azure_conv.csv", "--servers", "1", "--json") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("There is nothing to split: one server.")
    assert answer(shown)["best_split"] is None
    assert "does not say which prompts share a beginning" in shown


def test_a_part_of_a_long_trace_is_said_to_be_one(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advise(config, DATA / "mooncake_conversation.jsonl", "--servers", "1", "--requests", "30", "--json") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "simulated: 30 of 120 requests in a row" in shown


def test_what_no_server_can_hold_is_left_out_and_said(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = DATA / "mooncake_conversation.jsonl"
    assert advise(config, trace, "--servers", "1", "--kv-tokens", "30000") == 0
    assert "of 120 requests are longer than a server's KV cache" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--servers", "0"), "argument --servers: 0 is not a positive whole number"),
        (("--servers", "two"), "argument --servers: two is not a number"),
        (("--gpu", "h300", "--servers", "2"), "--gpu h300: not known; there is: a100-40gb, a100,"),
        (("--trace", "/no/such", "--servers", "2"), "/no/such: No such file or directory"),
        (("--model-config", "/no/such", "--servers", "2"), "/no/such: no such file; give the model's config.json"),
        (("--servers", "2", "--kv-dtype", "int3"), "--kv-dtype int3: not known; there is: auto,"),
        (("--servers", "2", "--network-gbps", "-1"), "argument --network-gbps: -1 is not a positive number"),
        (("--servers", "2", "--slo-ttft-ms", "nan"), "argument --slo-ttft-ms: nan is not a positive number"),
        (("--servers", "2", "--gpu-memory-utilization", "1.1"), "1.1 is not a share"),
        (("--servers", "2", "--requests", "3"), "3 requests say nothing; at least 10"),
        (("--servers", "2", "--kv-tokens", "500"), "no request fits in a server's KV cache of 448 tokens"),
        (("--servers", "2", "--metrics-interval-s", "5"), "--metrics-interval-s goes with --from-metrics"),
        (("--servers", "2", "--from-metrics", "x"), "argument --from-metrics: not allowed with argument --trace"),
        (("--servers", "2", "--tensor-parallel", "3"), "--tensor-parallel 3 does not divide the model's 32 heads"),
        (("--servers", "2", "--slo-tpot", "3"), "unknown argument --slo-tpot; did you mean --slo-tpot-ms?"),
        ((), "the following arguments are required: --servers"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(
    config: Path, more: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advise(config, DATA / "mooncake_conversation.jsonl", *more) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("warmroute: error: ")
    assert why in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("t.jsonl", "", "holds 0 requests"),
        ("t.jsonl", '{"timestamp": 1}\n', "line 1.*a trace is JSON lines with timestamp"),
        ("t.csv", "a,b\n1,2\n", "line 2: not a request"),
        ("t.csv", "\x00\x01", "holds 0 requests"),
        ("t.gz", "\x1f\x8b\x08\x00", "is compressed; unpack it first"),
        ("t.json", '[{"timestamp": 1, "input_length": 5}]', "one JSON array; a trace has one JSON object a line"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, why: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=why):
        read_trace(file)


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path: Path) -> None:
    file, plain = tmp_path / "marked.jsonl", DATA / "mooncake_conversation.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert read_trace(file).rows == read_trace(plain).rows


@pytest.mark.parametrize("last_ms", [3e10, 1.7e308])
def test_times_that_are_no_milliseconds_are_no_reason_to_wait_for_ever(
    last_ms: float, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.jsonl"
    times = [*range(11), last_ms]
    file.write_text("".join(f'{{"timestamp": {it}, "input_length": 100, "output_length": 5}}\n' for it in times))
    assert advise(config, file, "--servers", "1", "--requests", "12") == 2
    assert "should be milliseconds" in capsys.readouterr().err


def test_requests_of_one_moment_need_a_rate(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"timestamp": 5, "input_length": 100, "output_length": 5, "hash_ids": [1]}
    file = tmp_path / "t.jsonl"
    file.write_text((json.dumps(line) + "\n") * 40)
    assert advise(config, file, "--servers", "1") == 2
    assert "all requests bear the same time; give --rate" in capsys.readouterr().err
    assert advise(config, file, "--servers", "1", "--rate", "4", "--json") == 0
    assert answer(capsys.readouterr().out)["traffic"]["requests"] == 40


def test_a_plot_is_drawn(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "fleets.png"
    trace = DATA / "azure_conv.csv"
    assert advise(config, trace, "--servers", "2", "--requests", "20", "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert advise(config, trace, "--servers", "1", "--requests", "20", "--plot", str(tmp_path / "x.doc")) == 1
    assert "no plot: --plot" in capsys.readouterr().err


def test_labels_of_a_plot_do_not_lie_upon_each_other(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr("bench.advise.plot.blank", lambda *size: drawn.append(blank(*size)) or drawn[0])
    more = ("--servers", "2", "--requests", "20", "--slo-ttft-ms", "4000", "--plot", str(tmp_path / "x.png"))
    assert advise(config, DATA / "azure_conv.csv", *more) == 0
    for axes in drawn[0].axes:
        low, high = axes.get_ylim()
        ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
        shown = [tick.label1 for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]
        boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.y0)
        assert len(boxes) >= 2
        assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))


def test_a_plot_that_cannot_be_written_costs_no_answer(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    trace, taken = DATA / "azure_conv.csv", tmp_path / "taken.png"
    taken.mkdir()
    assert advise(config, trace, "--servers", "1", "--requests", "20", "--plot", str(taken), "--json") == 1
    shown = capsys.readouterr()
    assert "no plot: --plot" in shown.err
    assert answer(shown.out)["pays"] is False
    assert advise(config, trace, "--servers", "1", "--plot", str(tmp_path / "nowhere" / "x.png")) == 2
    shown = capsys.readouterr()
    assert "nowhere is no directory" in shown.err
    assert shown.out == ""


def test_without_matplotlib_the_rest_works(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    picture = tmp_path / "fleets.png"
    args = ("--servers", "1", "--requests", "20", "--plot", str(picture), "--json")
    assert advise(config, DATA / "azure_conv.csv", *args) == 1
    shown = capsys.readouterr()
    assert shown.err == "warmroute: no plot: a plot needs matplotlib: pip install 'warmroute[bench]'\n"
    assert answer(shown.out)["pays"] is False
    assert not picture.exists()


def test_every_argument_is_in_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).resolve().parents[2] / "docs" / "advise.md").read_text(encoding="utf-8")
    assert cli.main(["advise", "--help"]) == 0
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    table = {
        flag for line in document.splitlines() if line.startswith("| `--") for flag in re.findall(r"`(--[a-z-]+)", line)
    }
    assert flags <= table
    assert table - flags <= {"--kv-cache-dtype"}
    assert all(f"{name}," in document or f"{name} |" in document for name in GPUS)


# ---- parts -----------------------------------------------------------------------------------------------------------


def outcome(
    prefill: int, met: float, itl_p99_ms: float = 10.0, requests: int = 1000, servers: int = 4, chunk_tokens: int = 0
) -> Outcome:
    return Outcome(
        fleet=Fleet(servers, prefill, chunk_tokens), requests=requests, met=met, goodput_per_s=1, ttft_p50_ms=100,
        ttft_p95_ms=200, itl_p50_ms=5, itl_p95_ms=8, itl_p99_ms=itl_p99_ms, tpot_p95_ms=9, remote=0.5, hits=0,
        pulled_gbps=1, preemptions=0, overloaded=False,
    )  # fmt: skip


def test_a_split_pays_by_kept_objectives_alone() -> None:
    assert judge([outcome(0, 0.9), outcome(1, 0.97), outcome(2, 0.99)]).choice.fleet.prefill == 2
    equal = judge([outcome(0, 0.985, itl_p99_ms=90), outcome(1, 0.995)])
    assert not equal.pays
    assert any("smoother answers" in reason for reason in equal.reasons)
    worse = judge([outcome(0, 0.99), outcome(1, 0.5)])
    assert not worse.pays
    assert "the other splits keep no more" in worse.reasons[0]


def test_few_requests_need_a_larger_difference() -> None:
    assert judge([outcome(0, 0.90), outcome(1, 0.95)]).pays
    assert not judge([outcome(0, 0.90, requests=100), outcome(1, 0.95, requests=100)]).pays


def test_of_equal_splits_the_smoothest_is_taken() -> None:
    assert judge([outcome(0, 0.5), outcome(1, 0.991, 50.0), outcome(2, 0.99, 9.0)]).choice.fleet.prefill == 2


def test_smaller_chunks_are_named_only_where_they_smooth_something() -> None:
    plain = outcome(0, 1.0, 10.0)
    assert judge([plain, outcome(0, 1.0, 9.99, chunk_tokens=2048), outcome(1, 1.0)]).choice == plain
    assert judge([plain, outcome(0, 1.0, 5.0, chunk_tokens=2048), outcome(1, 1.0)]).choice.fleet.chunk_tokens == 2048


def test_neither_is_enough() -> None:
    little = judge([outcome(0, 0.7), outcome(1, 0.8)])
    assert (little.pays, little.enough) == (True, True)
    assert "add servers, or loosen it" in little.reasons[-1]
    nothing = judge([outcome(0, 0.1), outcome(1, 0.4)])
    assert (nothing.pays, nothing.enough) == (False, False)
    assert judge([outcome(0, 0.9, servers=1)]).enough


def test_far_too_few_servers(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = mixed(tmp_path / "trace.jsonl", 200, 50, 0.4)
    assert advise(config, trace, "--servers", "2", "--json") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 servers cannot carry this traffic, split or not.")
    told = answer(shown)
    assert (told["pays"], told["enough_servers"], told["growth"]) == (False, False, [])
    assert all(fleet["overloaded"] for fleet in told["fleets"])


@given(st.integers(1, 200), st.floats(0, 1))
def test_candidates_are_splits_of_all_servers(servers: int, share: float) -> None:
    found = [fleet.prefill for fleet in candidates(servers, share)]
    assert found == sorted(set(found))
    assert all(0 < prefill < servers for prefill in found)
    assert len(found) == min(servers - 1, 7) if servers <= 8 else 5 <= len(found) <= 7
    middle = min(max(round(share * servers), 1), servers - 1)
    assert servers == 1 or middle in found


rows = st.lists(
    st.builds(Row, st.floats(0, 1e4), st.integers(1, 10_000), st.integers(1, 1000), st.none()), min_size=3, max_size=60
)


@given(rows, st.integers(2, 70))
def test_a_part_is_requests_in_a_row(them: list[Row], n: int) -> None:
    them.sort(key=lambda row: row.at_s)
    whole = Traffic("t", tuple(row._replace(at_s=row.at_s - them[0].at_s) for row in them))
    assume(whole.span_s)
    part = whole.part(n)
    lengths = [row[1:3] for row in whole.rows]
    assert len(part.rows) == min(n, len(them))
    assert part.rows[0].at_s == 0
    cut = [row[1:3] for row in part.rows]
    assert any(lengths[i : i + len(cut)] == cut for i in range(len(lengths)))
    assert len(part.notes) == (n < len(them))


def test_a_part_that_shares_less_than_the_whole_says_so() -> None:
    chats = tuple(Row(float(i), 512, 10, [i % 10]) for i in range(100))
    notes = Traffic("t", chats).part(11).notes
    assert len(notes) == 2
    assert "they share 9% of their prompt tokens, in the whole trace 90% were seen before" in notes[1]
    assert len(Traffic("t", chats).part(90).notes) == 1


def test_azure_times_with_a_zone_and_without_a_fraction(tmp_path: Path) -> None:
    file = tmp_path / "week.csv"
    times = ("2024-05-12 00:00:00.001163+00:00", "2024-05-12 00:00:01+00:00", "2024-05-12 00:00:02.5010001")
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{at},100,10\n" for at in times))
    assert [round(row.at_s, 6) for row in read_trace(file).rows] == [0, 0.998837, 2.499837]


def test_a_quick_answer_is_made_of_fewer_requests_the_longer_they_are() -> None:
    short = Traffic("t", (Row(0, 100, 10, None), Row(1, 100, 10, None)))
    long = Traffic("t", (Row(0, 100_000, 1000, None), Row(1, 100_000, 1000, None)))
    assert affordable(short, 10, 64) > 2 * affordable(short, 30, 64) > affordable(long, 10, 64) >= 400


def test_heads_that_ranks_repeat_are_told_with_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL | {"num_key_value_heads": 2}))
    trace = mixed(tmp_path / "trace.jsonl", 20, 4, 0.4, out=8)
    assert advise(file, trace, "--servers", "2", "--tensor-parallel", "4", "--network-gbps", "400") == 0
    assert re.search(r"KV per token \(16-bit, 36 layers, held 2 times by the 4 ranks\)", capsys.readouterr().out)
