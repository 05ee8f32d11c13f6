"""Both sides' connections, their bytes cut anywhere and mutated, on transports without sockets."""

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.peer import UpstreamError
from tests.support.http1_world import Client, Worker, turns

cuts = st.lists(st.integers(0, 600), max_size=12)


def pieces(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in at} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


# ---- clients ---------------------------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, tuple[str, str, str]]:
    """(as it is sent, as it is to be read)"""
    body = draw(st.binary(max_size=60))
    target = draw(st.sampled_from(["/v1/completions", "/v1/chat/completions?a=%20&b", "/tokenize"]))
    rows = [f"POST {target} HTTP/1.1".encode(), b"Host: a", *draw(st.lists(st.just(b"X-A: 1"), max_size=3))]
    if draw(st.booleans()):
        sent = b"%x;ext\r\n%b\r\n0\r\nTrailer: 1\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        rows.append(b"Transfer-Encoding: Chunked")
    else:
        sent = body
        rows.append(b"content-length: %d" % len(body))
    before = draw(st.sampled_from([b"", b"", b"\r\n"]))
    return before + b"\r\n".join(rows) + b"\r\n\r\n" + sent, ("POST", target, body.decode("latin-1"))


@given(st.lists(requests(), min_size=1, max_size=4), cuts, st.booleans())
def test_requests_are_answered_in_order_however_their_bytes_come(
    wanted: list[tuple[bytes, tuple[str, str, str]]], at: list[int], waits: bool
) -> None:
    async def run() -> None:
        client = Client()
        for piece in pieces(b"".join(sent for sent, _ in wanted), at):
            client.send(piece)
            if waits:
                await turns(2)
        await turns(5 * len(wanted))
        assert client.echo.asked == [said for _, said in wanted]
        assert client.answers() == [(200, list(said)) for _, said in wanted]
        assert not client.transport.is_closed
        client.leave()
        await turns()
        assert not client.listener.connections
        await client.listener.close()

    asyncio.run(run())


@given(
    st.lists(requests(), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 600), st.binary(max_size=3)), min_size=1, max_size=4),
    cuts,
)
def test_mutated_requests_harm_nothing(
    wanted: list[tuple[bytes, tuple[str, str, str]]], changes: list[tuple[int, bytes]], at: list[int]
) -> None:
    """Answers stay HTTP, nothing is left running, and after a refusal nothing more is served."""

    async def run() -> None:
        client = Client()
        data = bytearray(b"".join(sent for sent, _ in wanted))
        for place, new in changes:
            data[place % len(data) : place % len(data) + 1] = new or b"\r"
        for piece in pieces(bytes(data), at):
            client.send(piece)
        await turns(30)
        statuses = [status for status, _ in client.answers()]
        assert all(status == 200 for status in statuses[:-1])
        assert len(client.echo.asked) == statuses.count(200)
        client.leave()
        await turns()
        assert (client.listener.connections, client.echo.running) == (set(), 0)
        await client.listener.close()

    asyncio.run(run())


