"""Answers to Match are the bytes that protobuf would make of them."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from gateway.indexservice.answers import Answers
from gateway.indexservice.publisher import Publisher, knowledge
from gateway.indexservice.wire import holding
from gateway.pb import indexer_pb2 as pb
from indexer import Holder, Match, PrefixIndex

COUNTS = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))
HOLDERS = st.tuples(st.text(max_size=8), st.integers(0, 200))
MATCHES = st.builds(Match, COUNTS, COUNTS, COUNTS, COUNTS)
FEEDS = st.builds(
    pb.Feed,
    endpoint_state=st.sampled_from(["connected", "stale"]),
    phase=st.sampled_from(["live", "replaying"]),
    epoch=st.integers(0, 1000),
    batches=st.integers(0, 3),
)


class History:
    sequence = 0


class Telling:
    """As much of a Publisher as is asked."""

    instance = "0123456789abcdef"

    def __init__(self) -> None:
        self.feeds: dict[Holder, pb.Feed] = {}
        self.history = History()


class Index:
    def __init__(self) -> None:
        self.resident: dict[Holder, int] = {}

    def resident_blocks(self, holder: Holder) -> int:
        return self.resident.get(holder, 0)


def expected(index: Index, telling: Telling, found: dict[Holder, Match]) -> pb.MatchResponse:
    answer = pb.MatchResponse(instance=telling.instance, sequence=telling.history.sequence)
    for holder, match in found.items():
        one = holding(*holder, match)
        feed = telling.feeds.get(holder)
        one.knowledge, one.epoch = knowledge(feed), 0 if feed is None else feed.epoch
        one.resident_blocks = index.resident_blocks(holder)
        answer.holdings.append(one)
    return answer


@given(
    st.lists(
        st.tuples(
            st.dictionaries(HOLDERS, MATCHES, max_size=5),
            st.dictionaries(HOLDERS, FEEDS, max_size=5) | st.none(),
            COUNTS,
        ),
        max_size=5,
    ),
    st.data(),
)
def test_each_answer_says_what_is_known_when_it_is_given(asked: list[Any], data: st.DataObject) -> None:
    index, telling = Index(), Telling()
    answers = Answers(cast(PrefixIndex, index), cast(Publisher, telling))
    earlier: dict[Holder, Match] = {}
    for found, feeds, sequence in asked:
        telling.history.sequence = sequence
        found |= earlier  # Met again, with other feeds and other numbers.
        earlier = found
        if feeds is not None:
            telling.feeds = {**feeds, **{holder: data.draw(FEEDS) for holder in list(found)[:2]}}
        index.resident = {holder: data.draw(COUNTS) for holder in found}
        assert pb.MatchResponse.FromString(answers.of(found)) == expected(index, telling, found)
