"""Spans that have ended, on their way to a collector in a thread of their own.

Whoever ends a span only puts it in a list. A collector that is slow or gone costs spans, which are counted, and nothing
else. The SDK's own processor does not say what it drops, and may take half a minute to end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping

import msgspec
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Counter

_log = logging.getLogger(__name__)
_SDK_LOG = "opentelemetry.exporter"
_OUTCOMES = ("exported", "failed", "dropped")
_RECENT_S = 60.0
_LAST_WORDS_S = 0.25
"""After the exporter was told to stop, until its thread is left to itself."""


class Batches(SpanProcessor):
    """Create it inside a running event loop."""

    def __init__(self, exporter: SpanExporter, registry: CollectorRegistry, sizes: Sizes) -> None:
        self._exporter = exporter
        self._most_waiting = sizes.most_waiting
        self._batch = min(sizes.batch, sizes.most_waiting)
        self._delay_s = sizes.delay_s
        spans = Counter(
            "warmroute_trace_spans",
            "Spans that ended, by whether the collector took them; dropped: too many were waiting.",
            ("outcome",),
            registry=registry,
        )
        self._exported, self._failed, self._dropped = (spans.labels(outcome) for outcome in _OUTCOMES)
        self._waiting: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._over = False
        self._given_up = False
        self._dropped_at_s: float | None = None
        self._reason: str | None = None
        self._said = _LastWords()
        self._done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Why spans do not all arrive."""
        if (reason := self._reason) is not None:
            return reason
        if self._dropped_at_s is not None and time.monotonic() - self._dropped_at_s < _RECENT_S:
            return "more spans end than the collector takes, some are dropped"
        return None

    # ---- of SpanProcessor --------------------------------------------------------------------------------------------

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        if self._over or len(self._waiting) >= self._most_waiting:
            self._dropped.inc()
            self._dropped_at_s = time.monotonic()
            return
        self._waiting.append(span)
        if len(self._waiting) == self._batch:
            self._wake.set()

    def shutdown(self) -> None:
        """Without waiting."""
        self._over = True
        self._wake.set()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        self._wake.set()
        return True

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def close(self, within_s: float) -> None:
        """Send what waits; what cannot be sent in time is dropped."""
        self.shutdown()
        try:
            async with asyncio.timeout(within_s):
                await self._done.wait()
        except TimeoutError:
            self._given_up = True
            self._exporter.shutdown()  # Wakes it from waiting for its next try.
            try:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._done.wait()
            except TimeoutError:
                _log.warning("the collector did not take the last spans within %g s", within_s)
        else:
            self._exporter.shutdown()
        self._dropped.inc(len(self._waiting))
        self._waiting.clear()
        self._said.leave()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        over = False
        while not over:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            over = self._over
            while self._waiting and not self._given_up:
                self._send([self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))])
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._done.set)

    def _send(self, spans: list[ReadableSpan]) -> None:
        self._said.text = ""
        try:
            good = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as exc:
            good, self._said.text = False, type(exc).__name__
        (self._exported if good else self._failed).inc(len(spans))
        before = self._reason
        self._reason = None if good else self._said.text or "the collector takes no spans"
        if before is None and not good:
            _log.warning("spans are lost: %s", self._reason)
        elif before is not None and good:
            _log.warning("the collector takes spans again")


class _LastWords(logging.Handler):
    """What the exporter says of a failure, which it only logs; with each batch anew, so that we say it once instead."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._logger = logging.getLogger(_SDK_LOG)
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.text = " ".join(record.getMessage().split())[:300]
        except Exception:
            self.text = "the exporter failed"

    def leave(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """most_waiting: ended spans kept at most. batch: most sent at once. delay_s: how long one waits for others."""

    most_waiting: int = 2048
    batch: int = 512
    delay_s: float = 5.0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Sizes:
        """As the SDK's variables say. What is no positive whole number is left out."""
        usual = cls()
        return cls(
            most_waiting=_whole(environ, "OTEL_BSP_MAX_QUEUE_SIZE", usual.most_waiting),
            batch=_whole(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", usual.batch),
            delay_s=_whole(environ, "OTEL_BSP_SCHEDULE_DELAY", round(usual.delay_s * 1000)) / 1000,
        )


def _whole(environ: Mapping[str, str], name: str, usual: int) -> int:
    text = environ.get(name, "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0:
        return int(text)
    if text:
        _log.warning("%s is not a positive whole number (%r): %d is taken", name, text[:40], usual)
    return usual
