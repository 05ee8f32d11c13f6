"""Where prefill workers say that their NIXL side channel is: can decode workers find it there?"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from gateway.doctor.catalogue import finding
from gateway.doctor.findings import Finding
from gateway.doctor.identity import Identity
from gateway.doctor.tap import connect_error
from gateway.engine.capabilities import is_local
from gateway.handoff.answer import same_host
from gateway.handoff.hosts import Hosts

_ANY = ("0.0.0.0", "::", "*")  # noqa: S104 - what engines announce
_LAST_PORT = 65_535


def address_of(me: Identity) -> tuple[str, int] | None:
    """Host and port of rank 0's, or of the rank whose prefill announced it: as the engine says, else as configured
    (workers[].nixl); None: nobody says.
    """
    if me.announced is not None:
        return me.announced
    settings = me.settings
    if settings is not None and settings.side_channel_host and settings.side_channel_port:
        return settings.side_channel_host, settings.side_channel_port
    given = urlsplit(f"//{me.nixl_address or ''}")
    return (given.hostname, given.port) if given.hostname and given.port else None


def judge_addresses(sources: Sequence[Identity], decoders: Sequence[Identity]) -> list[Finding]:
    """Pure. `sources` compute prompts for `decoders`; all have a connector."""
    found = []
    for me in sources:
        address = address_of(me)
        if address is None:
            said = "neither a prefill nor /server_info nor workers[].nixl tells where its side channel is"
            found.append(finding("side-channel-unknown", me.url, said))
            continue
        host, port = address
        away = [other.url for other in decoders if other.url != me.url and not _one_machine(me.url, other.url)]
        if _means_itself(host) and away:
            said = f"it announces {host}:{port}, which is another machine's own address at {away[0]}"
            shown = {"host": host, "port": port, "decode": away}
            found.append(finding("side-channel-local", me.url, said, evidence=shown))
    return found + _shared({me.url: me for me in (*sources, *decoders)}.values())


def _shared(workers: Iterable[Identity]) -> list[Finding]:
    """Ports that two engines say are theirs."""
    taken: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for me in workers:
        if (address := address_of(me)) is not None:
            host, port = address
            for each in _ports(me, port):
                taken[same_host(_seen_from_here(me, host)), each].append(me.url)
    found = []
    for (host, port), urls in taken.items():
        if len(urls) > 1:
            said = f"{' and '.join(urls)} both say that their side channel is {host}:{port}"
            shown = {"host": host, "port": port, "workers": urls}
            found.append(finding("side-channel-shared", "", said, evidence=shown))
    return found


async def judge_reach(sources: Sequence[Identity], hosts: Hosts, timeout_s: float) -> list[Finding]:
    """Whether they can be connected to from here, and are where the gateway will believe them."""
    found = await asyncio.gather(*(_reach(me, hosts, timeout_s) for me in sources))
    return [finding for some in found for finding in some]


async def _reach(me: Identity, hosts: Hosts, timeout_s: float) -> list[Finding]:
    address = address_of(me)
    if address is None:
        return []
    host, port = address
    found = []
    allowed, allowed_port = await hosts.side_channel(me.url, me.nixl_address)
    known = _is_one_of(host, allowed) and (allowed_port is None or port in _from(allowed_port, me.n_ranks))
    if not known:
        own = me.nixl_address or urlsplit(me.url).hostname
        said = f"it announces {host}:{port}, which the gateway does not take for {own}"
        found.append(finding("side-channel-foreign", me.url, said, evidence={"host": host, "port": port}))
    ports = _ports(me, port)
    here = _seen_from_here(me, host)
    where = f"[{here}]" if ":" in here else here
    errors = await asyncio.gather(*(connect_error(f"tcp://{where}:{each}", timeout_s) for each in ports))
    for each, error in zip(ports, errors, strict=True):
        if error is not None:
            said = f"cannot connect to {where}:{each} from here ({error})"
            shown = {"host": here, "port": each}
            found.append(finding("side-channel-unreachable", me.url, said, evidence=shown))
    if not found:
        found.append(finding("side-channel", me.url, f"its side channel {host}:{port} can be reached from here"))
    return found


def _ports(me: Identity, port: int) -> range:
    """Of all its ranks where `port` is known to be the first one's."""
    return _from(port, 1 if me.announced is not None else me.n_ranks)


def _from(port: int, n: int) -> range:
    return range(port, min(port + n, _LAST_PORT + 1))


def _is_one_of(host: str, allowed: frozenset[str]) -> bool:
    return same_host(host) in {same_host(each) for each in allowed}


def _means_itself(host: str) -> bool:
    """Whether the address means another machine on every machine."""
    return host in _ANY or is_local(host)


def _seen_from_here(me: Identity, host: str) -> str:
    """The worker's own machine, as its URL names it; with a worker on ours the address is good as it is."""
    own = urlsplit(me.url).hostname or host
    return own if host in _ANY or (is_local(host) and not is_local(own)) else host


def _one_machine(url: str, other: str) -> bool:
    one, two = urlsplit(url).hostname or "", urlsplit(other).hostname or ""
    return same_host(one) == same_host(two) or (is_local(one) and is_local(two))
