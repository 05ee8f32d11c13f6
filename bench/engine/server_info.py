"""`/server_info` of vLLM's dev mode: the parts of its configuration that a gateway can learn something from."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.engine.server import FakeVllm


def answer(server: "FakeVllm", config_format: str) -> dict[str, Any]:
    """The configuration as vLLM's one-line text (which names no KV connector) or as JSON."""
    config = server.config
    shown = _as_json(server) if config_format == "json" else _as_text(server)
    env = {
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": int(config.keepalive_timeout_s),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": config.nixl_host or config.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": server.nixl_ports[0],
        "VLLM_SERVER_DEV_MODE": True,
    }
    return {"vllm_config": shown, "vllm_env": env, "system_env": {}}


def _as_text(server: "FakeVllm") -> str:
    config = server.config
    root = config.root or config.model
    pairs = {
        "model": repr(root),
        "speculative_config": None,
        "tokenizer": repr(root),
        "dtype": config.dtype,
        "max_seq_len": config.engine.max_model_len,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": 1,
        "data_parallel_size": config.data_parallel_size,
        "quantization": None,
        "kv_cache_dtype": config.kv_cache_dtype,
        "device_config": "cuda",
        "seed": config.engine.seed,
        "served_model_name": config.model,
        "enable_prefix_caching": config.engine.enable_prefix_caching,
        "enable_chunked_prefill": True,
    }
    return ", ".join(f"{name}={value}" for name, value in pairs.items())


def _as_json(server: "FakeVllm") -> dict[str, Any]:
    config = server.config
    engine = config.engine
    connector = (
        {
            "kv_connector": config.kv_connector_name,
            "engine_id": server.nixl[0].engine_id,
            "kv_buffer_device": "cuda",
            "kv_role": config.kv_role,
            "kv_port": 14579,
            "kv_connector_extra_config": {"kv_lease_duration": config.kv_lease_s},
            "kv_connector_module_path": None,
            "enable_permute_local_kv": False,
            "kv_load_failure_policy": config.kv_load_failure_policy,
        }
        if server.nixl
        else None
    )
    return {
        "model_config": {
            "model": config.root or config.model,
            "dtype": config.dtype,
            "max_model_len": engine.max_model_len,
            "served_model_name": config.model,
        },
        "cache_config": {
            "block_size": engine.block_size,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "num_gpu_blocks": engine.num_gpu_blocks,
        },
        "parallel_config": {
            "tensor_parallel_size": config.tensor_parallel_size,
            "pipeline_parallel_size": 1,
            "data_parallel_size": config.data_parallel_size,
        },
        "scheduler_config": {
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "disable_hybrid_kv_cache_manager": False,
        },
        "attention_config": {"backend": config.attention_backend},
        "speculative_config": None,
        "kv_transfer_config": connector,
    }
