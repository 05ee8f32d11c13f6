"""Prefill and decode workers against each other: who cannot hand prompts over, and what is lost by it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gateway.config.schema import PdConfig
from gateway.doctor.catalogue import finding
from gateway.doctor.findings import Finding
from gateway.doctor.identity import Identity
from gateway.engine.capabilities import EventSource
from gateway.handoff.compatible import differences
from scorer.types import Role

_DEFAULT_POLICY = "cost"
_PLACES_BY_CACHE = ("cost", "threshold", "isl")
"""How policies begin that look at what the decode worker holds."""


class Team(msgspec.Struct, frozen=True):
    """Who computes prompts for whom. `prefills` x `decodes` are the pairs; `peers` are both."""

    prefills: list[Identity]
    decodes: list[Identity]
    peers: list[Identity]

    @property
    def sources(self) -> list[Identity]:
        """Everybody who may be asked for a prompt."""
        return self.prefills or self.peers

    @property
    def pairs(self) -> Iterator[tuple[Identity, Identity]]:
        for prefill in self.prefills:
            for decode in self.decodes:
                if _models(prefill) & _models(decode):
                    yield prefill, decode

    @property
    def peer_pairs(self) -> Iterator[tuple[Identity, Identity]]:
        """Each two once: what keeps one way apart keeps the other."""
        for i, one in enumerate(self.peers):
            for other in self.peers[i + 1 :]:
                if _models(one) & _models(other):
                    yield one, other


def team_of(workers: Sequence[Identity], pd: PdConfig) -> Team | None:
    """None where nobody hands anything over: no roles, and fewer than two workers with a connector."""
    usable = [me for me in workers if me.usable]
    prefills = [me for me in usable if me.role is Role.PREFILL]
    decodes = [me for me in usable if me.role.decodes]
    by_cost = (pd.policy or _DEFAULT_POLICY) == _DEFAULT_POLICY and pd.peers
    peers = [me for me in decodes if me.hands_over] if by_cost else []
    has_roles = any(me.role in (Role.PREFILL, Role.DECODE) for me in workers)
    if not has_roles and len(peers) < 2:
        return None
    return Team(prefills, decodes, peers if len(peers) > 1 else [])


def able(prefill: Identity, decode: Identity) -> bool:
    """Whether nothing that the two tell keeps them apart."""
    return not _one_cannot(prefill, decode) and not list(differences(prefill.side, decode.side))


def judge_team(
    team: Team, workers: Sequence[Identity], pd: PdConfig, sources: Mapping[str, Mapping[int, EventSource]]
) -> list[Finding]:
    """`sources`: where each worker's events are read, by URL and rank. Findings name workers or concern several."""
    found = _roles(workers, pd)
    taking_part = {me.url: me for pair in [*team.pairs, *team.peer_pairs] for me in pair}
    for me in taking_part.values():
        found += _connector(me, pd, computes=me in team.sources)
    if team.prefills and (pd.policy or _DEFAULT_POLICY).startswith(_PLACES_BY_CACHE):
        found += [_blind(me, pd) for me in team.decodes if not sources.get(me.url)]
    found += _pairs("pair-incompatible", team.pairs)
    found += _pairs("peer-incompatible", team.peer_pairs)
    found += _unlike(team.pairs)
    return found


def _roles(workers: Sequence[Identity], pd: PdConfig) -> list[Finding]:
    prefills = [me.url for me in workers if me.role is Role.PREFILL]
    if prefills and not any(me.role.decodes for me in workers):
        said = f"all workers are prefill workers ({', '.join(prefills)})"
        return [finding("no-decode-worker", "", said)]
    decodes = [me.url for me in workers if me.role is Role.DECODE]
    if decodes and not prefills and pd.policy not in ("local", "header"):
        said = f"there are decode workers ({', '.join(decodes)}), and no prefill worker"
        return [finding("no-prefill-worker", "", said)]
    return []


