"""Writes a random LoRA adapter in PEFT's file format, without needing PEFT; run in the engine venv.

usage: make_lora.py MODEL_DIR OUT_DIR [--rank 4] [--seed 1]
"""

import argparse
import json
import pathlib

import torch
from safetensors.torch import save_file

TARGETS = {"q_proj": "num_attention_heads", "v_proj": "num_key_value_heads"}
# Strong enough that the adapter's greedy text differs from the base model's.
WEIGHT_STD = 0.3


def make_lora(model: pathlib.Path, out: pathlib.Path, rank: int, seed: int) -> None:
    """Write adapter_config.json and adapter_model.safetensors for the Llama in ``model``."""
    config = json.loads((model / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for target, heads in TARGETS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            width = config[heads] * config["head_dim"]
            shapes = {"lora_A": (rank, config["hidden_size"]), "lora_B": (width, rank)}
            for half, shape in shapes.items():
                tensors[f"{name}.{half}.weight"] = torch.randn(shape, generator=generator) * WEIGHT_STD
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_rslora": False,
    }
    (out / "adapter_config.json").write_text(json.dumps(adapter, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    make_lora(args.model, args.out, args.rank, args.seed)
