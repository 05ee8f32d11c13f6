"""The two libraries that turn text into ids, behind one face, and the check that decides between them.

`fastokens` is 10 to 40 times as fast on unseen text; `tokenizers` is what engines use. So the fast one serves a
tokenizer only after it made the same ids as the other for every probe (`probes.py`), and is given up for good when it
errs later (`local.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from gateway.tokens.probes import probes
from gateway.tokens.types import CannotTokenize, Reason, pack_ids

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

EncoderName = Literal["fastokens", "tokenizers"]


class EncoderFault(Exception):
    """An encoder broke on a text, which is not in the message. `fatal`: it may be broken for other texts, too."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(type(cause).__name__)
        # A panic of a Rust library is no Exception, and would end the task that waits for it.
        self.fatal = not isinstance(cause, Exception)


class NotUsable(Exception):
    """Why `fastokens` cannot serve a tokenizer, for the status page."""


class Encoder(Protocol):
    """Thread-safe; holds no lock of the interpreter while it works."""

    name: EncoderName
    at_once_bytes: int
    """So much text, whatever it is, is done within some 0.3 ms."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Ids of each text, uint32 little-endian. Raises CannotTokenize for what is no Unicode text, EncoderFault."""


class PlainEncoder:
    """`tokenizers`. Its `encode` holds the GIL for the whole call (0.18 s for 300 KB); its batch calls do not."""

    name: EncoderName = "tokenizers"
    at_once_bytes = 512

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as exc:  # Half a surrogate pair: valid JSON, but no text.
            raise CannotTokenize(Reason.MALFORMED) from exc
        except BaseException as exc:
            raise EncoderFault(exc) from exc
        return [pack_ids(encoding.ids) for encoding in encodings]


class FastEncoder:
    """`fastokens`, which returns the ids as one buffer. Raises NotUsable when it cannot read the tokenizer."""

    name: EncoderName = "fastokens"
    at_once_bytes = 2048

    def __init__(self, file: Path, added: Sequence[AddedToken]) -> None:
        # One text is encoded in one thread of ours; the library would start as many as the host has cores.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        try:
            from fastokens import Tokenizer  # type: ignore[import-untyped]
        except ImportError as exc:
            raise NotUsable("the package 'fastokens' is not installed") from exc
        try:
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            if added:
                tokenizer.add_tokens(list(added))
        except BaseException as exc:
            raise NotUsable(f"it cannot read this tokenizer ({type(exc).__name__})") from exc
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        try:
            # One after the other: the library hands a batch to a thread pool of its own.
            return [self._tokenizer.encode_batch_flat([text], add_special_tokens)[0] for text in texts]
        except UnicodeEncodeError as exc:
            raise CannotTokenize(Reason.MALFORMED) from exc
        except BaseException as exc:
            raise EncoderFault(exc) from exc


def fast_encoder(file: Path, added: Sequence[AddedToken], tokenizer: Tokenizer, plain: Encoder) -> FastEncoder:
    """`fastokens` for the tokenizer in `file` with the tokens `added` to it, warm and checked against `plain`.

    Takes seconds for a large vocabulary. Raises NotUsable.
    """
    fast = FastEncoder(file, added)
    for name, texts in probes(tokenizer).items():
        for add_special_tokens in (False, True):
            try:
                theirs = fast.encode(texts, add_special_tokens=add_special_tokens)
            except (EncoderFault, CannotTokenize) as exc:
                raise NotUsable(f"it fails the self-check on {name} ({exc})") from exc
            if theirs != plain.encode(texts, add_special_tokens=add_special_tokens):
                raise NotUsable(f"self-check: it makes other ids than 'tokenizers' on {name}")
    return fast
