"""One storage tier's table: which workers hold which block key.

A key names its whole path from block 0, so this flat table is the radix tree without node objects: `masks[key]` is the
set of holders as a bit mask, and a prefix is held by whoever is in the mask of every key of its chain. The table is
split in 256 dicts because one large dict stalls everybody while it grows (0.3 s at 10M entries).

Most engines evict children before parents. While a holder's blocks are *closed* in that way (no block without its
parent), its mask at one key speaks for all keys above it, and a lookup may bisect. To know exactly when that holds,
`links` names the children of a key and each holder's `loose` its blocks whose parent it lacks; holders with loose
blocks are in `open` and are walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, islice
from operator import is_not

from indexer.keys import Extra, chain_again

N_SHARDS = 256
_LOW = N_SHARDS - 1
FIRST_STEP_BLOCKS = 64
LONGEST_STEP_BLOCKS = 512
NO_PARENT, ROOT_PARENT = -1, -2
"""Stand for the parent of a block that was announced by hash alone, and of a prompt's first block."""


class Chain:
    """The keys of one prompt at one block size, hashed only as far as somebody asks."""

    __slots__ = ("block_size", "extras", "keys", "n_blocks", "root", "tokens")

    def __init__(self, root: int, tokens: bytes, block_size: int, extras: dict[int, Extra]) -> None:
        self.root = root
        self.tokens = tokens
        self.block_size = block_size
        self.extras = extras
        self.n_blocks = len(tokens) // (4 * block_size)
        self.keys: list[int] = []

    def upto(self, stop: int) -> list[int]:
        keys = self.keys
        if len(keys) < stop:
            parent = keys[-1] if keys else self.root
            keys += chain_again(parent, self.tokens, self.block_size, len(keys), stop, self.extras)
        return keys


Depths = list[tuple[int, int]]
"""[(number of blocks from block 0, mask of the holders that reach exactly there)], shallow first."""


