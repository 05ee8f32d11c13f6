"""`/debug/fleet`: what decisions are made of, as a file. A request can be priced against it later, and elsewhere.

Blocks are there by their keys, which tell nothing of any text. What is left out: sessions, prompts with images by
reference, and secrets; a tenant's cache salt is made with one, so salted prompts match nothing here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from gateway.core import Core
from gateway.errors import UserError
from indexer import HeldBlocks, PrefixIndex
from scorer.answers import Answer
from scorer.fleet import Fleet
from scorer.ledger import NOTHING, Booking, InFlight, Load
from scorer.pairs import Pair
from scorer.planner import Planner
from scorer.types import ChangeKind, EngineStats, Role, WorkerChange

VERSION = 1
MOST_BLOCKS = 4_000_000
"""Some 43 MB of JSON."""


class SavedBooking(msgspec.Struct, kw_only=True, omit_defaults=True):
    comp_s: float = 0.0
    kv_tokens: int = 0
    age_s: float = 0.0
    pulled: bool = False
    done_tokens: int = 0
    stalled_s: float = 0.0
    slo_tpot_s: float | None = None
    answer_tokens: float = 1.0
    answer_sigma: float = 0.0


class SavedLoad(msgspec.Struct, kw_only=True):
    """`head_age_s`: since when the first of `prefills` has been the first."""

    prefills: list[SavedBooking] = []
    streams: list[SavedBooking] = []
    head_age_s: float = 0.0
    others: InFlight = NOTHING
    """What other replicas had there, `others_age_s` before."""
    others_age_s: float = 0.0


class SavedWorker(msgspec.Struct, kw_only=True):
    name: str
    url: str | None = None
    role: Role = Role.BOTH
    weight: float = 1.0
    models: list[str] | None = None
    adapters: list[str] = []
    max_model_len: int | None = None
    draining: bool = False
    available: bool = True
    publishes_events: bool = False
    stats: EngineStats | None = None
    stats_age_s: float = 0.0
    ranks: dict[int, SavedLoad] = {}
    root: str | None = None
    """Of its model card, where its tokenizer may be."""


class SavedPair(msgspec.Struct, kw_only=True):
    prefill: str
    decode: str
    pair: Pair
    retry_in_s: float | None = None


class SavedFleet(msgspec.Struct, kw_only=True):
    """`assumed` are blocks of workers without events. `blocks_left_out`: there were more than were to be saved."""

    warmroute_fleet_version: int
    saved_at_s: float
    policy: str
    pd_policy: str
    peers: bool
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    tokenizer: str | None = None
    hint_targets: tuple[str, ...] | None = None
    """Whom hint headers may name; None: they are not obeyed."""
    workers: list[SavedWorker]
    pairs: list[SavedPair] = []
    learned: dict[str, Any] = {}
    blocks: list[HeldBlocks] = []
    assumed: list[HeldBlocks] = []
    sent: list[HeldBlocks] = []
    """What was just sent to workers with events, which have not told of it yet."""
    blocks_left_out: int = 0


_decoder = msgspec.json.Decoder(SavedFleet)


async def save(core: Core, most_blocks: int = MOST_BLOCKS, *, hints: bool = False) -> bytes:
    """The fleet as it is now, with so many blocks at most, as JSON. `hints`: whether hint headers are obeyed."""
    now_s = time.monotonic()
    holdings, config = core.planner.holdings, core.config
    fleet = SavedFleet(
        warmroute_fleet_version=VERSION,
        saved_at_s=time.time(),
        policy=core.planner.policy,
        pd_policy=config.pd.policy or "local",
        peers=config.pd.peers,
        slo_ttft_s=None if config.scorer.slo_ttft_ms is None else config.scorer.slo_ttft_ms / 1000,
        slo_tpot_s=None if config.scorer.slo_tpot_ms is None else config.scorer.slo_tpot_ms / 1000,
        tokenizer=config.tokens.tokenizer,
        hint_targets=config.pd.allow if hints else None,
        workers=list(_workers(core, now_s)),
        pairs=list(_pairs(core, now_s)),
        learned=core.planner.calibration.state(),
        assumed=list(holdings.approximate.held_blocks()),
        sent=list(holdings.optimistic.held_blocks()),
    )
    left = most_blocks - sum(each.n_blocks for each in chain(fleet.assumed, fleet.sent))
    return await asyncio.to_thread(_with_blocks, fleet, core.index, left)


def _with_blocks(fleet: SavedFleet, index: PrefixIndex, most_blocks: int) -> bytes:
    for held in index.held_blocks():
        n = min(held.n_blocks, max(0, most_blocks))
        fleet.blocks_left_out += held.n_blocks - n
        most_blocks -= n
        if n:
            fleet.blocks.append(msgspec.structs.replace(held, keys=held.keys[: 8 * n]))
    return msgspec.json.encode(fleet)


def load(path: str) -> SavedFleet:
    """Raises UserError."""
    try:
        content = Path(path).read_bytes()
    except OSError as exc:
        raise UserError(f"{path}: {exc.strerror or exc}") from None
    try:
        fleet = _decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise UserError(f"{path} is no saved fleet (GET /debug/fleet of the admin port gives one): {exc}") from None
    if fleet.warmroute_fleet_version != VERSION:
        raise UserError(f"{path} is of another format ({fleet.warmroute_fleet_version}) than {VERSION}")
    return fleet


def restored(fleet: SavedFleet, now_s: float) -> Planner:
    """A planner that would decide as the one that was saved. Raises UserError for what cannot be."""
    index = PrefixIndex(budget_bytes=1 << 40)
    try:
        planner = Planner(Fleet(), index, policy=fleet.policy, pd_policy=fleet.pd_policy, peers=fleet.peers)
    except ValueError as exc:
        raise UserError(f"the saved fleet decides in a way that is not known here: {exc}") from None
    planner.calibration.load(fleet.learned)
    for saved in fleet.workers:
        _restore_worker(planner, saved, now_s)
    for each in fleet.pairs:
        retry_at_s = None if each.retry_in_s is None else now_s + each.retry_in_s
        pair = msgspec.structs.replace(each.pair, retry_at_s=retry_at_s)
        planner.pairs.pairs[each.prefill, each.decode] = pair
    holdings = planner.holdings
    try:
        for held in fleet.blocks:
            index.take_back(held)
        for held in fleet.assumed:
            holdings.approximate.take_back(held, now_s)
        for held in fleet.sent:
            holdings.optimistic.take_back(held, now_s)
    except (ValueError, TypeError) as exc:
        raise UserError(f"the saved fleet has blocks that cannot be: {exc}") from None
    return planner


def _workers(core: Core, now_s: float) -> Iterator[SavedWorker]:
    for name, worker in sorted(core.fleet.workers.items()):
        stats = worker.stats
        known = core.capabilities.get(name)
        yield SavedWorker(
            name=name,
            url=worker.url,
            role=worker.role,
            weight=worker.weight,
            models=None if worker.models is None else sorted(worker.models),
            adapters=sorted(worker.adapters),
            max_model_len=worker.max_model_len,
            draining=worker.draining,
            available=core.available(name),
            publishes_events=worker.publishes_events,
            stats=None if stats is None else msgspec.structs.replace(stats, scraped_at_s=0.0),
            stats_age_s=0.0 if stats is None else max(0.0, now_s - stats.scraped_at_s),
            ranks={rank: _load(load, now_s) for rank, load in worker.loads.items()},
            root=None if known is None else known.root,
        )


def _pairs(core: Core, now_s: float) -> Iterator[SavedPair]:
    for (prefill, decode), pair in sorted(core.planner.pairs.pairs.items()):
        retry_in_s = None if pair.retry_at_s is None else pair.retry_at_s - now_s
        saved = msgspec.structs.replace(pair, retry_at_s=None)
        yield SavedPair(prefill=prefill, decode=decode, pair=saved, retry_in_s=retry_in_s)


def _load(load: Load, now_s: float) -> SavedLoad:
    return SavedLoad(
        prefills=[_booking(booking, now_s) for booking in load.prefills],
        streams=[_booking(booking, now_s) for booking in load.streaming],
        head_age_s=max(0.0, now_s - load.head_since_s),
        others=load.others,
        others_age_s=max(0.0, now_s - load.others_at_s),
    )


def _booking(booking: Booking, now_s: float) -> SavedBooking:
    return SavedBooking(
        comp_s=booking.comp_s,
        kv_tokens=booking.kv_tokens,
        age_s=max(0.0, now_s - booking.booked_s),
        pulled=booking.pulled,
        done_tokens=booking.done_tokens,
        stalled_s=booking.stalled_s,
        slo_tpot_s=booking.slo_tpot_s,
        answer_tokens=booking.answer.tokens,
        answer_sigma=booking.answer.sigma,
    )


def _restore_worker(planner: Planner, saved: SavedWorker, now_s: float) -> None:
    kind = ChangeKind.ADDED
    change = WorkerChange(kind=kind, worker=saved.name, url=saved.url, role=saved.role, weight=saved.weight)
    worker = planner.fleet.apply(change)
    assert worker is not None  # noqa: S101 - it was added
    worker.draining = saved.draining
    worker.publishes_events = saved.publishes_events
    if saved.models is not None:
        planner.fleet.set_capabilities(
            saved.name,
            models=saved.models,
            adapters=saved.adapters,
            ranks=sorted(saved.ranks) or [0],
            max_model_len=saved.max_model_len,
        )
    if saved.stats is not None:
        scraped_at_s = now_s - saved.stats_age_s
        planner.fleet.set_stats(saved.name, msgspec.structs.replace(saved.stats, scraped_at_s=scraped_at_s))
    for rank, load in saved.ranks.items():
        _restore_load(worker.loads.setdefault(rank, Load()), load, now_s)
    planner.configure_worker(saved.name)


def _restore_load(load: Load, saved: SavedLoad, now_s: float) -> None:
    for each in saved.streams:
        booking = _rebook(load, each, now_s)
        booking.first_token(now_s)
        booking.done_tokens, booking.stalled_s = each.done_tokens, each.stalled_s
    for each in saved.prefills:
        _rebook(load, each, now_s)
    load.head_since_s = now_s - saved.head_age_s
    load.set_others(saved.others, now_s - saved.others_age_s)


def _rebook(load: Load, saved: SavedBooking, now_s: float) -> Booking:
    return Booking(
        load,
        saved.comp_s,
        saved.kv_tokens,
        now_s - saved.age_s,
        answer=Answer(saved.answer_tokens, saved.answer_sigma),
        slo_tpot_s=saved.slo_tpot_s,
        pulled=saved.pulled,
    )
