"""A toy tokenizer without files: stateless, reversible, about three characters a token.

Ids 0..15 are special, 16..271 are the bytes, and after them come all runs of one to three lower-case letters, then the
same runs behind a space. Text is cut greedily from the left: equal beginnings give equal ids, in every process.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Final

PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END, TOOL = range(8)
SPECIAL_NAMES: Final = ("<pad>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>", "<end>", "<tool>")
_FIRST_BYTE: Final = 16
_FIRST_RUN: Final = _FIRST_BYTE + 256
_PIECE: Final = re.compile(rb" ?[a-z]{1,3}|.", re.DOTALL)
_LETTERS: Final = b"abcdefghijklmnopqrstuvwxyz"


@functools.cache
def _pieces() -> tuple[list[bytes], dict[bytes, int]]:
    runs = [bytes(run) for size in (1, 2, 3) for run in itertools.product(_LETTERS, repeat=size)]
    pieces = [name.encode() for name in SPECIAL_NAMES] + [b""] * (_FIRST_BYTE - len(SPECIAL_NAMES))
    pieces += [bytes([byte]) for byte in range(256)]
    ids = {piece: number + _FIRST_BYTE for number, piece in enumerate(pieces[_FIRST_BYTE:])}
    # A lone letter is the run, not the byte: encode and decode agree on one id per piece.
    ids.update((run, number) for number, run in enumerate([*runs, *(b" " + run for run in runs)], _FIRST_RUN))
    return pieces + runs + [b" " + run for run in runs], ids


VOCAB_SIZE: Final = _FIRST_RUN + 2 * (26 + 26**2 + 26**3)
# Three-letter runs behind a space: generated text looks like words.
GENERATED_IDS: Final = (VOCAB_SIZE - 26**3, VOCAB_SIZE)


def encode(text: str) -> list[int]:
    """Token ids of `text`; lone surrogates become U+FFFD."""
    return list(_encoded(text))


@functools.lru_cache(maxsize=1024)
def _encoded(text: str) -> tuple[int, ...]:
    # chats send the same messages again and again
    ids = _pieces()[1]
    return tuple([ids[piece] for piece in _PIECE.findall(text.encode("utf-8", "replace"))])


def decode(token_ids: Iterable[int]) -> str:
    """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD. IndexError on an id outside of the vocabulary."""
    pieces = _pieces()[0]
    return b"".join([pieces[token_id] for token_id in token_ids]).decode("utf-8", "replace")


def token_strings(token_ids: Sequence[int]) -> list[str]:
    pieces = _pieces()[0]
    return [pieces[token_id].decode("utf-8", "replace") for token_id in token_ids]
