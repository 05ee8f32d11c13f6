"""docs/queue.md names what there is."""

from pathlib import Path

import msgspec
import pytest

from gateway.config.schema import QueueConfig, TenancyConfig
from gateway.debug.metrics import REJECTED
from gateway.queue.shed import HEADER, REASONS
from scorer.lateness import MIN_SAMPLES, MOST_ERROR
from scorer.queue import AGEING

PAGE = (Path(__file__).resolve().parents[2] / "docs/queue.md").read_text()


@pytest.mark.parametrize(("section", "struct"), [("queue", QueueConfig), ("tenancy", TenancyConfig)])
def test_every_key_is_there(section: str, struct: type[msgspec.Struct]) -> None:
    missing = [name for name in struct.__struct_fields__ if f"`{section}.{name}`" not in PAGE]
    assert missing == []


def test_every_reason_is_there_and_counted() -> None:
    for reason in REASONS:
        assert f"| `{reason}` |" in PAGE
        assert reason in REJECTED
    assert f"`{HEADER}`" in PAGE


def test_figures_are_those_of_the_code() -> None:
    assert f"before {MIN_SAMPLES} streamed requests" in PAGE
    assert f"under {MOST_ERROR:.0%}".replace("%", " %") in " ".join(PAGE.split())
    assert AGEING == 8
    assert "Each eighth place" in PAGE
    settings = QueueConfig()
    assert f"({settings.max_requests})" in PAGE
    assert f"({settings.max_tokens // 1_000_000}M prompt tokens)" in PAGE
    assert f"({settings.max_wait_s:g} s, where" in PAGE
    assert f"`queue.waiting_per_worker` ({settings.waiting_per_worker})" in PAGE
