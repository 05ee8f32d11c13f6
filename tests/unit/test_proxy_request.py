"""Bodies and headers -> RequestFacts."""

import json
import threading
from array import array
from typing import Any

import pytest

from gateway.large import LARGE_BYTES, MOST_TOKENS, decode_large
from gateway.request import BadRequest, RequestReader, Slo, decode_body
from gateway.tokens import TokenService
from scorer.fleet import Fleet
from scorer.types import ChangeKind, PdReason, RequestFacts, TokenSource, WorkerChange


def fleet(**models: tuple[str, ...]) -> Fleet:
    """Worker name -> its model's names; names that begin with `lora-` are adapters."""
    out = Fleet()
    for worker, names in models.items():
        out.apply(WorkerChange(kind=ChangeKind.ADDED, worker=worker, url="http://x"))
        base = [name for name in names if not name.startswith("lora-")]
        out.set_capabilities(worker, models=base, adapters=set(names) - set(base))
    return out


async def read(
    body: Any, kind: str | None = "completions", workers: Fleet | None = None, slo: Slo | None = None, **headers: str
) -> RequestFacts:
    service = TokenService()
    reader = RequestReader(workers or fleet(a=("m",)), service, slo)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return await reader.read("r1", kind, raw, {k.replace("_", "-"): v for k, v in headers.items()})
    finally:
        await service.close()


async def test_the_fields_a_decision_needs() -> None:
    facts = await read(
        {"model": "m", "prompt": [1, 2, 3], "n": 2, "max_tokens": 9, "stream": True, "cache_salt": "s", "priority": -5},
        x_session_id="chat-1",
        x_slo_ttft_ms="250",
        x_slo_tpot_ms="20.5",
    )
    assert facts == RequestFacts(
        request_id="r1",
        model="m",
        prompt_tokens=3,
        tokens=array("I", [1, 2, 3]).tobytes(),
        token_source=TokenSource.GIVEN,
        cache_salt="s",
        max_output_tokens=9,
        n_sequences=2,
        streaming=True,
        keep_local=PdReason.N_SEQUENCES,
        priority=-5,
        session="chat-1",
        slo_ttft_s=0.25,
        slo_tpot_s=0.0205,
    )


async def test_several_prompts_are_placed_by_the_longest_and_counted_together() -> None:
    facts = await read({"model": "m", "prompt": [[1], [2, 3, 4], [5, 6]]})
    assert facts.tokens == array("I", [2, 3, 4]).tobytes()
    assert (facts.prompt_tokens, facts.n_sequences, facts.keep_local) == (6, 3, PdReason.SEVERAL_PROMPTS)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({}, None),
        ({"n": 1}, None),
        ({"n": 2}, PdReason.N_SEQUENCES),
        ({"echo": True}, PdReason.ECHO),
        ({"prompt_logprobs": 1}, PdReason.PROMPT_LOGPROBS),
    ],
)
async def test_what_may_run_on_two_engines(extra: dict[str, Any], why: PdReason | None) -> None:
    assert (await read({"model": "m", "prompt": [1], **extra})).keep_local is why


async def test_max_completion_tokens_beats_max_tokens() -> None:
    facts = await read({"model": "m", "messages": [], "max_tokens": 5, "max_completion_tokens": 7}, "chat")
    assert facts.max_output_tokens == 7


