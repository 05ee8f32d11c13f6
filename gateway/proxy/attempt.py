"""How an attempt to get an answer can fail before the first byte."""

from __future__ import annotations

from gateway.engine.health import End


class AttemptFailed(Exception):
    """No usable answer came: no connection (CONNECT), it broke before the first byte (RESET), or it was given up
    (TIMEOUT). A broken one may have been about to be closed as idle, so a fresh one to the same worker may still do.
    """

    def __init__(self, end: End) -> None:
        super().__init__(end.value)
        self.end = end

    @property
    def reason(self) -> str:
        return {End.CONNECT: "connect", End.TIMEOUT: "timeout"}.get(self.end, "disconnected")


class LeaseOver(Exception):
    """The decode worker did not get the whole request while the prefill worker was sure to hold its blocks."""
