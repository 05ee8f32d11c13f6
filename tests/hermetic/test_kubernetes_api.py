"""The way to the API itself: certificates, tokens that are replaced, answers that are none."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
import yaml

from gateway.discovery.kubernetes import Access, Api
from gateway.discovery.kubernetes.access import from_kubeconfig, in_cluster
from gateway.discovery.kubernetes.api import Refused, Unreachable
from tests.support.kube_server import PODS, KubeServer
from tests.support.pods import pod
from tests.support.virtual_time import event_loop_policy

__all__ = ["event_loop_policy"]

PATH = "/api/v1/namespaces/default/pods"


@asynccontextmanager
async def api_of(access: Access) -> AsyncIterator[Api]:
    api = Api(access)
    try:
        yield api
    finally:
        await api.close()


async def test_the_cluster_is_checked_by_its_own_ca() -> None:
    ours, others = trustme.CA(), trustme.CA()
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.issue_cert("kubernetes.default.svc").configure_cert(serving)
    checked, wrong = ssl.create_default_context(), ssl.create_default_context()
    ours.configure_trust(checked)
    others.configure_trust(wrong)
    async with KubeServer(tls=serving) as kube:
        async with api_of(Access(server=kube.url, tls=checked, server_name="kubernetes.default.svc")) as api:
            assert b"items" in await api.get(PATH)
        for tls, name in ((wrong, "kubernetes.default.svc"), (checked, "kubernetes.example")):
            async with api_of(Access(server=kube.url, tls=tls, server_name=name)) as api:
                with pytest.raises(Unreachable, match="certificate"):
                    await api.get(PATH)


async def test_a_ca_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    before, after = trustme.CA(), trustme.CA()
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    after.issue_cert("127.0.0.1").configure_cert(serving)
    (tmp_path / "token").write_text("t")
    before.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    async with KubeServer(tls=serving) as kube:
        env = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(kube.port)}
        async with api_of(in_cluster(env, tmp_path)) as api:
            for _ in range(2):
                with pytest.raises(Unreachable, match="certificate"):
                    await api.get(PATH)
            after.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
            with pytest.raises(Unreachable, match="certificate"):
                await api.get(PATH)
            assert b"items" in await api.get(PATH)


@pytest.mark.parametrize("as_data", [True, False])
async def test_an_api_that_wants_a_certificate_gets_the_kubeconfigs(tmp_path: Path, as_data: bool) -> None:
    ca = trustme.CA()
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.verify_mode = ssl.CERT_REQUIRED
    ca.issue_cert("127.0.0.1").configure_cert(serving)
    ca.configure_trust(serving)
    mine = ca.issue_cert("developer")
    pems = {"certificate": mine.cert_chain_pems[0].bytes(), "key": mine.private_key_pem.bytes()}
    for name, pem in pems.items():
        (tmp_path / f"{name}.pem").write_bytes(pem)
    user = (
        {f"client-{name}-data": base64.b64encode(pem).decode() for name, pem in pems.items()}
        if as_data
        else {f"client-{name}": f"{name}.pem" for name in pems}
    )
    async with KubeServer(tls=serving) as kube:

        def access(user: dict[str, str]) -> Access:
            cluster = {"server": kube.url, "certificate-authority-data": base64.b64encode(ca.cert_pem.bytes()).decode()}
            tree = {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": user}],
            }
            (tmp_path / "config").write_text(yaml.safe_dump(tree))
            return from_kubeconfig(str(tmp_path / "config"))

        async with api_of(access(user)) as api:
            assert b"items" in await api.get(PATH)
        async with api_of(access({"token": "t"})) as api:
            with pytest.raises(Unreachable):
                await api.get(PATH)


async def test_a_token_that_is_replaced_is_used_at_once(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    async with KubeServer() as kube, api_of(Access(server=kube.url, token_file=file)) as api:
        kube.tokens = {"old"}
        await api.get(PATH)
        kube.tokens = {"new"}
        with pytest.raises(Refused) as refused:
            await api.get(PATH)
        assert refused.value.status == 401
        file.write_text("new\n")
        await api.get(PATH)
        file.unlink()
        with pytest.raises(Unreachable, match="No such file"):
            await api.get(PATH)


async def test_what_went_wrong_is_said() -> None:
    async with KubeServer() as kube, api_of(Access(server=kube.url)) as api:
        kube.forbidden = {PODS}
        with pytest.raises(Refused, match='cannot list resource "pods"'):
            await api.get(PATH)
        with pytest.raises(Refused, match="HTTP 404 Not Found"):
            await api.get("/apis/llm-d.ai/v1alpha2")
        kube.refusals = [(429, {"Retry-After": "7"}), (302, {"Location": "http://127.0.0.1:1/"})]
        with pytest.raises(Refused) as refused:
            await api.get(PATH)
        assert refused.value.retry_after_s == 7.0
        with pytest.raises(Refused):  # Nobody else is shown the token.
            await api.get(PATH)
        kube.slow_s = 5.0
        with pytest.raises(Unreachable, match="no answer in time"):
            await api.send("GET", PATH, timeout_s=0.05)
        kube.down = True
        with pytest.raises(Unreachable):
            await api.get(PATH)


async def test_watch_lines_of_any_length() -> None:
    async with KubeServer() as kube, api_of(Access(server=kube.url)) as api:
        for name, size in (("a", 1), ("b", 1 << 20), ("c", 1)):
            kube.put(PODS, name, pod(annotations={"x": "y" * size}))
        params = {"watch": "true", "resourceVersion": "1000", "timeoutSeconds": "0.05"}
        lines = [line async for line in api.watch(PATH, params, 5.0)]
        assert lines[0] == b""
        assert [len(line) > 1 << 20 for line in lines[1:4]] == [False, True, False]


async def test_a_watch_that_does_not_end_is_given_up() -> None:
    async with KubeServer() as kube, api_of(Access(server=kube.url)) as api:
        params = {"watch": "true", "resourceVersion": "1000", "timeoutSeconds": "60"}

        async def follow() -> None:
            async for line in api.watch(PATH, params, 0.2):
                if not line:
                    kube.lose()

        with pytest.raises(Unreachable):
            await asyncio.wait_for(follow(), 60)


async def test_a_token_that_fits_into_no_header_is_told(tmp_path: Path) -> None:
    file = tmp_path / "token"
    async with KubeServer() as kube, api_of(Access(server=kube.url, token_file=file)) as api:
        file.write_bytes(b"a\nb")
        with pytest.raises(Unreachable, match="header"):
            await api.get(PATH)
        file.write_bytes(b"\xff\xfe")
        kube.tokens = set()
        with pytest.raises(Refused, match="Unauthorized"):
            await api.get(PATH)
