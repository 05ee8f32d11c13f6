"""One member of an object set to another value, every other byte staying."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.handoff.fields import NotAnObject, with_member


@pytest.mark.parametrize(
    ("raw", "after"),
    [
        (b"{}", b'{"model":"new"}'),
        (b' { "a" : 1.0e0 } ', b' { "a" : 1.0e0 ,"model":"new"} '),
        (b'{"model":"old"}', b'{"model":"new"}'),
        (b'\n{ "a": [{"model":"old"}] ,\t"model" :\r\n"old" , "z": NaN}',
         b'\n{ "a": [{"model":"old"}] ,\t"model" :\r\n"new" , "z": NaN}'),
        (b'{"model":"old","a":{"model":"old"}}', b'{"model":"new","a":{"model":"old"}}'),
        (b'{"a":"\\"model\\":\\"old\\"","model":"old"}', b'{"a":"\\"model\\":\\"old\\"","model":"new"}'),
        (b'{"mod\\u0065l":"old","b":2}', b'{"mod\\u0065l":"new","b":2}'),
        (b'{"model":null,"model\\"":"old"}', b'{"model":"new","model\\"":"old"}'),
    ],
)  # fmt: skip
def test_every_other_byte_stays(raw: bytes, after: bytes) -> None:
    assert with_member(raw, "model", b'"new"') == after


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","model":"a"}',
        b'{"model":"a","x":1,"model":"b"}',
        b'{"x":1,"x":1,"model":"b"}',
        b'\xef\xbb\xbf{"model":"a"}',
        '{"model":"a"}'.encode("utf-16"),
    ],
)
def test_what_is_read_in_the_end_is_the_new_value(raw: bytes) -> None:
    assert json.loads(with_member(raw, "model", b'"new"'))["model"] == "new"


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b'{"a":', b'{"a":1}x'])
def test_what_is_no_object(raw: bytes) -> None:
    with pytest.raises(NotAnObject):
        with_member(raw, "model", b"1")


def test_a_name_that_is_there_ten_thousands_of_times_further_inside_costs_one_pass() -> None:
    """Each of them was tried: 400 KB of this held up everybody for 24 s."""
    raw = json.dumps({"model": "old", "messages": [{"model": "old"}] * 20_000}).encode()
    began_s = time.process_time()
    changed = with_member(raw, "model", b'"new"')
    assert time.process_time() - began_s < 1
    assert changed == raw.replace(b'"old"', b'"new"', 1)


names = st.sampled_from(["model", "a", "b", 'mo"del', "mod\\el", "é", ""])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just('"model":"old"'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
spaces = st.sampled_from(["", " ", "\n\t "])


@given(st.lists(st.tuples(names, values), max_size=6), spaces, st.booleans())
def test_any_object(members: list[tuple[str, object]], space: str, is_ascii: bool) -> None:
    rows = [
        f"{json.dumps(name, ensure_ascii=is_ascii)}{space}:{space}{json.dumps(value, ensure_ascii=is_ascii)}"
        for name, value in members
    ]
    raw = (space + "{" + space + f"{space},{space}".join(rows) + space + "}" + space).encode("utf-8", "surrogatepass")
    changed = with_member(raw, "model", b'"new"')
    expected = {**json.loads(raw), "model": "new"}
    assert repr(sorted(json.loads(changed).items())) == repr(sorted(expected.items()))
    if len({name for name, _ in members}) == len(members):
        assert len(changed) - len(raw) <= len('"model":"new",')
