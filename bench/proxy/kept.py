"""Samples in a file, so that one table can be made from several short runs on a machine that is never idle for long."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.proxy.measure import Sample


class _Line(msgspec.Struct, omit_defaults=True):
    sample: Sample | None = None
    decision: dict[str, float] | None = None


class Kept:
    """What was measured, now and in earlier runs; `file` None: now only. Raises OSError, or msgspec.MsgspecError for a
    file that is another's.
    """

    def __init__(self, file: Path | None) -> None:
        self.samples: list[Sample] = []
        self.decisions: list[dict[str, float]] = []
        self._file = file
        if file is not None and file.exists():
            decoder = msgspec.json.Decoder(_Line)
            for text in file.read_bytes().splitlines():
                self._take(decoder.decode(text))

    def sampled(self, sample: Sample) -> None:
        self._add(_Line(sample=sample))

    def decided(self, decision_us: dict[str, float]) -> None:
        self._add(_Line(decision=decision_us))

    def _add(self, line: _Line) -> None:
        self._take(line)
        if self._file is not None:
            with self._file.open("ab") as out:
                out.write(msgspec.json.encode(line) + b"\n")

    def _take(self, line: _Line) -> None:
        if line.sample is not None:
            self.samples.append(line.sample)
        if line.decision is not None:
            self.decisions.append(line.decision)
