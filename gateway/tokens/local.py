"""A tokenizer on local disk: tokenizer.json, special tokens and chat templates of one model directory. No downloads.

Ids are made by the fastest way that was found to be exact for this very tokenizer: `fastokens` where it passed its
check (`encoder.py`), and of a chat only what is new where it may be cut (`segments.py`). What turns out to be wrong
later is given up for good: prompts are then tokenised as a whole by `tokenizers`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.tokens.cache import IdCache, new_seed
from gateway.tokens.encoder import Encoder, EncoderFault, NotUsable, PlainEncoder, fast_encoder
from gateway.tokens.given import ChatPrompt, TextPrompt
from gateway.tokens.render import Rendered, render_chat, tools_of
from gateway.tokens.segments import MOST_PIECES, NOTHING_AROUND, Around, NotInPieces, Separator, cut_at
from gateway.tokens.settings import TokenSettings
from gateway.tokens.template import ChatTemplate
from gateway.tokens.types import CannotTokenize, Json, Reason

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_log = logging.getLogger(__name__)

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_REQUEST_TEMPLATES = 16
# Shows which control token a template writes most.
_SAMPLE = ChatPrompt({"messages": [{"role": ("user", "assistant")[i % 2], "content": "hello"} for i in range(5)]})


class LoadError(Exception):
    """There is no usable tokenizer at a path; the text says why and is fit for the status page."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How ids are made. Replaced as a whole, so that a worker thread never sees half of a change."""

    encoder: Encoder
    why_not_fast: str | None
    separator: Separator | None
    why_whole: str | None
    seed: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """A text in pieces, with the ids of those that are known."""

    tokenizer: LocalTokenizer
    way: _Way
    glue: bytes
    keys: list[int]
    found: list[bytes | None]
    new: dict[int, bytes]
    """Texts of the others, by key."""
    add_special_tokens: bool
    """To each piece."""
    around: Around

    @property
    def is_short(self) -> bool:
        """Whether the rest of the work is no longer than handing it to another thread."""
        return not self.new or sum(map(len, self.new.values())) <= self.way.encoder.at_once_bytes

    def ids(self) -> bytes:
        """Raises CannotTokenize."""
        return self.tokenizer._finished(self)


