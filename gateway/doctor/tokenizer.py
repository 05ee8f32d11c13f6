"""Does a local tokenizer make the engine's token ids? The gateway's own self-check, on its fixed prompts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.doctor.catalogue import finding
from gateway.doctor.fetch import Http
from gateway.doctor.findings import Finding
from gateway.tokens.engine import EngineTokenizer, aiohttp_tokenize, tokenize_body
from gateway.tokens.local import LoadError, LocalTokenizer, load
from gateway.tokens.selfcheck import CASES, SelfCheck, Tokenizable
from gateway.tokens.settings import TokenSettings
from gateway.tokens.types import CannotTokenize, Reason


def tokenizer_path(given: str | None, root: str | None) -> str | None:
    """`given`, or the model card's `root` where that is a directory of this machine."""
    if given is not None:
        return given
    return root if root is not None and Path(root).is_absolute() and Path(root).is_dir() else None


async def check_tokenizer(http: Http, model: str, path: str | None) -> list[Finding]:
    """One finding. `path` as from `tokenizer_path`."""
    worker = http.url
    if path is None:
        return [finding("tokenizer-unchecked", worker, "no local tokenizer is known for its model")]
    settings = TokenSettings()
    try:
        local = await asyncio.to_thread(load, path, settings)
    except LoadError as error:
        return [finding("tokenizer-unusable", worker, str(error))]
    return await _compare(http, model, path, local, settings)


async def _compare(http: Http, model: str, path: str, local: LocalTokenizer, settings: TokenSettings) -> list[Finding]:
    engine = EngineTokenizer(aiohttp_tokenize(http.session, http.url, http.headers), settings)
    asked: list[Tokenizable] = []
    refused: list[CannotTokenize] = []

    async def local_ids(prompt: Tokenizable) -> bytes:
        if not asked or asked[-1] is not prompt:
            asked.append(prompt)
        rendered = local.text_of(prompt)
        return await asyncio.to_thread(local.encode, rendered.text, add_special_tokens=prompt.add_special_tokens)

    async def engine_ids(prompt: Tokenizable) -> bytes:
        try:
            return await engine.ask(tokenize_body(prompt, model, settings)[0], http.timeout_s)
        except CannotTokenize as error:
            refused.append(error)
            raise

    check = SelfCheck(local_ids, engine_ids)
    verdict = await check.run_fixed()
    if verdict == "mismatch":
        kind = CASES[len(asked) - 1][0]
        said = f"{path} and the engine differ on test prompt {len(asked)} of {len(CASES)} ({kind})"
        return [finding("tokenizer-mismatch", http.url, said)]
    if verdict == "verified":
        return [finding("tokenizer", http.url, f"{path} agrees with the engine on {check.done} test prompts")]
    reason = refused[-1].reason if refused else Reason.NO_ENGINE
    return [finding("tokenize-unavailable", http.url, f"/tokenize gives no token ids ({reason.value})")]
