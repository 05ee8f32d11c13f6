"""A worker's answers -> what it is, and what of that is wrong. Pure, so it runs on recorded answers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from gateway.doctor.catalogue import finding
from gateway.doctor.fetch import Answer, Fault
from gateway.doctor.findings import Finding
from gateway.engine.capabilities import EventSource, Models, parse_event_sources, parse_models, parse_version
from gateway.engine.metrics import parse_metrics
from gateway.engine.settings import Settings
from gateway.engine.transfers import NixlCounts, parse_nixl
from gateway.handoff.compatible import Side
from scorer.types import EngineStats, Role

PATHS = ("/health", "/version", "/v1/models", "/metrics", "/kv_event_sources")

OLDEST = (0, 11)
"""The first vLLM whose event format was read (facts: array events since 0.11)."""
NEWEST = (0, 32)
"""The last vLLM that was run against."""
COUNTS_NIXL = (0, 22)
"""The first vLLM whose connector was read and counts its transfers; of older ones nothing is concluded."""
_NO_SUCH_PATH = (404, 405, 501)
_NUMBERS = re.compile(r"(\d+)\.(\d+)")
_ENGINE = re.compile(r'^vllm:cache_config_info\{[^\n]*?\bengine="(\d+)"', re.MULTILINE)


class KvShape(msgspec.Struct, frozen=True):
    """What makes a transfer's descriptors: one layer of one block each. `layer_bytes_per_token`: on one GPU."""

    layers: int
    layer_bytes_per_token: float


class Identity(msgspec.Struct, kw_only=True):
    """What one worker is. None: it does not say. `sources` by rank; `engines` are the ranks its metrics name.
    `announced`: where a prefill of its own said that its NIXL side channel is; `nixl_address`: where we are told that
    it is.
    """

    url: str
    role: Role = Role.BOTH
    version: str | None = None
    models: Models | None = None
    stats: EngineStats | None = None
    asleep: bool = False
    healthy: bool = True
    usable: bool = True
    """Whether it is a vLLM that can be sent prompts."""
    sources: dict[int, EventSource] | None = None
    engines: tuple[int, ...] = ()
    kv_cache_dtype: str | None = None
    settings: Settings | None = None
    nixl: NixlCounts | None = None
    kv_shape: KvShape | None = None
    announced: tuple[str, int] | None = None
    nixl_address: str | None = None

    @property
    def n_ranks(self) -> int:
        return max(len(self.engines), 1)

    @property
    def hands_over(self) -> bool | None:
        """Whether it has a NIXL connector whose blocks are fetched (not one that pushes them). None: not told."""
        if self.settings is not None and self.settings.connector is not None:
            return self.settings.transfer_mode == "pull"
        numbers = _NUMBERS.match(self.version or "")
        may_count_nothing = numbers is not None and (int(numbers[1]), int(numbers[2])) < COUNTS_NIXL
        if self.stats is None or (self.nixl is None and may_count_nothing):
            return None
        return self.nixl is not None

    @property
    def side(self) -> Side:
        """What another engine compares when the two shake hands."""
        return Side(
            name=self.url,
            version=self.version,
            model_path=None if self.models is None else self.models.root,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=None if self.stats is None else self.stats.block_size,
            hands_over=self.hands_over,
            settings=self.settings,
        )


def identify(url: str, answers: Mapping[str, Answer | Fault], role: Role = Role.BOTH) -> tuple[Identity, list[Finding]]:
    """`answers` by path of PATHS; `role` is the worker's in our configuration."""
    me = Identity(url=url, role=role)
    faults = [answer for answer in answers.values() if isinstance(answer, Fault)]
    if len(faults) == len(answers) and faults:
        me.usable = False
        worst = next((fault for fault in faults if fault.code != "timeout"), faults[0])
        return me, [finding(worst.code, url, worst.sentence)]
    got = {path: answer for path, answer in answers.items() if isinstance(answer, Answer)}
    version, problem = _version(got.get("/version"))
    text = _text(got.get("/metrics"))
    if version is None and "vllm" not in text and "vllm" not in _text(got.get("/v1/models")):
        me.usable = False
        return me, [finding("not-vllm", url, f"it answers HTTP, but is no vLLM server: {problem}")]
    me.version = version
    found = [*_versions(me), *(finding(fault.code, url, fault.sentence) for fault in _distinct(faults))]
    found += _health(me, got.get("/health"))
    found += _models(me, got.get("/v1/models"))
    found += _metrics(me, got.get("/metrics"), text)
    _sources(me, got.get("/kv_event_sources"))
    me.usable = me.healthy and not me.asleep and bool(me.models and me.models.models)
    return me, found


