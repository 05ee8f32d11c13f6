"""Which paths are served, and how. What is not listed is not forwarded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_POST = frozenset({"POST", "OPTIONS"})
_GET = frozenset({"GET", "OPTIONS"})


class Route(NamedTuple):
    """`tokens`: how the body's prompt is read (a kind of `TokenService.tokens_for`); None: placed by load alone.
    `queued`: the model has to run for it, so that it waits while no worker has room; `generates`: it writes text, of
    no limit that we read; `takes_salt`: engines read `cache_salt` in it, so that its tenant's cache can be kept apart.
    """

    methods: frozenset[str]
    tokens: str | None = None
    queued: bool = True
    generates: bool = False
    takes_salt: bool = True


_BY_PREFIX = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/inference/v1/generate": "generate",
}
_BY_LOAD = (
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/v1/classify",
    "/score",
    "/v1/score",
    "/generative_scoring",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
)
_UNREAD = ("/v1/chat/completions/batch", "/cohere/v2/chat")
_SALTLESS = frozenset(
    {"/cohere/v2/chat", "/v2/embed", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"}
)
"""vLLM 0.32 and vLLM-Omni drop a `cache_salt` there."""
_BY_SERVER = (
    "/v1/messages/count_tokens",
    *(f"{path}/{verb}" for path in _BY_PREFIX if path.startswith("/v1/") for verb in ("render", "derender")),
    "/cohere/v2/chat/render",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
)
"""What an engine's server does by itself."""

ROUTES: dict[str, Route] = {
    **{path: Route(_POST, kind) for path, kind in _BY_PREFIX.items()},
    **{path: Route(_POST, takes_salt=path not in _SALTLESS) for path in _BY_LOAD},
    **{path: Route(_POST, generates=True, takes_salt=path not in _SALTLESS) for path in _UNREAD},
    **{path: Route(_POST, queued=False) for path in _BY_SERVER},
    "/version": Route(_GET, queued=False),
    "/tokenizer_info": Route(_GET, queued=False),
}


class Control(NamedTuple):
    """An engine-admin path. `clears`: the engine's prefix cache is empty afterwards; `models`: what it serves
    changed.
    """

    method: str
    path: str
    clears: bool = False
    models: bool = False

    def clears_cache(self, query: Mapping[str, str]) -> bool:
        """Whether the prefix cache is empty after it was carried out with these parameters."""
        return self.clears and query.get("clear_cache", "true").lower() != "false"


def _controls() -> dict[str, Control]:
    table = [
        Control("POST", "/sleep", clears=True),
        Control("POST", "/wake_up"),
        Control("GET", "/is_sleeping"),
        Control("POST", "/reset_prefix_cache", clears=True),
        Control("POST", "/reset_mm_cache"),
        Control("POST", "/reset_encoder_cache"),
        Control("POST", "/pause", clears=True),
        Control("POST", "/resume"),
        Control("GET", "/is_paused"),
        Control("POST", "/abort_requests"),
        Control("POST", "/v1/load_lora_adapter", models=True),
        Control("POST", "/v1/unload_lora_adapter", models=True),
        Control("POST", "/start_profile"),
        Control("POST", "/stop_profile"),
        Control("GET", "/server_info"),
        Control("GET", "/kv_event_sources"),
        Control("GET", "/load"),
        Control("GET", "/version"),
    ]
    return {control.path: control for control in table} | {
        control.path.removeprefix("/v1"): control for control in table if control.models
    }


CONTROLS = _controls()
"""On the admin port only."""

WORKERS = "/admin/workers"
RESET = "/admin/index/reset"
"""Of the admin port, too."""
