"""A member that comes twice counts by its last value, here as in engines (Python's json): nobody can show us one and
them another.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from gateway.auth.checks import member_of
from gateway.config.schema import TenancyConfig
from gateway.handoff.bodies import clean
from gateway.handoff.fields import split, with_member
from gateway.large import decode_large
from gateway.request import decode_body, members_of
from gateway.tenancy import Tenancy

NAMES = ["model", "max_tokens", "cache_salt", "priority", "stream", "kv_transfer_params", "n"]
VALUES = st.sampled_from(
    ['"a"', '"b"', "1", "-5", "null", "true", "1e3", '"\\u0061"', '{"model":"x"}', '[{"model":"y","cache_salt":"z"}]',
     '"\\"model\\":\\"q\\""', '{"cache_salt":"w","cache_salt":"v"}', '""']
)  # fmt: skip
SPACES = st.sampled_from(["", " ", "\n", "\t ", " \r\n"])


def spelled(name: str, escaped: int) -> str:
    """As a JSON text, with one letter in an escape."""
    if escaped >= len(name):
        return json.dumps(name)
    return f'"{name[:escaped]}\\u{ord(name[escaped]):04x}{name[escaped + 1 :]}"'


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    members = draw(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 30), VALUES), min_size=1, max_size=8))
    space = draw(SPACES)
    rows = [f"{space}{spelled(name, at)}{space}:{space}{value}{space}" for name, at, value in members]
    return f"{space}{{{','.join(rows)}}}{space}".encode()


@given(bodies(), st.sampled_from(NAMES))
def test_every_reader_of_ours_reads_what_python_does(body: bytes, name: str) -> None:
    engine: dict[str, Any] = json.loads(body)
    assert decode_body(body) == engine
    assert members_of(body) == engine
    assert {key: json.loads(bytes(raw)) for key, raw in split(body).items()} == engine
    assert member_of(body, name) == engine.get(name)
    large = decode_large(body, "completions")
    assert large is not None
    assert large.fields == engine


@given(bodies())
def test_every_writer_of_ours_has_the_last_word(body: bytes) -> None:
    engine = json.loads(body)
    assert json.loads(with_member(body, "cache_salt", b'"ours"')) == {**engine, "cache_salt": "ours"}
    left = json.loads(clean(body))
    assert left == {name: value for name, value in engine.items() if name != "kv_transfer_params"}
    assert b"kv_transfer_params" not in clean(body) or "kv_transfer_params" not in left


TEXTS = st.text(min_size=1, max_size=12)


@given(st.tuples(TEXTS, st.none() | TEXTS), st.tuples(TEXTS, st.none() | TEXTS))
def test_two_salts_are_the_same_only_for_the_same_tenant_and_own_salt(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    tenancy = Tenancy(TenancyConfig(salt="derive"), "s" * 32, keyed=True)

    def salt(tenant: str, own: str | None) -> str:
        body = json.dumps({"model": "m"} if own is None else {"model": "m", "cache_salt": own}).encode()
        who, out = tenancy.take(CIMultiDict({"x-tenant": "evil"}), body, salted=True, authenticated=tenant)
        assert who == tenant
        return str(json.loads(out)["cache_salt"])

    assert (salt(*one) == salt(*other)) is (one == other)
    joined = one[0] + (one[1] or "")
    for cut in range(1, len(joined)):
        split_otherwise = joined[:cut], joined[cut:]
        assert (salt(*split_otherwise) == salt(*one)) is (split_otherwise == one)
