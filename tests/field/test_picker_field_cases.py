"""Faults that endpoint pickers met in the field, on ours."""

from __future__ import annotations

import pytest

from tests.support.epp_world import P, Pool, answer, request
from tests.support.fleets import prompt


@pytest.mark.parametrize(
    "usage",
    [
        b'"oops"',
        b'{"prompt_tokens":"1024"}',
        b'{"prompt_tokens":1024,"completion_tokens":[]}',
        b'{"prompt_tokens":-5,"prompt_tokens_details":{"cached_tokens":9}}',
        b'{"prompt_tokens":8,"prompt_tokens_details":{"cached_tokens":1e400}}',
        b'{"prompt_tokens":8,"prompt_tokens_details":"none"}',
        b"null",
        b"{",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_x7_usage_of_wrong_types_is_ignored_and_the_response_goes_on(usage: bytes, stream: bool) -> None:
    async with Pool(P()) as pool:
        pick = await pool.picked(request(prompt(400), stream=stream))
        if stream:
            answer(
                pick, b'data: {"choices":[],"usage":', usage, b"}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
            )
        else:
            answer(pick, b'{"id":"x","usage":', usage, b"}")
        assert pool.is_idle()
        assert pool.hits.workers["p0"].compared == 0
