"""The picker's server over real sockets, spoken to by gRPC's own client."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from gateway.errors import UserError
from gateway.extproc import server as server_module
from gateway.extproc import stream as stream_module
from gateway.extproc.server import METHOD, SERVICE, PickerServer, PickerSettings
from gateway.extproc.tls import Given, SelfSigned
from gateway.extproc.types import Ask, Pick, Refusal
from gateway.pb import ext_proc_pb2 as pb
from gateway.pb import health_pb2
from gateway.tls import ServingCertificate
from tests.support.extproc import (
    POD,
    Watched,
    destinations,
    kind,
    request_body,
    request_head,
    response_body,
    response_head,
)
from tests.support.gateway_world import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LOCAL = PickerSettings(host="127.0.0.1", port=0, health_port=0)
PATIENCE_S = 60.0


@pytest.fixture(params=["fast", "grpcio"], autouse=True)
def grpc_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What speaks gRPC; what is tested here holds for either."""
    monkeypatch.setitem(server_module._PORTS, "fast", server_module._PORTS[request.param])
    return str(request.param)


class Slow:
    """Picks POD once `go` is set; remembers what became of each call."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.asked: list[Ask] = []
        self.called_off = 0
        self.watches: list[Watched] = []

    async def pick(self, ask: Ask) -> Pick | Refusal:
        self.asked.append(ask)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.called_off += 1
            raise
        self.watches.append(Watched())
        return Pick(endpoints=(POD,), watch=self.watches[-1])


class Client:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def process(self, serializer: Callable[[Any], bytes] = pb.ProcessingRequest.SerializeToString) -> Any:
        method = self.channel.stream_stream(
            f"/{SERVICE}/{METHOD}",
            request_serializer=serializer,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        return method(timeout=PATIENCE_S)

    async def health(self, service: str = "") -> int:
        check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
        return int(answer.status)


@asynccontextmanager
async def serving(
    picker: Slow, settings: PickerSettings = LOCAL, ready: Callable[[], bool] = lambda: True
) -> AsyncIterator[tuple[PickerServer, Client]]:
    server = PickerServer(picker, settings, ready)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, Client(channel)
    finally:
        await server.close()


async def status_of(call: Any) -> grpc.StatusCode:
    status: grpc.StatusCode = await call.code()
    return status


async def test_a_whole_exchange() -> None:
    picker = Slow()
    async with serving(picker) as (server, client):
        call = client.process()
        for message in (request_head(), request_body(b"hello", ends=True)):
            await call.write(message)
        assert destinations(await call.read()) == (POD, POD)
        assert (await call.read()).request_body.response.body_mutation.streamed_response.body == b"hello"
        await call.write(response_head())
        assert kind(await call.read()) == "response_headers"
        await call.write(response_body(b"hi", ends=True))
        assert kind(await call.read()) == "response_body"
        await call.done_writing()
        assert await status_of(call) is grpc.StatusCode.OK
        assert picker.watches[0].told == [("responded", 200, None), ("chunk", b"hi"), ("ended",)]
        assert (server.counts.open, server.counts.begun, server.counts.failed) == (0, 1, 0)


async def test_what_is_decided_is_sent_whatever_comes_meanwhile() -> None:
    """The end of a body that comes while the answers to it are being written once called them off."""
    picker = Slow()
    async with serving(picker) as (_, client):
        for _ in range(100):
            call = client.process()
            await call.write(request_head(("content-length", "200000")))
            await call.write(request_body(b"x" * 200_000))
            await call.write(request_body(ends=True))
            size, ended = 0, False
            assert destinations(await call.read()) == (POD, POD)
            while not ended:
                streamed = (await call.read()).request_body.response.body_mutation.streamed_response
                size, ended = size + len(streamed.body), streamed.end_of_stream
            assert size == 200_000
            call.cancel()


async def test_messages_are_read_while_it_is_decided() -> None:
    picker = Slow()
    picker.go.clear()
    async with serving(picker) as (_, client):
        call = client.process()
        await call.write(request_head(("content-length", "1")))
        await call.write(request_body(b"x"))
        await until(lambda: bool(picker.asked))
        await call.write(response_head(status=504, ends=True))  # The proxy has lost patience.
        assert kind(await call.read()) == "response_headers"
        await until(lambda: picker.called_off == 1)
        await call.done_writing()
        assert await status_of(call) is grpc.StatusCode.OK


@pytest.mark.parametrize("leave", ["half-close", "cancel"])
async def test_who_leaves_calls_the_decision_off(leave: str) -> None:
    picker = Slow()
    picker.go.clear()
    async with serving(picker) as (server, client):
        call = client.process()
        await call.write(request_head(ends=True))
        await until(lambda: bool(picker.asked))
        if leave == "cancel":
            call.cancel()
        else:
            await call.done_writing()
            assert await status_of(call) is grpc.StatusCode.INTERNAL
        await until(lambda: picker.called_off == 1 and server.counts.open == 0)
        assert picker.watches == []


async def test_who_leaves_before_the_end_of_a_response_aborts_it() -> None:
    picker = Slow()
    async with serving(picker) as (server, client):
        call = client.process()
        await call.write(request_head(ends=True))
        await call.read()
        await call.write(response_head())
        await call.read()
        call.cancel()
        await until(lambda: server.counts.open == 0)
        assert picker.watches[0].told == [("responded", 200, None), ("aborted",)]


async def test_too_late_a_decision_is_503() -> None:
    picker = Slow()
    picker.go.clear()
    settings = PickerSettings(host="127.0.0.1", port=0, health_port=None, decision_timeout_s=0.05)
    async with serving(picker, settings) as (server, client):
        call = client.process()
        await call.write(request_head(ends=True))
        immediate = (await call.read()).immediate_response
        assert immediate.status.code == 503
        assert b"decision_timeout" in immediate.body
        assert (picker.called_off, server.counts.late, server.counts.failed) == (1, 1, 0)


async def test_the_deadline_of_decisions_may_change_while_it_serves() -> None:
    picker = Slow()
    picker.go.clear()
    async with serving(picker) as (server, client):
        server.decision_timeout_s = 0.05
        call = client.process()
        await call.write(request_head(ends=True))
        assert (await call.read()).immediate_response.status.code == 503
        assert server.counts.late == 1


@pytest.mark.parametrize("error", [RuntimeError("prompt text"), TimeoutError("prompt text")])
async def test_a_picker_that_raises_is_500(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Ask) -> Pick:
        raise error

    picker = Slow()
    monkeypatch.setattr(picker, "pick", fail)
    async with serving(picker) as (server, client):
        call = client.process()
        await call.write(request_head(ends=True))
        assert (await call.read()).immediate_response.status.code == 500
        assert (server.counts.failed, server.counts.late) == (1, 0)
    assert "prompt text" not in caplog.text


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff", b"\x12", b"", pb.ProcessingRequest(request_body=pb.HttpBody()).SerializeToString()]
)
async def test_garbage_never_ends_well(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Slow()) as (server, client):
        call = client.process(serializer=lambda raw: raw)
        await call.write(garbage)
        assert await status_of(call) is not grpc.StatusCode.OK
        await until(lambda: server.counts.open == 0)
        assert server.counts.broken + server.counts.failed == 1


async def test_a_proxy_that_is_set_up_wrongly_fills_no_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module._complaints, "told", set())
    async with serving(Slow()) as (server, client):
        for _ in range(5):
            call = client.process()
            await call.write(request_head(modes=(pb.GRPC, pb.BUFFERED_PARTIAL)))
            assert await status_of(call) is grpc.StatusCode.INTERNAL
        assert server.counts.broken == 5
    assert caplog.text.count("bodies in modes") == 1


async def test_a_stream_that_says_nothing_does_not_end_well() -> None:
    async with serving(Slow()) as (_, client):
        call = client.process()
        await call.done_writing()
        assert await status_of(call) is grpc.StatusCode.INTERNAL


async def test_a_message_may_be_as_large_as_a_body() -> None:
    async with serving(Slow()) as (_, client):
        call = client.process()
        await call.write(request_head(modes=(pb.BUFFERED, pb.NONE)))
        await call.read()
        await call.write(request_body(b"x" * (8 << 20), ends=True))
        assert destinations(await call.read()) == (POD, POD)


async def test_health_is_told_by_any_name_and_on_both_ports() -> None:
    ready = False
    async with serving(Slow(), ready=lambda: ready) as (server, client):
        other = grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}")
        for asked in (client, Client(other)):
            ready = False
            names = ("", "readiness", SERVICE, "inference-extension", "liveness")
            assert [await asked.health(name) for name in names] == [NOT_SERVING] * 4 + [SERVING]
            ready = True
            assert [await asked.health(name) for name in names] == [SERVING] * 5
        with pytest.raises(grpc.aio.AioRpcError):  # Picking is on the other port only.
            await Client(other).process().read()
        await other.close()


async def test_draining_serves_on_and_says_so_to_nobody_new() -> None:
    picker = Slow()
    async with serving(picker) as (server, client):
        running = client.process()
        await running.write(request_head(ends=True))
        await running.read()
        draining = asyncio.get_running_loop().create_task(server.drain(0.05, PATIENCE_S))
        await until(lambda: server.draining)
        assert await client.health(SERVICE) == NOT_SERVING
        assert await client.health("liveness") == SERVING
        new = client.process()
        await new.write(request_head(ends=True))
        assert destinations(await new.read()) == (POD, POD)
        new.cancel()
        assert not draining.done()
        running.cancel()
        assert await draining == 0


async def test_streams_opened_while_it_drains_are_served_by_connections_old_and_new() -> None:
    """Clients are told to connect anew, which may come at any moment of a request."""
    picker = Slow()
    async with serving(picker) as (server, client):
        running = client.process()
        await running.write(request_head(ends=True))
        await running.read()
        draining = asyncio.get_running_loop().create_task(server.drain(0.02, PATIENCE_S))
        begun = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < begun + 0.1:
            call = client.process()
            await call.write(request_head(ends=True))
            assert destinations(await call.read()) == (POD, POD)
            await call.done_writing()
            assert await status_of(call) is grpc.StatusCode.OK
        assert not draining.done()
        await running.done_writing()
        assert await status_of(running) is grpc.StatusCode.OK
        assert await draining == 0


async def test_clients_that_ask_at_the_moment_of_close_all_hear_of_it() -> None:
    picker = Slow()
    server = PickerServer(picker, LOCAL)
    await server.start()
    statuses: list[grpc.StatusCode] = []
    details: list[str] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:

        async def ask() -> None:
            while not statuses or grpc.StatusCode.UNAVAILABLE not in statuses:
                call = Client(channel).process()
                try:
                    await call.write(request_head(ends=True))
                    await call.read()
                    await call.done_writing()
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    pass
                statuses.append(await status_of(call))
                details.append(await call.details())

        asking = [asyncio.get_running_loop().create_task(ask()) for _ in range(10)]
        await until(lambda: len(statuses) > 20)
        await server.close()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*asking)
    assert server.counts.open == 0
    wanted = {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    wanted |= {grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED}  # Said by the client, of what it could not write.
    assert set(statuses) <= wanted, details


async def test_a_deadline_of_the_client_calls_the_decision_off() -> None:
    picker = Slow()
    picker.go.clear()
    async with serving(picker) as (server, client):
        method = client.channel.stream_stream(
            f"/{SERVICE}/{METHOD}",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        call = method(timeout=0.2)
        await call.write(request_head(ends=True))
        assert await status_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: picker.called_off == 1 and server.counts.open == 0)


async def test_compressed_messages_are_read_or_refused_plainly(grpc_by: str) -> None:
    """grpcio's client compresses when it is told to only; Envoy never does."""
    async with serving(Slow()) as (server, _):
        target, gzip = f"127.0.0.1:{server.port}", grpc.Compression.Gzip
        async with grpc.aio.insecure_channel(target, compression=gzip) as channel:
            name = "a" * 2000
            if grpc_by == "grpcio":
                assert await Client(channel).health(name) == SERVING
                return
            with pytest.raises(grpc.aio.AioRpcError, match="not taken compressed") as caught:
                await Client(channel).health(name)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_what_is_not_there_is_unimplemented(method: str) -> None:
    async with serving(Slow()) as (_, client):
        call = client.channel.stream_stream(method)(timeout=PATIENCE_S)
        assert await status_of(call) is grpc.StatusCode.UNIMPLEMENTED


