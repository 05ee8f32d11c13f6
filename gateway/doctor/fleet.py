"""Several workers against each other. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations

from gateway.doctor.catalogue import finding
from gateway.doctor.findings import Finding
from gateway.doctor.identity import Identity
from gateway.engine.capabilities import EventSource

Plan = Mapping[str, Mapping[int, EventSource]]
"""Worker -> rank -> where its events are read."""


def judge_fleet(workers: Sequence[Identity], plan: Plan, repeated: Sequence[str] = ()) -> list[Finding]:
    """Findings about more than one worker; `repeated` are URLs that were given more than once."""
    found = [finding("url-twice", "", f"{url} was given more than once") for url in repeated]
    found += _same_servers(workers, plan)
    found += _endpoints(plan)
    found += _models(workers)
    found += _differences("block-sizes-differ", "block size", workers, lambda me: me.stats and me.stats.block_size)
    return found


def _same_servers(workers: Sequence[Identity], plan: Plan) -> list[Finding]:
    """Start times have centiseconds; together with the same event ports two of them are one process."""

    def identity(me: Identity) -> Hashable:
        start = me.stats.process_start_s if me.stats else None
        ports = tuple((rank, (s.endpoint or "").rpartition(":")[2]) for rank, s in sorted(plan.get(me.url, {}).items()))
        return None if start is None else (start, me.version, me.models and me.models.models, ports)

    return [
        finding("same-server", "", f"{' and '.join(urls)} seem to be one server")
        for urls in _groups(workers, identity).values()
        if len(urls) > 1
    ]


def _endpoints(plan: Plan) -> list[Finding]:
    connected: dict[str, list[str]] = defaultdict(list)
    listened: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for url, sources in plan.items():
        for rank, source in sorted(sources.items()):
            name = f"{url} rank {rank}" if len(sources) > 1 else url
            if source.endpoint is None:
                continue
            if source.engine_connects:
                listened[source.endpoint].append((name, source.topic))
            else:
                connected[source.endpoint].append(name)
    found = [
        finding("event-endpoint-shared", "", f"{endpoint} is the event endpoint of {' and '.join(names)}")
        for endpoint, names in connected.items()
        if len(names) > 1
    ]
    for endpoint, engines in listened.items():
        if len(engines) < 2:
            continue
        by_topic: dict[str, list[str]] = defaultdict(list)
        for name, topic in engines:
            by_topic[topic].append(name)
        for topic, names in by_topic.items():
            if not topic:
                found.append(
                    finding("topic-missing", "", f"{' and '.join(names)} connect to {endpoint} without a topic")
                )
            elif len(names) > 1:
                said = f"{' and '.join(names)} connect to {endpoint} under the same topic {topic}"
                found.append(finding("topic-shared", "", said))
    return found


def _models(workers: Sequence[Identity]) -> list[Finding]:
    known = [me for me in workers if me.models is not None and me.models.models]
    found = []
    served = {me.url: set(me.models.models) for me in known if me.models is not None}
    if any(not served[a.url] & served[b.url] for a, b in combinations(known, 2)):
        said = "; ".join(f"{url}: {', '.join(sorted(names))}" for url, names in served.items())
        found.append(finding("models-differ", "", f"workers serve different models ({said})"))
    for name in sorted(set().union(*served.values())) if served else ():
        mine = [me for me in known if name in served[me.url]]
        said = f"{name}: max_model_len"
        found += _differences("versions-differ", f"{name}: vLLM", mine, lambda me: me.version)
        found += _differences("max-model-len-differs", said, mine, lambda me: me.models and me.models.max_model_len)
        found += _differences("roots-differ", f"{name}: root", mine, lambda me: me.models and me.models.root)
    return found


def _differences(
    code: str, what: str, workers: Sequence[Identity], value: Callable[[Identity], Hashable]
) -> list[Finding]:
    groups = _groups(workers, value)
    if len(groups) < 2:
        return []
    said = "; ".join(f"{what} {shown} at {', '.join(urls)}" for shown, urls in groups.items())
    return [finding(code, "", said)]


def _groups(workers: Sequence[Identity], value: Callable[[Identity], Hashable]) -> dict[Hashable, list[str]]:
    """URLs by value, without those that have none."""
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for me in workers:
        shown = value(me)
        if shown is not None:
            groups[shown].append(me.url)
    return groups
