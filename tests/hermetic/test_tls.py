"""TLS on both sides, with certificates of a throw-away CA."""

import asyncio
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest
import trustme

from bench.engine.server import FakeVllm
from gateway import service, tls
from gateway.cli import main
from gateway.config import Config
from gateway.config.schema import GatewayConfig, TlsConfig, TokensConfig, Worker
from gateway.debug.health import degradations
from gateway.discovery import DnsDiscovery, Source
from gateway.errors import UserError
from gateway.proxy.peer import NoConnection, PoolSettings
from gateway.proxy.upstream import new_upstream
from gateway.run import Gateway
from gateway.tls import ServingCertificate, client_context, scheme_of_workers, serving_certificate
from scorer.types import ChangeKind
from tests.support.followed import taken
from tests.support.gateway_world import engine, until
from tests.support.sidecar_world import Pod


class Files:
    """A CA, and a certificate for `host` with its key, as PEM files."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.ca_file, self.cert, self.key = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        self.ca.cert_pem.write_to_path(self.ca_file)
        self.renew(host)

    def renew(self, host: str = "127.0.0.1") -> trustme.LeafCert:
        leaf = self.ca.issue_cert(host)
        Path(self.cert).write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(self.key)
        return leaf

    def swap_key(self, content: bytes | None) -> bytes:
        """None: there is none any more. What there was."""
        file = Path(self.key)
        before = file.read_bytes() if file.exists() else b""
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        return before

    @property
    def serving(self) -> TlsConfig:
        return TlsConfig(cert=self.cert, key=self.key)

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def serial(port: int, context: ssl.SSLContext) -> str:
    """Of the certificate that is served now."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    number = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return str(number)


async def test_the_data_plane_serves_tls_and_takes_renewed_files(files: Files) -> None:
    async with Pod(tls=files.serving) as pod:
        port, context = pod.sidecar.port, files.trusting()
        first = await serial(port, context)
        files.renew()
        assert pod.sidecar.certificate is not None
        assert taken(pod.sidecar.certificate)
        assert await serial(port, context) != first
        with pytest.raises(ssl.SSLCertVerificationError):
            await serial(port, ssl.create_default_context())
        with pytest.raises((aiohttp.ClientError, OSError)):
            await pod.complete()  # Plain HTTP.
        async with pod.http.get(pod.admin + "/livez") as admin:  # The admin port is on the loopback, in plain HTTP.
            assert admin.status == 200


async def test_sighup_takes_files_at_once_and_says_which_it_cannot_use(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "_UPKEEP_S", 3600.0)  # Nobody else looks.
    async with Pod(tls=files.serving) as pod:
        port, context = pod.sidecar.port, files.trusting()

        def told() -> list[str]:
            found = degradations(pod.core)
            return [str(each.detail) for each in found if each.what == "certificate_rejected"]

        first = await serial(port, context)
        files.renew()
        pod.sidecar.reload()
        assert pod.sidecar.certificate is not None
        await until(lambda: pod.sidecar.certificate.n_taken == 1)
        assert await serial(port, context) not in (first, None)
        second = await serial(port, context)
        key = files.swap_key(b"half")
        for _ in range(3):
            pod.sidecar.reload()
        await until(told)
        assert await serial(port, context) == second
        assert "the last good certificate is in force" in told()[0]
        files.swap_key(None)
        pod.sidecar.reload()
        await until(lambda: told() == ["the last good certificate is in force: No such file or directory"])
        for _ in range(3):
            pod.sidecar.reload()
        files.swap_key(key)
        pod.sidecar.reload()
        await until(lambda: not told())
        assert await serial(port, context) == second
        assert caplog.text.count("the last good one stays: No such file") == 1


