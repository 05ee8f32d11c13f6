"""Inputs made of a target's seeds. The same number makes the same inputs, on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

LONGEST_BYTES = 64 << 10
_NUMBERS = (0, 1, 2, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 192, 254, 255)
_MOST_REPEATED = 20_000


def mutations(seeds: Sequence[bytes], words: Sequence[bytes], number: int) -> Iterator[bytes]:
    """Without end. What is repeated very often shows what takes more than linear time."""
    rng = random.Random(number)
    while True:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            _change(data, seeds, words, rng)
        yield bytes(data[:LONGEST_BYTES])


def _change(data: bytearray, seeds: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    length = min(rng.choice((1, 1, 2, 4, 8, 32, 200)), len(data) - at)
    match rng.randrange(9):
        case 0 if length:
            data[at] ^= 1 << rng.randrange(8)
        case 1 if length:
            data[at] = rng.choice(_NUMBERS)
        case 2:
            del data[at : at + length]
        case 3:
            data[at:at] = rng.randbytes(length or 1)
        case 4 if words:
            data[at : at + rng.choice((0, 0, length))] = rng.choice(words)
        case 5:
            data[at:at] = data[at : at + length]
        case 6:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            data[at:] = other[start:]
        case 7 if rng.random() < 0.3:
            piece = rng.choice(words) if words and rng.random() < 0.5 else bytes(data[at : at + length])
            times = rng.choice((10, 300, _MOST_REPEATED))
            before = rng.choice(words) if words and rng.random() < 0.5 else b""
            data[at:at] = before + piece * min(times, LONGEST_BYTES // max(1, len(piece)))
        case _:
            del data[at:]
