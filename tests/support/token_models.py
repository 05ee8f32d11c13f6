"""Small model directories for tests of gateway.tokens: a byte-level BPE trained here, and a chat template."""

from __future__ import annotations

import json
import sysconfig
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DATA = Path(__file__).parent.parent / "data" / "tokens"
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
BOS = 1


@cache
def tokenizer_json(source: str = "argparse.py", vocab_size: int = 600) -> str:
    """A byte-level BPE trained on one file of the standard library, which puts <|bos|> in front like Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = (Path(sysconfig.get_paths()["stdlib"]) / source).read_text(encoding="utf-8")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer.to_str()


def make_model(folder: Path, template: str | None, *, tokenizer: str | None = None, **config: object) -> Path:
    """Writes a model directory. `template`: name of a file in tests/data/tokens, without .jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer or tokenizer_json(), encoding="utf-8")
    content = {
        "bos_token": "<|bos|>",
        "eos_token": {"content": "<|eos|>", "special": True},
        "pad_token": "<|pad|>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template_source(template), encoding="utf-8")
    return folder


def template_source(name: str) -> str:
    return (DATA / f"{name}.jinja").read_text(encoding="utf-8")


def reference_ids(text: str, *, add_special_tokens: bool, tokenizer: str | None = None) -> list[int]:
    """Ids by the library's plain `encode`, the way vLLM calls it."""
    encoding = Tokenizer.from_str(tokenizer or tokenizer_json()).encode(text, add_special_tokens=add_special_tokens)
    return list(encoding.ids)
