"""How a fake server is set up, and the faults a test can switch on while it runs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bench.engine import tokenizer
from bench.engine.events import EVENT_FORMATS, EventFormat
from bench.engine.request import EngineConfig

ReplayMode = Literal["ok", "off", "truncated"]
Leg = Literal["prefill", "decode", "plain"]
Offer = dict[str, Any]


@dataclass(slots=True)
class Faults:
    """Mutable switches; every one is off by default. HTTP faults hit paths that begin with one of `paths`, and if `leg`
    is set only requests that are this leg of a prefill/decode hand-off (or no leg at all: plain)."""

    paths: tuple[str, ...] = ("/v1/",)
    leg: Leg | None = None
    stall: bool = False  # answer nothing and generate nothing, but keep connections open
    die_after_chunks: int | None = None  # cut the connection of a stream after that many chunks
    error_rate: float = 0.0  # share of requests answered with `error_status` at once
    error_status: int = 500
    fail_first: int = 0  # answer that many of the next requests with `error_status`, then work again
    reset_rate: float = 0.0  # share of requests whose connection is reset (RST) before an answer
    headers_delay_s: float = 0.0  # wait that long before the response headers
    prefill_delay_s: float = 0.0  # wait that long before a prefill leg reaches the engine
    answer: str | None = None  # do the work, then answer 200 with this body (no JSON, or another one)
    cut_answers: bool = False  # do the work, then cut the connection in the middle of an answer that is no stream
    offer: Callable[[Offer], Offer | None] | Offer | None = None  # replaces or is merged into a prefill's offer
    offer_without: tuple[str, ...] = ()  # keys taken out of a prefill's offer
    drop_batches: int = 0  # lose that many of the next event batches on the wire (still replayable)
    replay: ReplayMode = "ok"  # off: no answer; truncated: half of the batches and no end marker
    replay_delay_s: float = 0.0

    def update(self, values: dict[str, object]) -> None:
        """Set switches by name; ValueError for an unknown one."""
        for name, value in values.items():
            if name not in self.__dataclass_fields__:
                raise ValueError(f"no fault {name!r}; there is: {', '.join(self.__dataclass_fields__)}")
            setattr(self, name, tuple(value) if isinstance(value, list) else value)

    def hit(self, path: str, leg: Leg) -> bool:
        return path.startswith(self.paths) and self.leg in (None, leg)

    def tampered(self, offer: Offer | None) -> Offer | None:
        """What a prefill answers instead of its `kv_transfer_params`."""
        if callable(self.offer):
            offer = None if offer is None else self.offer(offer)
        elif self.offer is not None:
            offer = {**(offer or {}), **self.offer}
        return offer and {name: value for name, value in offer.items() if name not in self.offer_without}


def _toy_engine() -> EngineConfig:
    return EngineConfig(generated_ids=tokenizer.GENERATED_IDS)


@dataclass(frozen=True, kw_only=True)
class FakeVllmConfig:
    """One fake `vllm serve`. Endpoints follow vLLM's rules: bound if they contain `*` or `::` or are ipc/inproc, else
    connected. `*` is bound on `host`, port 0 picks a free port; data-parallel rank r uses port + r.

    `events_endpoint=None` publishes nothing. `event_format` and `replay_with_topic` select what older versions sent.
    Without `mean_output_tokens` the model never stops by itself, except where a chat request names no limit (then after
    64 tokens on average).

    With `kv_connector` it takes part in prefill/decode hand-offs as NixlConnector does. `nixl_host` and `nixl_port` are
    its side channel's address (None: the server's host, 0: a port of its own; rank r uses port + r), which only servers
    of the same process find; others can connect to it, and hear nothing. A dead peer that was never reached costs vLLM
    5 s, here `kv_handshake_timeout_s`.
    `FakeVllm.requests` holds the last `record_requests` inference requests.
    """

    model: str = "fake-model"
    aliases: tuple[str, ...] = ()
    root: str | None = None
    lora_modules: dict[str, str] = field(default_factory=dict)  # adapter name -> path
    engine: EngineConfig = field(default_factory=_toy_engine)
    data_parallel_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    events_endpoint: str | None = "tcp://*:0"
    replay_endpoint: str | None = "tcp://*:0"
    topic: str = ""
    event_format: EventFormat = "map"
    replay_with_topic: bool = True
    buffer_steps: int = 10_000
    hwm: int = 100_000
    version: str = "0.32.0"
    prompt_tokens_details: bool = True
    dev_mode: bool = True
    request_id_headers: bool = True
    store_responses: bool = False  # VLLM_ENABLE_RESPONSES_API_STORE
    mean_output_tokens: float | None = None
    image_tokens: int = 0  # what an image takes; 0: a text model
    keepalive_timeout_s: float = 5.0  # uvicorn's default: an idle connection is closed after it
    dtype: str = "torch.bfloat16"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1  # told only
    attention_backend: str | None = None  # told, and compared by engines that shake hands
    clock_ahead_s: float = 0.0  # of the Date header
    kv_connector: bool = False
    kv_connector_name: str = "NixlConnector"  # told only
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"  # told, not enforced (as in vLLM)
    kv_engine_id: str | None = None  # None: a new one with every start
    kv_lease_s: float = 30.0
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_handshake_s: float = 0.0
    kv_handshake_timeout_s: float = 0.05
    kv_pull_base_s: float = 0.002
    kv_pull_per_block_s: float = 4e-6
    kv_bytes_per_token: int = 131_072  # of all layers; Llama 3 8B in bf16
    kv_layers: int = 32
    nixl_host: str | None = None
    nixl_port: int = 0
    record_requests: int = 256
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise ValueError(f"data_parallel_size must be at least 1, got {self.data_parallel_size}")
        if self.event_format not in EVENT_FORMATS:
            raise ValueError(f"event_format must be one of {', '.join(EVENT_FORMATS)}, got {self.event_format!r}")

    def with_engine(self, **changes: object) -> "FakeVllmConfig":
        """The same server with some of its engine's settings changed."""
        return replace(self, engine=replace(self.engine, **changes))  # type: ignore[arg-type]
