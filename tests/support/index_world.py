"""A naive model of what the index must answer, and a random world of engines to drive both with.

The oracle keeps, per (worker, rank), a bag of resident engine hashes and knows what every hash stands for. A holder
holds a prompt as far as each block from block 0 on is resident. It does not know what keys, masks, orphans or epochs
are.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from indexer import Match, PrefixIndex, decode_batch

MEDIA = ("GPU", "CPU", "STORAGE")
BLOCK_SIZES = (2, 4)


@dataclass(frozen=True)
class Prompt:
    """Block-aligned content: what a block hash stands for is this prompt up to and with that block."""

    adapter: str | None
    salt: str | None
    tokens: tuple[int, ...]
    media: tuple[tuple[int, str], ...] = ()
    """((token position, id), ...)"""

    def blocks(self, size: int) -> list[tuple]:
        """One hashable path per full block: everything that makes the prefix up to its end what it is."""
        out = []
        for end in range(size, len(self.tokens) + 1, size):
            media = tuple((p // size, i) for p, i in self.media if p < end)
            out.append((self.adapter, self.salt, size, self.tokens[:end], media))
        return out

    def extra_keys(self, size: int) -> list[list[str] | None]:
        keys: list[list[str] | None] = [None] * (len(self.tokens) // size)
        for position, media_id in self.media:
            block = position // size
            if block < len(keys) and media_id not in (keys[block] or []):
                keys[block] = [*(keys[block] or []), media_id]
        return keys


@dataclass
class OracleHolder:
    resident: Counter = field(default_factory=Counter)
    roots: dict = field(default_factory=dict)
    batches: int = 0

    def store(
        self, tier: int, group: int, paths: list[tuple], from_root: bool, physical: bool, announced: bool = True
    ) -> None:
        count = physical
        if from_root and tier == 0:
            first = (tier, group, paths[0])
            if not self.resident[first]:
                self.roots[first] = self.batches
            elif announced and (first not in self.roots or self.batches - self.roots[first] > 3):
                count = False
        for path in paths:
            place = (tier, group, path)
            if not self.resident[place] or count:
                self.resident[place] += 1

    def remove(self, tier: int, group: int, path: tuple, physical: bool) -> None:
        place = (tier, group, path)
        if self.resident[place] > 1 and physical:
            self.resident[place] -= 1
        else:
            self.resident.pop(place, None)

    def clear(self, tier: int | None) -> None:
        for place in [p for p in self.resident if tier is None or p[0] == tier]:
            del self.resident[place]
        if tier is None or not any(p[0] != tier for p in self.resident):
            self.roots.clear()

    def match(self, prompt: Prompt) -> Match | None:
        best = [0, 0, 0, 0]
        for size in BLOCK_SIZES:
            paths = prompt.blocks(size)
            held = [{p[2] for p in self.resident if p[0] == tier} for tier in range(3)]
            for column, where in enumerate([*held, held[0] | held[1] | held[2]]):
                depth = 0
                while depth < len(paths) and paths[depth] in where:
                    depth += 1
                best[column] = max(best[column], depth * size)
        return Match(*best) if any(best) else None


class World:
    """Engines that store, evict, duplicate and clear at random; the index and the oracle see the same."""

    def __init__(self, rng: random.Random, *, tail_first: bool = False, logical: bool = False, tiers: int = 3) -> None:
        self.rng = rng
        self.tail_first = tail_first
        self.physical = not logical
        self.tiers = tiers
        self.index = PrefixIndex(removal_mode="logical" if logical else "physical")
        self.oracle: dict[tuple[str, int], OracleHolder] = {}
        self.sizes = {f"w{i}": rng.choice(BLOCK_SIZES) for i in range(rng.randint(1, 4))}
        self.salts = {name: rng.randrange(1 << 30) for name in self.sizes}
        self.models: dict[str, tuple[str, ...] | None] = {}
        for name in self.sizes:
            self.models[name] = models = rng.choice([None, None, ("m1", "m1-alias"), ("m2",)])
            if models is not None:
                self.index.set_worker(name, models=models, loras=["lora-a"])
        self.prompts: list[Prompt] = []
        for _ in range(rng.randint(2, 6)):
            self.prompts.append(self.new_prompt())

    def new_prompt(self) -> Prompt:
        rng = self.rng
        base: tuple[int, ...] = ()
        adapter, salt = rng.choice([(None, None)] * 3 + [("lora-a", None), (None, "tenant"), ("lora-a", "tenant")])
        if self.prompts and rng.random() < 0.7:
            other = rng.choice(self.prompts)
            base = other.tokens[: rng.randint(0, len(other.tokens))]
        tokens = base + tuple(rng.randrange(3) for _ in range(rng.randint(1, 20)))
        media = ((rng.randrange(len(tokens)), rng.choice(["img-1", "img-2"])),) if rng.random() < 0.15 else ()
        return Prompt(adapter, salt, tokens, media)

    def engine_hash(self, worker: str, path: tuple) -> int | bytes:
        digest = random.Random(repr((self.salts[worker], path))).getrandbits(64)
        if self.salts[worker] % 3 == 0:
            return digest.to_bytes(8, "big") if digest % 2 else digest
        return digest - (1 << 64) if self.salts[worker] % 3 == 1 and digest >= 1 << 63 else digest

    def holder(self, worker: str, rank: int) -> OracleHolder:
        return self.oracle.setdefault((worker, rank), OracleHolder())

    def publish(self, worker: str, rank: int, events: list) -> None:
        as_map = self.rng.random() < 0.5
        wire = [
            dict(zip(("type", *FIELDS[e[0]]), e, strict=False)) if as_map and isinstance(e, list) else e for e in events
        ]
        batch = [1.0, wire, rank]
        payload = msgspec.msgpack.encode(
            {"ts": 1.0, "events": wire, "data_parallel_rank": rank} if self.rng.random() < 0.1 else batch
        )
        self.index.apply(worker, 0, decode_batch(payload))

    def step(self) -> None:
        worker = self.rng.choice(list(self.sizes))
        rank = self.rng.choice([0, 0, 1])
        holder = self.holder(worker, rank)
        holder.batches += 1
        events = []
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            action = self.rng.random()
            if action < 0.58:
                events.append(self.store_event(worker, holder))
            elif action < 0.62:
                events.append(self.offload_event(worker, holder))
            elif action < 0.88 and holder.resident:
                events.append(self.remove_event(worker, holder))
            elif action < 0.94 and holder.resident and not self.tail_first:
                events.append(self.counted_remove_event(worker, holder))
            elif action < 0.97:
                tier = self.rng.choice([None, None, self.rng.randrange(self.tiers)])
                holder.clear(tier)
                events.append(["AllBlocksCleared"] if tier is None else ["AllBlocksCleared", MEDIA[tier]])
        self.publish(worker, rank, [e for e in events if e])
        if self.rng.random() < 0.3:
            self.check()

    def store_event(self, worker: str, holder: OracleHolder) -> list | None:
        rng, size = self.rng, self.sizes[worker]
        prompt = rng.choice(self.prompts)
        paths = prompt.blocks(size)
        if not paths:
            return None
        tier, group = rng.randrange(self.tiers), rng.choice([0, 0, 0, 1])
        stop = rng.randint(1, len(paths))
        if self.tail_first:
            start = 0
            while start < stop and holder.resident[tier, group, paths[start]]:
                start += 1
            if start == stop:
                return None
        else:
            start = rng.randrange(stop) if rng.random() < 0.5 else 0
        origin = rng.choice([None] * 6 + ["NEW", "REUSED"])
        remote = rng.random() < 0.05
        if not remote:
            counted = self.physical and origin != "REUSED"
            holder.store(tier, group, paths[start:stop], start == 0, counted, announced=origin is None)
        hashes = [self.engine_hash(worker, p) for p in paths[start:stop]]
        parent = self.engine_hash(worker, paths[start - 1]) if start else None
        extras = prompt.extra_keys(size)
        if prompt.salt:
            extras[0] = [*(extras[0] or []), prompt.salt]
        if prompt.adapter:
            extras = [[prompt.adapter, *(e or [])] for e in extras]
        tokens = list(prompt.tokens[start * size : stop * size])
        lora_id = 1 if prompt.adapter else None
        kind = "full_attention" if group else rng.choice(["full_attention", None])
        head = ["BlockStored", hashes, parent, tokens, size, lora_id, MEDIA[tier], prompt.adapter]
        event = [*head, extras[start:stop], group, kind]
        if origin is None and not remote:
            return event
        locality = {"locality": "REMOTE"} if remote else {}
        return {**dict(zip(("type", *FIELDS["BlockStored"]), event, strict=True)), "origin": origin, **locality}

    def offload_event(self, worker: str, holder: OracleHolder) -> dict | None:
        """Blocks named by hash alone, which another tier holds from the root on."""
        rng, size = self.rng, self.sizes[worker]
        paths = rng.choice(self.prompts).blocks(size)
        known = 0
        while known < len(paths) and holder.resident[0, 0, paths[known]]:
            known += 1
        if not known or self.tiers < 2 or self.tail_first:
            return None
        start = rng.randrange(known)
        for path in paths[start:known]:
            holder.store(1, 0, [path], False, self.physical)
        hashes = [self.engine_hash(worker, path) for path in paths[start:known]]
        return {"type": "BlockStored", "block_hashes": hashes, "token_ids": [], "medium": "CPU", "group_idx": 0}

    def counted_remove_event(self, worker: str, holder: OracleHolder) -> dict:
        """A removal that says how many copies are left."""
        tier, group, path = self.rng.choice(list(holder.resident))
        left = self.rng.choice([0, 0, 1, 3])
        if left:
            holder.resident[tier, group, path] = left
        else:
            holder.resident.pop((tier, group, path), None)
        return {
            "type": "BlockRemoved",
            "block_hashes": [self.engine_hash(worker, path)],
            "medium": MEDIA[tier],
            "group_idx": group,
            "remaining_copy_counts": [left],
        }

    def remove_event(self, worker: str, holder: OracleHolder) -> list:
        places = list(holder.resident)
        if self.tail_first:
            parents = {(t, g, _parent(p)) for t, g, p in places}
            places = [p for p in places if p not in parents]
        tier, group, path = self.rng.choice(places)
        holder.remove(tier, group, path, self.physical)
        return ["BlockRemoved", [self.engine_hash(worker, path)], MEDIA[tier], group]

    def check(self) -> None:
        prompt = self.rng.choice(self.prompts) if self.rng.random() < 0.9 else self.new_prompt()
        model = self.rng.choice([None, None, "m1", "m1-alias", "m2"])
        expected = {}
        for name, holder in self.oracle.items():
            serves = self.models[name[0]]
            found = holder.match(prompt) if model is None or serves is None or model in serves else None
            if found is not None:
                expected[name] = found
        got: dict = {}
        # a query's extra keys are per block of one size, so ask once per block size and keep its workers
        for size in BLOCK_SIZES:
            found = self.index.match(
                list(prompt.tokens),
                model=model,
                lora=prompt.adapter,
                cache_salt=prompt.salt,
                extra_keys=prompt.extra_keys(size),
            )
            got |= {h: m for h, m in found.items() if self.sizes[h[0]] == size}
        assert got == expected, (prompt, got, expected)

    def check_memory(self) -> None:
        """After everything is cleared nothing is left behind."""
        for worker in self.sizes:
            self.index.clear(worker)
        self.index.sweep(1 << 20)
        stats = self.index.stats()
        assert stats["entries"] == stats["orphan_blocks"] == stats["retired_holders"] == 0
        assert not any(stats["keys"].values())
        for plane in self.index._table.planes:
            assert not any(plane.links)
            assert not any(plane.masks)
            assert not plane.open
            assert not plane.unlinked


def _parent(path: tuple) -> tuple:
    adapter, salt, size, tokens, media = path
    end = len(tokens) - size
    return (adapter, salt, size, tokens[:end], tuple(m for m in media if m[0] < end // size))


FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": ("medium",),
}  # fmt: skip


def run_world(rng: random.Random, steps: int, **kwargs: bool | int) -> World:
    world = World(rng, **kwargs)  # type: ignore[arg-type]
    for _ in range(steps):
        world.step()
    world.check()
    return world
