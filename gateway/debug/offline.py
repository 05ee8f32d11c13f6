"""A request priced against a saved fleet (`gateway.debug.saved`), with nobody asked."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from multidict import MultiMapping
from prometheus_client import CollectorRegistry

from gateway.debug.explain import explained, kind_of, looked_at
from gateway.debug.saved import SavedFleet, restored
from gateway.errors import UserError
from gateway.proxy.errors import ApiError
from gateway.request import BadRequest, RequestReader, Slo
from gateway.sidecar.hints import HintReader
from gateway.sidecar.targets import Targets
from gateway.tokens import TokenService, TokenSettings
from scorer.planner import Planner

_LOAD_S = 120.0
_LOOK_S = 0.02


async def explain_saved(
    fleet: SavedFleet, body: bytes, tokenizer: str | None, kind: str | None, headers: MultiMapping[str]
) -> dict[str, Any]:
    """The plan, in JSON's terms, as of when the fleet was saved. `tokenizer`: a folder; None: the one the gateway was
    given, or the model's, if they are here. Raises ApiError or UserError.
    """
    path = _tokenizer(fleet, tokenizer)
    settings = TokenSettings(
        mode="local", tokenizer_paths={} if path is None else {"*": path}, check_rate=0.0, local_budget_s=_LOAD_S
    )
    tokens = TokenService(settings)
    for worker in fleet.workers:
        for model in (*(worker.models or ()), *worker.adapters):
            tokens.set_model(model, worker.root)
    await tokens.start()
    try:
        await _loaded(tokens)
        now_s = time.monotonic()
        planner = restored(fleet, now_s)
        reader = RequestReader(planner.fleet, tokens, Slo(ttft_s=fleet.slo_ttft_s, tpot_s=fleet.slo_tpot_s))
        try:
            facts = await reader.read("explain", kind_of(body, kind), body, headers)
        except BadRequest as exc:
            raise ApiError(400, str(exc), code=exc.code, param=exc.param) from None
        facts, notes = looked_at(facts, headers, _hints(fleet, planner))
        available = [worker.name for worker in fleet.workers if worker.available]
        answer = explained(planner, facts, available, random.Random(0), fleet.pd_policy, now_s)  # noqa: S311
    finally:
        await tokens.close()
    return {**answer, "notes": notes, "saved_at_s": fleet.saved_at_s, "blocks_left_out": fleet.blocks_left_out}


def _hints(fleet: SavedFleet, planner: Planner) -> HintReader | None:
    """Of a pod of several engines, which of them is asked is not known here."""
    if fleet.hint_targets is None:
        return None
    targets = Targets(planner.fleet, lambda change: None, fleet.hint_targets)
    return HintReader(targets, CollectorRegistry(), random.Random(0))  # noqa: S311


def _tokenizer(fleet: SavedFleet, given: str | None) -> str | None:
    if given is not None and not Path(given).exists():
        raise UserError(f"--tokenizer {given}: there is no such file or folder")
    return given or (fleet.tokenizer if fleet.tokenizer and Path(fleet.tokenizer).exists() else None)


async def _loaded(tokens: TokenService) -> None:
    deadline_s = time.monotonic() + _LOAD_S
    while any(model["local"]["state"] == "loading" for model in tokens.status().values()):
        if time.monotonic() > deadline_s:
            raise UserError(f"the tokenizer was not loaded within {_LOAD_S:.0f} s")
        await asyncio.sleep(_LOOK_S)
