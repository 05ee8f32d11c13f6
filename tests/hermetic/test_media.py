"""Chats with images: text before the first one matches exactly, and the conversation stays where its image is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_world import Fleet, engine, until

IMAGE_TOKENS = 1500


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    config = engine(image_tokens=IMAGE_TOKENS)
    async with Fleet(a=config, b=config, c=config) as started:
        yield started


def image(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"https://example.invalid/{name}.png"}, **fields}


def asks(name: str, question: str, system: str = "look closely") -> list[Any]:
    parts = [image(name), {"type": "text", "text": question}]
    return [{"role": "system", "content": system}, {"role": "user", "content": parts}]


async def chat(fleet: Fleet, messages: list[Any]) -> tuple[str, int, int, dict[str, Any]]:
    """(worker, predicted cached tokens, cached tokens, the answer's message)"""
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    status, answer, headers = await fleet.post(fleet.url + "/v1/chat/completions", body)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return (
        headers["x-warmroute-worker"],
        int(headers["x-warmroute-cached-tokens"]),
        cached,
        answer["choices"][0]["message"],
    )


async def test_a_conversation_stays_where_its_image_is_and_nothing_is_promised_that_was_not_seen(fleet: Fleet) -> None:
    for i in range(4):
        messages = asks(f"cat{i}", "what is it?")
        home = ""
        confirmed = 0
        for turn in range(4):
            worker, predicted, cached, message = await chat(fleet, messages)
            home = home or worker
            assert worker == home
            assert predicted <= cached
            if turn:
                assert cached > IMAGE_TOKENS - 16
            if turn > 1:
                assert predicted >= min(confirmed, IMAGE_TOKENS // 3)  # What the last answer has said, or nearly.
            confirmed = cached
            messages = [*messages, message, {"role": "user", "content": f"and then? {turn}"}]


async def test_other_questions_about_one_image_go_where_it_is(fleet: Fleet) -> None:
    home = (await chat(fleet, asks("cat", "what is it?")))[0]
    for question in ("where is it?", "why is it?", "whose is it?"):
        worker, predicted, cached, _ = await chat(fleet, asks("cat", question))
        assert (worker, cached > IMAGE_TOKENS - 16) == (home, True)
        assert predicted <= cached


async def test_other_images_spread(fleet: Fleet) -> None:
    workers = {(await chat(fleet, asks(f"other{i}", "what is it?")))[0] for i in range(40)}
    assert workers == {"a", "b", "c"}


async def test_load_still_moves_a_conversation(fleet: Fleet) -> None:
    """Affinity is a price like any other: a home that is taken away is left."""
    messages = asks("cat", "what is it?")
    home, _, _, message = await chat(fleet, messages)
    await fleet.engines[home].stop()
    worker, predicted, _, _ = await chat(fleet, [*messages, message, {"role": "user", "content": "and?"}])
    assert worker != home
    assert predicted < 16


async def test_a_restarted_home_is_forgotten(fleet: Fleet) -> None:
    messages = asks("cat", "what is it?")
    home, _, _, _ = await chat(fleet, messages)
    lives = fleet.core.planner.holdings.media._lives
    assert (home, 0) in lives
    await fleet.engines[home].restart()
    await until(lambda: (home, 0) not in lives)


async def test_text_before_the_image_matches_exactly(fleet: Fleet) -> None:
    system = "the quick brown fox jumps over the lazy dog " * 60
    text = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    home, _, _, _ = await chat(fleet, text)
    stats = fleet.core.index.stats
    await until(lambda: sum(sum(rank["blocks"].values()) for rank in stats()["workers"].get(home, {}).values()) > 10)
    worker, predicted, cached, _ = await chat(fleet, asks("new", "what is it?", system))
    assert worker == home
    assert 0 < predicted <= cached < 1500


async def test_many_questions_at_once_about_one_image(fleet: Fleet) -> None:
    answers = await asyncio.gather(*(chat(fleet, asks("one", f"question {i}?")) for i in range(6)))
    assert all(predicted <= cached for _, predicted, cached, _ in answers)
    homes = {worker for worker, *_ in answers}
    worker, _, cached, _ = await chat(fleet, asks("one", "a last question?"))
    assert worker in homes
    assert cached > IMAGE_TOKENS - 16


async def test_a_uuid_stands_for_the_image(fleet: Fleet) -> None:
    def by_uuid(url: Any) -> list[Any]:
        part = {"type": "image_url", "image_url": url, "uuid": "u-1"}
        return [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]

    home = (await chat(fleet, by_uuid({"url": "https://example.invalid/x.png"})))[0]
    for i in range(3):
        assert (await chat(fleet, by_uuid({"url": f"https://example.invalid/{i}.png"})))[0] == home
