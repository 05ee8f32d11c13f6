"""Bodies of any content: untouched values stay byte for byte, what was replaced comes back, nothing that steers
transfers is left.
"""

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.handoff.bodies import Body, clean
from gateway.request import members_of

KINDS = st.sampled_from(["chat", "completions", "messages", "responses", "generate"])
STEERING = ["kv_transfer_params", "ec_transfer_params"]
INSIDE = [*STEERING, "do_remote_prefill", "do_remote_decode", "remote_host", "remote_engine_id", "remote_"]
REPLACED = ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "stream", "stream_options"]

numbers = st.sampled_from(["0", "-0.0", "1.50", "1E5", "12345678901234567890123", "NaN", "-Infinity", "1e400"])
texts = st.text(st.characters(codec=None), max_size=8).map(json.dumps)  # With lone surrogates.
plain = st.text(max_size=8).map(lambda text: json.dumps(text, ensure_ascii=False))
spaces = st.sampled_from(["", " ", "\n\t "])
values = st.recursive(
    st.one_of(numbers, texts, plain, st.sampled_from(["null", "true", "false", "[]", "{ }"])),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: "[" + " , ".join(items) + "]"),
        st.lists(st.tuples(texts, inner), min_size=1, max_size=3).map(
            lambda items: "{" + ",".join(f"{name} :{value}" for name, value in items) + "}"
        ),
    ),
    max_leaves=6,
)


def escaped(name: str, which: int) -> str:
    """`name` as a JSON string with some letters in escapes."""
    return '"' + "".join(f"\\u{ord(c):04x}" if which >> i & 1 else c for i, c in enumerate(name)) + '"'


def keys(names: list[str]) -> st.SearchStrategy[str]:
    return st.builds(escaped, st.sampled_from(names), st.integers(0, 1 << 18))


@st.composite
def objects(draw: st.DrawFn, names: st.SearchStrategy[str], inner: st.SearchStrategy[str] = values) -> str:
    members = draw(st.lists(st.tuples(spaces, names, spaces, spaces, inner), max_size=6))
    return "{" + ",".join(f"{a}{key}{b}:{c}{value}" for a, key, b, c, value in members) + "}"


others = st.one_of(texts, keys(REPLACED + INSIDE[2:]), keys(["model", "prompt", "messages"]))
extras = objects(st.one_of(keys(INSIDE), texts))
sampling = objects(st.one_of(keys(["extra_args", "max_tokens"]), texts), st.one_of(values, extras))


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    text = draw(
        objects(
            st.one_of(keys([*STEERING, "vllm_xargs", "sampling_params"]), others),
            st.one_of(values, extras, sampling),
        )
    )
    return text.encode("utf-8", "surrogatepass")


def members(raw: bytes) -> dict[str, Any]:
    loaded = json.loads(raw)
    assert isinstance(loaded, dict)
    return loaded


def same(one: object, other: object) -> bool:
    return json.dumps(one) == json.dumps(other)  # NaN is NaN here.


def steers(body: dict[str, Any]) -> bool:
    carried = [body.get("vllm_xargs")]
    if isinstance(body.get("sampling_params"), dict):
        carried.append(body["sampling_params"].get("extra_args"))
    return any(name in body for name in STEERING) or any(
        name.startswith(tuple(INSIDE)) for inner in carried if isinstance(inner, dict) for name in inner
    )


@given(bodies())
def test_members_that_were_read_already_spare_a_look_and_change_nothing(raw: bytes) -> None:
    assert clean(raw, members_of(raw)) == clean(raw)


@given(bodies(), KINDS)
def test_clean_leaves_no_steering_key_and_everything_else(raw: bytes, kind: str) -> None:
    before, cleaned = members(raw), clean(raw)
    after = members(cleaned)
    assert not steers(after)
    for name, value in before.items():
        if name in STEERING:
            continue
        assert name in after
        if name not in ("vllm_xargs", "sampling_params"):
            assert same(after[name], value)
    assert Body(raw, kind).clean == cleaned
    if not any(name in json.dumps(before) for name in ("_params", "remote_")):
        assert cleaned is raw


@given(bodies(), st.sampled_from(["utf-8-sig", "utf-16", "utf-16-le", "utf-32"]))
def test_clean_reads_what_engines_read(raw: bytes, encoding: str) -> None:
    other = raw.decode("utf-8", "surrogatepass").encode(encoding, "surrogatepass")
    assert not steers(members(clean(other)))


@given(objects(others).map(lambda text: text.encode("utf-8", "surrogatepass")), KINDS)
def test_the_decode_leg_is_the_original(raw: bytes, kind: str) -> None:
    body = Body(raw, kind)
    assert body.decode() is raw
    ask, offer = {"do_remote_decode": True}, {"do_remote_prefill": True}
    decode = members(body.decode(offer))
    assert decode.pop("kv_transfer_params") == offer
    assert same(decode, members(raw))
    prefill = members(body.prefill(ask))
    assert prefill["kv_transfer_params"] == ask
    assert prefill["stream"] is False
    assert "stream_options" not in prefill
    changed = {*REPLACED, "store", "return_token_ids", "enable_response_messages", "sampling_params"}
    for name, value in members(raw).items():
        if name not in changed:
            assert same(prefill[name], value)


@given(st.dictionaries(st.text(max_size=5), values, max_size=5), KINDS)
def test_untouched_values_are_the_same_bytes(fields: dict[str, str], kind: str) -> None:
    text = ", ".join(f"{json.dumps(f'x{name}')} : {value}" for name, value in fields.items())
    raw = ("{" + text + "}").encode("utf-8", "surrogatepass")
    body = Body(raw, kind)
    for leg in (body.decode({"a": 1}), body.prefill({"a": 1})):
        for name, value in fields.items():
            quoted = {json.dumps(f"x{name}"), msgspec.json.encode(f"x{name}").decode()}
            assert any(f"{key}:{value}".encode("utf-8", "surrogatepass") in leg for key in quoted)
