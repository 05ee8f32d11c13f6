"""Client certificates on every side: of clients, of the admin port, and ours towards workers."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from bench.engine.server import FakeVllm
from gateway.cli import main
from gateway.config import Config, load_config
from gateway.config.schema import (
    AdminConfig,
    GatewayConfig,
    LoggingConfig,
    TenancyConfig,
    TlsConfig,
    TokensConfig,
    Worker,
)
from gateway.errors import UserError
from gateway.run import Gateway
from gateway.tls import name_in
from tests.support.followed import taken
from tests.support.gateway_world import engine, until
from tests.support.sidecar_world import Pod


class Authority:
    """A CA with certificates in files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._ca = trustme.CA()
        self.file = str(folder / f"{name}-ca.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *identities: str, common_name: str | None = None) -> tuple[str, str]:
        leaf = self._ca.issue_cert(*identities, common_name=common_name)
        cert, key = (str(self._folder / f"{self._name}-{name}.{kind}") for kind in ("pem", "key"))
        Path(cert).write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(key)
        return cert, key


class Pki:
    def __init__(self, folder: Path) -> None:
        self.servers, self.clients = Authority(folder, "servers"), Authority(folder, "clients")
        self.cert, self.key = self.servers.issue("server", "127.0.0.1")

    def serving(self, **more: Any) -> TlsConfig:
        return TlsConfig(cert=self.cert, key=self.key, **more)

    def client(self, pair: tuple[str, str] | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.servers.file)
        if pair is not None:
            context.load_cert_chain(*pair)
        return context


def cut_short(file: str) -> None:
    Path(file).write_text("half")


def joined(file: Path, *others: str) -> None:
    file.write_text("".join(Path(other).read_text() for other in others))


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def gateway_config(engine_url: str, **sections: Any) -> Config:
    ports = sections.pop("gateway", GatewayConfig(host="127.0.0.1", port=0, admin_port=0))
    return Config(
        gateway=ports,
        workers=(Worker(url=engine_url, name="a"),),
        tokens=TokensConfig(engine_budget_ms=2000),
        logging=LoggingConfig(level="error"),
        **sections,
    )


async def status_of(url: str, context: ssl.SSLContext, **request: Any) -> int | None:
    """None: the connection was refused."""
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(connector=connector) as http:
        try:
            async with http.request(request.pop("method", "GET"), url, **request) as response:
                await response.read()
                return response.status
        except (aiohttp.ClientError, OSError):
            return None


@pytest.mark.parametrize("http", ["fast", "aiohttp"])
async def test_only_who_shows_a_certificate_of_the_ca_comes_in(pki: Pki, http: str) -> None:
    good = pki.clients.issue("good", "client.example")
    other = pki.servers.issue("other", "client.example")
    ports = GatewayConfig(host="127.0.0.1", port=0, admin_port=0, http=http)  # type: ignore[arg-type]
    async with FakeVllm(engine()) as fake:
        config = gateway_config(fake.url, tls=pki.serving(client_ca=pki.clients.file), gateway=ports)
        async with Gateway(config) as gateway:
            await until(lambda: gateway.core.capabilities)
            url = f"https://127.0.0.1:{gateway.port}/v1/completions"
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            for pair, expected in ((None, None), (other, None), (good, 200)):
                assert await status_of(url, pki.client(pair), method="POST", json=body) == expected
            assert await status_of(f"https://127.0.0.1:{gateway.port}/health", pki.client(None)) is None


async def test_the_tenant_is_the_name_in_the_certificate_whatever_a_header_says(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_SALT_SECRET", "s" * 32)
    alice, bob = (pki.clients.issue(name, f"{name}.example", common_name=name) for name in ("alice", "bob"))
    nobody = pki.clients.issue("nobody", "host.example")
    tenancy = TenancyConfig(certificate=True, salt="derive", header="x-tenant", required=True)
    async with FakeVllm(engine()) as fake:
        config = gateway_config(fake.url, tls=pki.serving(client_ca=pki.clients.file), tenancy=tenancy)
        async with Gateway(config) as gateway:
            await until(lambda: gateway.core.capabilities)
            url = f"https://127.0.0.1:{gateway.port}/v1/completions"
            prompt = " ".join(map(str, range(200)))
            cached: list[int] = []
            for pair in (alice, alice, bob, bob):
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=pki.client(pair))) as http:
                    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "cache_salt": "same"}
                    async with http.post(url, json=body, headers={"X-Tenant": "alice"}) as response:
                        answer = await response.json()
                        assert response.status == 200, answer
                        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert [bool(n) for n in cached] == [False, True, False, True]
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            headers = {"X-Tenant": "alice"}
            assert await status_of(url, pki.client(nobody), method="POST", json=body, headers=headers) == 401


