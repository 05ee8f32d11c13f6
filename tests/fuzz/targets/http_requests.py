"""What clients send over HTTP/1.1: the same is understood and answered however the bytes come."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.http1.head import BadHead, parse_head
from tests.fuzz.cut import cut, seeds
from tests.support.http1_world import Client, turns

_POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"

SEEDS = seeds(
    _POST + b"Content-Length: 3\r\n\r\nabc" + _POST + b"Content-Length: 0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n1\r\nd\r\n0\r\nX: y\r\n\r\n" + _POST + b"\r\n",
    b"\r\n" + _POST + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na",
    b"POST http://a/tokenize?x=1 HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    _POST.replace(b"POST", b"HEAD") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
)
# fmt: off
WORDS = [
    _POST, b"\r\n\r\n", b"\r\n", b"\n", b"Content-Length: ", b"Transfer-Encoding: chunked", b"Host: b", b"0\r\n\r\n",
    b"5\r\nhello\r\n", b"Expect: 100-continue", b"Connection: close", b"Connection: keep-alive", b" HTTP/1.0", b"\0",
    b"\xff", b": ", b"Upgrade: websocket", b"ffffffffffff\r\n",
]
# fmt: on

_END = b"\r\n\r\n"
"""A head that cannot become one is refused at once or when it has come: sent behind all, it has come."""

_loop = asyncio.new_event_loop()


def fuzz_one(data: bytes) -> None:
    whole, pieces = cut(data)
    if not pieces:
        return
    _head(whole)
    told = [_loop.run_until_complete(_talk(each)) for each in ([whole], pieces)]
    assert told[0] == told[1], "how the bytes are cut decides what is understood"


def _head(whole: bytes) -> None:
    try:
        head = parse_head(whole.partition(b"\r\n\r\n")[0])
    except BadHead as exc:
        if exc.status not in (400, 431, 501, 505):
            raise
        return
    named = [name.lower() for name, _ in head.headers]
    assert head.length is not None or b"content-length" not in named
    assert head.target
    assert not any(set(value) & set(b"\r\n\0") for pair in head.headers for value in pair)


async def _talk(pieces: list[bytes]) -> Any:
    client = Client()
    for piece in (*pieces, _END):
        client.send(piece)
        await turns(3)
    await turns(40)
    asked, handed_over = client.echo.asked, client.pages.n_made
    # Who reads answers has to know that HEAD was asked: none has a body, whatever its length says.
    is_readable = all(method != "HEAD" for method, *_ in asked)
    answers = client.answers() if is_readable else []
    if is_readable:
        assert len(asked) == sum(status == 200 for status, _ in answers)
        assert all(status == 200 for status, _ in answers[:-1]), "something is served after a refusal"
    client.leave()
    await turns()
    assert (client.listener.connections, client.echo.running) == (set(), 0)
    await client.listener.close()
    return asked, [status == 200 for status, _ in answers], handed_over
