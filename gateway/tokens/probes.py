"""Texts on which two tokenizers are compared before one replaces the other: some 0.3 MB, made here, from a fixed seed.

Each group goes for one way in which they can drift apart; its name is what the status page shows. Some are made of the
tokenizer's own vocabulary and control tokens, so that the check is about this very tokenizer.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LANGUAGES = (
    "The quick brown fox jumps over the lazy dog; it's 7 o'clock, WE'LL see, they'd've gone.",
    "Größenwahn übt Zwölf Boxkämpfer, naïve café-goers, crème brûlée, façade, ŁÓDŹ, \u0130stanbul'da \u0131slak",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "نص حكيم له سر قاطع وذو شأن عظيم ١٢٣ עטלף אבק נס דרך מזגן שהתפוצץ",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश। เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u5929\u5730\u7384\u9ec3\u5b87\u5b99\u6d2a\u8352\u3002\u3044\u308d\u306f"
    "\u306b\u307b\u3078\u3068\u30a2\u30a4\u30a6\u30a8\u30aa \ud55c\uad6d\uc5b4 \ubb38\uc7a5 \u3400\U00020000\uff21",
)
_CODE = (
    "def f(x: int, *args, **kw) -> 'dict[str, int]':\n\tif x >= 0x1F and not args:\n        return {**kw, 'x': x**2}",
    'for (let i=0;i<n;++i){ a[i] ??= b?.c?.[`${i}`] ?? "\\u00e9"; }\r\n// TODO: XMLHttpRequest getURLForID\r\n',
    '{"name": "get_weather", "arguments": {"place": "Z\\u00fcrich", "days": [1, -2.5e-10, null, true]}}',
    "SELECT * FROM t WHERE a<>b AND c LIKE '%x_%' -- comment\n<div id='a'>&nbsp;</div>\n$$\\frac{a_1}{b^{2}}$$",
)
_EMOJI = (
    "\U0001f600\U0001f44d\U0001f3fd\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f1fa\U0001f1f3 ok \u2764\ufe0f\u20e3"
    "\u00a9\u2122\u2192\u2713 \U0001d54f\U0001d7d8 \ue000\U0010ffff",
)
_COMBINING = (
    "e\u0301 \u00e9 a\u0308\u0304 \u1e69 s\u0323\u0307 s\u0307\u0323 \ufb01 \u2460 \u212b \u017f \u0130 \u1e9e \uac00 "
    "\u1100\u1161 \u0e33 \u0f71\u0f72 q\u0307\u0323 \u0300alone x" + "\u0301" * 40,
)
_WHITESPACE = (
    "",
    " ",
    "\n",
    "  leading and trailing  ",
    "a  b   c    d\te\t\tf \t g\n\nh\r\ni\rj \n k\n  l",
    "\u00a0\u2003\u3000\u200b\u2028\u2029\u0085\x0b\x0c \ufeff x\x00y\x7f",
    " " * 300 + "x" + "\n" * 100 + "\t" * 50 + "\r\n" * 30 + " ",
)
_NUMBERS = (
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 1e-9 0xDEADBEEF 192.168.0.1 \u0661\u0662\u0663 \u00bd x\u00b2",
)
_LONG = ("a" * 5000, "Donaudampfschifffahrtsgesellschaft" * 60, "\u4e2d" * 2000, "=-" * 1500, "9" * 2000, "!?" * 1000)
_ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "etaoin shrdlu ETAOIN 0123456789.,;:'\"!?()-\n\t",
    "\u00e0\u00df\u0107\u0434\u03b1\u05d0\u0628\u0915\u0e01\u4e2d\u6587\u3042\ud55c\u0301\u0308\u200d\U0001f600 x1",
)
_SEED = 20250
_MOST_CONTROL_TOKENS = 48


def probes(tokenizer: Tokenizer) -> dict[str, list[str]]:
    """Texts by what they try."""
    rng = random.Random(_SEED)  # noqa: S311 - the same texts every time
    vocabulary = _from_vocabulary(tokenizer, rng)
    groups = {
        "languages": list(_LANGUAGES),
        "code": list(_CODE),
        "emoji": list(_EMOJI),
        "combining marks": list(_COMBINING),
        "whitespace": list(_WHITESPACE),
        "numbers": list(_NUMBERS),
        "long words": list(_LONG),
        "random text": ["".join(rng.choices(alphabet, k=1500)) for alphabet in _ALPHABETS],
        "its vocabulary": vocabulary,
        "control tokens": _with_control_tokens(tokenizer, rng),
    }
    pieces = [text for texts in groups.values() for text in texts if len(text) < 2000]
    # Long texts are cut up and done in parts by some.
    groups["long texts"] = ["".join(rng.choices(pieces, k=400)) for _ in range(2)]
    return groups


def _from_vocabulary(tokenizer: Tokenizer, rng: random.Random) -> list[str]:
    """Texts put together from entries of the vocabulary, which is where merges are many."""
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    texts = []
    for separator in ("", " "):
        words = [tokenizer.decode([rng.randrange(size)]) for _ in range(1000)] if size else []
        texts += [separator.join(words[i : i + 100]) for i in range(0, len(words), 100)]
    return texts


def _with_control_tokens(tokenizer: Tokenizer, rng: random.Random) -> list[str]:
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if len(contents) > _MOST_CONTROL_TOKENS:
        contents = rng.sample(contents, _MOST_CONTROL_TOKENS)
    texts = ["</s><s>[INST] <|im_start|>user<|eot_id|><|endoftext|> [/INST] <unk> <|im_", "".join(contents)]
    for content in contents:
        half = content[: len(content) // 2]
        texts.append(f"a{content}b {content} c\n{content}\n{half}{content}{content}{half} {content.upper()}")
    return texts
