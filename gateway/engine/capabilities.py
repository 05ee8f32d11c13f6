"""What one engine can do, as it says itself: models, adapters, limits, version, where it publishes KV events."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from gateway.engine.settings import Settings

MAX_CARDS = 1000
MAX_RANKS = 256
"""More model cards or ranks than these, from one worker, are left out."""

_WILDCARDS = {"*", "", "0.0.0.0", "::"}  # noqa: S104


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter: `parent` is the base model's name, `path` where the engine loaded it from."""

    name: str
    parent: str | None = None
    path: str | None = None


class EventSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank publishes KV events, with addresses that can be reached from outside of its machine.

    An address is None when there is none, or when it cannot be reached (ipc on another machine): `unreachable` then
    says so. With `engine_connects` the engine does not listen but connects to `endpoint` itself.
    """

    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_batches: int | None = None
    engine_connects: bool = False
    unreachable: str | None = None


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """None means that the engine does not say (an old version, or a face that is switched off)."""

    models: tuple[str, ...] = ()
    """Every name of the base model; the first is the one the engine uses itself."""
    adapters: tuple[Adapter, ...] = ()
    root: str | None = None
    """Path or hub name of the model's weights."""
    max_model_len: int | None = None
    version: str | None = None
    event_sources: Mapping[int, EventSource] | None = None
    """By data-parallel rank; empty when KV events are switched off."""
    block_size: int | None = None
    kv_blocks: int | None = None
    prefix_caching: bool | None = None
    kv_cache_dtype: str | None = None
    """None for "auto" too, which may be any."""
    settings: Settings | None = None
    """Told in development mode only, and asked only of engines that hand KV over."""

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.models[1:]


class Models(msgspec.Struct, frozen=True):
    """The part of Capabilities that can change while the engine runs."""

    models: tuple[str, ...]
    adapters: tuple[Adapter, ...]
    root: str | None
    max_model_len: int | None


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str


class _Source(msgspec.Struct):
    enable_kv_cache_events: bool = True
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None
    buffer_steps: int | None = None


_cards = msgspec.json.Decoder(_Cards)
_version = msgspec.json.Decoder(_Version)
_sources = msgspec.json.Decoder(dict[int, _Source], strict=False)


def parse_models(body: bytes) -> Models:
    """`/v1/models`: a card without a parent is a name of the base model, one with a parent an adapter.

    Raises msgspec.MsgspecError for anything else.
    """
    cards = _cards.decode(body).data[:MAX_CARDS]
    base = [card for card in cards if card.parent is None]
    adapters = tuple(Adapter(card.id, card.parent, card.root) for card in cards if card.parent is not None)
    return Models(
        tuple(dict.fromkeys(card.id for card in base)),
        adapters,
        next((card.root for card in base if card.root), None),
        next((card.max_model_len for card in base if card.max_model_len), None),
    )


def parse_version(body: bytes) -> str:
    """`/version`. Raises msgspec.MsgspecError."""
    return _version.decode(body).version


def parse_event_sources(body: bytes, worker_url: str) -> dict[int, EventSource]:
    """`/kv_event_sources`: per rank, addresses as seen from outside. Raises msgspec.MsgspecError."""
    host = urlsplit(worker_url).hostname or ""
    return {
        rank: _reachable(source, host)
        for rank, source in list(_sources.decode(body).items())[:MAX_RANKS]
        if rank >= 0 and source.enable_kv_cache_events and source.publisher != "null" and source.endpoint
    }


def engine_binds(endpoint: str) -> bool:
    """Whether vLLM listens at a publisher endpoint it was given so; otherwise it connects there.

    A concrete address that is not the local machine's is one it bound and resolved itself.
    """
    if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        return True
    return not is_local(_split(endpoint)[0])


def _reachable(source: _Source, host: str) -> EventSource:
    assert source.endpoint is not None  # noqa: S101 - the caller leaves out those without
    connects = not engine_binds(source.endpoint)
    endpoint = source.endpoint if connects else outside_address(source.endpoint, host)
    replay = source.replay_endpoint and outside_address(source.replay_endpoint, host)
    lost = [
        given
        for given, seen in ((source.endpoint, endpoint), (source.replay_endpoint, replay))
        if given is not None and seen is None
    ]
    return EventSource(
        endpoint=endpoint,
        replay_endpoint=replay or None,
        topic=source.topic or "",
        buffer_batches=source.buffer_steps,
        engine_connects=connects,
        unreachable=", ".join(lost) or None,
    )


def outside_address(endpoint: str, host: str) -> str | None:
    """`endpoint` as reached from here, when the engine's HTTP server is reached at `host`.

    Wildcards, loopback and link-local addresses mean the engine's machine. None: only reachable on that machine, and
    that is another one.
    """
    if endpoint.startswith("inproc://"):
        return None
    if endpoint.startswith("ipc://"):
        return endpoint if is_local(host) else None
    own, port = _split(endpoint)
    if not port.isdigit():
        return None
    if own in _WILDCARDS or is_local(own):
        own = host
    return f"tcp://[{own}]:{port}" if ":" in own else f"tcp://{own}:{port}"


def _split(endpoint: str) -> tuple[str, str]:
    own, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return own.strip("[]"), port


def is_local(host: str) -> bool:
    """Whether `host` means something else on every machine."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_link_local
