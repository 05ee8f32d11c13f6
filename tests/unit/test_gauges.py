"""Gauges that are more than a field read."""

from typing import cast

from gateway.debug.gauges import _predicted_wait_s
from scorer.fleet import Worker
from scorer.ledger import Load


class _Backlog:
    def __init__(self, backlog_s: float) -> None:
        self._backlog_s = backlog_s

    def prefill_backlog_s(self, now_s: float) -> float:
        return self._backlog_s


def test_the_predicted_wait_is_that_of_the_emptiest_rank_with_what_was_learned() -> None:
    worker = Worker("a", 1)
    assert _predicted_wait_s(worker) == 0.0
    worker.loads = {rank: cast(Load, _Backlog(backlog_s)) for rank, backlog_s in enumerate((7.0, 2.5))}
    worker.wait_factor = 2.0
    assert _predicted_wait_s(worker) == 5.0
    worker.loads = {}
    assert _predicted_wait_s(worker) == 0.0