async def test_we_show_workers_a_certificate_and_take_a_renewed_one(pki: Pki) -> None:
    """A sidecar that demands certificates is the engine."""
    cert, key = pki.clients.issue("ours", "gateway.example")
    demanding = pki.serving(client_ca=pki.clients.file)
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(Pod(tls=demanding))
        url = f"https://127.0.0.1:{behind.sidecar.port}"
        without = await stack.enter_async_context(Pod(engine_url=url, tls=TlsConfig(ca=pki.servers.file)))
        assert (await without.ask("GET", "/health"))[0] == 503
        tls = TlsConfig(ca=pki.servers.file, client_cert=cert, client_key=key)
        pod = await stack.enter_async_context(Pod(engine_url=url, tls=tls))
        await until(lambda: pod.core.capabilities)
        assert (await pod.complete())[0] == 200
        followed = pod.core.trust_of_workers
        assert followed is not None
        assert not followed.refresh()
        pki.clients.issue("ours", "gateway.example")
        assert taken(followed)
        assert (await pod.ask("GET", "/health"))[0] == 200
        cut_short(key)
        for _ in range(3):
            assert not followed.refresh()
        assert (await pod.complete())[0] == 200


async def test_a_ca_of_workers_that_is_added_counts_without_a_restart(pki: Pki, tmp_path: Path) -> None:
    second = Authority(tmp_path, "second")
    trusted = tmp_path / "workers.pem"
    joined(trusted, second.file)
    async with (
        Pod(tls=pki.serving()) as behind,
        Pod(engine_url=f"https://127.0.0.1:{behind.sidecar.port}", tls=TlsConfig(ca=str(trusted))) as pod,
    ):
        assert (await pod.ask("GET", "/health"))[0] == 503
        joined(trusted, second.file, pki.servers.file)
        assert pod.core.trust_of_workers is not None
        assert taken(pod.core.trust_of_workers)
        assert (await pod.ask("GET", "/health"))[0] == 200


async def test_the_admin_port_off_the_loopback_knows_its_clients_by_another_ca(pki: Pki) -> None:
    tenants, operators = pki.clients, Authority(Path(pki.clients.file).parent, "operators")
    tenant, operator = tenants.issue("t", "t.example"), operators.issue("o", "o.example")
    ports = GatewayConfig(host="127.0.0.1", port=0, admin_host="0.0.0.0", admin_port=0)
    config = gateway_config(
        "http://127.0.0.1:9",
        gateway=ports,
        tls=pki.serving(client_ca=tenants.file),
        admin=AdminConfig(client_ca=operators.file),
    )
    async with Gateway(config) as gateway:
        url = f"https://127.0.0.1:{gateway.admin_port}/admin/workers"
        for pair, expected in ((None, None), (tenant, None), (operator, 200)):
            assert await status_of(url, pki.client(pair)) == expected
        assert await status_of(f"https://127.0.0.1:{gateway.port}/livez", pki.client(operator)) is None


async def test_a_ca_that_is_added_counts_without_a_restart(pki: Pki, tmp_path: Path) -> None:
    second = Authority(tmp_path, "second")
    pair = second.issue("c", "c.example")
    trusted = tmp_path / "trusted.pem"
    joined(trusted, pki.clients.file)
    async with Pod(tls=pki.serving(client_ca=str(trusted))) as pod:
        url = f"https://127.0.0.1:{pod.sidecar.port}/livez"
        assert await status_of(url, pki.client(pair)) is None
        joined(trusted, pki.clients.file, second.file)
        assert pod.sidecar.certificate is not None
        assert await asyncio.to_thread(taken, pod.sidecar.certificate)
        assert await status_of(url, pki.client(pair)) == 200


def test_names_in_certificates() -> None:
    subject = ((("commonName", "cn"),),)
    assert name_in({"subject": subject}) == "cn"
    assert name_in({"subject": subject, "subjectAltName": (("DNS", "x"), ("URI", "spiffe://a/b"))}) == "spiffe://a/b"
    assert name_in({"subject": subject, "subjectAltName": (("URI", "a"), ("URI", "b"))}) is None
    assert name_in({"subject": ()}) is None
    assert name_in({}) is None
    assert name_in(None) is None


def test_settings_that_check_nothing_are_refused(pki: Pki, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tree, named in (
        ({"tls": {"client_ca": "x"}}, "tls.client_ca"),
        ({"admin": {"client_ca": "x"}}, "admin.client_ca"),
        ({"tls": {"client_cert": "x"}}, "tls.client_key"),
        ({"tenancy": {"certificate": True}}, "tenancy.certificate"),
        (
            {
                "tenancy": {"certificate": True},
                "auth": {"keys_env": "X"},
                "tls": {"cert": "c", "key": "k", "client_ca": "x"},
            },
            "tenancy.certificate",
        ),
    ):
        file = tmp_path / "c.yaml"
        file.write_text(json.dumps(tree))
        with pytest.raises(UserError, match=named.replace(".", r"\.")):
            load_config(str(file))
    junk = tmp_path / "junk.pem"
    junk.write_text("none")
    flags = ["--tls-cert", pki.cert, "--tls-key", pki.key, "--tls-client-ca", str(junk), "--port", "0"]
    assert main(["gateway", "--worker", "http://x:1", *flags]) == 2
    assert "client_ca" in capsys.readouterr().err
    flags = ["--tls-client-cert", str(junk), "--tls-client-key", pki.key]
    assert main(["gateway", "--worker", "https://x:1", *flags]) == 2
    assert "tls.client_cert" in capsys.readouterr().err