def test_half_replaced_files_change_nothing(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    certificate = serving_certificate(files.serving)
    assert certificate is not None
    assert not certificate.refresh()
    files.ca.issue_cert("127.0.0.1").private_key_pem.write_to_path(files.key)
    for _ in range(3):
        assert not certificate.refresh()
    assert caplog.text.count("the last good one stays") == 1
    Path(files.cert).unlink()
    assert not certificate.refresh()
    files.renew()
    assert taken(certificate)
    assert not certificate.refresh()


async def test_files_that_change_while_they_are_taken_break_nothing(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tried is what is served, whatever the files are by then."""
    async with Pod(tls=files.serving) as pod:
        certificate = pod.sidecar.certificate
        assert certificate is not None
        first = await serial(pod.sidecar.port, files.trusting())
        files.renew()
        tried = certificate._made

        def made(contents: tuple[bytes, ...]) -> ssl.SSLContext:
            context = tried(contents)
            Path(files.key).write_text("half of it")
            return context

        monkeypatch.setattr(certificate, "_made", made)
        assert taken(certificate)
        second = await serial(pod.sidecar.port, files.trusting())
        assert second != first
        monkeypatch.undo()
        for _ in range(3):
            assert not certificate.refresh()
        assert await serial(pod.sidecar.port, files.trusting()) == second


@pytest.mark.parametrize("when", ["before it is read", "while it is read"])
def test_a_chain_that_is_still_being_written_is_not_taken(
    files: Files, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = serving_certificate(files.serving)
    assert certificate is not None
    between = files.ca.create_child_ca()
    leaf = between.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(files.key)
    whole = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    assert whole.count(b"BEGIN") == 2
    Path(files.cert).write_bytes(leaf.cert_chain_pems[0].bytes())  # It makes sense by itself.
    assert not certificate.look()
    if when == "while it is read":
        read = tls._contents

        def torn(names: tuple[str, ...]) -> tuple[bytes, ...]:
            contents = read(names)
            Path(files.cert).write_bytes(whole)
            return contents

        monkeypatch.setattr(tls, "_contents", torn)
        assert not certificate.look()
        monkeypatch.undo()
    else:
        Path(files.cert).write_bytes(whole)
    assert not certificate.look()
    assert certificate.look()
    certificate.take()
    assert certificate.contents[0] == whole


def test_keys_are_given_to_openssl_where_the_system_has_no_memory_files(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_FDS", "/nowhere")
    assert serving_certificate(files.serving) is not None


@pytest.mark.parametrize("insecure", [False, True])
async def test_engines_are_spoken_to_in_tls(files: Files, insecure: bool) -> None:
    """One sidecar is the TLS engine of another: scrapes, pages and inference all go through it."""
    tls = TlsConfig(insecure_skip_verify=True) if insecure else TlsConfig(ca=files.ca_file)
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(Pod(tls=files.serving))
        url = f"https://127.0.0.1:{behind.sidecar.port}"
        pod = await stack.enter_async_context(Pod(engine_url=url, tls=tls))
        await until(lambda: pod.core.capabilities)
        assert (await pod.complete())[0] == 200
        assert (await pod.ask("GET", "/health"))[0] == 200
        assert "vllm:num_requests_running" in (await pod.ask("GET", "/metrics"))[1]


async def test_an_engine_nobody_vouches_for_gets_nothing(files: Files, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Files(tmp_path / "other")
    async with Pod(tls=files.serving) as behind:
        url = f"https://127.0.0.1:{behind.sidecar.port}"
        for tls in (TlsConfig(), TlsConfig(ca=other.ca_file)):
            async with Pod(engine_url=url, tls=tls) as pod:
                status, answer, _ = await pod.ask("GET", "/v1/models", headers={"Authorization": "Bearer secret"})
                assert (status, answer["error"]["code"]) == (502, "engine_unreachable")
                assert (await pod.ask("GET", "/health"))[0] == 503
        assert behind.sidecar.plane.in_flight == 0


async def test_names_are_checked(tmp_path: Path) -> None:
    files = Files(tmp_path, host="another.example")
    async with Pod(tls=files.serving) as pod:
        settings = {"connect_timeout_s": 2.0, "pool_idle_s": 1.0, "request_timeout_s": 5.0}
        for tls, good in (
            (TlsConfig(ca=files.ca_file), False),
            (TlsConfig(ca=files.ca_file, insecure_skip_verify=True), True),
        ):
            upstream = new_upstream(
                f"https://127.0.0.1:{pod.sidecar.port}", PoolSettings(**settings, tls=client_context(tls))
            )
            try:
                async with await upstream.send("GET", "/livez", {}, b"") as answer:  # type: ignore[arg-type]
                    assert answer.status == 200
                    assert good
            except NoConnection:
                assert not good
            finally:
                await upstream.close()


async def test_a_worker_found_by_dns_is_checked_by_the_name_it_was_found_by(tmp_path: Path) -> None:
    """Scrapes, tokenising and inference all go to an address, with a certificate of the name."""
    files = Files(tmp_path, host="vllm.models.svc")
    ports = GatewayConfig(host="127.0.0.1", port=0, admin_port=0)
    config = Config(gateway=ports, tls=TlsConfig(ca=files.ca_file), tokens=TokensConfig(engine_budget_ms=2000))
    async with Pod(tls=files.serving) as behind, Gateway(config) as gateway, aiohttp.ClientSession() as http:
        core, good = gateway.core, f"127.0.0.1:{behind.sidecar.port}"
        entry = Worker(url=f"https://vllm.models.svc:{behind.sidecar.port}")
        core.follow(DnsDiscovery([entry], interval_s=60, resolve=lambda name: ["127.0.0.1"]))
        await until(lambda: good in core.capabilities)
        body = {"model": "tiny", "prompt": "x " * 40, "max_tokens": 1}
        async with http.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body) as response:
            assert (response.status, response.headers["x-warmroute-worker"]) == (200, good)
        (status,) = core.tokens.status().values()
        assert status["served"] == {"engine": 1}
        found = core.roster.claims(good)[Source.DNS]
        core.take(Source.DNS, msgspec.structs.replace(found, kind=ChangeKind.CHANGED, server_name="evil.svc"))
        await until(lambda: core.scraper.reachable(good) is False)
        async with http.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body) as response:
            assert response.status == 502


async def test_plain_engines_need_no_tls() -> None:
    async with FakeVllm(engine()) as fake, Pod(engine_url=fake.url, tls=TlsConfig(insecure_skip_verify=True)) as pod:
        await until(lambda: pod.core.capabilities)
        assert (await pod.complete())[0] == 200


def test_scheme_of_workers_that_hints_name() -> None:
    assert scheme_of_workers(TlsConfig()) == "http"
    assert scheme_of_workers(TlsConfig(ca="x")) == scheme_of_workers(TlsConfig(insecure_skip_verify=True)) == "https"


def test_files_that_cannot_be_used_are_named(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    junk = files.folder / "junk.pem"
    junk.write_text("no certificate")
    for cert, key in ((files.cert, "/no/such"), (str(junk), files.key), (files.cert, str(junk))):
        with pytest.raises(UserError, match=r"tls\.cert: .*tls\.key: "):
            ServingCertificate(cert, key)
    for ca in ("/no/such", str(junk)):
        with pytest.raises(UserError, match=r"tls\.ca: "):
            client_context(TlsConfig(ca=ca))
    assert main(["sidecar", "--tls-cert", files.cert, "--tls-key", "/no/such", "--port", "0"]) == 2
    assert "No such file or directory" in capsys.readouterr().err
