"""How an attempt to get an answer can fail before the first byte."""

from __future__ import annotations

from gateway.engine.health import End
from gateway.proxy.relay import Answer


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


class LoadFailed(Exception):
    """The KV did not get to the decode worker, which has said so before any content. The text says how."""


class BehindSidecar(Exception):
    """The decode worker is one of our own faces, which takes transfer params out of every body: its engine has computed
    the prompt itself. `answer` is right all the same.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class Rejected(Exception):
    """The decode worker, or something before it, refuses a leg in a way that may be about what we added to it."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status
