"""Cached tokens as predicted, against cached tokens as the engines reported them."""

from __future__ import annotations

import msgspec

_ANSWERS = 50
_MISSED = 0.2
"""Of the tokens predicted to be cached: so many that are not there are no chance."""


class HitStats(msgspec.Struct):
    """Sums over the answers of one worker that reported their cached tokens (`compared`), and over all of them."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    compared: int = 0
    compared_prompt_tokens: int = 0
    compared_predicted_tokens: int = 0
    actual_tokens: int = 0
    over_tokens: int = 0
    """Predicted but not there, summed over the requests where that was so."""
    under_tokens: int = 0
    """There but not predicted."""
    remote_requests: int = 0
    """Of the decode worker: answers to prompts that a prefill worker had computed."""
    remote_prompt_tokens: int = 0
    remote_said_tokens: int = 0
    """What those answers said was cached, in the decode worker's own words."""

    def missed_share(self) -> float | None:
        """Of the tokens predicted to be cached, those that were not; None while that is no more than chance."""
        if self.compared < _ANSWERS or not self.compared_predicted_tokens:
            return None
        share = self.over_tokens / self.compared_predicted_tokens
        return share if share >= _MISSED else None


class HitBook:
    """`HitStats` by worker."""

    def __init__(self) -> None:
        self.workers: dict[str, HitStats] = {}

    def add_worker(self, worker: str) -> None:
        self.workers.setdefault(worker, HitStats())

    def remove_worker(self, worker: str) -> None:
        self.workers.pop(worker, None)

    def predicted(self, worker: str, prompt_tokens: int, predicted_tokens: int) -> None:
        stats = self.workers.get(worker)
        if stats is not None:
            stats.requests += 1
            stats.prompt_tokens += prompt_tokens
            stats.predicted_tokens += predicted_tokens

    def reported(self, worker: str, prompt_tokens: int, predicted_tokens: int, actual_tokens: int) -> None:
        stats = self.workers.get(worker)
        if stats is None:
            return
        stats.compared += 1
        stats.compared_prompt_tokens += prompt_tokens
        stats.compared_predicted_tokens += predicted_tokens
        stats.actual_tokens += actual_tokens
        stats.over_tokens += max(0, predicted_tokens - actual_tokens)
        stats.under_tokens += max(0, actual_tokens - predicted_tokens)

    def handed_over(self, worker: str, prompt_tokens: int, said_tokens: int) -> None:
        stats = self.workers.get(worker)
        if stats is not None:
            stats.remote_requests += 1
            stats.remote_prompt_tokens += prompt_tokens
            stats.remote_said_tokens += said_tokens
