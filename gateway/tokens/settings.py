"""How prompts become token ids: every knob, with its unit and its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Mode = Literal["auto", "local", "engine", "estimate"]
ContentFormat = Literal["auto", "string", "openai"]

ANY_MODEL = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """Defaults serve without configuration: the model card's local directory, else the engine, else an estimate.

    `tokenizer_paths`: model name (or "*") -> tokenizer.json or model directory; beats the engine's model card.
    `chat_template_path`, `content_format`, `default_chat_template_kwargs`, `exclude_tools_when_tool_choice_none`,
    `trust_request_chat_template`: set them as the engine's flags of the same names are set.
    `threads`, `max_queued`: local tokenizer threads, and requests that run or wait for one at most.
    `engine_budget_s`: longest wait for ``/tokenize``, beside `engine_s_per_token` per estimated token. A prompt whose
    length alone needs more than `engine_length_max_s` is not asked for at all.
    `check_rate`: share of locally tokenised prompts that are compared with the engine in the background, 0..1.
    """

    mode: Mode = "auto"
    tokenizer_paths: Mapping[str, str] = field(default_factory=dict)
    chat_template_path: str | None = None
    content_format: ContentFormat = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    trust_request_chat_template: bool = False
    threads: int = 2
    max_queued: int = 64
    local_budget_s: float = 1.0
    max_prompt_bytes: int = 16 << 20
    cache_bytes: int = 32 << 20
    engine_budget_s: float = 0.020
    # Measured: 5 to 6 us per token for /tokenize of vLLM 0.32 on an H200 host.
    engine_s_per_token: float = 6e-6
    engine_length_max_s: float = 0.250
    engine_max_inflight: int = 32
    breaker_failures: int = 5
    breaker_open_s: float = 1.0
    breaker_open_max_s: float = 30.0
    check_rate: float = 0.01
    check_budget_s: float = 10.0
    check_retry_s: float = 5.0
    check_retry_max_s: float = 60.0
    bytes_per_token: float = 4.0

    def __post_init__(self) -> None:
        for name in ("threads", "max_queued", "max_prompt_bytes", "engine_max_inflight", "breaker_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"tokens.{name} must be at least 1")
        for name in (
            "local_budget_s",
            "engine_budget_s",
            "breaker_open_s",
            "check_budget_s",
            "check_retry_s",
            "bytes_per_token",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"tokens.{name} must be greater than 0")
        if not 0 <= self.check_rate <= 1:
            raise ValueError("tokens.check_rate must be between 0 and 1")
        for name in ("engine_s_per_token", "engine_length_max_s", "cache_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"tokens.{name} must not be negative")
