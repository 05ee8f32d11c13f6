"""`x-warmroute-outcome`, in which a sidecar of ours says what it has made of the plan it was sent."""

from __future__ import annotations

import msgspec

from scorer.types import CHOICES, PdReason

_LONGEST = 1024
_LONGEST_PREFILL_MS = 3_600_000.0


class SidecarOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """`prefill_s`: from sending the prefill leg to its answer."""

    plan_id: str
    choice: str
    reason: PdReason | None
    prefill_s: float | None


def read_outcome(value: str) -> SidecarOutcome | None:
    """Of `id=..;choice=..;reason=..[;prefiller=..][;prefill_ms=..]`; None if it is not one. Keys we do not know are
    left alone.
    """
    if len(value) > _LONGEST:
        return None
    fields = {key.strip(): text for key, equals, text in (part.partition("=") for part in value.split(";")) if equals}
    choice = fields.get("choice", "")
    if "id" not in fields or choice not in CHOICES:
        return None
    return SidecarOutcome(
        plan_id=fields["id"],
        choice=choice,
        reason=_reason(fields.get("reason")),
        prefill_s=_seconds(fields.get("prefill_ms")),
    )


def _reason(text: str | None) -> PdReason | None:
    try:
        return PdReason(text)
    except ValueError:
        return None


def _seconds(text: str | None) -> float | None:
    try:
        ms = float(text or "")
    except ValueError:
        return None
    return ms / 1000 if 0 <= ms <= _LONGEST_PREFILL_MS else None
