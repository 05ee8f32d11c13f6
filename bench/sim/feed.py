"""One engine's KV events on their way to the index: late, now and then lost, fetched again. The order is kept by the
gateway's own `indexer.Stream`.
"""

from __future__ import annotations

import random
from collections import deque

from bench.engine.events import AllBlocksCleared, BlockStored, Event
from indexer import Apply, Clear, EventBatch, PrefixIndex, Replay, Stream
from indexer.events import AllBlocksCleared as IndexCleared
from indexer.events import BlockRemoved as IndexRemoved
from indexer.events import BlockStored as IndexStored
from indexer.events import KVEvent
from indexer.stream import Action

REPLAY_S = 0.02
"""From asking for batches to having them."""
HISTORY_BATCHES = 10_000
"""vLLM's `buffer_steps`."""


class Feed:
    """`delay_s` from an event to the index, `loss` the share of batches that do not come. Without `replays` a gap stays
    and the stream is partial from then on.
    """

    def __init__(
        self, worker: str, index: PrefixIndex, rng: random.Random, *, delay_s: float, loss: float, replays: bool
    ) -> None:
        self.worker = worker
        self.stream = Stream(can_replay=replays)
        self.lost = 0
        self.cleared = False
        """Whether the index has forgotten this worker since this was last set to False."""
        self._index = index
        self._rng = rng
        self._delay_s = delay_s
        self._loss = loss
        self._next_seq = 0
        self._coming: deque[tuple[float, int, EventBatch]] = deque()
        self._history: deque[tuple[int, EventBatch]] = deque(maxlen=HISTORY_BATCHES)
        self._replays: list[tuple[float, Replay]] = []
        self._do(self.stream.connected(), 0.0)

    def publish(self, events: list[Event], now_s: float) -> None:
        batch = EventBatch(now_s, _converted(events))
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        if self._loss:
            self._history.append((seq, batch))
            if self._rng.random() < self._loss:
                self.lost += 1
                return
        self._coming.append((now_s + self._delay_s, seq, batch))

    def restarted(self, now_s: float) -> None:
        """The engine is a new process that numbers from 0, and the gateway knows it."""
        self._next_seq = 0
        self._coming.clear()
        self._history.clear()
        self._do(self.stream.restarted("restart"), now_s)

    def drain(self, now_s: float) -> None:
        """Take in everything that has arrived by now."""
        coming = self._coming
        while True:
            live_s = coming[0][0] if coming else float("inf")
            replay_s = self._replays[0][0] if self._replays else float("inf")
            if min(live_s, replay_s) > now_s:
                return
            if replay_s <= live_s:
                _, replay = self._replays.pop(0)
                for seq, batch in [each for each in self._history if each[0] >= replay.start]:
                    self._do(self.stream.replayed(replay.id, seq, b"", batch), replay_s)
                self._do(self.stream.replay_done(replay.id), replay_s)
            else:
                _, seq, batch = coming.popleft()
                self._do(self.stream.live(seq, b"", batch), live_s)

    def _do(self, actions: list[Action], now_s: float) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self._index.apply(self.worker, 0, action.batch)
            elif isinstance(action, Clear):
                self._index.clear(self.worker)
                self.cleared = True
            elif isinstance(action, Replay):
                self._replays.append((now_s + REPLAY_S, action))


def _converted(events: list[Event]) -> list[KVEvent]:
    """As they come out of the gateway's decoder. Removals in a row are one event, which means the same."""
    out: list[KVEvent] = []
    removed: IndexRemoved | None = None
    for event in events:
        if isinstance(event, BlockStored):
            removed = None
            out.append(
                IndexStored(
                    event.block_hashes,
                    event.parent_block_hash,
                    event.token_ids,
                    event.block_size,
                    event.lora_id,
                    event.medium,
                    event.lora_name,
                    event.extra_keys,
                    event.group_idx,
                    event.kv_cache_spec_kind,
                )
            )
        elif isinstance(event, AllBlocksCleared):
            removed = None
            out.append(IndexCleared())
        elif removed is None:
            removed = IndexRemoved(list(event.block_hashes), event.medium, event.group_idx)
            out.append(removed)
        else:
            removed.block_hashes += event.block_hashes
    return out