class LocalTokenizer:
    """Text and chats to token ids. Thread-safe; every method may take milliseconds: call from a worker thread.

    `plain` serves until `speed_up` has found a faster encoder; `find_fast` makes that and raises NotUsable.
    `separator`: where chats are cut into pieces that `cache` keeps; None, and `why_whole`: they are not.
    """

    def __init__(
        self,
        plain: PlainEncoder,
        templates: dict[str, ChatTemplate],
        special_tokens: Json,
        settings: TokenSettings,
        cache: IdCache,
        *,
        name: str = "",
        find_fast: Callable[[], Encoder] | None = None,
        separator: Separator | None = None,
        why_whole: str | None = None,
        truncation_side: str = "right",
        harmony: bool = False,
    ) -> None:
        self._name = name
        self._plain = plain
        self._templates = templates
        self._special_tokens = special_tokens
        self._settings = settings
        self._cache = cache
        self._find_fast = find_fast
        self._way = _Way(plain, None, separator, why_whole, new_seed())
        self._compiled = lru_cache(_MAX_REQUEST_TEMPLATES)(ChatTemplate)
        self.truncation_side = truncation_side
        self.harmony = harmony
        self.faults = 0
        """Texts that the fast encoder broke on; the plain one had to make their ids."""

    def speed_up(self) -> None:
        """Takes the faster encoder if there is one for this tokenizer. Seconds of work, once."""
        find, self._find_fast = self._find_fast, None
        if find is None:
            return
        way = self._way
        try:
            faster = replace(way, encoder=find())
        except NotUsable as exc:
            faster = replace(way, why_not_fast=str(exc))
            _log.info("%s: 'fastokens' is not used: %s", self._name, exc)
        if self._way is way:  # Else something was found to be wrong meanwhile.
            self._way = faster

    def text_of(self, prompt: TextPrompt | ChatPrompt) -> Rendered:
        """The text that is tokenised for `prompt`. Raises CannotTokenize."""
        if isinstance(prompt, TextPrompt):
            return Rendered(prompt.text, prefix_only=False)
        if self.harmony:
            raise CannotTokenize(Reason.HARMONY)
        return render_chat(prompt, self._template_for(prompt), self._settings, self._special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool, part: int = 0) -> bytes:
        """Token ids of `text`, uint32 little-endian. Raises CannotTokenize for what is not Unicode text."""
        return self.look_up(text, add_special_tokens=add_special_tokens, part=part).ids()

    def look_up(self, text: str, *, add_special_tokens: bool, part: int = 0) -> Lookup:
        """What is known of `text` in that part of the cache: microseconds of work. Raises as `encode` does."""
        try:
            data = text.encode()
        except UnicodeEncodeError as exc:
            raise CannotTokenize(Reason.MALFORMED) from exc
        way, pieces, glue, around = self._way, [data], b"", NOTHING_AROUND
        added = None if way.separator is None else way.separator.around if add_special_tokens else NOTHING_AROUND
        if way.separator is not None and added is not None:
            cut = data.split(way.separator.text, MOST_PIECES)
            if len(cut) <= MOST_PIECES:
                pieces, glue, around, add_special_tokens = cut, way.separator.ids, added, False
        seed = (2 * way.seed + add_special_tokens) ^ part
        keys = [IdCache.key(piece, seed) for piece in pieces]
        found = self._cache.get_all(keys, map(len, pieces))
        new = {key: piece for key, piece, ids in zip(keys, pieces, found, strict=True) if ids is None}
        return Lookup(self, way, glue, keys, found, new, add_special_tokens, around)

    def _finished(self, lookup: Lookup) -> bytes:
        found = lookup.found
        if lookup.new:
            texts = [str(piece, "utf-8") for piece in lookup.new.values()]
            made = self._made(lookup.way, texts, add_special_tokens=lookup.add_special_tokens)
            by_key = dict(zip(lookup.new, made, strict=True))
            self._cache.put_all(by_key.items())
            found = [by_key[key] if ids is None else ids for key, ids in zip(lookup.keys, found, strict=True)]
        ids = lookup.glue.join(found)  # type: ignore[arg-type]  # none is None here
        around = lookup.around
        return ids if around is NOTHING_AROUND else around.before + ids + around.after

    def _made(self, way: _Way, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        try:
            return way.encoder.encode(texts, add_special_tokens=add_special_tokens)
        except EncoderFault as fault:
            if way.encoder is self._plain:
                raise
            self.faults += 1
            if fault.fatal:
                self._give_up(f"it broke on a prompt ({fault})")
            return self._plain.encode(texts, add_special_tokens=add_special_tokens)

    @property
    def shortcuts(self) -> bool:
        """Whether ids are made in another way than by `tokenizers` from the whole text."""
        return self._way.encoder is not self._plain or self._way.separator is not None

    def verified(self, prompt: TextPrompt | ChatPrompt) -> bytes:
        """The ids of `prompt` by `tokenizers`, from its whole text. If they are not those that are served, the
        shortcuts are given up. As slow as can be: for samples. Raises CannotTokenize.
        """
        text = self.text_of(prompt).text
        way, add_special_tokens = self._way, prompt.add_special_tokens
        (ids,) = self._plain.encode([text], add_special_tokens=add_special_tokens)
        if self.shortcuts and self.encode(text, add_special_tokens=add_special_tokens, part=prompt.part) != ids:
            whole = self._made(way, [text], add_special_tokens=add_special_tokens)
            culprit = "it" if whole != [ids] else "cutting it into pieces"
            self._give_up(f"{culprit} made other ids of a prompt than 'tokenizers'")
        return ids

    def _give_up(self, why: str) -> None:
        # Another seed: what was remembered may be wrong, too.
        self._way = _Way(self._plain, why, None, why, new_seed())
        _log.warning("%s: %s; prompts are tokenised as a whole by 'tokenizers' from now on", self._name, why)

    def status(self) -> Json:
        """Who makes the ids, and why not faster."""
        way = self._way
        return {
            "encoder": way.encoder.name,
            "why_not_fastokens": way.why_not_fast,
            "pieces": way.separator is not None,
            "why_whole": way.why_whole,
            "faults": self.faults,
        }

    def _template_for(self, chat: ChatPrompt) -> ChatTemplate:
        tools = tools_of(chat.body, self._settings)
        asked = chat.body.get("chat_template")
        if asked is not None:
            if not self._settings.trust_request_chat_template:
                raise CannotTokenize(Reason.UNTRUSTED_TEMPLATE)
            named = self._templates.get(asked)
            try:
                return named or self._compiled(asked)
            except ValueError as exc:
                raise CannotTokenize(Reason.TEMPLATE_REJECTED) from exc
        # vLLM: the processor's template first, but never with tools; then the tokenizer's.
        names = ("tool_use", "default") if tools is not None else ("processor", "default")
        for name in names:
            if (template := self._templates.get(name)) is not None:
                return template
        raise CannotTokenize(Reason.NO_TEMPLATE)


def load(path: str, settings: TokenSettings, cache: IdCache | None = None) -> LocalTokenizer:
    """The tokenizer at `path`, a tokenizer.json or a directory that has one. Raises LoadError.

    `cache` keeps its ids beside those of others.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as exc:
        raise LoadError("the package 'tokenizers' is not installed") from exc
    # One text at a time is encoded in our own bounded threads; the library's pool would take every core of the host.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    file = Path(path)
    folder = file if file.is_dir() else file.parent
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise LoadError(f"no such file: {file}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as exc:  # The library raises bare Exception for a file it cannot read.
        raise LoadError(f"{file}: not a tokenizer this version of 'tokenizers' can read") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    added = _add_missing_tokens(tokenizer, config, file)
    templates = _templates(folder, config, settings)
    special_tokens = _special_tokens(folder, config)
    model_type = _read_json(folder / "config.json").get("model_type")
    plain = PlainEncoder(tokenizer)
    plain.encode(["warm up"], add_special_tokens=True)  # The first call builds caches.
    separator, why_whole = _separator(file, added, templates, special_tokens, settings)
    return LocalTokenizer(
        plain,
        templates,
        special_tokens,
        settings,
        IdCache(settings.cache_bytes) if cache is None else cache,
        name=path,
        find_fast=partial(fast_encoder, file, added, tokenizer, plain),
        separator=separator,
        why_whole=why_whole,
        truncation_side=str(config.get("truncation_side", "right")),
        harmony=model_type == "gpt_oss",
    )


def _separator(
    file: Path,
    added: Sequence[AddedToken],
    templates: Mapping[str, ChatTemplate],
    special_tokens: Json,
    settings: TokenSettings,
) -> tuple[Separator | None, str | None]:
    samples = []
    for template in templates.values():
        with suppress(CannotTokenize):
            samples.append(render_chat(_SAMPLE, template, settings, special_tokens).text)
    try:
        return cut_at(file.read_bytes(), added, samples), None
    except NotInPieces as exc:
        return None, str(exc)


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise LoadError(f"{path}: cannot be read as JSON") from exc
    if not isinstance(value, dict):
        raise LoadError(f"{path}: expected a JSON object")
    return value


def _add_missing_tokens(tokenizer: Tokenizer, config: Json, file: Path) -> list[AddedToken]:
    """Adds the tokens that only tokenizer_config.json declares, as transformers does, and returns them."""
    from tokenizers import AddedToken

    declared = config.get("added_tokens_decoder") or {}
    known = tokenizer.get_added_tokens_decoder()
    added = []
    for token_id, entry in sorted(((int(key), value) for key, value in declared.items()), key=lambda item: item[0]):
        if token_id in known:
            continue
        flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)
        tokenizer.add_tokens([token])
        added.append(token)
        if tokenizer.token_to_id(entry["content"]) != token_id:
            raise LoadError(f"{file}: tokenizer_config.json gives an added token another id")
    return added


def _special_tokens(folder: Path, config: Json) -> Json:
    """Named special tokens, which templates read as variables (`bos_token` ...)."""
    merged = {**_read_json(folder / "special_tokens_map.json"), **config}
    extra = merged.get("extra_special_tokens")
    named = {name: merged.get(name) for name in _SPECIAL} | (extra if isinstance(extra, dict) else {})
    return {name: text for name, value in named.items() if (text := _content(value))}


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _templates(folder: Path, config: Json, settings: TokenSettings) -> dict[str, ChatTemplate]:
    """Chat templates by name: "default", "tool_use", "processor" and any other the model brings."""
    sources: dict[str, Any] = {}
    declared = config.get("chat_template")
    if isinstance(declared, list):
        sources.update({entry["name"]: entry["template"] for entry in declared})
    elif declared is not None:
        sources["default"] = declared
    if (processor := _read_json(folder / "chat_template.json").get("chat_template")) is not None:
        sources["processor"] = processor
    for path in [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]:
        if path.is_file():
            sources["default" if path.parent == folder else path.stem] = _read_text(path)
            if path.parent == folder:
                sources.pop("processor", None)
    if settings.chat_template_path is not None:  # As --chat-template: it beats all others.
        sources = {"default": _read_text(Path(settings.chat_template_path))}
    try:
        return {name: ChatTemplate(source) for name, source in sources.items() if isinstance(source, str)}
    except ValueError as exc:
        raise LoadError(f"{folder}: {exc}") from exc


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise LoadError(f"{path}: cannot be read as text") from exc
