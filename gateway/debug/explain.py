"""Why would this prompt go there? `/debug/explain` prices it as the planner would, and sends nothing.

`warmroute explain` is its client.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from multidict import CIMultiDict

from gateway.admin_client import ADDRESS, ask
from gateway.cli import Parser
from gateway.core import Core
from gateway.debug.decisions import COMPONENTS
from gateway.proxy import errors
from gateway.proxy.errors import ApiError
from gateway.request import BadRequest, decode_body
from scorer.planner import ModelNotFound, NoWorker

_KINDS = {"messages": "chat", "prompt": "completions", "input": "responses", "token_ids": "generate"}


async def explain(core: Core, body: bytes, headers: Mapping[str, str], kind: str | None) -> dict[str, Any]:
    """The plan for an OpenAI body, in JSON's terms. `kind`: see `TokenService.tokens_for`; None: told by the body's
    fields. Raises ApiError.
    """
    try:
        fields = decode_body(body)
        if kind is None:
            kind = next((name for field, name in _KINDS.items() if field in fields), None)
        began_s = time.monotonic()
        _, body = core.tenancy.take(CIMultiDict(headers), body, salted=True, anonymous=True)
        facts = await core.reader.read("explain", kind, body, headers)
    except BadRequest as exc:
        raise ApiError(400, str(exc), code=exc.code, param=exc.param) from None
    available = core.up.names()
    try:
        plan = core.planner.explain(facts, available, time.monotonic(), core.rng)
    except ModelNotFound as exc:
        raise errors.model_not_found(exc.model) from None
    except NoWorker as exc:
        raise errors.no_worker(str(exc)) from None
    overhead_ms = round((time.monotonic() - began_s) * 1000, 3)
    return {
        "model": facts.model,
        "lora": facts.lora,
        "prompt_tokens": facts.prompt_tokens,
        "token_source": facts.token_source.value,
        "policy": plan.policy,
        "reason": plan.reason,
        "pd_policy": core.config.pd.policy,
        "choice": plan.choice,
        "pd_reason": plan.pd_reason.value,
        "session": None if plan.session is None else plan.session.value,
        "n_candidates": plan.n_candidates,
        "weights": {name: worker.weight for name, worker in sorted(core.fleet.workers.items())},
        "unavailable": sorted(set(core.fleet.workers) - set(available)),
        "overhead_ms": overhead_ms,
        "considered": [msgspec.to_builtins(candidate) for candidate in plan.considered],
    }


def main(args: Sequence[str]) -> int:
    parser = Parser(
        prog="warmroute explain",
        description="Ask a running gateway where a request would go and what each worker would cost. Sends nothing.",
    )
    parser.add_argument("--admin", default=ADDRESS, metavar="URL", help="the gateway's admin address")
    parser.add_argument("--body", metavar="FILE", help="an OpenAI request body, - for standard input")
    parser.add_argument("--model", help="with --prompt: the model to ask for")
    parser.add_argument("--prompt", help="a prompt, instead of a body")
    parser.add_argument("--json", action="store_true", help="print the answer as it came")
    options = parser.parse(args)
    answer = ask(options.admin.rstrip("/") + "/debug/explain", _body(parser, options))
    print(json.dumps(answer, indent=2) if options.json else _table(answer))
    return 0


def _body(parser: Parser, options: Any) -> bytes:
    if (options.body is None) == (options.prompt is None):
        parser.error("give one of --body and --prompt")
    if options.body is None:
        model = {} if options.model is None else {"model": options.model}
        return json.dumps({**model, "prompt": options.prompt}).encode()
    return sys.stdin.buffer.read() if options.body == "-" else Path(options.body).read_bytes()


def _table(answer: dict[str, Any]) -> str:
    rows = [["worker", "rank", "cached", "total s", "ttft s", *COMPONENTS]]
    for candidate in answer["considered"]:
        price = candidate["price"]
        worker, rank = candidate["decode"]
        if candidate["prefill"]:
            worker += f" ({'peer' if candidate['peer'] else 'prefill'} {candidate['prefill'][0]})"
        values = [f"{price[f'{name}_s']:.4f}" for name in COMPONENTS]
        cached = str(candidate["cached_tokens"])
        rows.append([worker, str(rank), cached, f"{price['total_s']:.4f}", f"{price['ttft_s']:.4f}", *values])
    used = [i for i in range(len(rows[0])) if i < 5 or any(float(row[i]) for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    lines = ["  ".join(row[i].ljust(widths[i]) if i == 0 else row[i].rjust(widths[i]) for i in used) for row in rows]
    head = (
        f"{answer['prompt_tokens']} prompt tokens ({answer['token_source']}) for {answer['model']}; {answer['reason']};"
        f" {answer['choice']} ({answer['pd_reason']})"
    )
    return "\n".join([head, *lines])
