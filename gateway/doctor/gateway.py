"""What a running gateway sees of its fleet, by its admin port."""

from __future__ import annotations

import msgspec

from gateway.debug.hits import HitStats
from gateway.debug.remedies import REMEDIES
from gateway.doctor.catalogue import finding
from gateway.doctor.fetch import Answer, Fault, Http
from gateway.doctor.findings import Finding

_READY, _CACHE = "/readyz?verbose", "/debug/cache"
_PASSING = ("worker_draining", "events_catching_up", "tokens_by_engine")
"""Degradations that end by themselves, or are how it was set up."""
_MOST = 100


class _Degraded(msgspec.Struct):
    what: str
    detail: str = ""
    worker: str | None = None
    model: str | None = None


class _Ready(msgspec.Struct):
    degraded: list[_Degraded]


class _Worker(msgspec.Struct):
    hits: HitStats | None = None


class _Cache(msgspec.Struct):
    workers: dict[str, _Worker]


_readies = msgspec.json.Decoder(_Ready)
_caches = msgspec.json.Decoder(_Cache)


async def examine_gateway(http: Http) -> list[Finding]:
    """`http.url` is the admin address."""
    ready, cache = await http.get(_READY), await http.get(_CACHE)
    for path, answer in ((_READY, ready), (_CACHE, cache)):
        if isinstance(answer, Fault):
            return [finding("gateway-unreachable", "", f"{http.url}: {answer.sentence}")]
        if answer.status in (401, 403):
            said = (
                f"{http.url}{path} has status {answer.status}: it wants its admin token, in WARMROUTE_ADMIN_TOKEN here"
            )
            return [finding("gateway-unreachable", "", said)]
        if answer.status not in (200, 503):  # 503: it is not ready, and says why
            return [finding("gateway-unreachable", "", f"{http.url}{path} has status {answer.status}")]
    assert isinstance(ready, Answer)  # noqa: S101 - seen above
    assert isinstance(cache, Answer)  # noqa: S101
    try:
        degraded, workers = _readies.decode(ready.body).degraded, _caches.decode(cache.body).workers
    except msgspec.MsgspecError:
        return [finding("gateway-unreachable", "", f"{http.url} does not answer as a warmroute gateway")]
    found = [_degraded(each) for each in degraded if each.what not in _PASSING][:_MOST]
    found += [each for name, worker in workers.items() if (each := _missed(name, worker.hits)) is not None]
    if found:
        return found
    beside = sorted({each.what for each in degraded})
    said = f"it sees nothing wrong with its {len(workers)} workers" + (f" ({', '.join(beside)})" if beside else "")
    return [finding("gateway", "", said)]


def _degraded(each: _Degraded) -> Finding:
    about = each.worker or each.model
    said = f"{each.what}: {f'{about}: ' if about else ''}{each.detail.rstrip('.')}"
    shown = {"what": each.what, "worker": each.worker, "model": each.model}
    found = finding("gateway-degraded", "", said, evidence={key: value for key, value in shown.items() if value})
    remedy = REMEDIES.get(each.what)  # none: a newer gateway's
    return found if remedy is None else msgspec.structs.replace(found, fix=remedy)


def _missed(name: str, hits: HitStats | None) -> Finding | None:
    share = None if hits is None else hits.missed_share()
    if hits is None or share is None:
        return None
    said = f"{name} had {share:.0%} fewer cached tokens than predicted, over {hits.compared} answers"
    shown = {
        "worker": name,
        "answers": hits.compared,
        "predicted_tokens": hits.compared_predicted_tokens,
        "missed_tokens": hits.over_tokens,
    }
    return finding("gateway-hits-missed", "", said, evidence=shown)
