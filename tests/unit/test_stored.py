"""Which worker holds which response: the table, and ids read off answers."""

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stored import Gone, Place, ResponseHead, StoredResponses, id_of, is_stored

DAY_S = 24 * 3600.0
WHOLE = b'{"id":"resp_1","created_at":1,"output":[{"id":"msg_1"}]}'
STREAM = b'event: response.created\ndata: {"response":{"id":"resp_1","output":[]},"sequence_number":0}\n\n'
OPENAI = b'event: response.created\ndata: {"type":"response.created","response": { "id": "resp_1"}}\n\n'


def test_the_last_worker_that_said_an_id_has_it() -> None:
    stored = StoredResponses()
    stored.remember("r", Place("a", 0), 0.0)
    stored.remember("r", Place("b", 1), 1.0)
    assert stored.find("r", 2.0) == Place("b", 1)
    assert stored.find("other", 2.0) is None


def test_a_worker_that_ends_takes_its_responses_along() -> None:
    stored = StoredResponses()
    stored.remember("old", Place("a", 0), 0.0)
    stored.remember("elsewhere", Place("b", 0), 0.0)
    stored.lost("a")
    stored.remember("new", Place("a", 0), 1.0)
    assert stored.find("old", 2.0) == Gone("a")
    assert stored.find("new", 2.0) == Place("a", 0)
    assert stored.find("elsewhere", 2.0) == Place("b", 0)


def test_ids_are_bounded_in_number_length_and_time() -> None:
    stored = StoredResponses(most=2)
    for i, name in enumerate(("x", "y", "z", "", "w" * 257)):
        stored.remember(name, Place("a", 0), float(i))
        stored.find("y", float(i))  # Used, so it is not the one to go.
    assert (len(stored), stored.find("y", 5.0), stored.find("z", 5.0)) == (2, Place("a", 0), Place("a", 0))
    assert stored.find("y", 1.0 + DAY_S) is None
    none = StoredResponses(most=0)
    none.remember("x", Place("a", 0), 0.0)
    assert len(none) == 0


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["remember", "find", "lost"]), st.sampled_from("pqrst"), st.sampled_from("ab")),
        max_size=60,
    ),
)
def test_it_remembers_what_a_list_would(most: int, steps: list[tuple[str, str, str]]) -> None:
    stored = StoredResponses(most)
    naive: OrderedDict[str, tuple[str, bool]] = OrderedDict()
    for step, response_id, worker in steps:
        if step == "remember":
            stored.remember(response_id, Place(worker, 0), 0.0)
            naive.pop(response_id, None)
            naive[response_id] = (worker, True)
            while len(naive) > most:
                naive.popitem(last=False)
        elif step == "lost":
            stored.lost(worker)
            naive = OrderedDict((key, (w, alive and w != worker)) for key, (w, alive) in naive.items())
        else:
            known = naive.get(response_id)
            expected: Any = None if known is None else Place(known[0], 0) if known[1] else Gone(known[0])
            assert stored.find(response_id, 1.0) == expected
            if known is not None and known[1]:
                naive.move_to_end(response_id)


@pytest.mark.parametrize("answer", [WHOLE, STREAM, OPENAI])
def test_an_id_is_found_however_the_answer_is_cut(answer: bytes) -> None:
    for size in range(1, len(answer)):
        found: list[str] = []
        head = ResponseHead(found.append)
        for start in range(0, len(answer), size):
            head.feed(answer[start : start + size])
        assert found == ["resp_1"]


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b'\n { "id" : "a\\"\\u00e9b" }', 'a"\u00e9b'),
        (b'{"error": {"message": "no", "id": "x"}}', None),
        (b'{"output": [{"id": "msg_1"}]}', None),
        (b'data: {"x": "say \\"response\\": {\\"id\\": \\"evil\\"}"}', None),
        (b'{"id": 5}', None),
        (b'{"id": "\\x"}', None),
        (b'{"id": "\xff"}', None),
        (b'{"id": "unfinished', None),
        (b"", None),
    ],
)
def test_only_a_responses_own_id_counts(head: bytes, found: str | None) -> None:
    assert id_of(head) == found


def test_no_more_than_the_beginning_is_kept() -> None:
    found: list[str] = []
    head = ResponseHead(found.append)
    head.feed(b" " * 5000)
    head.feed(WHOLE)
    assert found == []


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        (b'{"input": "x"}', True),
        (b'{"store": true}', True),
        (b'{"store" : false}', False),
        (b'{"input": "say \\"store\\": false"}', True),
        (b'{"store": falsehood}', True),
    ],
)
def test_who_wants_nothing_kept(body: bytes, stored: bool) -> None:
    assert is_stored(body) is stored
