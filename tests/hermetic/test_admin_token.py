"""The admin port: what needs its token, where it must have one, and what the main port shows beside keys."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from multidict import CIMultiDict

from gateway.admin_client import Refused, ask
from gateway.auth.admin import AdminToken
from gateway.config import Config
from gateway.config.schema import (
    AdminConfig,
    AuthConfig,
    EppConfig,
    GatewayConfig,
    LoggingConfig,
    SidecarConfig,
    TenancyConfig,
    Worker,
)
from gateway.epp.run import Epp
from gateway.errors import UserError
from gateway.record.command import Recording
from gateway.record.recorder import PATH as RECORD
from gateway.run import Gateway
from gateway.sidecar.run import Sidecar
from tests.support.auth import bearer, made, write_keys
from tests.support.proxy_world import Call, Stub

TOKEN = "a-token-of-the-tests"
ANYWHERE = "0.0.0.0"
VARIABLE = "WARMROUTE_ADMIN_TOKEN"


def config(*, host: str = "127.0.0.1", **sections: Any) -> Config:
    return Config(
        gateway=GatewayConfig(host="127.0.0.1", port=0, admin_host=host, admin_port=0),
        sidecar=SidecarConfig(host="127.0.0.1", port=0, admin_host=host, admin_port=0),
        epp=EppConfig(host="127.0.0.1", port=0, health_port=0, metrics_port=0, admin_host=host, admin_port=0),
        workers=(Worker(url="http://127.0.0.1:9", name="a"),),
        logging=LoggingConfig(level="error"),
        **sections,
    )


@pytest.mark.parametrize("face", [Gateway, Sidecar, Epp])
async def test_o8_off_the_loopback_no_face_starts_without_a_token(
    face: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=rf"{face.__name__.lower()}\.admin_host: 0\.0\.0\.0 .*{VARIABLE}"):
        face(config(host=ANYWHERE))
    await face(config(host=ANYWHERE, admin=AdminConfig(unprotected=True))).close()
    monkeypatch.setenv(VARIABLE, TOKEN)
    await face(config(host=ANYWHERE)).close()
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(UserError, match="16 characters"):
        face(config())


async def test_a_ca_of_operators_is_no_protection_where_there_is_no_tls() -> None:
    """The picker takes tls.cert for itself only with epp.tls: files."""
    for face in (Gateway, Epp):
        with pytest.raises(UserError, match="admin_host"):
            face(config(host=ANYWHERE, admin=AdminConfig(client_ca="ca.pem")))


async def test_the_picker_knows_no_clients_certificates() -> None:
    with pytest.raises(UserError, match=r"tenancy\.certificate"):
        Epp(config(tenancy=TenancyConfig(certificate=True)))


async def test_with_a_token_only_probes_are_answered_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    async with Gateway(config()) as gateway, aiohttp.ClientSession() as http:
        admin = f"http://127.0.0.1:{gateway.admin_port}"
        basic = "Basic " + base64.b64encode(b"anybody:" + TOKEN.encode()).decode()
        good = [{"Authorization": f"Bearer {TOKEN}"}, {"Authorization": basic}, {"authorization": f"bearer {TOKEN}"}]
        bad: list[dict[str, str]] = [
            {}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}, {"Authorization": "Basic !"},
            {"Authorization": "Bearer \xff"}, {"x-api-key": TOKEN},
        ]  # fmt: skip
        for path in (
            "/debug",
            "/debug/config",
            "/admin/workers",
            "/metrics",
            "/readyz?verbose",
            "/health",
            "/none",
            "/sleep",
        ):
            for headers in bad:
                async with http.get(admin + path, headers=headers) as response:
                    assert response.status == 401, (path, headers)
                    assert response.headers["WWW-Authenticate"].startswith("Basic ")
                    assert json.loads(await response.text())["error"]["code"] == "invalid_admin_token"
        for headers in good:
            async with http.get(admin + "/admin/workers", headers=headers) as response:
                assert response.status == 200
        for path, expected in (("/livez", 200), ("/readyz", 503)):
            async with http.get(admin + path) as response:
                assert response.status == expected
        # What a browser has remembered is of no use to another site's page.
        async with http.post(admin + "/sleep", headers={**good[1], "Origin": "https://evil.example"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (403, "cross_origin")
        async with http.get(admin + "/admin/workers", headers={**good[0], "Host": "evil.example"}) as response:
            assert response.status == 403


async def test_commands_send_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    async with Gateway(config()) as gateway:
        url = f"http://127.0.0.1:{gateway.admin_port}/admin/workers"
        assert len((await asyncio.to_thread(ask, url))["workers"]) == 1
        admin = f"http://127.0.0.1:{gateway.admin_port}"
        row = Recording(admin + RECORD, tmp_path / "trace.jsonl")
        running = asyncio.ensure_future(row.run())
        await asyncio.wait_for(row.begun.wait(), 60)
        running.cancel()
        monkeypatch.setenv(VARIABLE, "another token of them")
        with pytest.raises(Refused, match="admin token"):
            await asyncio.to_thread(ask, url)


def test_a_token_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    settings = AdminConfig(token_file=str(file))
    with pytest.raises(UserError, match=r"admin\.token_file: .*No such file"):
        AdminToken.of(settings, {})
    file.write_text(TOKEN + "\n")
    token = AdminToken.of(settings, {VARIABLE: "x"})
    assert token is not None
    assert token.is_in(CIMultiDict(bearer(TOKEN)))
    assert not token.is_in(CIMultiDict(bearer("x" + TOKEN)))
    assert not token.is_in(CIMultiDict([("Authorization", f"Bearer {TOKEN}")] * 2))
    assert AdminToken.of(AdminConfig(), {VARIABLE: " "}) is None


async def test_where_clients_need_keys_the_main_port_tells_others_only_whether_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, key = made()
    file = tmp_path / "keys.yaml"
    write_keys(file, key)
    monkeypatch.setenv(VARIABLE, TOKEN)
    async with Gateway(config(auth=AuthConfig(keys_file=str(file)))) as gateway, aiohttp.ClientSession() as http:
        main = f"http://127.0.0.1:{gateway.port}"
        for headers, details in (({}, False), (bearer(secret), False), (bearer(TOKEN), True)):
            for path, shown in (("/metrics", b"warmroute_"), ("/readyz?verbose", b"degraded")):
                async with http.get(main + path, headers=headers) as response:
                    assert (response.status == 401) is not details
                    assert (shown in await response.read()) is details
            async with http.get(main + "/health", headers=headers) as response:
                assert response.status == 503
                assert ("workers" in await response.json()) is details
            async with http.get(main + "/readyz", headers=headers) as response:
                assert response.status == 503
            async with http.get(main + "/livez", headers=headers) as response:
                assert response.status == 200


@pytest.mark.parametrize("engines", ["", "the engines' key"])
async def test_engines_never_see_the_token(engines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    monkeypatch.setenv("VLLM_API_KEY", engines)
    heads: list[bytes] = []

    async def notes(call: Call) -> None:
        if not call.line.startswith("GET /metrics"):
            heads.append(call.head)
        await call.ok()

    async with Stub(notes) as one, Stub(notes) as two:
        workers = (Worker(url=one.url, name="a"), Worker(url=two.url, name="b"))
        settings = msgspec.structs.replace(config(), workers=workers)
        async with Gateway(settings) as gateway, aiohttp.ClientSession(headers=bearer(TOKEN)) as http:
            admin = f"http://127.0.0.1:{gateway.admin_port}"
            async with http.post(admin + "/sleep?level=1", json={}) as response:
                assert response.status in (200, 502, 503)
            body = {"model": "m", "input": "x", "previous_response_id": "r"}
            async with http.post(admin + "/debug/explain?kind=responses", json=body) as response:
                await response.read()
    asked = [head for head in heads if head.startswith((b"POST /sleep", b"GET /v1/responses"))]
    assert len(asked) >= 2
    for head in asked:
        assert TOKEN.encode() not in head
        assert (f"Bearer {engines}".encode() in head) is bool(engines)
