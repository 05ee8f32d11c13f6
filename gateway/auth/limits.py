"""How much one key may ask: requests and tokens a minute, and requests at once.

Requests and tokens are buckets that are full at first and fill again at their rate, so that after a quiet minute up to
two minutes' worth may come in one. Tokens are reserved before they are used, as many as a request may take, and put
right when it is known how many it took; a request that took more leaves a debt that later ones wait for.

Times are monotonic seconds and are given, never read. The state is that of one gateway process; several that are one
gateway share it (`gateway/processes/books.py`).
"""

from __future__ import annotations

import msgspec

_MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Of a token: sums of floats must not refuse what is there to the last one."""


class Bucket:
    """`limit` a minute. The level may be below 0."""

    __slots__ = ("_at_s", "_level", "limit")

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at_s = now_s

    def state(self) -> tuple[float, float, float]:
        """(limit, level, when it was that)"""
        return self.limit, self._level, self._at_s

    def restore(self, limit: int, level: float, at_s: float) -> None:
        """As another's `state` was."""
        self.limit, self._level, self._at_s = limit, level, at_s

    def level(self, now_s: float) -> float:
        if now_s > self._at_s:
            self._level = min(self.limit, self._level + (now_s - self._at_s) * self.limit / _MINUTE_S)
            self._at_s = now_s
        return self._level

    def has(self, n: float, now_s: float) -> bool:
        return self.level(now_s) + _ROUNDING >= n

    def take(self, n: float, now_s: float) -> None:
        """Below nothing, too."""
        self._level = min(self.limit, self.level(now_s) - n)

    def wait_s(self, n: float, now_s: float) -> float:
        """Until it has `n`, if nobody takes any."""
        return max(0.0, (n - self.level(now_s)) * _MINUTE_S / self.limit)

    def resize(self, limit: int, now_s: float) -> None:
        """What is taken stays taken."""
        self._level = self.level(now_s) + limit - self.limit
        self.limit = limit

    def remaining(self, now_s: float) -> int:
        return max(0, int(self.level(now_s) + _ROUNDING))

    def reset_s(self, now_s: float) -> float:
        """Until it is full."""
        return self.wait_s(self.limit, now_s)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """None: without a limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class Exceeded(Exception):
    """`what` is `requests`, `tokens`, `concurrent requests`, or `size` for a prompt that no wait makes room for;
    `after_s` says when to come back.
    """

    def __init__(self, what: str, limit: int, after_s: float, asked: int = 1) -> None:
        super().__init__(what)
        self.what = what
        self.limit = limit
        self.after_s = after_s
        self.asked = asked


class Account:
    """The books of one key. `enter` and `leave` go together; so do `reserve` and `settle`."""

    __slots__ = ("_most", "_requests", "_tokens", "running")

    def __init__(self, limits: Limits, now_s: float) -> None:
        self.running = 0
        self._most: int | None = None
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.configure(limits, now_s)

    def configure(self, limits: Limits, now_s: float) -> None:
        """Go by these from now on."""
        self._most = limits.concurrent_requests
        self._requests = _resized(self._requests, limits.requests_per_minute, now_s)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, now_s)

    def enter(self, now_s: float) -> None:
        """One request more. Raises Exceeded, and has changed nothing then."""
        if self._most is not None and self.running >= self._most:
            raise Exceeded("concurrent requests", self._most, 1.0)
        self.ask(now_s)
        self.running += 1

    def ask(self, now_s: float) -> None:
        """One request more, which is at work nowhere: it needs no `leave`. Raises Exceeded, as above."""
        requests, tokens = self._requests, self._tokens
        if requests is not None and not requests.has(1, now_s):
            raise Exceeded("requests", requests.limit, requests.wait_s(1, now_s))
        if tokens is not None and not tokens.has(1, now_s):
            raise Exceeded("tokens", tokens.limit, tokens.wait_s(1, now_s))
        if requests is not None:
            requests.take(1, now_s)

    def leave(self) -> None:
        self.running -= 1

    def reserve(self, prompt_tokens: int, output_tokens: int, now_s: float) -> int:
        """How many tokens were taken: no more than a full bucket holds. Raises Exceeded, and has changed nothing
        then.
        """
        tokens = self._tokens
        if tokens is None:
            return 0
        if prompt_tokens > tokens.limit:
            raise Exceeded("size", tokens.limit, 0.0, prompt_tokens)
        wanted = min(prompt_tokens + output_tokens, tokens.limit)
        if not tokens.has(wanted, now_s):
            raise Exceeded("tokens", tokens.limit, tokens.wait_s(wanted, now_s), wanted)
        tokens.take(wanted, now_s)
        return wanted

    def settle(self, reserved: int, used: int, now_s: float) -> None:
        if self._tokens is not None:
            self._tokens.take(used - reserved, now_s)

    def headers(self, now_s: float) -> list[tuple[str, str]]:
        """OpenAI's."""
        rows: list[tuple[str, str]] = []
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                rows += (
                    (f"x-ratelimit-limit-{what}", str(bucket.limit)),
                    (f"x-ratelimit-remaining-{what}", str(bucket.remaining(now_s))),
                    (f"x-ratelimit-reset-{what}", shown_s(bucket.reset_s(now_s))),
                )
        return rows


def shown_s(seconds: float) -> str:
    """As OpenAI writes durations: `0s`, `12ms`, `1.5s`, `6m0s`."""
    ms = round(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms" if ms else "0s"
    minutes, rest_ms = divmod(ms, 60_000)
    rest = f"{rest_ms / 1000:g}s"
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + rest


def _resized(bucket: Bucket | None, limit: int | None, now_s: float) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit, now_s)
    bucket.resize(limit, now_s)
    return bucket