async def test_draining_has_an_end() -> None:
    async with serving(Slow()) as (server, client):
        call = client.process()
        await call.write(request_head(ends=True))
        await call.read()
        assert await server.drain(0.0, 0.05) == 1


async def test_close_cuts_streams_and_calls_decisions_off() -> None:
    picker = Slow()
    picker.go.clear()
    server = PickerServer(picker, LOCAL)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = Client(channel).process()
        await call.write(request_head(ends=True))
        await until(lambda: bool(picker.asked))
        await server.close()
        assert await status_of(call) is not grpc.StatusCode.OK
        await until(lambda: not server.counts.open)
        assert picker.called_off == 1


async def test_what_is_decided_by_the_time_it_closes_is_still_answered() -> None:
    """As a queue decides that closes: who waits in it is answered instead of cut."""
    picker = Slow()
    picker.go.clear()
    server = PickerServer(picker, LOCAL)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        calls = [Client(channel).process() for _ in range(20)]
        for call in calls:
            await call.write(request_head(ends=True))
        await until(lambda: len(picker.asked) == 20)
        picker.go.set()
        closing = asyncio.get_running_loop().create_task(server.close())
        for call in calls:
            assert destinations(await call.read()) == (POD, POD)
        await closing


async def test_a_port_in_use_is_said_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
            await PickerServer(Slow(), PickerSettings(host="127.0.0.1", port=port)).start()