@pytest.mark.parametrize(
    ("kind", "extra", "limit", "n"),
    [
        ("completions", {"max_completion_tokens": 1, "max_output_tokens": 1, "max_tokens": 900}, 900, 1),
        ("responses", {"max_tokens": 1, "max_output_tokens": 900}, 900, 1),
        ("messages", {"max_completion_tokens": 1, "max_tokens": 900}, 900, 1),
        ("generate", {"max_tokens": 1, "n": 1, "sampling_params": {"max_tokens": 900, "n": 4}}, 900, 4),
        ("generate", {"sampling_params": None}, None, 1),
        ("completions", {"max_tokens": "900", "n": "4"}, 900, 4),
        ("completions", {"max_tokens": 900.0, "n": 4.0}, 900, 4),
        ("completions", {"max_tokens": "9e2", "n": 4.5}, None, 1),
        ("completions", {"max_tokens": float("inf"), "n": float("nan")}, None, 1),
    ],
)
async def test_limits_are_those_that_the_api_obeys_in_any_spelling_it_takes(
    kind: str, extra: dict[str, Any], limit: int | None, n: int
) -> None:
    """Tokens are reserved by them: a limit that an engine ignores makes no request cheaper."""
    prompts: dict[str, dict[str, Any]] = {
        "generate": {"token_ids": [1]},
        "completions": {"prompt": [1]},
        "responses": {"input": "x"},
    }
    facts = await read({"model": "m", **prompts.get(kind, {"messages": []}), **extra}, kind)
    assert (facts.max_output_tokens, facts.n_sequences) == (limit, n)


async def test_an_adapter_is_named_as_the_model() -> None:
    workers = fleet(a=("m", "lora-x"), b=("m",))
    assert (await read({"model": "lora-x", "prompt": [1]}, workers=workers)).lora == "lora-x"
    assert (await read({"model": "m", "prompt": [1]}, workers=workers)).lora is None


async def test_without_a_model_the_only_one_is_meant() -> None:
    assert (await read({"prompt": [1]}, workers=fleet(a=("m", "alias"), b=("m",)))).model == "m"
    with pytest.raises(BadRequest, match="model"):
        await read({"prompt": [1]}, workers=fleet(a=("m",), b=("other",)))


async def test_objectives_of_the_configuration_hold_where_the_request_names_none() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    facts = await read({"model": "m", "prompt": [1]}, slo=slo, x_slo_ttft_ms="100")
    assert (facts.slo_ttft_s, facts.slo_tpot_s) == (0.1, 0.1)


async def test_objectives_may_be_spelled_as_llm_d_spells_them() -> None:
    facts = await read({"model": "m", "prompt": [1]}, x_llm_d_slo_ttft_ms="100", x_llm_d_slo_tpot_ms="20")
    assert (facts.slo_ttft_s, facts.slo_tpot_s) == (0.1, 0.02)
    facts = await read({"model": "m", "prompt": [1]}, x_llm_d_slo_ttft_ms="100", x_slo_ttft_ms="50")
    assert facts.slo_ttft_s == 0.1  # The newer name counts, as of llm-d's other headers.
    with pytest.raises(BadRequest, match="x-llm-d-slo-ttft-ms"):
        await read({"model": "m", "prompt": [1]}, x_llm_d_slo_ttft_ms="soon")


@pytest.mark.parametrize("value", ["fast", "0", "-1", "nan", "inf", ""])
async def test_an_objective_that_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match="x-slo-ttft-ms"):
        await read({"model": "m", "prompt": [1]}, x_slo_ttft_ms=value)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe", b'{"a":1}x', b"[" * 100_000],
)
async def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        await read(body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"seed": 123456789012345678901234567890}', 123456789012345678901234567890),
        (b'{"seed": -9223372036854775809}', -9223372036854775809),
        (b'{"seed": 1e400}', float("inf")),
        (b'{"seed": "\\ud800"}', "\ud800"),
        (b'{"seed": 1, "seed": 2}', 2),
    ],
)
def test_what_engines_read_we_read(body: bytes, value: object) -> None:
    assert decode_body(body)["seed"] == value


@pytest.mark.parametrize(
    "field",
    [{"n": "two"}, {"n": True}, {"max_tokens": None}, {"cache_salt": 5}, {"priority": "high"}, {"stream": "yes"}],
)
async def test_wrong_types_are_the_engines_business(field: dict[str, Any]) -> None:
    facts = await read({"model": "m", "prompt": [1], **field})
    assert (facts.n_sequences, facts.cache_salt, facts.priority, facts.streaming) == (1, None, 0, False)


async def test_a_model_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadRequest, match="`model` must be a string"):
        await read({"model": 5, "prompt": [1]})


