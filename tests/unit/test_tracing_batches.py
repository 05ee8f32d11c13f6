"""Spans on their way to a collector: never in the way of the loop, never lost without being counted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from gateway.tracing.batches import Batches, Sizes


class Exporter(SpanExporter):
    """Takes spans once it is let to."""

    def __init__(self, *, good: bool = True, held: bool = False, wakes: bool = True) -> None:
        self.good = good
        self.got: list[int] = []
        self.free = threading.Event()
        self.entered = threading.Event()
        self._wakes = wakes
        if not held:
            self.free.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.free.wait(10)
        self.got.append(len(spans))
        if not self.good:
            logging.getLogger("opentelemetry.exporter.otlp.proto.http").error("Failed to export: nobody\nlistens")
        return SpanExportResult.SUCCESS if self.good else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        if self._wakes:
            self.free.set()


class Spans:
    def __init__(self, exporter: SpanExporter, sizes: Sizes) -> None:
        self.registry = CollectorRegistry()
        self.batches = Batches(exporter, self.registry, sizes)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(self.batches)
        self._tracer = provider.get_tracer("t")

    def end(self, n: int) -> None:
        for _ in range(n):
            self._tracer.start_span("s").end()

    def counted(self) -> dict[str, float]:
        return {
            outcome: self.registry.get_sample_value("warmroute_trace_spans_total", {"outcome": outcome}) or 0.0
            for outcome in ("exported", "failed", "dropped")
        }


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


async def test_what_waits_at_the_end_is_sent() -> None:
    exporter = Exporter()
    it = Spans(exporter, Sizes(batch=4, delay_s=60))
    it.end(10)
    await it.batches.close(5)
    assert sum(exporter.got) == 10
    assert max(exporter.got) <= 4
    assert it.counted() == {"exported": 10, "failed": 0, "dropped": 0}


async def test_a_full_batch_is_sent_at_once_and_a_lone_span_after_the_delay() -> None:
    exporter = Exporter()
    it = Spans(exporter, Sizes(batch=4, delay_s=60))
    it.end(4)
    await until(lambda: exporter.got == [4])
    await it.batches.close(5)
    exporter = Exporter()
    it = Spans(exporter, Sizes(delay_s=0.01))
    it.end(1)
    await until(lambda: exporter.got == [1])
    await it.batches.close(5)


async def test_a_slow_collector_costs_spans_and_no_time(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter(held=True)
    it = Spans(exporter, Sizes(most_waiting=10, batch=2, delay_s=60))
    it.end(2)
    await asyncio.to_thread(exporter.entered.wait, 10)
    began_s = time.monotonic()
    it.end(100)
    assert time.monotonic() - began_s < 1.0
    assert it.counted()["dropped"] == 90
    assert it.batches.problem == "more spans end than the collector takes, some are dropped"
    exporter.free.set()
    await it.batches.close(5)
    assert it.counted() == {"exported": 12, "failed": 0, "dropped": 90}


async def test_a_collector_that_is_gone_is_told_once_and_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter(good=False)
    it = Spans(exporter, Sizes(delay_s=0.01))
    for n in (1, 2, 3):
        it.end(1)
        await until(lambda n=n: it.counted()["failed"] == n)
    await until(lambda: it.batches.problem == "Failed to export: nobody listens")
    exporter.good = True
    it.end(1)
    await until(lambda: it.batches.problem is None)
    await it.batches.close(5)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["spans are lost: Failed to export: nobody listens", "the collector takes spans again"]


async def test_the_end_is_bounded_in_time_and_what_is_left_is_counted() -> None:
    exporter = Exporter(held=True, wakes=False)
    it = Spans(exporter, Sizes(batch=2, delay_s=60))
    it.end(6)
    began_s = time.monotonic()
    await it.batches.close(0.2)
    assert time.monotonic() - began_s < 3
    assert it.counted()["dropped"] == 4
    exporter.free.set()


async def test_the_exporter_is_told_to_hurry() -> None:
    exporter = Exporter(held=True)
    it = Spans(exporter, Sizes(batch=2, delay_s=60))
    it.end(6)
    await it.batches.close(0.2)
    assert it.counted() == {"exported": 2, "failed": 0, "dropped": 4}


async def test_an_exporter_that_breaks_is_a_failed_batch() -> None:
    class Broken(Exporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            raise ValueError("with a secret")

    it = Spans(Broken(), Sizes(delay_s=0.01))
    it.end(3)
    await until(lambda: it.counted()["failed"] == 3)
    await until(lambda: it.batches.problem == "ValueError")
    await it.batches.close(5)


def test_sizes_are_those_of_the_sdks_variables(caplog: pytest.LogCaptureFixture) -> None:
    assert Sizes.of({}) == Sizes()
    said = {"OTEL_BSP_MAX_QUEUE_SIZE": "7", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "3", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    assert Sizes.of(said) == Sizes(most_waiting=7, batch=3, delay_s=0.05)
    assert Sizes.of({"OTEL_BSP_MAX_QUEUE_SIZE": "-1", "OTEL_BSP_SCHEDULE_DELAY": "soon"}) == Sizes()
    assert len(caplog.records) == 2
