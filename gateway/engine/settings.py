"""How an engine is set up, as its page for development (`/server_info`, VLLM_SERVER_DEV_MODE=1) tells.

vLLM 0.32 gives its configuration as JSON when asked for `config_format=json`, and as one line of text else; the text
names no KV connector.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

PATH = "/server_info?config_format=json"
DEFAULT_LEASE_S = 30.0
"""vLLM's `kv_lease_duration` where nobody sets it."""
_NIXL = "Nixl"
_PUSH = "NixlPushConnector"
_DRAFTS = ("eagle", "eagle3", "mtp", "dflash", "dspark")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """None: not told. Those of the connector are NixlConnector's, wherever it stands in a MultiConnector."""

    dtype: str | None = None
    tensor_parallel: int | None = None
    attention_backend: str | None = None
    draft: str | None = None
    """A draft model that looks at hidden states, and so takes part in what is handed over; "none" if there is none."""
    hybrid_manager: bool | None = None
    connector: str | None = None
    """vLLM's name of it; "none" where there is none."""
    kv_role: str | None = None
    lease_s: float | None = None
    load_failure_policy: str | None = None
    backends: str | None = None
    cross_layer_blocks: bool | None = None
    side_channel_host: str | None = None
    side_channel_port: int | None = None
    """Of rank 0; rank r uses the r-th after it."""

    @property
    def transfer_mode(self) -> str | None:
        """Only engines of the same one understand each other."""
        if self.connector is None or not self.connector.startswith(_NIXL):
            return None
        return "push" if self.connector == _PUSH else "pull"


class _ServerInfo(msgspec.Struct):
    vllm_config: str | dict[str, Any]
    vllm_env: dict[str, Any] = {}


_server_info = msgspec.json.Decoder(_ServerInfo)
_TEXT = {
    name: re.compile(rf"(?:^|[ ,(]){name}=([\w.]+)") for name in ("dtype", "tensor_parallel_size", "speculative_config")
}


def parse_settings(body: bytes) -> Settings:
    """`/server_info` in either form. Raises msgspec.MsgspecError for what is neither."""
    info = _server_info.decode(body)
    host, port = (
        _text(info.vllm_env, "VLLM_NIXL_SIDE_CHANNEL_HOST"),
        _size(info.vllm_env, "VLLM_NIXL_SIDE_CHANNEL_PORT"),
    )
    if isinstance(info.vllm_config, str):
        told = {name: found[1] for name, shown in _TEXT.items() if (found := shown.search(info.vllm_config))}
        return Settings(
            dtype=told.get("dtype"),
            tensor_parallel=int(text) if (text := told.get("tensor_parallel_size", "")).isdigit() else None,
            draft="none" if told.get("speculative_config") == "None" else None,
            side_channel_host=host,
            side_channel_port=port,
        )
    config = info.vllm_config
    hybrid_off = _section(config, "scheduler_config").get("disable_hybrid_kv_cache_manager")
    settings = Settings(
        dtype=_text(_section(config, "model_config"), "dtype"),
        tensor_parallel=_size(_section(config, "parallel_config"), "tensor_parallel_size"),
        attention_backend=_text(_section(config, "attention_config"), "backend"),
        draft=_draft(config),
        hybrid_manager=not hybrid_off if isinstance(hybrid_off, bool) else None,
        side_channel_host=host,
        side_channel_port=port,
    )
    return _with_connector(settings, config)


def _with_connector(settings: Settings, config: Mapping[str, Any]) -> Settings:
    if "kv_transfer_config" not in config:
        return settings
    transfer = _section(config, "kv_transfer_config")
    children = _section(transfer, "kv_connector_extra_config").get("connectors")
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict) and str(child.get("kv_connector")).startswith(_NIXL):
            transfer = {**transfer, **child}
    extra = _section(transfer, "kv_connector_extra_config")
    name = _text(transfer, "kv_connector") or "none"
    lease_s = extra.get("kv_lease_duration", DEFAULT_LEASE_S)
    backends, cross = extra.get("backends", ["UCX"]), extra.get("enable_cross_layers_blocks", False)
    if not name.startswith(_NIXL):
        return msgspec.structs.replace(settings, connector=name, kv_role=_text(transfer, "kv_role"))
    return msgspec.structs.replace(
        settings,
        connector=name,
        kv_role=_text(transfer, "kv_role"),
        lease_s=float(lease_s) if type(lease_s) in (int, float) else None,
        load_failure_policy=_text(transfer, "kv_load_failure_policy"),
        backends=", ".join(sorted(map(str, backends))) if isinstance(backends, list) else None,
        cross_layer_blocks=str(cross).lower() in ("true", "1"),
    )


def _draft(config: Mapping[str, Any]) -> str | None:
    if "speculative_config" not in config:
        return None
    speculative = _section(config, "speculative_config")
    method = _text(speculative, "method") or ""
    if method not in _DRAFTS:
        return "none"
    return f"{method} {_text(speculative, 'model') or ''}".strip()


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _text(config: Mapping[str, Any], name: str) -> str | None:
    found = config.get(name)
    return found if isinstance(found, str) and found else None


def _size(config: Mapping[str, Any], name: str) -> int | None:
    found = config.get(name)
    return found if type(found) is int and found > 0 else None
