"""What is asked: chats of fixed sizes, a tokenizer and template for them, and KV events of engines that hold them."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.kv_frames import BLOCK_SIZE, frame

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL = "bench-model"
FRESH_MARK = b"0123456789abcdef"
"""Where a body that is to be new each time has its number, of the same length."""
SMALL_BYTES, LARGE_BYTES = 2048, 65_536
N_SMALL, N_LARGE = 256, 64
STREAM_CHUNKS = 200
_SOURCES = ("argparse.py", "typing.py", "datetime.py", "socket.py", "subprocess.py", "ssl.py", "logging/__init__.py")
_VOCABULARY = 8192
_TURN_BYTES = 2000
_BLOCKS_PER_EVENT = 64
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Bodies(msgspec.Struct, frozen=True):
    """Request bodies: half of the small ones' prompt is the same in all, as is a large one's first message. The
    `fresh` ones have `FRESH_MARK` in their last message.
    """

    small: list[bytes]
    large: list[bytes]
    fresh_small: list[bytes]
    fresh_large: list[bytes]

    def streamed(self, pace_ms: int) -> list[bytes]:
        """The small ones, asking for `STREAM_CHUNKS` chunks, one every `pace_ms`; 0: as fast as can be."""
        out = []
        for body in self.small:
            fields = json.loads(body)
            out.append(_body({**fields, "stream": True, "max_tokens": STREAM_CHUNKS, "seed": pace_ms}))
        return out


def bodies(seed: int = 1, n_small: int = N_SMALL, n_large: int = N_LARGE) -> Bodies:
    rng = random.Random(seed)
    words = _words()
    shared = _text(rng, words, SMALL_BYTES // 2)
    small = [_chat(rng, words, shared, SMALL_BYTES) for _ in range(n_small)]
    large = [_chat(rng, words, shared, LARGE_BYTES) for _ in range(n_large)]
    return Bodies(small, large, [_fresh(body) for body in small], [_fresh(body) for body in large])


def _body(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _fresh(body: bytes) -> bytes:
    """With the end of the last message replaced by the mark."""
    end = body.rindex(b'"}]')
    return body[: end - len(FRESH_MARK)] + FRESH_MARK + body[end:]


def _chat(rng: random.Random, words: Sequence[str], shared: str, n_bytes: int) -> bytes:
    """A chat of exactly `n_bytes`: system prompt, then turns of up to `_TURN_BYTES`, the user's last."""
    messages = [{"role": "system", "content": shared}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0.7}
    wrapping = len('{"role":"assistant","content":""},')
    while (left := n_bytes - len(_body(fields)) - 2 * wrapping) > 2 * _TURN_BYTES:
        messages += [
            {"role": "user", "content": _text(rng, words, _TURN_BYTES // 4)},
            {"role": "assistant", "content": _text(rng, words, _TURN_BYTES)},
        ]
    messages.append({"role": "user", "content": ""})
    left = n_bytes - len(_body(fields))
    messages[-1]["content"] = _text(rng, words, left)
    return _body(fields)


def _text(rng: random.Random, words: Sequence[str], n_bytes: int) -> str:
    """Words and full stops of exactly `n_bytes` bytes, none of which JSON escapes."""
    parts: list[str] = []
    size = 0
    while size < n_bytes:
        sentence = " ".join(rng.choices(words, k=rng.randint(5, 15))).capitalize() + ". "
        parts.append(sentence)
        size += len(sentence)
    return "".join(parts)[:n_bytes]


@functools.cache
def _corpus() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in _SOURCES)


def _words() -> list[str]:
    """Words of the standard library's sources, as often as they are used there."""
    return re.findall(r"\b[a-z]{2,12}\b", _corpus())


# ---- tokens ----------------------------------------------------------------------------------------------------------


def model_folder() -> Path:
    """A directory with a byte-level BPE trained on Python's own sources, and a chat template; made once per machine."""
    digest = hashlib.sha256(f"{_VOCABULARY}{_TEMPLATE}{_corpus()}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"warmroute-bench-{digest}"
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"model_type":"llama"}')
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "chat_template.jinja").write_text(_TEMPLATE)
        unfinished = folder / "tokenizer.json.part"
        _train().save(str(unfinished))
        unfinished.rename(folder / "tokenizer.json")
    return folder


def _train() -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus().splitlines(keepends=True), trainer)
    return tokenizer


def token_ids(folder: Path, bodies: Sequence[bytes]) -> list[list[int]]:
    """What an engine with that tokenizer and template makes of each chat; not by the gateway's own code."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = []
    for body in bodies:
        turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in json.loads(body)["messages"])
        texts.append("".join(turns) + "<|im_start|>assistant\n")
    return [list(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


# ---- what the engines hold -------------------------------------------------------------------------------------------


def kv_frames(prompts: Sequence[Sequence[int]], n_workers: int) -> list[list[bytes]]:
    """Payloads of KV events by worker: prompt i is held by worker i modulo their number, and what it shares with
    others by theirs too.
    """
    frames: list[list[bytes]] = [[] for _ in range(n_workers)]
    held: list[set[int]] = [set() for _ in range(n_workers)]
    for i, ids in enumerate(prompts):
        worker = i % n_workers
        parent: int | None = None
        hashes: list[int] = []
        start = 0
        for n in range(len(ids) // BLOCK_SIZE):
            block = ids[n * BLOCK_SIZE : (n + 1) * BLOCK_SIZE]
            key = _block_hash(hashes[-1] if hashes else parent, block)
            if key in held[worker]:
                parent, start = key, n + 1
            else:
                held[worker].add(key)
                hashes.append(key)
        if hashes:
            new = list(ids[start * BLOCK_SIZE : (start + len(hashes)) * BLOCK_SIZE])
            frames[worker].append(frame(hashes, parent, new, _BLOCKS_PER_EVENT))
    return frames


def _block_hash(parent: int | None, block: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr((parent, block)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
