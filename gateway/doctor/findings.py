"""One finding about one worker."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec


class Severity(IntEnum):
    """Ordered: a higher one is worse. Notes need no action."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


class Rule(msgspec.Struct, frozen=True):
    """What is always true of a finding: how bad it is, why it matters (empty for an OK), what to change."""

    severity: Severity
    meaning: str
    fix: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`sentence` is what was seen; `worker` is empty for what concerns several; `rank` None: not one rank's.
    `evidence`: the figures in the sentence, by name, for programs.
    """

    severity: Severity
    code: str
    worker: str
    sentence: str
    meaning: str = ""
    fix: str = ""
    rank: int | None = None
    evidence: Mapping[str, Any] = {}


class Report(msgspec.Struct, frozen=True):
    """Findings by worker in the order of the command line, then those about several workers."""

    workers: dict[str, list[Finding]]
    fleet: list[Finding]

    @property
    def findings(self) -> list[Finding]:
        return [finding for findings in self.workers.values() for finding in findings] + self.fleet

    @property
    def worst(self) -> Severity:
        return max((finding.severity for finding in self.findings), default=Severity.OK)