class Plane:
    """Holder masks by block key for one tier. With `linked` off, closedness is not tracked and every lookup walks."""

    __slots__ = ("linked", "links", "masks", "open", "size", "unlinked")

    def __init__(self, linked: bool) -> None:
        self.linked = linked
        self.masks: list[dict[int, int]] = [{} for _ in range(N_SHARDS)]
        self.links: list[dict[int, int | set[int]]] = [{} for _ in range(N_SHARDS)]
        self.unlinked: set[int] = set()
        self.open = 0
        self.size = 0

    def holders(self, key: int) -> int:
        return self.masks[key & _LOW].get(key, 0)

    def add(self, key: int, parent: int, parent_held: bool, bit: int, loose: dict[int, int]) -> bool:
        """`bit` now holds `key`. False if it did already (nothing changed)."""
        shard = self.masks[key & _LOW]
        mask = shard.get(key)
        if mask is None:
            shard[key] = bit
            self.size += 1
            if self.linked:
                self._link(parent, key)
        elif mask & bit:
            return False
        else:
            shard[key] = mask | bit
            if key in self.unlinked and parent != NO_PARENT:
                self.unlinked.discard(key)
                self._link(parent, key)
        if self.linked:
            if not parent_held:
                loose[key] = parent
                self.open |= bit
            if loose:
                self._join_children(key, bit, loose)
        return True

    def add_chain(
        self, keys: Sequence[int], parent: int, parent_held: bool, bit: int, loose: dict[int, int]
    ) -> list[int]:
        """`bit` now holds all of `keys`, each the parent of the next. Returns those it held already.

        The same as `add` for one after the other, with its common case, a block nobody has yet, spelled out.
        """
        if loose or self.unlinked or not parent_held or not self.linked:
            held = []
            for key in keys:
                if not self.add(key, parent, parent_held, bit, loose):
                    held.append(key)
                parent, parent_held = key, True
            return held
        masks, links = self.masks, self.links
        held = []
        born = 0
        before = after = -1  # the last mask that was widened, and what it became: equal neighbours share one object
        for key in keys:
            shard = masks[key & _LOW]
            mask = shard.get(key)
            if mask is None:
                shard[key] = bit
                born += 1
                children = links[parent & _LOW]
                if parent >= 0 and children.setdefault(parent, key) != key:
                    self._link(parent, key)
            elif mask is before:
                shard[key] = after
            elif mask & bit:
                held.append(key)
            else:
                before = mask
                shard[key] = after = mask | bit
            parent = key
        self.size += born
        return held

    def remove(self, key: int, bit: int, loose: dict[int, int]) -> None:
        """`bit` no longer holds `key`, which it did."""
        shard = self.masks[key & _LOW]
        mask = shard[key] & ~bit
        if mask:
            shard[key] = mask
        else:
            del shard[key]
            self.size -= 1
            if self.unlinked:
                self.unlinked.discard(key)
        if not self.linked:
            return
        parent = loose.pop(key, None) if loose else None
        if parent is not None and not mask:
            self._unlink(parent, key)
        children = self.links[key & _LOW].get(key)
        if children is not None:
            masks = self.masks
            alive = False
            for child in (children,) if isinstance(children, int) else children:
                held = masks[child & _LOW].get(child, 0)
                if held:
                    alive = True
                    if held & bit:
                        loose[child] = key
                        self.open |= bit
            if not mask and not alive:
                del self.links[key & _LOW][key]
        if parent is not None and not loose:
            self.open &= ~bit

    def _link(self, parent: int, key: int) -> None:
        if parent < 0:
            if parent == NO_PARENT:
                self.unlinked.add(key)
            return
        links = self.links[parent & _LOW]
        children = links.get(parent)
        if children is None:
            links[parent] = key
        elif isinstance(children, set):
            children.add(key)
            n = len(children)
            if n >= 4 and n & (n - 1) == 0:
                # a hot system prompt outlives its children: forget the dead ones at every doubling
                links[parent] = {child for child in children if self.holders(child)}
        elif children != key:
            links[parent] = {children, key} if self.holders(children) else key

    def _unlink(self, parent: int, key: int) -> None:
        if self.holders(parent):
            return
        links = self.links[parent & _LOW]
        children = links.get(parent)
        if isinstance(children, set):
            children.discard(key)
            if not any(self.holders(child) for child in children):
                del links[parent]
        elif children == key:
            del links[parent]

    def _join_children(self, key: int, bit: int, loose: dict[int, int]) -> None:
        children = self.links[key & _LOW].get(key)
        if children is None:
            return
        if isinstance(children, int):
            loose.pop(children, None)
        elif len(children) < len(loose):
            for child in children:
                loose.pop(child, None)
        else:
            for child in [c for c, parent in loose.items() if parent == key]:
                del loose[child]
        if not loose:
            self.open &= ~bit

    def depths(self, prompt: Chain, candidates: int) -> Depths:
        """How far each of `candidates` (a mask) holds `prompt` in this tier."""
        masks = self.masks
        out: Depths = []
        current = candidates
        n = prompt.n_blocks
        i, step = 0, FIRST_STEP_BLOCKS
        while i < n and current:
            keys = prompt.upto(min(i + step, n))
            stop = len(keys)
            step = min(2 * step, LONGEST_STEP_BLOCKS)
            if self.linked and not current & self.open:
                last = keys[stop - 1]
                held = masks[last & _LOW].get(last, 0) & current
                if held != current:
                    self._bisect(out, keys, i - 1, stop - 1, current, held)
                    current = held
            elif i or self.holders(keys[0]) & current:
                current = _narrow(out, i, current, [masks[k & _LOW].get(k, 0) for k in keys[i:stop]])
            else:
                current = 0
            i = stop
        if current and i:
            out.append((i, current))
        return out

    def _bisect(self, out: Depths, keys: list[int], low: int, high: int, at_low: int, at_high: int) -> None:
        """Appends to `out` who drops out between the blocks `low` (-1: before the first) and `high`, held by `at_low`
        and, of those, fewer: `at_high`. Their blocks are closed, so that between two blocks with the same holders there
        is nothing to look for: a block far from where somebody ends is not looked up, and each lookup is a cache miss.
        """
        if high - low == 1:
            if high:
                out.append((high, at_low ^ at_high))
            return
        middle = (low + high) // 2
        key = keys[middle]
        at_middle = self.masks[key & _LOW].get(key, 0) & at_low
        if at_middle != at_low:
            self._bisect(out, keys, low, middle, at_low, at_middle)
        if at_middle != at_high:
            self._bisect(out, keys, middle, high, at_middle, at_high)


def joint_depths(planes: list[Plane], prompt: Chain, candidates: int) -> Depths:
    """How far each of `candidates` holds `prompt` when every block may lie in any of `planes`."""
    tables = [plane.masks for plane in planes]
    out: Depths = []
    current = candidates
    n = prompt.n_blocks
    i, step = 0, FIRST_STEP_BLOCKS
    while i < n and current:
        j = min(i + step, n)
        step = min(2 * step, LONGEST_STEP_BLOCKS)
        found = []
        for key in prompt.upto(j)[i:j]:
            mask = 0
            for table in tables:
                mask |= table[key & _LOW].get(key, 0)
            found.append(mask)
        current = _narrow(out, i, current, found)
        i = j
    if current and i:
        out.append((i, current))
    return out


def _narrow(out: Depths, start: int, current: int, found: list[int]) -> int:
    """Carry `current` through the masks `found` of the blocks from `start` on.

    Appends to `out` whoever drops out and returns who is left. Blocks that were stored together share one mask object,
    so only where the object changes can the holders change.
    """
    held = current & found[0]
    if held != current:
        if start:
            out.append((start, current ^ held))
        current = held
    for i in compress(range(1, len(found)), map(is_not, found, islice(found, 1, None))):
        if not current:
            break
        held = current & found[i]
        if held != current:
            out.append((start + i, current ^ held))
            current = held
    return current
