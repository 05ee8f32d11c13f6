"""`warmroute indexer` and gateways that keep a copy of its index, with real sockets."""

from __future__ import annotations

import asyncio
import random
import signal
import ssl
from array import array
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from gateway import rpc
from gateway.config.schema import EppConfig, IndexConfig, IndexServiceConfig, TlsConfig
from gateway.epp.run import Epp
from gateway.errors import UserError
from gateway.indexservice import link, server
from gateway.indexservice.addresses import Addresses
from gateway.indexservice.server import SERVICE
from gateway.indexservice.wire import change_of, packed, section_changes
from gateway.pb import health_pb2
from gateway.pb import indexer_pb2 as pb
from gateway.run import Gateway
from indexer import Replica, decode_batch
from indexer.keys import chain, root
from tests.support.gateway_world import engine, until
from tests.support.indexer_world import Fleet, IndexerProcess, address, ask, channel, digests
from tests.support.wire import stored


def prompt(seed: int, n_tokens: int = 256) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 200) for _ in range(n_tokens)]


def ids(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


async def is_copied(indexer, gateway: Gateway) -> None:
    await until(lambda: digests(gateway.core.index) == digests(indexer.core.index) != {})


async def test_a_gateway_without_events_of_its_own_knows_who_holds_what() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        indexer = await fleet.indexer()
        gateway = await fleet.gateway(address(indexer))
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        worker, _ = await fleet.complete(gateway, prompt(1))
        await is_copied(indexer, gateway)
        again, answer = await fleet.complete(gateway, prompt(1))
        assert again == worker
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 200
        # another gateway, which never sent that prompt, sends it there too
        other = await fleet.gateway(address(indexer))
        await is_copied(indexer, other)
        await until(lambda: other.core.fleet.models())
        assert (await fleet.complete(other, prompt(1)))[0] == worker
        status, body = await fleet.get(gateway.admin_port, "/readyz?verbose")
        assert status == 200
        assert not [it for it in body["degraded"] if it["what"].startswith(("index", "events"))]


async def test_match_by_tokens_and_by_keys() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        indexer = await fleet.indexer()
        gateway = await fleet.gateway(address(indexer))
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        worker, _ = await fleet.complete(gateway, prompt(2))
        await is_copied(indexer, gateway)
        await until(lambda: any(feed.batches for feed in indexer.publisher.feeds.values()))
        answer = await ask(address(indexer), "Match", pb.MatchRequest(model="tiny", token_ids=ids(prompt(2))))
        (found,) = answer.holdings
        assert (found.worker, found.rank, found.knowledge) == (worker, 0, pb.KNOWN)
        assert found.gpu_tokens == found.reach_tokens == 256
        assert found.resident_blocks >= 16
        keys = packed(chain(root(None, 16), ids(prompt(2)), 16, 0, 16, {}))
        by_keys = await ask(address(indexer), "Match", pb.MatchRequest(block_keys=keys, block_size=16))
        assert by_keys.holdings == answer.holdings
        assert not (await ask(address(indexer), "Match", pb.MatchRequest(block_keys=keys, block_size=8))).holdings
        assert not (await ask(address(indexer), "Match", pb.MatchRequest(model="x", token_ids=ids(prompt(2))))).holdings
        salted = pb.MatchRequest(model="tiny", cache_salt="s", token_ids=ids(prompt(2)))
        assert not (await ask(address(indexer), "Match", salted)).holdings


@pytest.mark.parametrize(
    "request_",
    [
        pb.MatchRequest(),
        pb.MatchRequest(token_ids=b"12345"),
        pb.MatchRequest(token_ids=b"1234", block_keys=b"12345678", block_size=16),
        pb.MatchRequest(block_keys=b"1234567", block_size=16),
        pb.MatchRequest(block_keys=b"12345678"),
        pb.MatchRequest(block_keys=b"12345678", block_size=1 << 30),
        pb.MatchRequest(block_keys=b"12345678", block_size=16, cache_salt="s"),
        pb.MatchRequest(token_ids=b"1234" * ((1 << 20) + 1)),
    ],
    ids=range(8),
)
async def test_a_question_that_is_none_is_refused(request_: pb.MatchRequest) -> None:
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(address(indexer), "Match", request_)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details()
        assert (await ask(address(indexer), "Match", pb.MatchRequest(token_ids=b"1234"))).instance


async def test_what_is_no_message_and_what_is_newer_than_we_are() -> None:
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(address(indexer), "Match", b"\xff" * 100)
        newer = pb.MatchRequest(token_ids=b"1234").SerializeToString() + bytes([0xFA, 0x7F, 3]) + b"new"
        assert (await ask(address(indexer), "Match", newer)).instance
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await ask(address(indexer), "Forget", pb.ForgetRequest(worker="nobody"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_stats_health_metrics_and_the_page() -> None:
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        stats = await ask(address(indexer), "Stats", pb.StatsRequest())
        assert [(it.worker, it.rank, it.feed.endpoint_state) for it in stats.holders] == [("a", 0, "connected")]
        async with channel(address(indexer)) as it:
            check = it.unary_unary(
                "/grpc.health.v1.Health/Check",
                health_pb2.HealthCheckRequest.SerializeToString,
                health_pb2.HealthCheckResponse.FromString,
            )
            answer = await check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert "warmroute_indexer_ready 1.0" in (await fleet.get(indexer.port, "/metrics"))[1]
        assert (await fleet.get(indexer.port, "/readyz"))[0] == 200
        status, state = await fleet.get(indexer.admin_port, "/debug/state")
        assert status == 200
        assert state["head"]["face"] == "indexer"
        assert "<html" in (await fleet.get(indexer.admin_port, "/debug"))[1]


async def test_what_is_known_can_be_compared_from_outside() -> None:
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        gateway = await fleet.gateway(address(indexer))
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        await fleet.complete(gateway, prompt(3))
        await is_copied(indexer, gateway)
        (holder,) = (await ask(address(indexer), "Stats", pb.StatsRequest())).holders
        told = {"blocks": holder.digest.blocks, "keys_sum": f"{holder.digest.keys_sum:016x}"}
        assert told["blocks"] == 16
        for port in (gateway.admin_port, indexer.admin_port):
            assert (await fleet.get(port, "/debug/cache?digests"))[1]["digests"] == {"a": {"0": told}}
            assert "digests" not in (await fleet.get(port, "/debug/cache"))[1]


async def test_a_cache_emptied_through_one_gateway_is_empty_for_all() -> None:
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        gateway, other = await fleet.gateway(address(indexer)), await fleet.gateway(address(indexer))
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        await fleet.complete(gateway, prompt(3))
        await is_copied(indexer, gateway)
        await is_copied(indexer, other)
        url = f"http://127.0.0.1:{gateway.admin_port}/reset_prefix_cache"
        async with fleet.http.post(url) as response:
            assert response.status == 200, await response.text()
        assert digests(gateway.core.index) == {}
        await until(lambda: digests(indexer.core.index) == digests(other.core.index) == {})


async def test_no_request_fails_while_the_indexer_is_killed_and_comes_back() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet, IndexerProcess(fleet.workers) as process:
        gateway = await fleet.gateway(process.address)
        link = gateway.core.link
        await until(lambda: gateway.core.fleet.models() and link.is_live)
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        stop = asyncio.Event()

        async def load(seed: int) -> int:
            n = 0
            while not stop.is_set():
                await fleet.complete(gateway, prompt(seed * 1000 + n % 7, 128))
                n += 1
                await asyncio.sleep(0.01)
            return n

        loads = [asyncio.create_task(load(seed)) for seed in range(4)]
        try:
            await until(lambda: digests(gateway.core.index))
            await process.kill()
            await until(lambda: link.is_stale)
            _, body = await fleet.get(gateway.admin_port, "/readyz?verbose")
            assert [it["what"] for it in body["degraded"] if it["what"].startswith(("index", "events"))] == [
                "indexer_lost"
            ]
            assert "warmroute_index_service_up 0.0" in (await fleet.get(gateway.admin_port, "/metrics"))[1]
            await until(lambda: "index stale" in gateway.core.decisions.last(1)[0].plan.reason)
            assert digests(gateway.core.index)  # as it was
            await process.start()
            await until(lambda: link.is_live)
        finally:
            stop.set()
            counts = await asyncio.gather(*loads)
        assert min(counts) > 10
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        await fleet.complete(gateway, prompt(1))
        assert "index stale" not in gateway.core.decisions.last(1)[0].plan.reason


async def test_of_two_indexers_one_is_enough() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet, IndexerProcess(fleet.workers) as first:
        second = await fleet.indexer()
        await first.ready()
        gateway = await fleet.gateway(first.address, address(second))
        link = gateway.core.link
        await until(lambda: link.is_live and gateway.core.fleet.models())
        assert (link.address, second.server.counts.watchers) == (first.address, 0)
        await fleet.complete(gateway, prompt(4))
        await is_copied(second, gateway)
        await first.kill()
        await until(lambda: second.server.counts.watchers == 1)
        await fleet.complete(gateway, prompt(5))
        await is_copied(second, gateway)
        assert not [what for what, _ in link.degraded()]


async def test_a_copy_that_went_wrong_heals() -> None:
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        gateway = await fleet.gateway(address(indexer))
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        await fleet.complete(gateway, prompt(6))
        await is_copied(indexer, gateway)
        gateway.core.index.drop("a")
        await until(lambda: gateway.core.ingest.counters().get("copy_wrong_digests"))
        await is_copied(indexer, gateway)


async def test_a_slow_watcher_is_told_to_begin_anew_and_harms_nobody() -> None:
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer(history_bytes=1 << 16)
        gateway = await fleet.gateway(address(indexer))
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        history = indexer.publisher.history
        async with channel(address(indexer)) as it:
            watch = it.unary_stream(f"/{SERVICE}/Watch", pb.WatchRequest.SerializeToString, pb.Update.FromString)
            begin = (await watch(pb.WatchRequest()).read()).begin
            for seed in range(200):
                await fleet.complete(gateway, prompt(seed, 512))
                if not history.has_all_after(begin.sequence):
                    break
            # where it was is no longer kept: a snapshot comes, not a hole
            late = await watch(pb.WatchRequest(instance=begin.instance, sequence=begin.sequence)).read()
            assert not late.begin.resumed
            at = pb.WatchRequest(instance=begin.instance, sequence=history.sequence)
            resumed = await watch(at).read()
            assert resumed.begin.resumed
        await is_copied(indexer, gateway)


async def test_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "indexer.sock"
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer(socket=str(path), port=None)
        gateway = await fleet.gateway(f"unix:{path}")
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        await fleet.complete(gateway, prompt(7))
        await is_copied(indexer, gateway)
    assert not path.exists()


async def test_a_gateway_that_asks_keeps_no_copy_and_sends_prompts_where_they_are() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        indexer = await fleet.indexer()
        gateway = await fleet.gateway(address(indexer), mode="query", budget_ms=1000)
        link = gateway.core.link
        await until(lambda: link.is_live and all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        worker, _ = await fleet.complete(gateway, prompt(8))
        await until(lambda: digests(indexer.core.index))
        other = await fleet.gateway(address(indexer), mode="query", budget_ms=1000)
        await until(lambda: other.core.link.is_live and other.core.fleet.models())
        assert (await fleet.complete(other, prompt(8)))[0] == worker
        assert other.core.ingest.counters()["query_answered"] == 1
        assert "index" not in other.core.decisions.last(1)[0].plan.reason
        await until(lambda: other.core.index.resident_blocks((worker, 0)) >= 16)


async def test_an_indexer_that_answers_late_or_not_at_all_delays_no_request() -> None:
    async with Fleet(a=engine()) as fleet, IndexerProcess(fleet.workers) as process:
        await process.ready()
        gateway = await fleet.gateway(process.address, mode="query", budget_ms=5)
        link, counters = gateway.core.link, gateway.core.ingest.counters
        await until(lambda: link.is_live and gateway.core.fleet.models())
        await process.kill(signal.SIGSTOP)
        await fleet.complete(gateway, prompt(9))
        assert counters()["query_late"] == 1  # which is counted when the budget is over before the answer
        assert "index late" in gateway.core.decisions.last(1)[0].plan.reason
        await until(lambda: link.is_stale)
        await fleet.complete(gateway, prompt(9))
        assert counters()["query_late"] == 1  # nobody is asked any more
        assert "index unknown" in gateway.core.decisions.last(1)[0].plan.reason
        _, body = await fleet.get(gateway.admin_port, "/readyz?verbose")
        assert "indexer_lost" in [it["what"] for it in body["degraded"]]
        await process.kill(signal.SIGCONT)
        await until(lambda: link.is_live)


async def test_a_frozen_indexer_is_left_for_another() -> None:
    async with Fleet(a=engine()) as fleet, IndexerProcess(fleet.workers) as frozen:
        await frozen.ready()
        second = await fleet.indexer()
        gateway = await fleet.gateway(frozen.address, address(second))
        link = gateway.core.link
        await until(lambda: link.is_live and gateway.core.fleet.models())
        assert link.address == frozen.address
        await frozen.kill(signal.SIGSTOP)
        await until(lambda: second.server.counts.watchers == 1)
        await fleet.complete(gateway, prompt(10))
        await is_copied(second, gateway)


async def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    ours = authority.issue_cert("127.0.0.1")
    ours.cert_chain_pems[0].write_to_path(cert)
    ours.private_key_pem.write_to_path(key)
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer(tls=TlsConfig(cert=cert, key=key), client_ca=ca)
        gateway = await fleet.gateway(address(indexer), tls=True, ca=ca, cert=cert, key=key)
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        await fleet.complete(gateway, prompt(11))
        await is_copied(indexer, gateway)
        asking = await fleet.gateway(address(indexer), tls=True, ca=ca, cert=cert, key=key, mode="query")
        await until(lambda: asking.core.link.is_live)
        unknown = await fleet.gateway(address(indexer), tls=True, ca=ca)
        await until(lambda: unknown.core.link.problem)
        assert not digests(unknown.core.index)
        other = str(tmp_path / "other.pem")
        stranger.cert_pem.write_to_path(other)
        misled = await fleet.gateway(address(indexer), tls=True, ca=other, cert=cert, key=key)
        await until(lambda: misled.core.link.problem)
        assert not misled.core.link.is_live


async def test_a_certificate_that_is_renewed_is_shown_to_whoever_connects_next(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")

    def write(authority: trustme.CA) -> None:
        pair = authority.issue_cert("127.0.0.1")
        pair.private_key_pem.write_to_path(key)
        pair.cert_chain_pems[0].write_to_path(cert)

    def trusts(authority: trustme.CA) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(authority.cert_pem.bytes())

    async def answers(authority: trustme.CA) -> bool:
        try:
            await ask(address(indexer), "Stats", pb.StatsRequest(), trusts(authority))
        except grpc.aio.AioRpcError as exc:
            assert exc.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017 - what else is a fault
            return False
        return True

    write(old)
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer(tls=TlsConfig(cert=cert, key=key))
        assert await answers(old)
        assert not await answers(new)
        write(new)
        async with asyncio.timeout(20):
            while not await answers(new):  # noqa: ASYNC110 - the files are looked at when somebody connects
                await asyncio.sleep(0.05)
        assert not await answers(old)


async def test_whom_it_knows_its_clients_by_is_followed_like_its_certificate(tmp_path: Path) -> None:
    ours, first, second = trustme.CA(), trustme.CA(), trustme.CA()
    cert, key, ca = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "clients.pem"))

    def renew() -> bytes:
        pair = ours.issue_cert("127.0.0.1")
        pair.private_key_pem.write_to_path(key)
        pair.cert_chain_pems[0].write_to_path(cert)
        return pair.cert_chain_pems[0].bytes()

    def shown(authority: trustme.CA) -> grpc.ChannelCredentials:
        client = authority.issue_cert("client.example")
        return grpc.ssl_channel_credentials(
            ours.cert_pem.bytes(), client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
        )

    async def answers(credentials: grpc.ChannelCredentials) -> bool:
        try:
            await ask(address(indexer), "Stats", pb.StatsRequest(), credentials)
        except grpc.aio.AioRpcError as exc:
            assert exc.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017 - what else is a fault
            return False
        return True

    def served() -> str:
        """Shown before it asks for the client's, which this one has not."""
        return ssl.get_server_certificate(("127.0.0.1", indexer.server.port), timeout=60)

    def trust(*authorities: trustme.CA) -> None:
        Path(ca).write_bytes(b"".join(each.cert_pem.bytes() for each in authorities))

    def renew_without_ca() -> str:
        Path(ca).unlink()
        return renew().decode()

    renew()
    trust()
    async with Fleet(a=engine()) as fleet:
        with pytest.raises(UserError, match=r"clients\.pem"):
            await fleet.indexer(tls=TlsConfig(cert=cert, key=key), client_ca=ca)
        trust(first)
        indexer = await fleet.indexer(tls=TlsConfig(cert=cert, key=key), client_ca=ca)
        assert await answers(shown(first))
        assert not await answers(shown(second))
        renewed = renew_without_ca()
        assert await answers(shown(first))  # The last good ones.
        trust(first, second)
        async with asyncio.timeout(60):
            while not await answers(shown(second)):  # noqa: ASYNC110 - the files are looked at when somebody connects
                await asyncio.sleep(0.05)
        assert await answers(shown(first))
        assert (await asyncio.to_thread(served)).split() == renewed.split()


def test_certificates_and_token_for_an_indexer_are_read_again_for_each_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = trustme.CA()
    ca, token = tmp_path / "ca.pem", tmp_path / "token"
    authority.cert_pem.write_to_path(str(ca))
    token.write_text("t" * 20)
    config = IndexServiceConfig(addresses=("a:1",), tls=True, ca=str(ca), token_file=str(token))
    addresses = Addresses(config, random.Random(1))
    first = addresses.credentials()
    token.write_text("u" * 20)
    assert addresses.credentials() is not first
    assert addresses.metadata == (("authorization", "Bearer " + "u" * 20),)
    token.write_text("short")
    for _ in range(3):
        assert addresses.credentials() is not None
    assert addresses.metadata == (("authorization", "Bearer " + "u" * 20),)
    assert caplog.text.count("the last good certificates and token") == 1


async def test_an_indexer_that_goes_down_sends_its_watchers_away_first() -> None:
    async with Fleet(a=engine()) as fleet:
        first, second = await fleet.indexer(), await fleet.indexer()
        gateway = await fleet.gateway(address(first), address(second))
        await until(lambda: gateway.core.link.is_live and gateway.core.fleet.models())
        drained = asyncio.create_task(first.drain(10.0))
        await until(lambda: second.server.counts.watchers == 1)
        assert not gateway.core.link.is_stale
        assert await drained == 0


async def test_a_picker_behind_envoy_goes_by_it_too() -> None:
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        gateway = await fleet.gateway(address(indexer))
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        await fleet.complete(gateway, prompt(12))
        service = IndexServiceConfig(addresses=(address(indexer),))
        picker = EppConfig(host="127.0.0.1", port=0, health_port=0, metrics_port=0, admin_port=0, tls="off")
        config = fleet.config(index=IndexConfig(source="service", service=service), epp=picker)
        async with Epp(config) as epp:
            await until(lambda: digests(epp.core.index) == digests(indexer.core.index) != {})
            await until(lambda: all(w.publishes_events for w in epp.core.fleet.workers.values()))


async def to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_watcher_that_reads_nothing_is_cut_off() -> None:
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer(write_timeout_s=1.0)
        gateway = await fleet.gateway(address(indexer))
        await until(lambda: gateway.core.link.is_live)
        async with channel(address(indexer)) as it:
            watch = it.unary_stream(f"/{SERVICE}/Watch", pb.WatchRequest.SerializeToString, pb.Update.FromString)
            call = watch(pb.WatchRequest())
            await call.read()
            index, n = indexer.core.index, 0
            while not indexer.server.counts.cut:
                assert n < 4_000_000
                for _ in range(200):
                    hashes = list(range(n, n + 128))
                    index.apply("x", 0, decode_batch(stored(hashes, hashes, block_size=1)))
                    n += 128
                await asyncio.sleep(0.05)
            with pytest.raises(grpc.aio.AioRpcError) as cut:
                await to_the_end(call)
        assert cut.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OUT_OF_RANGE)
        await is_copied(indexer, gateway)
        assert not gateway.core.ingest.counters().get("copy_cut_off")


async def test_a_snapshot_is_whole_and_ends() -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        indexer = await fleet.indexer()
        for n in range(0, 80_000, 128):
            hashes = list(range(n, n + 128))
            indexer.core.index.apply("x", 0, decode_batch(stored(hashes, hashes, block_size=1)))
        replica, parts, ended = Replica(), [], None
        async with channel(address(indexer)) as it:
            snapshot = it.unary_stream(
                f"/{SERVICE}/Snapshot", pb.SnapshotRequest.SerializeToString, pb.Update.FromString
            )
            async for update in snapshot(pb.SnapshotRequest()):
                assert ended is None
                assert update.ByteSize() < 1 << 20
                for section in update.sections:
                    parts = section_changes(section) if section.first else [*parts, *section_changes(section)]
                    if section.last:
                        replica.replace((section.worker, section.rank), parts)
                for delta in update.deltas:
                    for change in delta.changes:
                        if not change.HasField("feed"):
                            replica.take(change_of(change))
                ended = update.end if update.HasField("end") else None
        assert ended is not None
        assert digests(replica) == digests(indexer.core.index) != {}


async def refused(where: str, method: str, request_: Any, metadata: Any = None) -> grpc.StatusCode | None:
    """What a call ends with; None: it is answered."""
    async with channel(where) as it:
        kind = it.unary_stream if method in ("Watch", "Snapshot") else it.unary_unary
        call = kind(f"/{SERVICE}/{method}", type(request_).SerializeToString)(request_, metadata=metadata, timeout=10)
        try:
            await (call.read() if method in ("Watch", "Snapshot") else call)
        except grpc.aio.AioRpcError as exc:
            return exc.code()
        return None


REQUESTS = {
    "Match": pb.MatchRequest(token_ids=ids(prompt(1))),
    "Watch": pb.WatchRequest(),
    "Snapshot": pb.SnapshotRequest(),
    "Stats": pb.StatsRequest(),
    "Forget": pb.ForgetRequest(worker="a"),
}


async def test_with_a_token_nobody_is_answered_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, file, path = "t" * 20, tmp_path / "token", str(tmp_path / "indexer.sock")
    file.write_text(token + "\n")
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer(token_file=str(file), socket=path)
        where = address(indexer)
        for method, request_ in REQUESTS.items():
            for given in (None, "", token, f"Bearer {token}x", "Bearer " + "é"):
                metadata = None if given is None else (("authorization", given.encode("ascii", "ignore").decode()),)
                assert await refused(where, method, request_, metadata) is grpc.StatusCode.UNAUTHENTICATED
            twice = (("authorization", f"Bearer {token}"),) * 2
            assert await refused(where, method, request_, twice) is grpc.StatusCode.UNAUTHENTICATED
            assert await refused(where, method, request_, (("authorization", f"Bearer {token}"),)) is None
            assert await refused(f"unix:{path}", method, request_) is None
        assert indexer.server.counts.unauthenticated == 6 * len(REQUESTS)
        async with channel(where) as it:  # Probes have no token.
            check = it.unary_unary("/grpc.health.v1.Health/Check", None, health_pb2.HealthCheckResponse.FromString)
            assert (await check(b"", timeout=10)).status == health_pb2.HealthCheckResponse.SERVING
        without = await fleet.gateway(where)
        await until(lambda: without.core.link.problem)
        assert "UNAUTHENTICATED" in without.core.link.problem
        gateway = await fleet.gateway(where, token_file=str(file))
        await until(lambda: all(w.publishes_events for w in gateway.core.fleet.workers.values()))
        await fleet.complete(gateway, prompt(12))
        await is_copied(indexer, gateway)
        gateway.core.cache_cleared("a")
        await until(lambda: not digests(indexer.core.index))
        monkeypatch.setenv("WARMROUTE_INDEXER_TOKEN", token)
        asking = await fleet.gateway(where, mode="query")
        await until(lambda: asking.core.link.is_live)
        await fleet.complete(asking, prompt(13))
        await until(lambda: asking.core.ingest.counters().get("query_answered"))


@pytest.mark.parametrize("content", ["short", "with spaces in it, it is none", "", b"\xff" * 20])
def test_a_token_that_is_none_stops_the_start(tmp_path: Path, content: str | bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match="token") as wrong:
        Addresses(IndexServiceConfig(addresses=("a:1",), token_file=str(file)), random.Random(1))
    assert str(content) not in str(wrong.value) or not content


async def test_of_too_many_copies_the_last_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_WATCHERS", 2)
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        gateways = [await fleet.gateway(address(indexer)) for _ in range(2)]
        await until(lambda: all(gateway.core.link.is_live for gateway in gateways))
        for method in ("Watch", "Snapshot"):
            assert await refused(address(indexer), method, REQUESTS[method]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert indexer.server.counts.turned_away == 2
        assert await refused(address(indexer), "Match", REQUESTS["Match"]) is None
        await gateways[0].close()
        await until(lambda: indexer.server.counts.watchers == 1)
        assert await refused(address(indexer), "Snapshot", REQUESTS["Snapshot"]) is None


@pytest.mark.parametrize("most", ["_MOST_BLOCKS", "_MOST_HOLDERS"])
async def test_an_indexer_that_tells_without_end_is_given_up(most: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, most, 1)
    async with Fleet(a=engine(), b=engine()) as fleet:
        indexer = await fleet.indexer()
        for worker in "xy":
            indexer.core.index.apply(worker, 0, decode_batch(stored([1, 2], [1, 2], block_size=1)))
        gateway = await fleet.gateway(address(indexer))
        await until(lambda: gateway.core.ingest.counters().get("copy_unreadable"))
        assert "more than there can be" in gateway.core.link.problem


async def test_of_too_many_calls_the_last_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_WATCHERS", 1)
    monkeypatch.setattr(server, "MOST_MATCHES", 0)
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        gateway = await fleet.gateway(address(indexer))
        await until(lambda: gateway.core.link.is_live)
        assert await refused(address(indexer), "Match", REQUESTS["Match"]) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def endless(it: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    """What becomes of a call that says nothing and does not end."""
    forever = asyncio.Event()

    async def nothing():
        await forever.wait()
        yield b""

    call = it.stream_unary(method, lambda raw: raw, lambda raw: raw)(nothing(), metadata=metadata)
    try:
        return await call.code()
    finally:
        call.cancel()


@pytest.mark.parametrize("method", [f"/{SERVICE}/Match", f"/{SERVICE}/Watch", "/grpc.health.v1.Health/Check"])
async def test_strangers_whose_calls_do_not_end_take_nobodys_place(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "t" * 20
    monkeypatch.setenv("WARMROUTE_INDEXER_TOKEN", token)
    monkeypatch.setattr(server, "MOST_WATCHERS", 1)
    monkeypatch.setattr(server, "MOST_MATCHES", 1)
    monkeypatch.setattr(rpc, "_QUESTION_S", 3600.0)
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        async with channel(address(indexer)) as it:
            calls = [asyncio.create_task(endless(it, method, ())) for _ in range(8)]
            if SERVICE in method:
                assert {await call for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
                assert indexer.server.counts.unauthenticated == 8
            gateway = await fleet.gateway(address(indexer))
            await until(lambda: gateway.core.link.is_live)
            assert indexer.server.counts.turned_away == 0
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("method", [f"/{SERVICE}/Match", f"/{SERVICE}/Watch", "/grpc.health.v1.Health/Check"])
async def test_a_question_that_does_not_come_is_not_waited_for(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_QUESTION_S", 0.1)
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        async with channel(address(indexer)) as it:
            assert await asyncio.wait_for(endless(it, method, ()), 60) is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("method", [*REQUESTS, "Check"])
async def test_a_message_that_is_none_is_said_to_be_none(method: str, caplog: pytest.LogCaptureFixture) -> None:
    path = "/grpc.health.v1.Health/Check" if method == "Check" else f"/{SERVICE}/{method}"
    async with Fleet(a=engine()) as fleet:
        indexer = await fleet.indexer()
        async with channel(address(indexer)) as it:
            call = it.unary_stream(path, lambda raw: raw, lambda raw: raw)(b"\xff\xff\xff", timeout=60)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "DecodeError" not in caplog.text
