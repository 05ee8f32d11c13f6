"""A short run of `python -m bench scale`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.scale import command
from bench.scale.held import Held


def test_replicas_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = [
        "--quick",
        "--json",
        "--only",
        "quality",
        "--replicas",
        "1,8",
        "--jobs",
        "1",
        "--cache",
        str(tmp_path / "kept"),
    ]
    assert command.main(args) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    for name in ("round-robin", "1 replica", "8 replicas, sync", "8 replicas, apart"):
        assert any(line.startswith(f"| {name} |") for line in lines)
    found = json.loads(last)
    assert found["bench"] == "scale"
    target, chats = found["targets"]
    figures = found["figures"]
    p90_ms = {
        name: figures[f"ladder_{name}_ttft_p90_ms"] for name in ("1_replica", "8_replicas_sync", "8_replicas_apart")
    }
    assert target["measured"] == pytest.approx(p90_ms["8_replicas_sync"] / p90_ms["1_replica"], abs=0.001)
    assert p90_ms["8_replicas_sync"] < p90_ms["8_replicas_apart"]
    assert figures["ladder_8_replicas_apart_hit_share"] < figures["ladder_8_replicas_sync_hit_share"]
    slo = [figures[f"chat_{name}_slo_share"] for name in ("1_replica", "8_replicas_sync")]
    assert chats["measured"] == pytest.approx(slo[0] - slo[1], abs=0.001)
    assert command.main(args) == 0  # From what was kept.
    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize("args", [["--replicas", "0"], ["--loss", "1"], ["--delay-ms", "-1"], ["--only", "else"]])
def test_what_cannot_be_run_is_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(args)
    assert caught.value.code == 2
    assert args[0] in capsys.readouterr().err


def test_a_large_fleet_in_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Real processes; sizes are then computed of what was kept."""
    kept = tmp_path / "kept.json"
    small = ["--workers", "4", "--blocks", "400", "--sharers", "2", "--prompt-blocks", "32", "--rate", "5000"]
    parts = [word for part in ("start", "steady", "fanout", "match", "redis") for word in ("--only", part)]
    args = [*parts, *small, "--seconds", "0.3", "--followers", "2", "--clients", "2", "--json", "--keep", str(kept)]
    assert command.main(args) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["copies"] == Held(workers=4, blocks=400, sharers=2, prompt_blocks=32).copies
    assert figures["steady_changes_per_s"] > 0
    assert figures["fanout_bytes_per_change"] > 8 / 2  # A removed block is its key; so is a stored one.
    assert figures["match_keys_2_per_s"] > 0
    if "redis_start_s" in figures:
        assert figures["redis_replayed_share"] < 1
    assert command.main(["--only", "sizes", "--figures", str(kept)]) == 0
    assert "| 1,000,000 |" in capsys.readouterr().out


def test_what_cannot_be_computed_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    for content, told in (
        ('{"figures": {}}', "has no figure 'indexer_us_per_change'"),
        ("[]", "not what --keep writes"),
    ):
        file.write_text(content)
        assert command.main(["--only", "sizes", "--figures", str(file)]) == 2
        assert told in capsys.readouterr().err
