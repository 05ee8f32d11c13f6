"""Which tokenizers let a prompt be tokenised in pieces, cut at one control token of the chat template.

A chat's next turn then costs its new text: what stood before is known piece by piece. Pieces are known by their own
text, so a template that rewrites history costs what it rewrote, and no more.

Joined ids equal the ids of the whole exactly if (1) the text is always cut at every occurrence of the separator: it is
an added token, matched before normalisation, takes no space beside it, needs no word boundary, and no other added token
can swallow it; (2) a piece is treated alike wherever it stands: nothing is put in front of the first one, words do not
reach over the cut; (3) nothing is random or cut off, and what is put around the whole (with `add_special_tokens`; chat
templates write themselves what belongs in front) is always the same. `cut_at` allows what is known to keep to this, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.tokens.types import pack_ids

MOST_PIECES = 4096
"""A text with more is tokenised as a whole: each piece has a cost of its own, and a place in the cache."""

_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Replace"})
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"})


class NotInPieces(Exception):
    """Why a tokenizer's prompts are tokenised as a whole, for the status page."""


@dataclass(frozen=True, slots=True)
class Around:
    """Ids (uint32 little-endian) that the tokenizer puts before and after a text."""

    before: bytes = b""
    after: bytes = b""


NOTHING_AROUND = Around()


@dataclass(frozen=True, slots=True)
class Separator:
    """An added token, as text (UTF-8) and as ids (uint32 little-endian). `around`: what `add_special_tokens` adds to a
    text; None: that is not known, and such texts must be tokenised as a whole.
    """

    text: bytes
    ids: bytes
    around: Around | None = None


class _Model(msgspec.Struct):
    type: str = "?"
    dropout: float | None = None


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @property
    def cuts(self) -> bool:
        return self.special and not (self.normalized or self.lstrip or self.rstrip or self.single_word)


class TokenizerFile(msgspec.Struct):
    """What decides, of a tokenizer.json."""

    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    added_tokens: list[_Added] = []


def cut_at(file: bytes, added: Iterable[Any], samples: Sequence[str]) -> Separator:
    """The separator for the tokenizer in `file`, a tokenizer.json, with `added` tokens (`tokenizers.AddedToken`).

    Of those that qualify it is the one most frequent in `samples`, which are rendered chats. Raises NotInPieces.
    """
    try:
        parsed = msgspec.json.decode(file, type=TokenizerFile)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise NotInPieces("its file is unlike any known") from exc
    if parsed.model.type != "BPE":
        raise NotInPieces(f"its model is {parsed.model.type}, not BPE")
    if parsed.model.dropout:
        raise NotInPieces("it drops merges at random")
    for part in _parts(parsed.normalizer, "normalizers"):
        if part.get("type") not in _NORMALIZERS:
            raise NotInPieces(f"its normalizer {part.get('type')} may depend on where a text stands")
    for part in _parts(parsed.pre_tokenizer, "pretokenizers"):
        if part.get("type") not in _PRE_TOKENIZERS or part.get("add_prefix_space", False):
            raise NotInPieces(f"its pre-tokenizer {part.get('type')} may depend on where a text stands")
    tokens = parsed.added_tokens + [
        _Added(-1, t.content, t.special, t.normalized, t.lstrip, t.rstrip, t.single_word) for t in added
    ]
    if any(token.single_word for token in tokens):
        raise NotInPieces("an added token of it needs a word boundary")
    text = "\n".join(samples)
    found = [(text.count(token.content), token) for token in tokens if token.cuts and token.id >= 0 and token.content]
    found = [(n, token) for n, token in found if n > 0 and not any(_swallows(other, token) for other in tokens)]
    if not found:
        raise NotInPieces("its chat template writes no control token to cut at")
    best = max(found, key=lambda pair: pair[0])[1]
    return Separator(best.content.encode(), pack_ids([best.id]), _around(parsed.post_processor))


def _around(post_processor: dict[str, Any] | None) -> Around | None:
    """What the post-processor adds to a single text, if it is of a kind that adds the same to each."""
    found = NOTHING_AROUND
    for part in _parts(post_processor, "processors"):
        kind = part.get("type")
        if kind == "ByteLevel":  # It changes offsets alone.
            continue
        if kind != "TemplateProcessing" or found is not NOTHING_AROUND:
            return None
        try:
            found = _of_template(part["single"], part["special_tokens"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None
    return found


def _of_template(single: list[dict[str, Any]], special: dict[str, Any]) -> Around:
    """Raises all kinds of errors for what is not as `tokenizers` writes it."""
    (at,) = (i for i, piece in enumerate(single) if "Sequence" in piece)
    if single[at]["Sequence"]["id"] != "A":
        raise ValueError("another text's place")
    before, after = (
        b"".join(pack_ids(special[piece["SpecialToken"]["id"]]["ids"]) for piece in pieces)
        for pieces in (single[:at], single[at + 1 :])
    )
    return Around(before, after)


def _parts(value: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if value.get("type") != "Sequence":
        return [value]
    return [part for item in value.get(inner) or () for part in _parts(item, inner)]


def _swallows(other: _Added, separator: _Added) -> bool:
    """Whether some text holds `separator`, and yet not as a token, because `other` was found in its place."""
    mine, theirs = separator.content, other.content
    if theirs == mine:
        # two texts that overlap themselves: which of them is found depends on where one begins to look
        return any(mine.endswith(mine[:n]) for n in range(1, len(mine)))
    if not theirs:
        return False
    if mine in theirs:
        return True
    return any(theirs.endswith(mine[:n]) for n in range(1, min(len(mine), len(theirs) + 1)))
