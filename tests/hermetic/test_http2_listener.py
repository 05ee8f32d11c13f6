"""Our HTTP/2 over real sockets: clients that do not read, that leave, that never shake hands, on both event loops."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import h2.events
import pytest
import trustme
import uvloop

from gateway.extproc.http2 import connection as connection_module
from gateway.extproc.http2 import frames
from gateway.extproc.http2 import listener as listener_module
from gateway.extproc.http2.calls import Call
from gateway.extproc.http2.listener import Listener
from tests.support.gateway_world import until
from tests.support.http2_talk import BEGIN, GRPC, Talk, frame, frames_of, request

pytestmark = pytest.mark.hermetic

Run = Callable[[Coroutine[Any, Any, None]], None]
MOST_BYTES = 1 << 20
MESSAGE = b"\0" + (60_000).to_bytes(4, "big") + b"m" * 60_000
PATIENCE_S = 60.0


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def serving_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    return context


def client_tls(authority: trustme.CA, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(list(protocols))
    return context


class Echo:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.n = 0
        self.is_lost = False

    def message(self, raw: bytes) -> None:
        self.n += 1
        self.call.send(raw)

    def half_closed(self) -> None:
        self.call.finish()

    def lost(self) -> None:
        self.is_lost = True


class Serving:
    def __init__(self, listener: Listener, calls: list[Echo], port: int) -> None:
        self.listener = listener
        self.calls = calls
        self.port = port

    async def connect(self, tls: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = None if tls is None else "localhost"
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=tls, server_hostname=name)

    async def is_echoing(self, tls: ssl.SSLContext | None = None) -> None:
        """A whole call on a connection of its own."""
        reader, writer = await self.connect(tls)
        writer.write(BEGIN + request(1) + frame(frames.DATA, frames.END_STREAM, 1, b"\0\0\0\0\2ok"))
        assert b"\0\0\0\0\2ok" in await upto(reader, b"grpc-status")
        writer.close()


async def upto(reader: asyncio.StreamReader, end: bytes) -> bytes:
    got = b""
    async with asyncio.timeout(PATIENCE_S):
        while end not in got:
            more = await reader.read(1 << 16)
            assert more, got
            got += more
    return got


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Serving]:
    calls: list[Echo] = []

    def method(call: Call) -> Echo:
        calls.append(Echo(call))
        return calls[-1]

    listener = Listener({"/a.B/C": method}, MOST_BYTES, tls)
    try:
        yield Serving(listener, calls, await listener.start("127.0.0.1", 0))
    finally:
        await listener.close()
        assert all(call.is_lost for call in calls)


@pytest.mark.parametrize("secure", [False, True])
def test_a_client_that_does_not_read_is_held_back_alone(
    run: Run, secure: bool, authority: trustme.CA, serving_tls: ssl.SSLContext
) -> None:
    """Its windows are as large as can be: only the socket is full. Once it reads, every byte arrives."""

    async def test() -> None:
        tls = client_tls(authority, "h2") if secure else None
        async with serving(serving_tls if secure else None) as server:
            reader, writer = await server.connect(tls)
            widen = frame(frames.WINDOW_UPDATE, 0, 0, (1 << 30).to_bytes(4, "big"))
            settings = frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 30})
            writer.write(frames.PREFACE + settings + widen + request(1))
            n = 0
            while writer.transport.get_write_buffer_size() < 8 << 20:
                for _ in range(10):
                    writer.write(frame(frames.DATA, 0, 1, MESSAGE))
                n += 10
                assert n < 4000, "it is read without end"
                await asyncio.sleep(0.005)
            (link,) = server.listener._links
            assert link._transport is not None
            assert link._transport.get_write_buffer_size() < 4 << 20
            assert server.calls[0].n < n
            await server.is_echoing(tls)
            got = 0
            async with asyncio.timeout(PATIENCE_S):
                while got < n * len(MESSAGE):
                    more = await reader.read(1 << 20)
                    assert more
                    got += len(more)
            assert server.calls[0].n == n
            writer.transport.abort()
            await until(lambda: server.calls[0].is_lost)

    run(test())


def test_a_client_that_opens_no_window_is_held_back_alone(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            writer.write(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}) + request(1))
            for _ in range(16):
                writer.write(frame(frames.DATA, 0, 1, MESSAGE))
            await until(lambda: bool(server.calls) and server.calls[0].n == 16)
            (link,) = server.listener._links
            assert link._connection is not None
            (stream,) = link._connection.streams.values()
            assert sum(map(len, stream.waiting)) == 16 * len(MESSAGE)
            assert stream.taken == 16 * len(MESSAGE) <= connection_module._STREAM_WINDOW_BYTES
            await server.is_echoing()
            # On the same connection too.
            writer.write(request(3) + frame(frames.WINDOW_UPDATE, 0, 3, b"\0\0\1\0"))
            writer.write(frame(frames.DATA, frames.END_STREAM, 3, b"\0\0\0\0\2ok"))
            await upto(reader, b"grpc-status")
            writer.close()

    run(test())


def test_many_calls_and_large_messages_by_another_implementation(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            client = Talk().client.__class__(config=Talk().client.config)
            client.initiate_connection()
            bodies = {i: b"\0" + (i * 997).to_bytes(4, "big") + bytes(i * 997) for i in range(1, 301, 2)}
            left = dict(bodies)
            for stream_id in bodies:
                client.send_headers(stream_id, GRPC)
            got: dict[int, bytes] = dict.fromkeys(bodies, b"")
            ended: set[int] = set()
            async with asyncio.timeout(PATIENCE_S):
                while len(ended) < len(bodies):
                    for stream_id in list(left):
                        room = min(client.local_flow_control_window(stream_id), client.max_outbound_frame_size, 30_000)
                        if room > 0:
                            part, left[stream_id] = left[stream_id][:room], left[stream_id][room:]
                            client.send_data(stream_id, part, end_stream=not left[stream_id])
                            if not left[stream_id]:
                                del left[stream_id]
                    writer.write(client.data_to_send())
                    data = await reader.read(1 << 16)
                    assert data
                    for event in client.receive_data(data):
                        if isinstance(event, h2.events.DataReceived):
                            got[event.stream_id] += event.data
                            client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                        elif isinstance(event, h2.events.StreamEnded):
                            ended.add(event.stream_id)
            assert got == bodies
            writer.close()

    run(test())


def test_what_is_under_way_when_we_close_does_not_take_back_our_good_bye(run: Run) -> None:
    """A socket that is closed with unread bytes is reset, and the client's unread ones are gone, GOAWAY with them."""

    async def test() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            writer.write(BEGIN + request(1))
            await until(lambda: bool(server.calls))
            closing = asyncio.ensure_future(server.listener.close())
            await asyncio.sleep(0)
            for i in range(3, 1003, 2):
                writer.write(request(i, ends=True) + frame(frames.PING, 0, 0, bytes(8)))
                if i % 50 == 3:
                    await asyncio.sleep(0.001)
            got = await upto(reader, frames.head(8, frames.GOAWAY, 0, 0))
            async with asyncio.timeout(PATIENCE_S):
                got += await reader.read()
            told = [payload for kind, _, _, payload in frames_of(got) if kind == frames.GOAWAY]
            assert [(frames.long_of(each), each[4:8]) for each in told] == [(1, bytes(4))]
            writer.close()
            await asyncio.wait_for(closing, PATIENCE_S)
            assert len(server.calls) == 1

    run(test())