async def test_a_compressed_body_is_placed_by_size() -> None:
    facts = await read(b"\x1f\x8b" + b"x" * 4000, content_encoding="gzip")
    assert (facts.model, facts.tokens, facts.prompt_tokens) == ("m", None, 1000)


async def test_a_form_names_its_model() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + b"\0" * 200_000
        + b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    )
    facts = await read(body, None, fleet(a=("whisper", "x")), content_type="multipart/form-data; boundary=b")
    assert (facts.model, facts.streaming) == ("whisper", False)
    assert facts.prompt_tokens == len(body) // 256  # Sound has fewer tokens than text.
    streamed = body.replace(
        b"\r\n--b--", b'\r\n--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n--b--'
    )
    assert (await read(streamed, None, content_type="multipart/form-data; boundary=b")).streaming
    assert (await read(streamed, None, content_type="Multipart/Form-Data; boundary=b")).streaming


async def test_a_form_without_a_model_means_the_only_one_or_is_told_so() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'
    form = "multipart/form-data; boundary=b"
    assert (await read(body, None, fleet(a=("whisper",)), content_type=form)).model == "whisper"
    with pytest.raises(BadRequest, match="several models"):
        await read(body, None, fleet(a=("whisper",), b=("other",)), content_type=form)


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens", "max_output_tokens", "n", "priority"])
async def test_numbers_no_engine_can_hold_are_as_good_as_absent(field: str) -> None:
    body = b'{"model":"m","prompt":[1],"%b":%b}' % (field.encode(), b"9" * 400)
    facts = await read(body)
    assert (facts.max_output_tokens, facts.n_sequences, facts.priority) == (None, 1, 0)


async def test_of_many_given_tokens_the_first_are_matched_and_all_counted() -> None:
    ids = list(range(100_000, 100_000 + MOST_TOKENS + 1000))
    facts = await read({"model": "m", "prompt": ids, "max_tokens": 3})
    assert facts.tokens == array("I", ids[:MOST_TOKENS]).tobytes()
    assert (facts.prompt_tokens, facts.exact_prefix_tokens) == (len(ids), MOST_TOKENS)
    assert (facts.token_source, facts.max_output_tokens) == (TokenSource.GIVEN, 3)


async def test_large_bodies_are_read_off_the_loop_and_like_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def spied(body: bytes, kind: str | None) -> object:
        threads.append(threading.get_ident())
        return decode_large(body, kind)

    monkeypatch.setattr("gateway.request.decode_large", spied)
    body = {"model": "m", "prompt": [[1, 2], [3]], "stream": True, "user": "x" * LARGE_BYTES}
    assert await read(body) == await read({**body, "user": ""})
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize("text", [rb"\ud800", rb"\ud83d half", b"plain"])
def test_large_text_python_reads_is_read(text: bytes) -> None:
    large = decode_large(b'{"model":"m","prompt":"' + text + b"y" * LARGE_BYTES + b'"}', "completions")
    assert large is not None
    assert not large.left_out
    assert large.fields["prompt"].endswith("y")


def test_a_million_members_are_not_taken_apart() -> None:
    """Each costs a key and a value with the interpreter's lock held: 63 MB took 10 s."""
    body = b'{"model":"m","stream":true,' + b",".join(b'"k%d":1' % i for i in range(200_000)) + b"}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.large._fields", None)
        large = decode_large(body, "completions")
    assert large is not None
    assert (large.fields, large.left_out) == ({"model": "m", "stream": True}, True)
    assert decode_large(body[:-1], "completions") is None


async def test_bodies_of_a_million_pieces_are_placed_by_their_size() -> None:
    body = b'{"messages":[' + b'{"role":"user","content":"x"},' * 200_000 + b'{}],"model":"m","stream":true}'
    facts = await read(body, "chat")
    assert (facts.model, facts.streaming, facts.tokens, facts.prompt_tokens) == ("m", True, None, len(body) // 4)


@pytest.mark.parametrize("body", [b"[" + b" " * LARGE_BYTES + b"]", b'{"model":"m"' + b" " * LARGE_BYTES])
async def test_a_large_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="valid JSON"):
        await read(body)
