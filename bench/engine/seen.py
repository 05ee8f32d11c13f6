"""Requests as a server received them, for tests to look at."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from bench.engine.config import Leg


@dataclass(frozen=True)
class Seen:
    """One inference request. `headers` is case-insensitive; repeated names: `headers.getall` of multidict."""

    path: str
    headers: Mapping[str, str]
    raw: bytes

    @cached_property
    def body(self) -> dict[str, Any]:
        """The JSON object; empty if it is none."""
        try:
            body = msgspec.json.decode(self.raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return {}
        return body if isinstance(body, dict) else {}

    @cached_property
    def leg(self) -> Leg:
        """Which leg of a prefill/decode hand-off it is."""
        if b"do_remote_" not in self.raw:
            return "plain"
        params = self.body.get("kv_transfer_params")
        if not isinstance(params, dict):
            return "plain"
        if params.get("do_remote_prefill"):
            return "decode"
        return "prefill" if params.get("do_remote_decode") else "plain"
