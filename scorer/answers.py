"""How long answers get. It differs between the requests of one model far more than anything else that is predicted."""

from __future__ import annotations

SCALE = 0.5513
"""sqrt(3) / pi: the scale of a logistic distribution whose standard deviation is 1."""
_KNOWN = 0.15
"""Answers whose lengths differ less than this are taken to be alike."""
_FAR = 1e6


class Answer:
    """Half of all such answers get `tokens` long; the logarithm of the length has the standard deviation `sigma` (0: it
    is known).
    """

    __slots__ = ("_steepness", "tokens", "varies")

    def __init__(self, tokens: float = 1.0, sigma: float = 0.0) -> None:
        self.tokens = max(1.0, tokens)
        self.varies = sigma > _KNOWN
        self._steepness = 1.0 / (SCALE * max(sigma, _KNOWN))

    @property
    def sigma(self) -> float:
        return 1.0 / (SCALE * self._steepness) if self.varies else 0.0

    def ends_between(self, low_tokens: float, high_tokens: float, done_tokens: int) -> float:
        """The probability that an answer which has `done_tokens` ends between `low_tokens` (not more than) and
        `high_tokens`: log-logistic.
        """
        steepness = self._steepness
        tokens = self.tokens
        high = high_tokens / tokens
        so_far = 1.0 + (done_tokens / tokens) ** steepness
        past_low = 1.0 if low_tokens <= done_tokens else so_far / (1.0 + min(low_tokens / tokens, _FAR) ** steepness)
        share: float = past_low - so_far / (1.0 + (high if high < _FAR else _FAR) ** steepness)
        return share
