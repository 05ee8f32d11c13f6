"""Recorded traffic, and generators of traffic like it for when no recording is at hand.

Mooncake's JSON lines: ``{"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": [..]}``, one id for each
block of 512 tokens, named for its whole prefix. `warmroute record` writes the same, each row with its ``"block_size"``,
and ``null`` for ids where nobody knew the prompt's tokens. Azure's CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``, no
prefixes.
"""

from __future__ import annotations

import codecs
import csv
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.sim.load import Ask, Stage
from bench.sim.prompts import blocks, unique
from bench.sim.record import Record

MOONCAKE_BLOCK_TOKENS = 512
_ALONE = 1 << 30
"""Text of requests without ids: above all ids of blocks."""


class Row(NamedTuple):
    """One request of a trace. `hash_ids` name blocks of `block_tokens`; None: it shares nothing with others."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: list[int] | None
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    block_size: int = MOONCAKE_BLOCK_TOKENS


def read_mooncake(path: Path, limit: int | None = None) -> list[Row]:
    """The first `limit` requests of a file, by their times (a recording has them as they ended). Raises ValueError that
    names the line for one that is no request.
    """
    decode = msgspec.json.Decoder(_Line).decode
    rows: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(rows) >= limit:
                break
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                it = decode(line)
            except msgspec.DecodeError as exc:
                raise ValueError(f"{path}, line {number}: {exc}") from None
            if it.input_length <= 0 or it.block_size <= 0:
                raise ValueError(f"{path}, line {number}: lengths must be above 0")
            if it.hash_ids is not None and it.input_length > len(it.hash_ids) * it.block_size:
                raise ValueError(f"{path}, line {number}: {it.input_length} tokens in {len(it.hash_ids)} blocks")
            output_tokens = max(1, it.output_length)
            rows.append(Row(it.timestamp / 1000, it.input_length, output_tokens, it.hash_ids, it.block_size))
    return sorted(_small(rows), key=lambda row: row.at_s)


def _small(rows: list[Row]) -> list[Row]:
    """With ids that can be numbers of texts: where some are hashes, all are numbered as they come."""
    if all(0 <= each < _ALONE for row in rows for each in row.hash_ids or ()):
        return rows
    numbers: defaultdict[int, int] = defaultdict(count().__next__)
    return [row._replace(hash_ids=row.hash_ids and [numbers[each] for each in row.hash_ids]) for row in rows]


def read_azure(path: Path, limit: int | None = None) -> list[Row]:
    """Raises ValueError that names the line for one that is no request."""
    rows: list[Row] = []
    with path.open(newline="", encoding="utf-8-sig") as text:
        start: datetime | None = None
        lines = csv.DictReader(text)
        while limit is None or len(rows) < limit:
            try:
                if (it := next(lines, None)) is None:
                    break
                # Some of the traces name their zone (UTC), some do not; seven digits of a second are cut to six.
                at = datetime.fromisoformat(it["TIMESTAMP"]).replace(tzinfo=None)
                start = start or at
                at_s = (at - start).total_seconds()
                lengths = max(1, int(it["ContextTokens"])), max(1, int(it["GeneratedTokens"]))
            except (csv.Error, KeyError, TypeError, ValueError) as exc:
                raise ValueError(f"{path}, line {lines.line_num}: not a request ({exc})") from None
            rows.append(Row(at_s, *lengths, None))
    return rows


def like_mooncake(seed: int, n: int) -> list[Row]:
    """Conversations as in Mooncake's trace, by its published figures: 3.4 requests a second, lengths near log-normal
    (12,000 tokens on average, half under 7,000; answers 343), one first block that all share, and 37 % of the blocks
    seen before, because some requests go on where an earlier one ended.
    """
    rng = random.Random(f"mooncake {seed}")
    rows: list[Row] = []
    open_chats: list[Row] = []
    ids = iter(range(1, 1 << 31))
    at_s = 0.0
    for _ in range(n):
        at_s += rng.expovariate(3.4)
        output = max(1, min(2000, round(rng.lognormvariate(5.6, 0.75))))
        if open_chats and rng.random() < 0.34:
            before = open_chats.pop(rng.randrange(max(0, len(open_chats) - 1000), len(open_chats)))
            whole = before.input_tokens // MOONCAKE_BLOCK_TOKENS
            grown = before.input_tokens + before.output_tokens + round(rng.lognormvariate(6.5, 1.0))
            tokens = min(126_000, grown)
            kept = (before.hash_ids or [0])[:whole]
        else:
            tokens = max(900, min(126_000, round(rng.lognormvariate(8.75, 1.05))))
            kept = [0]
        wanted = -(-tokens // MOONCAKE_BLOCK_TOKENS)
        hash_ids = [*kept, *(next(ids) for _ in range(wanted - len(kept)))]
        rows.append(Row(at_s, tokens, output, hash_ids[:wanted]))
        open_chats.append(rows[-1])
    return rows


def like_azure(seed: int, n: int) -> list[Row]:
    """Lengths and arrivals as in Azure's 2023 conversation trace: 5.5 requests a second, 1,155 tokens in (half under
    1,020), 211 out (half under 129), nearly Poisson.
    """
    rng = random.Random(f"azure {seed}")
    rows: list[Row] = []
    at_s = 0.0
    for _ in range(n):
        at_s += rng.expovariate(5.53)
        tokens = max(3, min(14_050, round(rng.lognormvariate(6.65, 0.95))))
        rows.append(Row(at_s, tokens, max(1, min(1500, round(rng.lognormvariate(4.86, 1.0)))), None))
    return rows


class Replay:
    """Requests at their own times, `speed` times as fast. `prefill_only`: answers of one token, for engines that only
    compute prompts.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        speed: float = 1.0,
        prefill_only: bool = False,
        slo_ttft_s: float | None = None,
        slo_tpot_s: float | None = None,
        bounded: bool = False,
    ) -> None:
        self._rows = rows
        self._speed = speed
        self._prefill_only = prefill_only
        self._slo = slo_ttft_s, slo_tpot_s
        self._bounded = bounded

    def start(self, stage: Stage) -> None:
        for number, row in enumerate(self._rows):
            stage.submit(row.at_s / self._speed, self._ask(number, row))

    def _ask(self, number: int, row: Row) -> Ask:
        def tokens() -> bytes:
            if row.hash_ids is None:
                return unique(_ALONE + number, row.input_tokens)
            return blocks(row.hash_ids, row.block_tokens, row.input_tokens)

        output = 1 if self._prefill_only else row.output_tokens
        bound = output if self._bounded or self._prefill_only else None
        return Ask(tokens, output, bound, *self._slo, seed=number)

    def ended(self, ask: Ask, record: Record, stage: Stage) -> None:
        pass


def hit_bound(rows: Iterable[Row]) -> float:
    """The share of blocks that were seen before: what an endless cache shared by all could save."""
    seen: set[int] = set()
    hits = total = 0
    for row in rows:
        for hash_id in row.hash_ids or ():
            total += 1
            hits += hash_id in seen
            seen.add(hash_id)
    return hits / total if total else 0.0