def _connector(me: Identity, pd: PdConfig, *, computes: bool) -> list[Finding]:
    settings = me.settings
    if me.hands_over is False:
        name = "none" if settings is None else settings.connector or "none"
        if name != "none":
            said = f"its KV connector is {name}"
            return [finding("connector-unsupported", me.url, said, evidence={"connector": name})]
        return [finding("connector-missing", me.url, "it counts no NIXL transfers, so has no NIXL connector")]
    if settings is None or settings.connector is None:
        said = "it does not tell its set-up (connector, lease, types, tensor parallelism)"
        return [finding("settings-unknown", me.url, said)]
    lease_s = settings.lease_s
    shown = {"connector": settings.connector, "kv_role": settings.kv_role, "lease_s": lease_s}
    said = f"{settings.connector}, {settings.kv_role or 'no kv_role'}, leases of {lease_s or 0:g} s"
    found = [finding("connector", me.url, said, evidence=shown)]
    if computes and lease_s is not None and lease_s != pd.lease_s:
        said = f"it keeps blocks for {lease_s:g} s, and pd.lease_s is {pd.lease_s:g} s"
        code = "lease-short" if lease_s < pd.lease_s else "lease-long"
        found.append(finding(code, me.url, said, evidence={"lease_s": lease_s, "pd_lease_s": pd.lease_s}))
    one_sided = {"kv_consumer": Role.PREFILL, "kv_producer": Role.DECODE}
    if one_sided.get(settings.kv_role or "") is me.role:
        said = f"a {me.role.value} worker has the kv_role {settings.kv_role}"
        found.append(finding("kv-role", me.url, said, evidence={"kv_role": settings.kv_role, "role": me.role.value}))
    if me.role.decodes and settings.load_failure_policy == "recompute":
        found.append(finding("load-failures-hidden", me.url, "its kv_load_failure_policy is recompute"))
    return found


def _blind(me: Identity, pd: PdConfig) -> Finding:
    policy = pd.policy or _DEFAULT_POLICY
    said = f"its KV events cannot be read, and pd.policy {policy} asks what it holds"
    return finding("decode-without-events", me.url, said, evidence={"policy": policy})


def _pairs(code: str, pairs: Iterator[tuple[Identity, Identity]]) -> list[Finding]:
    """One finding for each difference, with everybody it keeps apart."""
    apart: defaultdict[tuple[str, str, str], list[list[str]]] = defaultdict(list)
    for prefill, decode in pairs:
        if _one_cannot(prefill, decode):
            continue
        for each in differences(prefill.side, decode.side):
            apart[each.what, each.prefill, each.decode].append([prefill.url, decode.url])
    found = []
    for (what, one, other), names in apart.items():
        firsts, seconds = (sorted({pair[i] for pair in names}) for i in (0, 1))
        said = f"different {what}: {one} at {', '.join(firsts)}; {other} at {', '.join(seconds)}"
        shown = {"what": what, "prefill": one, "decode": other, "pairs": names}
        found.append(finding(code, "", said, evidence=shown))
    return found


def _one_cannot(prefill: Identity, decode: Identity) -> bool:
    """For want of a connector, which is said apart."""
    return prefill.hands_over is False or decode.hands_over is False


def _unlike(pairs: Iterator[tuple[Identity, Identity]]) -> list[Finding]:
    """What engines do not refuse each other for at once, but pay for or may fail at."""
    found = []
    blocks: set[tuple[int, int]] = set()
    for prefill, decode in pairs:
        if not able(prefill, decode):
            continue
        sizes = tuple(None if me.stats is None else me.stats.block_size for me in (prefill, decode))
        if sizes[0] and sizes[1] and sizes[0] != sizes[1] and (sizes[0], sizes[1]) not in blocks:
            blocks.add((sizes[0], sizes[1]))
            said = f"blocks of {sizes[0]} tokens at {prefill.url}, of {sizes[1]} at {decode.url}"
            shown = {"prefill": sizes[0], "decode": sizes[1], "pair": [prefill.url, decode.url]}
            found.append(finding("pair-block-sizes", "", said, evidence=shown))
        theirs, ours = (None if me.settings is None else me.settings.tensor_parallel for me in (prefill, decode))
        if theirs and ours and theirs > ours:
            said = f"{prefill.url} has a tensor parallelism of {theirs}, {decode.url} of {ours}"
            shown = {"prefill": theirs, "decode": ours, "pair": [prefill.url, decode.url]}
            found.append(finding("pair-tensor-parallel", "", said, evidence=shown))
    return found


def _models(me: Identity) -> frozenset[str]:
    return frozenset() if me.models is None else frozenset(me.models.models)