# ---- workers ---------------------------------------------------------------------------------------------------------


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, int, bytes, bool]:
    """(as it is sent, status, body, whether the connection may be used again)"""
    status = draw(st.sampled_from([200, 404, 503]))
    said = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=4))
    interim = draw(st.sampled_from([b"", b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"]))
    closes = draw(st.booleans())
    rows = [b"HTTP/1.1 %d Words" % status, b"X-A: 1", *([b"Connection: close"] if closes else [])]
    match draw(st.sampled_from(["length", "chunked", "end"])):
        case "length":
            rows.append(b"Content-Length: %d" % sum(map(len, said)))
            body = b"".join(said)
        case "chunked":
            rows.append(b"transfer-encoding: chunked")
            body = b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in said) + b"0\r\nX-Trailer: 1\r\n\r\n"
        case _:
            closes, body = True, b"".join(said)
    return interim + b"\r\n".join(rows) + b"\r\n\r\n" + body, status, b"".join(said), not closes


@given(answers(), cuts)
def test_answers_are_read_however_their_bytes_come(sent: tuple[bytes, int, bytes, bool], at: list[int]) -> None:
    data, status, body, reusable = sent

    async def run() -> None:
        worker = Worker()
        reading = asyncio.ensure_future(worker.read())
        for piece in pieces(data, at):
            if not worker.transport.is_closed:
                worker.wire.data_received(piece)
        if not reusable and not worker.transport.is_closed:
            worker.wire.eof_received()
            worker.transport.close()
        got_status, got_body, headers = await asyncio.wait_for(reading, 5)
        assert (got_status, got_body) == (status, body)
        assert (b"X-A", b"1") in headers
        assert not any(name == b"X-Trailer" for name, _ in headers)
        assert worker.freed == ([worker.wire] if reusable else [])
        await turns()
        assert worker.lost == ([] if reusable else [worker.wire])

    asyncio.run(run())


@given(
    answers(), st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=3)), max_size=3), cuts, st.integers(0, 400)
)
def test_mutated_and_broken_off_answers_end(
    sent: tuple[bytes, int, bytes, bool], changes: list[tuple[int, bytes]], at: list[int], length: int
) -> None:
    """Each ends in an answer or an error, none in a wait; and what could not be read leaves no connection in use."""

    async def run() -> None:
        worker = Worker()
        reading = asyncio.ensure_future(worker.read())
        data = bytearray(sent[0])
        for place, new in changes:
            data[place % len(data) : place % len(data) + 1] = new
            if not data:
                data = bytearray(b"\n")
        for piece in pieces(bytes(data[: max(1, length)]), at):
            if not worker.transport.is_closed:
                worker.wire.data_received(piece)
        await turns(2)
        was_freed = worker.freed and not worker.transport.is_closed
        if not worker.transport.is_closed:
            worker.wire.eof_received()
            worker.transport.close()
        try:
            status, _, _ = await asyncio.wait_for(reading, 5)
            assert status
        except UpstreamError:
            assert not was_freed
        await turns()
        assert worker.lost == [worker.wire]

    asyncio.run(run())


def test_a_second_answer_is_not_kept_for_the_next_request() -> None:
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"

    async def run() -> None:
        for joined in (True, False):
            worker = Worker()
            for piece in [good + good] if joined else [good, good]:
                worker.wire.data_received(piece)
            assert (await worker.read())[:2] == (200, b"ab")
            assert worker.transport.is_closed

    asyncio.run(run())


def test_empty_lines_before_a_request_in_any_pieces() -> None:
    async def run() -> None:
        for data in (b"\r\n", b"\r\n\r\n\r\n"):
            client = Client()
            for byte in data:
                client.send(bytes([byte]))
            client.send(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
            await turns()
            assert client.answers() == [(200, ["POST", "/tokenize", ""])]
            client.leave()
            await turns()
            await client.listener.close()
        for data in (b"\n", b"\r\n\n", b"\rP"):
            client = Client()
            client.send(data)
            assert client.transport.written.startswith(b"HTTP/1.1 400")
            client.leave()
            await turns()
            await client.listener.close()

    asyncio.run(run())


def test_an_answer_longer_than_is_held_leaves_the_connection_reading() -> None:
    body = b"x" * (1 << 20)

    async def run() -> None:
        worker = Worker()
        worker.wire.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:-1])
        assert worker.transport.is_paused
        worker.wire.data_received(body[-1:])  # Some transports have more in hand.
        assert worker.freed == [worker.wire]
        assert not worker.transport.is_paused
        assert (await worker.read())[1] == body
        worker.answer = worker.wire.ask("POST", b"POST / HTTP/1.1\r\n\r\n", b"{}", ask=False)
        worker.wire.data_received(b"HTTP/1.1 204 No Content\r\n\r\n")
        assert (await worker.read())[0] == 204

    asyncio.run(run())
