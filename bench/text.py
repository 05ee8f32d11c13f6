"""Text made up of words that follow a law of few common and many rare ones, and a tokenizer trained on such text."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

VOCABULARY = 64_000
CONTROL_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_WORDS += r"|\s+(?!\S)|\s+"
_ONSETS = ("", *"bcdfghklmnprstvw", "th", "st", "tr", "ch")
_NUCLEI = (*"aeiou", "ea", "ou", "io")
_CODAS = ("", *"nrstlmd", "ng", "ck")
_COMMON, _RARE = 70_000, 70_000
_PUNCTUATION = (",", ".", ".\n", "? ", "(x)", " = {", "};\n", " 42", " 3.14159", " 2026")


class Text:
    """Draws text. The same seed gives the same text; `rng` goes on from call to call."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        words = random.Random(1)  # the language is the same for every seed
        syllables = ["".join(parts) for parts in itertools.product(_ONSETS, _NUCLEI, _CODAS)]

        def word() -> str:
            made = "".join(words.choices(syllables, k=words.choice((1, 1, 2, 2, 2, 3, 3, 4))))
            return made.capitalize() if words.random() < 0.1 else made

        self.words = list(dict.fromkeys(word() for _ in range(_COMMON + _RARE)))
        self._cumulative = list(itertools.accumulate(1 / (i + 20) for i in range(len(self.words))))

    def draw(self, n_words: int) -> str:
        rng = self.rng
        words = rng.choices(self.words, cum_weights=self._cumulative, k=n_words)
        for i in range(rng.randrange(9), n_words, 9):
            words[i] += rng.choice(_PUNCTUATION)
        return " ".join(words)


def train(folder: Path) -> Path:
    """Writes a model directory: a byte-level BPE like Llama 3's, and a chat template. Takes some seconds."""
    text = Text(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = itertools.chain([" " + " ".join(text.words[:_COMMON])], (text.draw(2000) for _ in range(100)))
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": CONTROL_TOKENS[0]}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
