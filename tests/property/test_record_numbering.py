"""What a recording tells of prompts: which beginnings they share, beside a naive oracle, and nothing else."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.record.numbering import Numbering
from gateway.record.reader import BLOCK_TOKENS, Reader
from gateway.record.recorder import Recorder
from scorer.types import RequestFacts

Ids = list[int]


@st.composite
def prompts(draw: st.DrawFn) -> list[tuple[str, Ids]]:
    """(model, token ids): some go on where others end, or share a beginning."""
    out: list[tuple[str, Ids]] = []
    for _ in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from([ids for _, ids in out])) if out and draw(st.booleans()) else []
        kept = base[: draw(st.integers(0, len(base)))]
        more = draw(st.integers(0 if kept else 1, 3 * BLOCK_TOKENS))
        own = [draw(st.integers(0, 3))] * more
        out.append((draw(st.sampled_from(["m", "n"])), kept + own))
    return out


def recorded(asked: list[tuple[str, Ids]], salt: str | None = None) -> list[dict[str, Any]]:
    async def run() -> bytes:
        recorder, reader = Recorder(), Reader(0.0)
        recorder._readers.append(reader)
        for i, (model, ids) in enumerate(asked):
            facts = RequestFacts(
                request_id=f"{i}",
                model=model,
                prompt_tokens=len(ids),
                tokens=array("I", ids).tobytes(),
                cache_salt=salt,
            )
            recorder.note(facts, i / 1000, len(ids), 5)
        return await reader.take()

    lines = [json.loads(line) for line in asyncio.run(run()).splitlines()]
    return [line for line in lines if "timestamp" in line]


def common(a: Ids, b: Ids) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(prompts())
def test_rows_share_numbers_just_where_prompts_share_blocks(asked: list[tuple[str, Ids]]) -> None:
    rows = recorded(asked)
    for (_, ids), row in zip(asked, rows, strict=True):
        assert row["input_length"] == len(ids)
        assert len(row["hash_ids"]) == -(-len(ids) // BLOCK_TOKENS)
    for i, (model, ids) in enumerate(asked):
        for j in range(i):
            other, others = asked[j]
            shared = common(ids, others) // BLOCK_TOKENS if model == other else 0
            assert common(rows[i]["hash_ids"], rows[j]["hash_ids"]) == shared
            assert len(set(rows[i]["hash_ids"]) & set(rows[j]["hash_ids"])) == shared


@given(prompts(), st.permutations(range(4)), st.integers(0, 2**31))
def test_what_is_written_does_not_depend_on_the_tokens(
    asked: list[tuple[str, Ids]], renamed: list[int], offset: int
) -> None:
    """The same traffic in other words, for other models, under another salt: the same file."""
    other = [(f"other {model}", [renamed[token] + offset for token in ids]) for model, ids in asked]
    assert recorded(asked) == recorded(other) == recorded(asked, salt="s")


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40), st.integers(1, 8))
def test_bounded_numbers_never_say_equal_of_what_is_not(paths: list[Ids], capacity: int) -> None:
    numbering = Numbering(capacity)
    named: dict[int, tuple[int, ...]] = {}
    told: list[Ids] = []
    for path in paths:
        keys = [tuple(path[: i + 1]) for i in range(len(path))]
        numbers = numbering.path(keys, n_more=1)
        for number, key in zip(numbers, keys, strict=False):
            assert named.setdefault(number, key) == key
        assert numbers[-1] not in named
        named[numbers[-1]] = ()
        # equal at one step: equal at all before it
        assert all(common(numbers, other) == len(set(numbers) & set(other)) for other in told)
        told.append(numbers)
        assert len(numbering._known) <= capacity
    distinct = {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
    assert numbering.forgotten >= len(distinct) - capacity


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(2, 8))
def test_what_was_asked_for_lately_keeps_its_number(keys: Ids, capacity: int) -> None:
    """Beside a list of the keys in the order of their last use."""
    numbering = Numbering(capacity)
    lately: dict[int, int] = {}
    for key in keys:
        number = numbering.path([key])[0]
        assert lately.pop(key, number) == number
        lately[key] = number
        if len(lately) > capacity:
            del lately[next(iter(lately))]
    assert set(lately.values()) == set(numbering._known.values())
