"""What the tap and the probes saw of one worker -> findings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.config.schema import EventsConfig
from gateway.doctor.catalogue import finding
from gateway.doctor.findings import Finding
from gateway.doctor.probe import Outcome
from gateway.doctor.tap import HeardCopy, is_up
from gateway.engine.capabilities import EventSource
from gateway.engine.feed import FeedStatus
from indexer.holder import FULL_PREFIX_KINDS


class RankSeen(msgspec.Struct, kw_only=True):
    """Everything that is known of one rank's events.

    `connect_error` and `replay_connect_error` say why a plain connection fails (None: not tried, or it works). `index`
    is what the index says of this rank (`PrefixIndex.stats`), `kv_blocks` what the engine has. `outcome` None: no
    probe was sent.
    """

    rank: int
    source: EventSource
    status: FeedStatus | None = None
    heard: HeardCopy = HeardCopy()
    connect_error: str | None = None
    replay_connect_error: str | None = None
    index: dict[str, Any] = {}
    kv_blocks: int | None = None
    outcome: Outcome | None = None

    @property
    def is_connected(self) -> bool:
        return self.status is not None and is_up(self.status)


def judge(
    worker: str,
    seen: Sequence[RankSeen],
    *,
    n_ranks: int,
    block_size: int | None,
    bad_messages: int = 0,
    rank_conflicts: int = 0,
) -> list[Finding]:
    """Findings about the events of `worker`, which has `n_ranks`; its metrics name `block_size`."""
    found: list[Finding] = []
    several = n_ranks > 1
    anyone_heard = any(rank.heard.batches for rank in seen)
    for each in seen:
        rank = each.rank if several else None
        about = [*_connection(worker, each), *_probe(worker, each, anyone_heard and several)]
        about += _replay(worker, each)
        about += _content(worker, each, block_size)
        found += [msgspec.structs.replace(one, rank=rank) for one in about]
    missing = sorted(set(range(n_ranks)) - {each.rank for each in seen})
    if missing and several:
        listed = ", ".join(map(str, missing))
        found.append(finding("rank-unannounced", worker, f"it has {n_ranks} ranks, but no event address for {listed}"))
    if rank_conflicts:
        said = f"{rank_conflicts} batches of one rank came over the connection of another"
        found.append(finding("rank-mixed", worker, said))
    if bad_messages:
        found.append(finding("events-malformed", worker, f"{bad_messages} messages were no event batches"))
    return found


def judge_mode(worker: str, sources: Mapping[int, EventSource], events: EventsConfig) -> list[Finding]:
    """Whether a gateway set up so listens where the engine connects."""
    wanted = sorted({source.endpoint for source in sources.values() if source.engine_connects and source.endpoint})
    if not wanted:
        return []
    ports = {endpoint.rpartition(":")[2] for endpoint in wanted}
    if events.mode == "bind" and ports == {(events.bind_endpoint or "").rpartition(":")[2]}:
        return []
    listens = "events.mode is connect"
    if events.mode == "bind":
        listens = f"events.bind_endpoint is {events.bind_endpoint}"
    said = (
        f"it connects to {', '.join(wanted)}, and {listens}: start the gateway with --events-mode bind "
        f"--events-bind-endpoint tcp://0.0.0.0:{wanted[0].rpartition(':')[2]}"
    )
    return [finding("events-need-bind", worker, said, evidence={"endpoints": wanted, "events_mode": events.mode})]


# ---- the connection -------------------------------------------------------------------------------------------------


def _connection(worker: str, seen: RankSeen) -> list[Finding]:
    source, status = seen.source, seen.status
    if source.endpoint is None:
        return [finding("events-unreachable", worker, f"{source.unreachable} is only reachable on its own machine")]
    if status is None or seen.is_connected:
        return []
    if source.engine_connects:
        if status.endpoint_state == "failed":
            said = f"cannot listen at {source.endpoint} ({status.endpoint_error})"
            return [finding("events-bind-failed", worker, said)]
        return [finding("events-unreachable", worker, f"it should connect to {source.endpoint}, but did not")]
    if status.endpoint_state == "failed":
        said = f"{source.endpoint} is no address to connect to ({status.endpoint_error})"
        return [finding("events-unreachable", worker, said)]
    if seen.connect_error is not None:
        return [finding("events-unreachable", worker, f"cannot connect to {source.endpoint} ({seen.connect_error})")]
    return [finding("events-wrong-port", worker, f"{source.endpoint} accepts connections, but is no event publisher")]


def _replay(worker: str, seen: RankSeen) -> list[Finding]:
    source, status = seen.source, seen.status
    if source.replay_endpoint is None:
        if source.unreachable is not None and source.endpoint is not None:
            said = f"{source.unreachable} is only reachable on its own machine"
            return [finding("replay-unreachable", worker, said)]
        return [finding("replay-off", worker, "it has no replay endpoint")] if source.endpoint else []
    if status is None or not seen.is_connected:
        return []
    if seen.replay_connect_error is not None:
        said = f"cannot connect to {source.replay_endpoint} ({seen.replay_connect_error})"
        return [finding("replay-unreachable", worker, said)]
    counters = status.counters
    foreign, epochs = counters.get("foreign_replayed_batches", 0), counters.get("epochs", 0)
    if foreign or epochs:
        said = (
            f"{foreign} replayed batches were another rank's" if foreign else f"its stream started anew {epochs} times"
        )
        return [finding("replay-foreign", worker, said)]
    if counters.get("replay_failures", 0):
        got = "broke off" if counters.get("applied_batches", 0) > _live(seen) else "did not come"
        return [finding("replay-incomplete", worker, f"the answer of {source.replay_endpoint} {got}")]
    if not counters.get("replays", 0):
        return []
    if status.missing_batches and not status.gaps:
        said = f"its history begins at batch {status.missing_batches} of {status.next_seq}"
        return [finding("replay-short", worker, said)]
    return [finding("replay", worker, f"{source.replay_endpoint} answers; {status.next_seq} batches so far")]


def _lost_live(seen: RankSeen) -> int:
    """Gaps among the batches that came live. The one before the first of them is the history that was not read."""
    if seen.status is None:
        return 0
    return max(0, seen.status.gaps - bool(seen.status.counters.get("replay_failures", 0)))


def _live(seen: RankSeen) -> int:
    """Batches that came live, at most: each probe makes one or two."""
    return 4 if seen.outcome is not None else 0


# ---- the probe ------------------------------------------------------------------------------------------------------


def _probe(worker: str, seen: RankSeen, others_heard: bool) -> list[Finding]:
    outcome = seen.outcome
    if outcome is None or outcome.failure is not None:  # the caller reports failures, which need no events
        return []
    if not seen.is_connected:
        return []
    if outcome.undelivered:
        return [finding("events-undelivered", worker, "a batch about the probe can be replayed, but never came live")]
    if not outcome.matched and not outcome.announced:
        code = "rank-silent" if others_heard else "events-silent"
        return [
            finding(
                code, worker, f"no event came within {outcome.waited_s:g} s of a prompt of {outcome.n_tokens} tokens"
            )
        ]
    if outcome.unmatched is not None:
        code, sentence = outcome.unmatched
        return [finding(code, worker, sentence)]
    if others_heard and seen.rank not in outcome.matched:
        ranks = ", ".join(map(str, sorted(outcome.matched)))
        return [finding("rank-ignored", worker, f"a prompt for rank {seen.rank} was computed by rank {ranks}")]
    size = max(seen.heard.block_sizes, default=1)
    announced = outcome.matched_tokens
    if announced + size <= outcome.n_tokens - 1:
        said = f"{announced} of {outcome.n_tokens // size * size} tokens in full blocks were announced"
        return [finding("events-incomplete", worker, said)]
    return []


def judge_reuse(worker: str, outcome: Outcome, *, rank: int | None) -> list[Finding]:
    """What the answer to a probe says by itself, with or without events."""
    if outcome.failure is not None:
        return [finding("probe-failed", worker, outcome.failure, rank=rank)]
    cached, predicted = outcome.repeat_cached, outcome.predicted_tokens
    if cached is None:
        return [
            finding("cached-tokens-missing", worker, "the answer to a repeated prompt has no cached_tokens", rank=rank)
        ]
    if cached == 0:
        said = f"a prompt of {outcome.n_tokens} tokens sent twice reused nothing"
        return [finding("cache-not-reused", worker, said, rank=rank)]
    if predicted is None:
        return []
    if cached != predicted:
        said = f"{predicted} cached tokens were predicted, the engine reports {cached}"
        return [finding("cached-tokens-differ", worker, said, rank=rank)]
    said = f"a prompt of {outcome.n_tokens} tokens: {outcome.matched_tokens} announced, {cached} reused as predicted"
    return [finding("events", worker, said, rank=rank)]


# ---- what the events hold -------------------------------------------------------------------------------------------


def _content(worker: str, seen: RankSeen, block_size: int | None) -> list[Finding]:
    heard, found = seen.heard, []
    gaps = _lost_live(seen)
    if gaps:
        found.append(finding("events-gap", worker, f"{gaps} gaps in the sequence of batches"))
    if heard.malformed:
        found.append(finding("events-malformed", worker, f"{heard.malformed} events cannot be read"))
    refused = seen.index.get("counters", {}).get("refused_block_size_events", 0)
    if refused:
        said = f"{refused} events had blocks that are finer than the GPU's"
        found.append(finding("block-size-refused", worker, said, evidence={"events": refused}))
    if heard.unknown:
        named = ", ".join(f"{name} ({count})" for name, count in sorted(heard.unknown.items()))
        found.append(finding("events-unknown-type", worker, f"unknown events: {named}"))
    if block_size and heard.block_sizes and block_size not in heard.block_sizes:
        sizes = ", ".join(map(str, heard.block_sizes))
        found.append(
            finding("block-size-differs", worker, f"events have blocks of {sizes}, the metrics say {block_size}")
        )
    other = sorted(kind for kind in heard.kinds if kind not in FULL_PREFIX_KINDS and kind != "unnamed")
    if other and len(other) < len(heard.kinds):
        found.append(finding("groups-ignored", worker, f"groups of kind {', '.join(other)} are left out"))
    held = seen.index.get("blocks", {}).get("gpu", 0) + seen.index.get("extra_copies", 0)
    if seen.kv_blocks and held > seen.kv_blocks:
        found.append(finding("copies-stay", worker, f"the index counts {held} blocks, the engine has {seen.kv_blocks}"))
    return found