def _distinct(faults: list[Fault]) -> list[Fault]:
    return list({(fault.code, fault.sentence): fault for fault in faults}.values())


def _text(answer: Answer | None) -> str:
    return answer.body.decode(errors="replace") if answer is not None and answer.status == 200 else ""


def _version(answer: Answer | None) -> tuple[str | None, str]:
    if answer is None:
        return None, "/version cannot be read"
    if answer.status != 200:
        return None, f"/version has status {answer.status}"
    try:
        return parse_version(answer.body), ""
    except msgspec.MsgspecError:
        return None, "/version is not what vLLM answers"


def _versions(me: Identity) -> list[Finding]:
    numbers = _NUMBERS.match(me.version or "")
    if numbers is None or (me.version or "").startswith("0.1.dev"):
        said = f"says {me.version!r}" if me.version else "does not say its version"
        return [finding("version-unknown", me.url, f"it {said}")]
    version = (int(numbers[1]), int(numbers[2]))
    if version < OLDEST:
        return [finding("version-unsupported", me.url, f"it is vLLM {me.version}")]
    reachable = finding("reachable", me.url, f"vLLM {me.version} answers")
    if version > NEWEST:
        newest = ".".join(map(str, NEWEST))
        return [reachable, finding("version-newer", me.url, f"it is vLLM {me.version}; {newest} is the newest tested")]
    return [reachable]


def _health(me: Identity, answer: Answer | None) -> list[Finding]:
    if answer is None or answer.status == 200 or answer.status in _NO_SUCH_PATH:
        return []
    me.healthy = False
    return [finding("unhealthy", me.url, f"/health has status {answer.status}")]


def _models(me: Identity, answer: Answer | None) -> list[Finding]:
    if answer is None:
        return []
    if answer.status in (401, 403):
        return [finding("unauthorized", me.url, f"/v1/models has status {answer.status}")]
    try:
        me.models = parse_models(answer.body) if answer.status == 200 else None
    except msgspec.MsgspecError:
        me.models = None
    if me.models is None or not me.models.models:
        said = f"has status {answer.status}" if answer.status != 200 else "lists no model"
        return [finding("models-unreadable", me.url, f"/v1/models {said}")]
    name, *aliases = me.models.models
    parts = [f"model {name}"]
    if aliases:
        parts.append(f"also called {', '.join(aliases)}")
    if me.models.max_model_len:
        parts.append(f"up to {me.models.max_model_len} tokens")
    if me.models.adapters:
        parts.append(f"adapters {', '.join(adapter.name for adapter in me.models.adapters)}")
    return [finding("models", me.url, "; ".join(parts))]


def _metrics(me: Identity, answer: Answer | None, text: str) -> list[Finding]:
    if answer is None:
        return []
    if "vllm:" not in text:
        said = f"has status {answer.status}" if answer.status != 200 else "holds no series of vLLM"
        return [finding("metrics-unreadable", me.url, f"/metrics {said}")]
    scrape = parse_metrics(text, 0.0)
    stats = me.stats = scrape.stats
    me.engines = tuple(sorted({int(engine) for engine in _ENGINE.findall(text)}))
    me.asleep = scrape.asleep is True
    me.kv_cache_dtype = scrape.kv_cache_dtype
    me.nixl = parse_nixl(text)
    parts = [f"block size {stats.block_size or 'unknown'}"]
    parts.append(f"KV capacity {stats.kv_capacity_tokens or 'unknown'} tokens")
    if me.n_ranks > 1:
        parts.append(f"{me.n_ranks} data-parallel ranks")
    if stats.process_start_s is not None:
        parts.append(f"process started at {stats.process_start_s:.0f} (Unix)")
    found = [finding("metrics", me.url, ", ".join(parts))]
    if stats.prefix_caching is False:
        found.append(finding("prefix-caching-off", me.url, "prefix caching is off"))
    elif stats.prefix_caching is None:
        found.append(finding("prefix-caching-unknown", me.url, "the metrics have no cache_config_info"))
    if me.asleep:
        found.append(finding("asleep", me.url, "it is in sleep mode"))
    return found


def _sources(me: Identity, answer: Answer | None) -> None:
    if answer is None or answer.status != 200:
        return
    try:
        me.sources = parse_event_sources(answer.body, me.url)
    except (msgspec.MsgspecError, ValueError):
        me.sources = None
