"""How a fake server is set up, and the faults a test can switch on while it runs."""

from dataclasses import dataclass, field, replace
from typing import Literal

from bench.engine import tokenizer
from bench.engine.events import EVENT_FORMATS, EventFormat
from bench.engine.request import EngineConfig

ReplayMode = Literal["ok", "off", "truncated"]


@dataclass(slots=True)
class Faults:
    """Mutable switches; every one is off by default. HTTP faults hit paths that begin with one of `paths`."""

    paths: tuple[str, ...] = ("/v1/",)
    stall: bool = False  # answer nothing and generate nothing, but keep connections open
    die_after_chunks: int | None = None  # cut the connection of a stream after that many chunks
    error_rate: float = 0.0  # share of requests answered with `error_status` at once
    error_status: int = 500
    reset_rate: float = 0.0  # share of requests whose connection is reset (RST) before an answer
    headers_delay_s: float = 0.0  # wait that long before the response headers
    drop_batches: int = 0  # lose that many of the next event batches on the wire (still replayable)
    replay: ReplayMode = "ok"  # off: no answer; truncated: half of the batches and no end marker
    replay_delay_s: float = 0.0

    def update(self, values: dict[str, object]) -> None:
        """Set switches by name; ValueError for an unknown one."""
        for name, value in values.items():
            if name not in self.__dataclass_fields__:
                raise ValueError(f"no fault {name!r}; there is: {', '.join(self.__dataclass_fields__)}")
            setattr(self, name, tuple(value) if isinstance(value, list) else value)


def _toy_engine() -> EngineConfig:
    return EngineConfig(generated_ids=tokenizer.GENERATED_IDS)


@dataclass(frozen=True, kw_only=True)
class FakeVllmConfig:
    """One fake `vllm serve`. Endpoints follow vLLM's rules: bound if they contain `*` or `::` or are ipc/inproc, else
    connected. `*` is bound on `host`, port 0 picks a free port; data-parallel rank r uses port + r.

    `events_endpoint=None` publishes nothing. `event_format` and `replay_with_topic` select what older versions sent.
    Without `mean_output_tokens` the model never stops by itself, except where a chat request names no limit (then after
    64 tokens on average). `kv_load_failure_policy` is what a decode side does if a pull fails.
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
    mean_output_tokens: float | None = None
    keepalive_timeout_s: float = 5.0  # uvicorn's default: an idle connection is closed after it
    kv_connector: bool = False  # answer do_remote_decode / do_remote_prefill as NixlConnector does
    kv_lease_s: float = 30.0
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_pull_base_s: float = 0.002
    kv_pull_per_block_s: float = 4e-6
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise ValueError(f"data_parallel_size must be at least 1, got {self.data_parallel_size}")
        if self.event_format not in EVENT_FORMATS:
            raise ValueError(f"event_format must be one of {', '.join(EVENT_FORMATS)}, got {self.event_format!r}")

    def with_engine(self, **changes: object) -> "FakeVllmConfig":
        """The same server with some of its engine's settings changed."""
        return replace(self, engine=replace(self.engine, **changes))  # type: ignore[arg-type]
