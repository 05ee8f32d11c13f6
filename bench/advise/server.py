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
    """`hardware.kv_bytes_per_token` is what a transfer moves, all ranks together, on average over a usual sequence of
    `context_tokens`; `kv_source` says where `kv_tokens` comes from, `is_estimated` that it is of the memory.
    """

    model: Model
    gpu: Gpu
    tensor_parallel: int
    value_bytes: int
    hardware: Hardware
    times: Scaled
    kv_source: str
    context_tokens: int = 1
    is_estimated: bool = False

    def kv_bytes(self, tokens: int) -> int:
        """Of one sequence, all ranks together."""
        return round(self.model.kv_bytes(tokens, self.value_bytes) * self.model.copies(self.tensor_parallel))

    def kv_tokens(self, sequence_tokens: int) -> int:
        """How many it holds in sequences so long: windows make room in long ones. As given, where they were given."""
        if not (self.is_estimated and self.model.layers.windowed):
            return self.hardware.kv_tokens
        usual, these = (
            self.model.kv_bytes_per_token(self.value_bytes, n) for n in (self.context_tokens, sequence_tokens)
        )
        return int(self.hardware.kv_tokens * usual / these)

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
    is_estimated = kv_tokens is None
    if kv_tokens is None:
        memory_bytes = memory_share * gpu.memory_bytes * tensor_parallel
        left_bytes = memory_bytes - model.weights.bytes
        if left_bytes < context_tokens * held_bytes:
            room = (
                f"only {left_bytes / 1e9:.0f} GB, and a request of the traffic's mean length ({context_tokens:,} "
                f"tokens) takes {context_tokens * held_bytes / 1e9:,.0f} GB"
                if left_bytes > 0
                else "no room for KV"
            )
            raise InputError(
                f"the weights (about {model.weights.bytes / 1e9:.0f} GB) leave {room} in {memory_share:g} of "
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
    return ServerPlan(
        model, gpu, tensor_parallel, value_bytes, hardware, times, kv_source, context_tokens, is_estimated
    )