async def test_ipv6() -> None:
    server = PickerServer(Slow(), PickerSettings(host="::1", port=0, health_port=None))
    try:
        await server.start()
    except UserError:
        pytest.skip("no IPv6 here")
    async with grpc.aio.insecure_channel(f"[::1]:{server.port}") as channel:
        assert await Client(channel).health() == SERVING
    await server.close()


def certificate_of(port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(plain) as secure:
        assert secure.selected_alpn_protocol() == "h2"
        return secure.getpeercert(binary_form=True) or b""


async def test_self_signed() -> None:
    settings = PickerSettings(host="127.0.0.1", port=0, health_port=None, identity=SelfSigned())
    server = PickerServer(Slow(), settings)
    await server.start()
    root = ssl.DER_cert_to_PEM_cert(await asyncio.to_thread(certificate_of, server.port)).encode()
    options = [("grpc.ssl_target_name_override", "warmroute")]
    credentials = grpc.ssl_channel_credentials(root)
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", credentials, options) as channel:
        assert await Client(channel).health() == SERVING
    await server.close()


async def test_new_files_of_a_certificate_are_served_without_a_restart(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    authority = trustme.CA()

    def renew() -> None:
        leaf = authority.issue_cert("127.0.0.1")
        Path(cert).write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(key)

    renew()
    certificate = ServingCertificate(cert, key)
    settings = PickerSettings(host="127.0.0.1", port=0, health_port=None, identity=Given(certificate))
    server = PickerServer(Slow(), settings)
    await server.start()
    first = await asyncio.to_thread(certificate_of, server.port)
    assert await asyncio.to_thread(certificate_of, server.port) == first
    renew()
    for _ in range(2):
        certificate.refresh()  # As the service does now and then.
    second = await asyncio.to_thread(certificate_of, server.port)
    assert second != first
    await asyncio.to_thread(Path(key).write_text, "half of a pair")
    for _ in range(2):
        certificate.refresh()
    assert await asyncio.to_thread(certificate_of, server.port) == second
    await server.close()


@pytest.mark.parametrize("shown", [True, False])
async def test_client_certificates_are_demanded(tmp_path: Path, shown: bool) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    leaf, ours = authority.issue_cert("127.0.0.1"), clients.issue_cert("envoy.example")
    cert, key, ca = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    leaf.cert_chain_pems[0].write_to_path(cert)
    leaf.private_key_pem.write_to_path(key)
    clients.cert_pem.write_to_path(ca)
    identity = Given(ServingCertificate(cert, key, ca))
    server = PickerServer(Slow(), PickerSettings(host="127.0.0.1", port=0, health_port=None, identity=identity))
    await server.start()
    pair = (ours.private_key_pem.bytes(), ours.cert_chain_pems[0].bytes()) if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *pair)
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", credentials) as channel:
        if shown:
            assert await Client(channel).health() == SERVING
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await Client(channel).health()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.close()
