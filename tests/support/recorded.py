"""What vLLM 0.32 was recorded to say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"


def load(name: str) -> Any:
    return json.loads((DATA / f"vllm_0.32_{name}.json").read_text(encoding="utf-8"))


def sse(events: Sequence[tuple[str | None, Any]]) -> bytes:
    """A recorded stream as it was sent."""
    out = b""
    for event, told in events:
        out += b"" if event is None else b"event: %b\n" % event.encode()
        out += b"data: %b\n\n" % (told if isinstance(told, str) else json.dumps(told)).encode()
    return out
