"""Writes a tiny Llama with random weights, a byte-level BPE tokenizer and a chat template; run in the engine venv.

usage: make_model.py OUT_DIR [--hidden 128] [--layers 2] [--vocab 2048] [--context-tokens 4096] [--seed 0]

No network. The same package versions and seed give the same files, so greedy text and block hashes repeat. The model
says nothing sensible; it makes an engine do real scheduling, caching and eviction at some milliseconds per step.
``--hidden 512 --layers 6`` makes a prefill that a test can see (about 0.4 ms per token on one core).
"""

import argparse
import json
import pathlib
import shutil
import sysconfig

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = pathlib.Path(__file__).with_name("chat_template.jinja")
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CORPUS = ("argparse.py", "inspect.py", "socket.py", "statistics.py", "typing.py")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
# Large weights keep random logits apart, so that greedy text is varied and does not hang on rounding.
WEIGHT_STD = 0.2


def make_tokenizer(out: pathlib.Path, vocab_size: int, context_tokens: int) -> int:
    """Train on the standard library's own source and write the Hugging Face tokenizer files; returns the vocab size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(((stdlib / name).read_text(encoding="utf-8") for name in CORPUS), trainer)
    # As most Llama tokenizers do: text gets a BOS by itself, and a chat template must not end up with two.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS_ID]} $A", special_tokens=[(SPECIAL[BOS_ID], BOS_ID)]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS_ID],
        "eos_token": SPECIAL[EOS_ID],
        "pad_token": SPECIAL[PAD_ID],
        "additional_special_tokens": SPECIAL[3:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    shutil.copyfile(CHAT_TEMPLATE, out / "chat_template.jinja")
    return tokenizer.get_vocab_size()


def make_weights(out: pathlib.Path, hidden: int, layers: int, vocab_size: int, context_tokens: int, seed: int) -> None:
    """Write config.json, generation_config.json and model.safetensors in the layout of a Hugging Face Llama."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * WEIGHT_STD

    inner = hidden * 2
    tensors = {"model.embed_tokens.weight": random(vocab_size, hidden)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, hidden),
            f"{name}.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, hidden),
            f"{name}.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, hidden),
            f"{name}.self_attn.o_proj.weight": random(hidden, HEADS * HEAD_DIM),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.mlp.gate_proj.weight": random(inner, hidden),
            f"{name}.mlp.up_proj.weight": random(inner, hidden),
            f"{name}.mlp.down_proj.weight": random(hidden, inner),
        }
    tensors |= {"model.norm.weight": torch.ones(hidden), "lm_head.weight": random(vocab_size, hidden)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": vocab_size,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    vocab_size = make_tokenizer(args.out, args.vocab, args.context_tokens)
    make_weights(args.out, args.hidden, args.layers, vocab_size, args.context_tokens, args.seed)


if __name__ == "__main__":
    main()
