"""Bodies made to keep us busy: what is done to clean them is bounded, and they are still cleaned."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from gateway.bad_request import BadRequest
from gateway.handoff import bodies, fields
from gateway.handoff.bodies import MOST_MEMBERS, clean, is_takeable
from gateway.handoff.fields import LENIENT_BYTES

STEERING = '"kv_transfer_params":{"do_remote_prefill":true}'
MANY = 1_300_000


class Work:
    """Members taken apart, and bytes that Python's own parser was given."""

    members = 0
    lenient_bytes = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    done = Work()
    split, leniently = fields.split, fields._split_leniently

    def counted(raw: bytes | msgspec.Raw) -> fields.Fields:
        found = split(raw)
        done.members += len(found)
        return found

    def counted_leniently(text: str) -> fields.Fields:
        done.lenient_bytes += len(text)
        return leniently(text)

    monkeypatch.setattr(bodies, "split", counted)
    monkeypatch.setattr(fields, "_split_leniently", counted_leniently)
    yield done
    assert done.members <= MOST_MEMBERS + 10
    assert done.lenient_bytes <= LENIENT_BYTES


def members(n: int, colon: str = ":") -> str:
    return ",".join(f'"k{i}"{colon}0' for i in range(n))


COLONS = [":", " :", "\r\n\t: "]


@pytest.fixture(scope="module", params=COLONS, ids=repr)
def huge(request: pytest.FixtureRequest) -> str:
    """A million members and more, written in one of the ways there are."""
    text = members(MANY, request.param)
    assert len(text) > 14 << 20
    return text


def test_a_million_members_are_not_taken_apart(work: Work, huge: str) -> None:
    raw = f"{{{huge}}}".encode()
    assert clean(raw) is raw
    assert not is_takeable(raw)
    assert work.members == 0


@pytest.mark.parametrize("steering", [STEERING, STEERING.replace("_", "\\u005f"), '"vllm_xargs":{"remote_host":"h"}'])
def test_nor_are_they_when_one_of_them_steers(work: Work, huge: str, steering: str) -> None:
    for text in (f"{{{huge},{steering}}}", f"{{{steering},{huge}}}"):
        with pytest.raises(BadRequest) as caught:
            clean(text.encode())
        assert caught.value.code == "invalid_json"
    assert work.members == 0


@pytest.mark.parametrize("carrier", ['{"vllm_xargs":{%s}}', '{"sampling_params":{"extra_args":{%s}}}'])
def test_nor_are_they_in_what_carries_such_keys(work: Work, huge: str, carrier: str) -> None:
    with pytest.raises(BadRequest):
        clean((carrier % huge).encode())
    assert work.members == 0


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("steers", [True, False])
@pytest.mark.parametrize("many", [True, False])
def test_what_only_pythons_parser_reads_is_not_read_at_length(steers: bool, many: bool) -> None:
    """Engines would read it: so what may steer them is refused unread."""
    filler = members(MANY) if many else '"x":"' + "y" * (2 << 20) + '"'
    raw = f'{{"x":NaN,{filler}{"," + STEERING if steers else ""}}}'.encode()
    if many or steers:
        with pytest.raises(BadRequest):
            clean(raw)
    else:
        assert clean(raw) is raw


DIRTY: dict[str, tuple[str, dict[str, Any]]] = {
    "at_the_top": ("{%s," + STEERING + "}", {}),
    "first": ("{" + STEERING + ",%s}", {}),
    "escaped": ("{%s," + STEERING.replace("_", "\\u005f") + "}", {}),
    "carried": ('{%s,"vllm_xargs":{"remote_host":"h","x":1}}', {"vllm_xargs": {"x": 1}}),
    "nested": (
        '{%s,"sampling_params":{"extra_args":{"do_remote_prefill":1}}}',
        {"sampling_params": {"extra_args": {}}},
    ),
}


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("case", DIRTY)
def test_up_to_the_bound_what_steers_is_stripped(case: str) -> None:
    template, rest = DIRTY[case]
    filler = members(MOST_MEMBERS - 6)
    raw = (template % filler).encode()
    assert is_takeable(raw)
    assert json.loads(clean(raw)) == {**json.loads(f"{{{filler}}}"), **rest}


def test_in_a_carrier_too() -> None:
    filler = members(MOST_MEMBERS - 6)
    raw = f'{{"model":"m","vllm_xargs":{{{filler},"remote_port":1}}}}'.encode()
    assert json.loads(clean(raw)) == {"model": "m", "vllm_xargs": json.loads(f"{{{filler}}}")}


def test_a_large_body_of_few_members_is_taken_apart(work: Work) -> None:
    """Its text may hold what looks like a few."""
    prompt = 'they said: "no": ' * 50_000 + "x" * (16 << 20)
    raw = json.dumps({"prompt": prompt, "kv_transfer_params": {}}).encode()
    assert is_takeable(raw)
    assert json.loads(clean(raw)) == {"prompt": prompt}
    assert work.members == 2


def test_ids_are_no_members() -> None:
    raw = json.dumps({"prompt": list(range(500_000)), "kv_transfer_params": {}}).encode()
    assert is_takeable(raw)
    assert "kv_transfer_params" not in json.loads(clean(raw))
