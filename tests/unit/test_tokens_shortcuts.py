"""When a faster encoder and pieces are used, when they are not, and that the status says why."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.tokens import TokenSettings, encoder
from gateway.tokens.cache import IdCache
from gateway.tokens.encoder import EncoderFault, FastEncoder, NotUsable, PlainEncoder, fast_encoder
from gateway.tokens.given import ChatPrompt, TextPrompt
from gateway.tokens.local import LocalTokenizer, load
from gateway.tokens.probes import probes
from gateway.tokens.segments import MOST_PIECES, NotInPieces, cut_at
from gateway.tokens.types import CannotTokenize, Reason, pack_ids
from tests.support.odd_tokenizers import (
    BYTE_LEVEL,
    PIECES,
    WHOLE,
    WHOLE_WITH_SPECIAL_TOKENS,
    around,
    with_part,
    with_post_processor,
    with_token,
)
from tests.support.token_models import make_model, reference_ids, tokenizer_json

SAMPLE = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>assistant\n"


def model(folder: Path, **kwargs: Any) -> LocalTokenizer:
    local = load(str(make_model(folder, "chatml", **kwargs)), TokenSettings())
    local.speed_up()
    return local


def conversation(n: int, text: str = "word ") -> ChatPrompt:
    return ChatPrompt({"messages": [{"role": "user", "content": f"{text}{i}"} for i in range(n)]})


class Breaking:
    """An encoder that serves until it is told to fail."""

    name: encoder.EncoderName = "fastokens"

    def __init__(self, inner: PlainEncoder) -> None:
        self.inner = inner
        self.cause: BaseException | None = None
        self.shift = 0
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        self.texts += texts
        if self.cause is not None:
            raise EncoderFault(self.cause)
        found = self.inner.encode(texts, add_special_tokens=add_special_tokens)
        return [ids + bytes(self.shift) for ids in found]


def breaking(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str | None = None) -> tuple[LocalTokenizer, Breaking]:
    """A local tokenizer whose faster encoder can be made to fail."""
    made: list[Breaking] = []

    def find(path: Path, added: object, tokenizer: object, plain: PlainEncoder) -> Breaking:
        made.append(Breaking(plain))
        return made[0]

    monkeypatch.setattr("gateway.tokens.local.fast_encoder", find)
    return model(folder, tokenizer=file), made[0]


# ---- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_a_tokenizer_that_must_see_the_whole_is_found_out(name: str) -> None:
    """What is harmless for one of the two tokens may still cut at the other; nothing may cut at the wrong one."""
    if name.startswith("swallowed"):
        assert cut_at(WHOLE[name].encode(), [], [SAMPLE]).text == b"<|im_end|>"
    else:
        with pytest.raises(NotInPieces):
            cut_at(WHOLE[name].encode(), [], [SAMPLE])


@pytest.mark.parametrize("name", PIECES)
def test_a_tokenizer_that_may_be_cut_is(name: str) -> None:
    found = cut_at(PIECES[name].encode(), [], [SAMPLE])
    assert found.text in (b"<|im_start|>", b"<|im_end|>")
    tokenizer = Tokenizer.from_str(PIECES[name])
    assert list(found.ids) == list(pack_ids([tokenizer.token_to_id(found.text.decode())]))
    assert (found.around is None) == (name in WHOLE_WITH_SPECIAL_TOKENS)
    if found.around is not None:
        expected = pack_ids(tokenizer.encode("", add_special_tokens=True).ids)
        assert found.around.before + found.around.after == expected


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "TemplateProcessing"},
        {"type": "TemplateProcessing", "single": 1, "special_tokens": {}},
        {"type": "TemplateProcessing", "single": [], "special_tokens": {}},
        {**around(["<|bos|>"], []), "special_tokens": {}},
        {**around([], []), "single": [{"Sequence": {"id": "B"}}]},
        {"type": "Sequence", "processors": [BYTE_LEVEL, {"type": "New"}]},
    ],
)
def test_what_an_unknown_post_processor_adds_is_not_guessed(bad: dict[str, Any]) -> None:
    assert cut_at(with_post_processor(bad).encode(), [], [SAMPLE]).around is None


def test_of_a_completion_only_new_text_is_tokenised_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, fast = breaking(monkeypatch, tmp_path)
    local.encode(SAMPLE, add_special_tokens=False)
    fast.texts.clear()
    text = SAMPLE + "<|im_end|>\n<|im_start|>user\nmore"
    assert local.encode(text, add_special_tokens=True) == pack_ids(reference_ids(text, add_special_tokens=True))
    assert fast.texts == ["assistant\n<|im_end|>\n", "user\nmore"]


@pytest.mark.parametrize("file", [b"", b"[]", b"{}", b'{"model": {"type": "Unigram"}}', b'{"model": 1}', b"[" * 9999])
def test_an_unknown_file_is_not_cut(file: bytes) -> None:
    with pytest.raises(NotInPieces):
        cut_at(file, [], [SAMPLE])


def test_a_token_that_overlaps_itself_is_no_separator() -> None:
    with pytest.raises(NotInPieces, match="no control token"):
        cut_at(with_token("aba").encode(), [], ["aba aba"])


def test_a_token_that_only_the_config_adds_can_swallow_too() -> None:
    from tokenizers import AddedToken

    added = [AddedToken("<|im_start|>user"), AddedToken("<|im_end|>\n")]
    with pytest.raises(NotInPieces, match="no control token"):
        cut_at(tokenizer_json().encode(), added, [SAMPLE])


def test_a_template_without_control_tokens_leaves_nothing_to_cut_at(tmp_path: Path) -> None:
    make_model(tmp_path, None)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    status = load(str(tmp_path), TokenSettings()).status()
    assert (status["pieces"], status["why_whole"]) == (False, "its chat template writes no control token to cut at")


def test_only_new_text_is_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, fast = breaking(monkeypatch, tmp_path)
    local.encode(local.text_of(conversation(30)).text, add_special_tokens=False)
    fast.texts.clear()
    text = local.text_of(conversation(31)).text
    assert local.encode(text, add_special_tokens=False) == pack_ids(reference_ids(text, add_special_tokens=False))
    assert fast.texts == ["user\nword 30<|im_end|>\n"]


def test_a_template_that_rewrites_history_costs_what_it_rewrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, fast = breaking(monkeypatch, tmp_path)
    long = conversation(30)
    local.encode(local.text_of(long).text, add_special_tokens=False)
    fast.texts.clear()
    long.messages[3] = {"role": "user", "content": "cut out"}
    local.encode(local.text_of(long).text, add_special_tokens=False)
    assert fast.texts == ["user\ncut out<|im_end|>\n"]


def test_too_many_pieces_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, fast = breaking(monkeypatch, tmp_path)
    text = "<|im_start|>x" * (MOST_PIECES + 5)
    assert local.encode(text, add_special_tokens=False) == pack_ids(reference_ids(text, add_special_tokens=False))
    assert fast.texts == [text]
    fast.texts.clear()
    local.encode("<|im_start|>x" * (MOST_PIECES - 1), add_special_tokens=False)
    assert fast.texts == ["", "x"]


def test_threads_may_share_it(tmp_path: Path) -> None:
    local = load(str(make_model(tmp_path, "chatml")), TokenSettings(), IdCache(20_000))
    local.speed_up()
    prompts = [local.text_of(conversation(n % 12 + 1, f"text {n % 5} ")).text for n in range(60)]
    expected = {text: pack_ids(reference_ids(text, add_special_tokens=False)) for text in prompts}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: local.encode(text, add_special_tokens=False), prompts * 5))
    assert found == [expected[text] for text in prompts * 5]


# ---- the faster encoder ----------------------------------------------------------------------------------------------


def test_fastokens_serves_after_its_check(tmp_path: Path) -> None:
    local = load(str(make_model(tmp_path, "chatml")), TokenSettings())
    assert local.status()["encoder"] == "tokenizers"
    local.speed_up()
    assert local.status() == {
        "encoder": "fastokens",
        "why_not_fastokens": None,
        "pieces": True,
        "why_whole": None,
        "faults": 0,
    }


def test_it_works_without_fastokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    local = model(tmp_path)
    assert local.status()["encoder"] == "tokenizers"
    assert local.status()["why_not_fastokens"] == "the package 'fastokens' is not installed"
    assert local.encode("hello", add_special_tokens=True) == pack_ids(reference_ids("hello", add_special_tokens=True))


def test_a_tokenizer_it_cannot_read_stays_with_the_other(tmp_path: Path) -> None:
    local = model(tmp_path, tokenizer=with_part("normalizer", {"type": "BertNormalizer", "clean_text": True,
        "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}))  # fmt: skip
    status = local.status()
    assert status["encoder"] == "tokenizers"
    assert "it cannot read this tokenizer" in status["why_not_fastokens"]


def test_tokens_of_the_config_reach_the_faster_encoder(tmp_path: Path) -> None:
    n = Tokenizer.from_str(tokenizer_json()).get_vocab_size()
    extra = {str(n): {"content": "<|new|>", "special": True, "normalized": False}}
    local = model(tmp_path, added_tokens_decoder=extra)
    assert local.status()["encoder"] == "fastokens"
    assert local.encode("a<|new|>b", add_special_tokens=False)[4:8] == pack_ids([n])


@pytest.mark.parametrize("group", ["languages", "whitespace", "control tokens", "its vocabulary", "long texts"])
def test_other_ids_for_any_probe_disqualify(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, None)
    tokenizer = Tokenizer.from_str(tokenizer_json())
    bad = probes(tokenizer)[group][-1]

    def encode(self: FastEncoder, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        found = PlainEncoder(tokenizer).encode(texts, add_special_tokens=add_special_tokens)
        return [ids + bytes(4 * (text == bad)) for text, ids in zip(texts, found, strict=True)]

    monkeypatch.setattr(FastEncoder, "encode", encode)
    with pytest.raises(NotUsable, match=f"other ids than 'tokenizers' on {group}"):
        fast_encoder(tmp_path / "tokenizer.json", [], tokenizer, PlainEncoder(tokenizer))


def test_probes_are_the_same_every_time_and_no_larger_than_they_need_to_be() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json())
    assert probes(tokenizer) == probes(tokenizer)
    assert 100_000 < sum(len(text) for texts in probes(tokenizer).values() for text in texts) < 500_000


@pytest.mark.parametrize("make", [lambda file, tok: FastEncoder(file, []), lambda file, tok: PlainEncoder(tok)])
def test_half_a_surrogate_pair_is_no_text(make: Callable[[Path, Tokenizer], encoder.Encoder], tmp_path: Path) -> None:
    make_model(tmp_path, None)
    made = make(tmp_path / "tokenizer.json", Tokenizer.from_str(tokenizer_json()))
    with pytest.raises(CannotTokenize) as caught:
        made.encode(["a\ud800b"], add_special_tokens=False)
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("fast", [True, False])
def test_other_threads_run_while_it_encodes(fast: bool, tmp_path: Path) -> None:
    """The longest time another thread stood still is a small part of the call, which it would never be with the GIL
    held; on a busy machine it may be once.
    """
    make_model(tmp_path, None)
    made: encoder.Encoder = PlainEncoder(Tokenizer.from_str(tokenizer_json()))
    if fast:
        made = FastEncoder(tmp_path / "tokenizer.json", [])
    n_chars = 3_000_000 if fast else 400_000
    assert any(_longest_pause(made, n_chars, turn) < 0.5 for turn in range(5))


def _longest_pause(made: encoder.Encoder, n_chars: int, turn: int) -> float:
    """Of another thread, as a share of the call."""
    text = "".join(chr(97 + (i * i + turn) % 26) for i in range(n_chars))
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        began_s = time.perf_counter()
        made.encode([text], add_special_tokens=False)
        ended_s = time.perf_counter()
    finally:
        done.set()
        ticker.join()
    inside = [began_s, *(t for t in ticks if began_s < t < ended_s), ended_s]
    return max(b - a for a, b in pairwise(inside)) / (ended_s - began_s)


# ---- what is found out later -----------------------------------------------------------------------------------------


def test_a_text_it_breaks_on_is_done_by_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, fast = breaking(monkeypatch, tmp_path)
    fast.cause = ValueError()
    expected = pack_ids(reference_ids("hello", add_special_tokens=True))
    assert local.encode("hello", add_special_tokens=True) == expected
    assert (local.status()["encoder"], local.faults) == ("fastokens", 1)


def test_a_panic_ends_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    local, fast = breaking(monkeypatch, tmp_path)
    fast.cause = Panic()
    expected = pack_ids(reference_ids("hello", add_special_tokens=True))
    assert local.encode("hello", add_special_tokens=True) == expected
    assert local.status()["why_not_fastokens"] == "it broke on a prompt (Panic)"


def test_other_ids_for_a_prompt_end_its_use_and_what_it_made_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local, fast = breaking(monkeypatch, tmp_path)
    fast.shift = 4
    chat, expected = conversation(3), reference_ids(local.text_of(conversation(3)).text, add_special_tokens=False)
    assert local.encode(local.text_of(chat).text, add_special_tokens=False) != pack_ids(expected)
    assert local.verified(chat) == pack_ids(expected)
    assert local.encode(local.text_of(chat).text, add_special_tokens=False) == pack_ids(expected)
    status = local.status()
    assert (status["encoder"], status["pieces"]) == ("tokenizers", False)
    assert status["why_not_fastokens"] == "it made other ids of a prompt than 'tokenizers'"
    assert [tmp_path.name in message and "as a whole" in message for message in caplog.messages] == [True]
    local.speed_up()
    assert local.status() == status, "what erred once is not tried again"


def test_pieces_that_do_not_fit_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tokens.segments._swallows", lambda other, separator: False)
    local = model(tmp_path, tokenizer=with_token("x<|im_start|>"))
    assert local.status()["pieces"]
    assert local.verified(conversation(2))
    assert local.status()["pieces"]
    hostile = ChatPrompt({"messages": [{"role": "user", "content": "x<|im_start|>y"}]})
    expected = Tokenizer.from_str(with_token("x<|im_start|>")).encode(
        local.text_of(hostile).text, add_special_tokens=False
    )
    assert local.verified(hostile) == pack_ids(expected.ids)
    assert local.status()["why_whole"] == "cutting it into pieces made other ids of a prompt than 'tokenizers'"


def test_a_right_prompt_changes_nothing(tmp_path: Path) -> None:
    local = model(tmp_path)
    for prompt in (conversation(5), TextPrompt("hello", add_special_tokens=True)):
        assert local.verified(prompt)
    assert local.shortcuts
