"""One server: a model on some GPUs, as the simulator takes it."""

from __future__ import annotations

from dataclasses import dataclass

from bench.advise.errors import InputError
from bench.advise.gpu import Gpu
from bench.advise.model_config import Model
from bench.advise.scale import Scaled, scaled
from bench.sim.hardware import Hardware


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """`hardware.kv_bytes_per_token` is what a transfer moves, all ranks together; `kv_source` says where `kv_tokens`
    comes from.
    """

    model: Model
    gpu: Gpu
    tensor_parallel: int
    value_bytes: int
    hardware: Hardware
    times: Scaled
    kv_source: str

    @property
    def kv_layers(self) -> int:
        return self.model.layers.full + self.model.layers.windowed

    @property
    def rank_layer_bytes_per_token(self) -> float:
        """KV of one token in one layer on one rank."""
        model = self.model
        return model.kv_values_per_layer * self.value_bytes * model.copies(self.tensor_parallel) / self.tensor_parallel


def plan_server(
    model: Model,
    gpu: Gpu,
    *,
    tensor_parallel: int,
    value_bytes: int,
    context_tokens: int,
    memory_share: float,
    kv_tokens: int | None = None,
    kv_source: str = "as given",
    chunk_tokens: int = 8192,
    max_num_seqs: int = 256,
) -> ServerPlan:
    """`context_tokens`: of a usual sequence. `kv_tokens` None: `memory_share` of the memory less the weights. Raises
    InputError when the model does not fit.
    """
    layers = model.layers.full + model.layers.windowed
    if not layers:
        raise InputError("the model has no attention layer: there is no KV to hand over")
    if tensor_parallel > 1 and model.heads % tensor_parallel:
        raise InputError(f"--tensor-parallel {tensor_parallel} does not divide the model's {model.heads} heads")
    held_bytes = model.kv_bytes_per_token(value_bytes, context_tokens) * model.copies(tensor_parallel)
    if kv_tokens is None:
        memory_bytes = memory_share * gpu.memory_bytes * tensor_parallel
        left_bytes = memory_bytes - model.weights.bytes
        if left_bytes < context_tokens * held_bytes:
            raise InputError(
                f"the weights (about {model.weights.bytes / 1e9:.0f} GB) leave no room for KV in {memory_share:g} of "
                f"{tensor_parallel} x {gpu.memory_bytes / 1e9:.0f} GB ({gpu.name}); raise --tensor-parallel, take a "
                "larger --gpu, or give --kv-tokens"
            )
        kv_tokens = int(left_bytes / held_bytes)
        kv_source = (
            f"{memory_share:g} of the memory less the weights ({model.weights.parameters / 1e9:.1f} G parameters, "
            f"{model.weights.bytes / 1e9:.0f} GB, estimated from the config)"
        )
    times = scaled(model, gpu, tensor_parallel, value_bytes, context_tokens)
    hardware = Hardware(times.timing, layers, round(held_bytes), kv_tokens, chunk_tokens, max_num_seqs)
    return ServerPlan(model, gpu, tensor_parallel, value_bytes, hardware, times, kv_source)
