"""A tokenizer on local disk: tokenizer.json, special tokens and chat templates of one model directory. No downloads.

`encode_batch_fast` releases the GIL; `Tokenizer.encode` holds it for the whole call (0.18 s for 300 KB of text), so it
is never used. Incremental tokenising (only the new turn of a chat) belongs behind `LocalTokenizer.encode`.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.tokens.given import ChatPrompt, TextPrompt
from gateway.tokens.render import Rendered, render_chat, tools_of
from gateway.tokens.settings import TokenSettings
from gateway.tokens.template import ChatTemplate
from gateway.tokens.types import CannotTokenize, Json, Reason, pack_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_REQUEST_TEMPLATES = 16


class LoadError(Exception):
    """There is no usable tokenizer at a path; the text says why and is fit for the status page."""


class LocalTokenizer:
    """Text and chats to token ids. Thread-safe; every method may take milliseconds: call from a worker thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: dict[str, ChatTemplate],
        special_tokens: Json,
        settings: TokenSettings,
        *,
        truncation_side: str = "right",
        harmony: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._special_tokens = special_tokens
        self._settings = settings
        self._compiled = lru_cache(_MAX_REQUEST_TEMPLATES)(ChatTemplate)
        self.truncation_side = truncation_side
        self.harmony = harmony

    def text_of(self, prompt: TextPrompt | ChatPrompt) -> Rendered:
        """The text that is tokenised for `prompt`. Raises CannotTokenize."""
        if isinstance(prompt, TextPrompt):
            return Rendered(prompt.text, prefix_only=False)
        if self.harmony:
            raise CannotTokenize(Reason.HARMONY)
        return render_chat(prompt, self._template_for(prompt), self._settings, self._special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Token ids of `text`, uint32 little-endian. Raises CannotTokenize for what is not Unicode text."""
        try:
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as exc:  # Half a surrogate pair: valid JSON, but no text.
            raise CannotTokenize(Reason.MALFORMED) from exc
        return pack_ids(encoding.ids)

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


def load(path: str, settings: TokenSettings) -> LocalTokenizer:
    """The tokenizer at `path`, a tokenizer.json or a directory that has one. Raises LoadError."""
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
    _add_missing_tokens(tokenizer, config, file)
    model_type = _read_json(folder / "config.json").get("model_type")
    local = LocalTokenizer(
        tokenizer,
        _templates(folder, config, settings),
        _special_tokens(folder, config),
        settings,
        truncation_side=str(config.get("truncation_side", "right")),
        harmony=model_type == "gpt_oss",
    )
    local.encode("warm up", add_special_tokens=True)  # The first call builds caches.
    return local


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


def _add_missing_tokens(tokenizer: Tokenizer, config: Json, file: Path) -> None:
    """Tokens that only tokenizer_config.json declares; transformers adds them too."""
    from tokenizers import AddedToken

    declared = config.get("added_tokens_decoder") or {}
    known = tokenizer.get_added_tokens_decoder()
    for token_id, entry in sorted(((int(key), value) for key, value in declared.items()), key=lambda item: item[0]):
        if token_id in known:
            continue
        flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        tokenizer.add_tokens([AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)])
        if tokenizer.token_to_id(entry["content"]) != token_id:
            raise LoadError(f"{file}: tokenizer_config.json gives an added token another id")


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
