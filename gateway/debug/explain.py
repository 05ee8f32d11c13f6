"""Why would this prompt go there? `/debug/explain` prices it as the planner would, and sends nothing.

`warmroute explain` is its client.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from multidict import CIMultiDict, MultiMapping

from gateway.admin_client import ADDRESS, Refused, ask
from gateway.cli import Parser
from gateway.core import Core
from gateway.debug.decisions import COMPONENTS
from gateway.proxy import errors
from gateway.proxy.errors import ApiError
from gateway.proxy.headers import KV_SOURCE_HEADER, PLAN_HEADER, PREFILLER_HEADER, RANK_HEADER
from gateway.proxy.steps import hinted
from gateway.request import BadRequest, decode_body
from gateway.sidecar.hints import HintReader
from scorer.planner import ModelNotFound, NoWorker, Planner
from scorer.types import RequestFacts

_REFUSED = 1
_NOT_OBEYED = "not obeyed here: only by a sidecar, or with pd.policy: header"
_KINDS = {"messages": "chat", "prompt": "completions", "input": "responses", "token_ids": "generate"}

Rewritten = Callable[[bytes, CIMultiDict[str]], bytes]


async def explain(
    core: Core,
    body: bytes,
    headers: MultiMapping[str],
    kind: str | None,
    hints: HintReader | None,
    rewritten: Rewritten | None = None,
) -> dict[str, Any]:
    """The plan for an OpenAI body, in JSON's terms. `kind`: see `TokenService.tokens_for`; None: told by the body's
    fields. `hints` None: hint headers are not obeyed. Raises ApiError.
    """
    try:
        kind = kind_of(body, kind)
        began_s = time.monotonic()
        _, body = core.tenancy.take(CIMultiDict(headers), body, salted=True, anonymous=True)
        if rewritten is not None:
            body = rewritten(body, CIMultiDict(headers))
        facts = await core.reader.read("explain", kind, body, headers)
    except BadRequest as exc:
        raise ApiError(400, str(exc), code=exc.code, param=exc.param) from None
    facts, notes = looked_at(facts, headers, hints)
    answer = explained(core.planner, facts, core.up.names(), core.rng, core.config.pd.policy, time.monotonic())
    return {**answer, "notes": notes, "overhead_ms": round((time.monotonic() - began_s) * 1000, 3)}


class _Asked(NamedTuple):
    """A `Sender` of nothing but headers."""

    headers: MultiMapping[str]

    def sockname(self) -> None:
        return None


def looked_at(
    facts: RequestFacts, headers: MultiMapping[str], hints: HintReader | None
) -> tuple[RequestFacts, list[str]]:
    """The facts with what hint headers say, and what there is to be said of those. Raises ApiError."""
    given = [name for name in (PREFILLER_HEADER, KV_SOURCE_HEADER, PLAN_HEADER, RANK_HEADER) if name in headers]
    if hints is None:
        return facts, [f"{name.lower()}: {_NOT_OBEYED}" for name in given]
    found, notes = hints.look(_Asked(headers))
    return hinted(facts, found), notes


def kind_of(body: bytes, kind: str | None) -> str | None:
    """Of which API a body is, where nobody says. Raises BadRequest."""
    fields = decode_body(body)
    return kind or next((name for field, name in _KINDS.items() if field in fields), None)


def explained(
    planner: Planner, facts: RequestFacts, available: Sequence[str], rng: random.Random, pd_policy: str | None,
    now_s: float,
) -> dict[str, Any]:  # fmt: skip
    """What `planner` would do, and why. Raises ApiError."""
    try:
        plan = planner.explain(facts, available, now_s, rng)
    except ModelNotFound as exc:
        raise errors.model_not_found(exc.model) from None
    except NoWorker as exc:
        raise errors.no_worker(str(exc)) from None
    workers = planner.fleet.workers
    return {
        "model": facts.model,
        "lora": facts.lora,
        "prompt_tokens": facts.prompt_tokens,
        "token_source": facts.token_source.value,
        "policy": plan.policy,
        "reason": plan.reason,
        "pd_policy": pd_policy,
        "choice": plan.choice,
        "pd_reason": plan.pd_reason.value,
        "session": None if plan.session is None else plan.session.value,
        "n_candidates": plan.n_candidates,
        "weights": {name: worker.weight for name, worker in sorted(workers.items())},
        "unavailable": sorted(set(workers) - set(available)),
        "broken_pairs": [
            {"prefill": prefill, "decode": decode, "state": state, "reason": pair.incompatible or pair.last_failure}
            for (prefill, decode), pair in sorted(planner.pairs.pairs.items())
            if (state := pair.state(now_s)) != "closed" and {prefill, decode} <= workers.keys()
        ],
        "considered": [msgspec.to_builtins(candidate) for candidate in plan.considered],
    }


def main(args: Sequence[str]) -> int:
    parser = Parser(
        prog="warmroute explain",
        description="Where a request would go and what each worker would cost, by a running gateway or by a fleet that "
        "was saved. Sends nothing. Exit code 1: the request would be refused; 2: it could not be asked.",
    )
    parser.add_argument("--admin", default=ADDRESS, metavar="URL", help=f"the gateway's admin address ({ADDRESS})")
    parser.add_argument("--body", metavar="FILE", help="an OpenAI request body, - for standard input")
    parser.add_argument("--model", help="with --prompt: the model to ask for")
    parser.add_argument("--prompt", help="a prompt, instead of a body")
    parser.add_argument("--kind", choices=sorted(set(_KINDS.values())), help="the API of the body, if it does not tell")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="one of the request's")
    parser.add_argument("--save-state", metavar="FILE", help="save the fleet as it is now, - for standard output")
    parser.add_argument("--state", metavar="FILE", help="ask a fleet that was saved, and no gateway")
    parser.add_argument("--tokenizer", metavar="PATH", help="with --state: where the model's tokenizer is here")
    parser.add_argument("--json", action="store_true", help="print the answer as it came")
    options = parser.parse(args)
    try:
        if options.save_state is not None:
            return _save(parser, options)
        answer = _saved(parser, options) if options.state is not None else _live(parser, options)
    except (Refused, ApiError) as exc:
        print(f"warmroute: error: {exc}", file=sys.stderr)
        return _REFUSED
    print(json.dumps(answer, indent=2) if options.json else _table(answer))
    return 0


def _live(parser: Parser, options: Any) -> Any:
    if options.tokenizer is not None:
        parser.error("--tokenizer goes with --state; a running gateway has its own")
    query = f"?kind={options.kind}" if options.kind else ""
    url = options.admin.rstrip("/") + "/debug/explain" + query
    return ask(url, _body(parser, options), headers=_headers(parser, options))


def _saved(parser: Parser, options: Any) -> Any:
    from gateway.debug.offline import explain_saved
    from gateway.debug.saved import load

    body, headers = _body(parser, options), _headers(parser, options)
    return asyncio.run(explain_saved(load(options.state), body, options.tokenizer, options.kind, headers))


def _save(parser: Parser, options: Any) -> int:
    if any(each is not None for each in (options.state, options.body, options.prompt)):
        parser.error("--save-state saves and asks nothing; give the request with --state, afterwards")
    saved = json.dumps(ask(options.admin.rstrip("/") + "/debug/fleet"))
    if options.save_state == "-":
        print(saved)
    else:
        Path(options.save_state).write_text(saved + "\n", encoding="utf-8")
    return 0


def _body(parser: Parser, options: Any) -> bytes:
    if (options.body is None) == (options.prompt is None):
        parser.error("give one of --body and --prompt")
    if options.body is None:
        model = {} if options.model is None else {"model": options.model}
        return json.dumps({**model, "prompt": options.prompt}).encode()
    return sys.stdin.buffer.read() if options.body == "-" else Path(options.body).read_bytes()


def _headers(parser: Parser, options: Any) -> CIMultiDict[str]:
    headers: CIMultiDict[str] = CIMultiDict()
    for header in options.header:
        name, colon, value = header.partition(":")
        if not colon or not name.strip() or "\n" in header or "\r" in header:
            parser.error(f"--header takes NAME:VALUE, got {header!r}")
        headers[name.strip()] = value.strip()
    return headers


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
    notes = [
        f"no handover from {pair['prefill']} to {pair['decode']}: {pair['state']} ({pair['reason']})"
        for pair in answer["broken_pairs"]
    ]
    notes += answer.get("notes", ())
    if answer["unavailable"]:
        notes.append(f"not available: {', '.join(answer['unavailable'])}")
    if answer.get("blocks_left_out"):
        notes.append(f"{answer['blocks_left_out']} blocks were not saved: more may be cached than is shown")
    return "\n".join([head, *lines, *notes])
