"""docs/observability.md against the code: keys, attributes, spans, metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from gateway.config.schema import TracingConfig
from gateway.proxy.access import Record
from gateway.proxy.usage import Usage
from gateway.tracing import attributes
from gateway.tracing.types import TRACE_ID_HEADER, LegKind, Stage
from scorer.types import Candidate, PdReason, Plan, RequestFacts
from tests.support.traced import traced

DOC = (Path(__file__).resolve().parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")


def documented() -> set[str]:
    """Names in backquotes; one that begins with a dot goes on from the one before it."""
    found: set[str] = set()
    stem = ""
    for name in re.findall(r"`([\w.]+)`", DOC):
        if name.startswith("."):
            found.add(stem + name)
        else:
            stem = name.rpartition(".")[0]
            found.add(name)
    return found


def record() -> Record:
    return Record(
        request_id="r", method="POST", path="/v1/chat/completions", status=500, client="::1", worker="d", rank=1,
        model="m", policy="p", tokens="local", prompt_tokens=1, choice="remote", pd_reason="cost", prefill="p",
        prefill_ms=1.0, predicted_cached_tokens=1, cached_tokens=1, output_tokens=1, overhead_ms=1.0, queued_ms=1.0,
        ttft_ms=1.0, retries=1, cut="timeout", error="e",
    )  # fmt: skip


class Flown:
    facts = RequestFacts(request_id="r", model="m", prompt_tokens=1, max_output_tokens=5)
    plan = Plan(
        request_id="r", chosen=Candidate(decode=("d", 1), prefill=("p", 0)), considered=(), policy="p",
        n_candidates=2, reason="x", pd_reason=PdReason.COST, decided_at_s=0.0,
    )  # fmt: skip


def test_every_attribute_is_there_and_no_other() -> None:
    flight: object = Flown()
    said = {
        *attributes.of_request(record(), "chat", "http"),
        *attributes.of_end(record(), flight, Usage(1, 1, 1)),  # type: ignore[arg-type]
        *attributes.of_leg("POST", "/", "http://w:8000", "d", 1, 1),
        "error.type",
    }
    names = documented()
    assert said <= names, said - names
    families = ("http.", "url.", "client.", "server.", "gen_ai.", "warmroute.", "error.")
    assert {name for name in names if name.startswith(families)} <= said


def test_spans_keys_header_and_metric_are_there() -> None:
    for name in (*get_args(Stage), *get_args(LegKind)):
        assert re.search(rf"\b{name}\b", DOC)
    for key in TracingConfig.__struct_fields__:
        assert f"| `tracing.{key}` |" in DOC
    assert f"`{TRACE_ID_HEADER}`" in DOC
    assert "`warmroute_trace_spans_total{" in DOC


async def test_the_metric_is_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    it = traced(monkeypatch)
    await it.spans()
    outcomes = re.search(r"warmroute_trace_spans_total\{outcome=\"([\w|]+)\"", DOC)
    assert outcomes is not None
    for outcome in outcomes[1].split("|"):
        assert it.registry.get_sample_value("warmroute_trace_spans_total", {"outcome": outcome}) == 0