def test_a_client_that_stays_after_good_bye_is_cut(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            writer.write(BEGIN + request(1) + frame(frames.DATA, 0, 0))
            await upto(reader, b"never opened")
            assert server.calls[0].is_lost
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read() == b""
            await until(lambda: not server.listener._links)
            writer.close()

    run(test())


@pytest.mark.parametrize("says", [b"", frames.PREFACE[:7], frames.PREFACE])
def test_a_client_that_says_nothing_is_cut(run: Run, says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_FIRST_S", 0.5)

    async def test() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            quiet, other = await server.connect()
            other.write(BEGIN)
            writer.write(says)
            await until(lambda: len(server.listener._links) == 2)
            async with asyncio.timeout(PATIENCE_S):
                got = await reader.read()
            assert [kind for kind, _, _, _ in frames_of(got)][-1] == frames.GOAWAY
            await until(lambda: len(server.listener._links) == 1)
            await server.is_echoing()
            assert not quiet.at_eof()
            writer.close()
            other.close()

    run(test())


def test_http_1_over_tls_is_refused(run: Run, authority: trustme.CA, serving_tls: ssl.SSLContext) -> None:
    async def test() -> None:
        async with serving(serving_tls) as server:
            reader, writer = await server.connect(client_tls(authority, "http/1.1"))
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                got = await reader.read()
            assert b"this is not HTTP/2" in got
            writer.close()
            await until(lambda: not server.listener._links)
            await server.is_echoing(client_tls(authority, "h2", "http/1.1"))

    run(test())


@pytest.mark.parametrize("says", [b"", b"\x16\x03\x01\x02\x00\x01", BEGIN])
def test_a_handshake_that_never_ends_is_cut(
    run: Run, says: bytes, authority: trustme.CA, serving_tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_FIRST_S", 1.5)

    async def test() -> None:
        async with serving(serving_tls) as server:
            reader, writer = await server.connect()
            writer.write(says)
            await server.is_echoing(client_tls(authority, "h2"))
            with pytest.raises(ConnectionError):  # noqa: PT012
                async with asyncio.timeout(PATIENCE_S):
                    while await reader.read(100):
                        pass
                    raise ConnectionResetError
            writer.close()

    run(test())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_a_machine_that_is_gone_is_noticed(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            _, writer = await server.connect()
            writer.write(BEGIN)
            await until(lambda: bool(server.listener._links))
            (link,) = server.listener._links
            assert link._transport is not None
            peer = link._transport.get_extra_info("socket")
            assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()

    run(test())


@pytest.mark.parametrize("how", ["close", "eof", "abort"])
def test_a_client_that_leaves_is_heard_of(run: Run, how: str) -> None:
    async def test() -> None:
        async with serving() as server:
            _, writer = await server.connect()
            writer.write(BEGIN + request(1) + frame(frames.DATA, 0, 1, MESSAGE[:100]))
            await until(lambda: bool(server.calls))
            if how == "eof":
                writer.write_eof()
            elif how == "close":
                writer.close()
            else:
                writer.transport.abort()
            await until(lambda: server.calls[0].is_lost and not server.listener._links)
            writer.close()

    run(test())


def test_a_client_that_hangs_up_while_we_close_changes_nothing(run: Run) -> None:
    """Its socket is no longer connected, which the event loop tells us only later."""

    async def test() -> None:
        async with serving() as server:
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(BEGIN)
                await until(lambda: any(link._connection and link._connection.begun for link in server.listener._links))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await server.listener.close()
            await until(lambda: not server.listener._links)

    run(test())


def test_a_proxy_that_is_set_up_wrongly_is_told_of_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_module._complaints, "told", set())

    async def test() -> None:
        async with serving() as server:
            for says in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01") * 3:
                reader, writer = await server.connect()
                writer.write(says)
                await reader.read()
                writer.close()
            await server.is_echoing()

    run(test())
    assert caplog.text.count("this is not HTTP/2") == 1
    assert caplog.text.count("this is TLS, and plain HTTP/2 is expected") == 1
    assert len(caplog.records) == 2


def test_a_bug_of_ours_closes_one_connection(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setitem(connection_module._READ, frames.PING, fail)

    async def test() -> None:
        async with serving() as server:
            _, other = await server.connect()
            other.write(BEGIN + request(1))
            reader, writer = await server.connect()
            writer.write(BEGIN + request(1) + frame(frames.PING, 0, 0, bytes(8)))
            async with asyncio.timeout(PATIENCE_S):
                assert frames_of(await reader.read())[-1][0] == frames.GOAWAY
            writer.close()
            await until(lambda: [call.is_lost for call in server.calls].count(True) == 1)
            await server.is_echoing()
            other.close()

    run(test())
    assert caplog.text.count("a proxy's connection is closed: RuntimeError") == 1
