"""Without the extra, and with it and tracing off, nothing of OpenTelemetry is loaded, and everything works."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from gateway.config.schema import TracingConfig
from gateway.errors import UserError
from gateway.tracing.start import start

_WITHOUT = """
import sys

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if sys.argv[1] == "gone":
    sys.meta_path.insert(0, Gone())

import asyncio, json
import msgspec
import aiohttp
from gateway.config import Config
from gateway.config.schema import EppConfig, GatewayConfig, LoggingConfig, SidecarConfig, TracingConfig, Worker
from gateway.epp.run import Epp
from gateway.errors import UserError
from gateway.run import Gateway
from gateway.sidecar.run import Sidecar
from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from bench.engine.timing import preset

async def main():
    engine = FakeVllmConfig(model="tiny").with_engine(timing=preset("instant"))
    async with FakeVllm(engine) as worker:
        config = Config(
            gateway=GatewayConfig(host="127.0.0.1", port=0, admin_port=0),
            sidecar=SidecarConfig(engine=worker.url, host="127.0.0.1", port=0, admin_port=0),
            epp=EppConfig(host="127.0.0.1", port=0, health_port=0, metrics_port=0, admin_port=0, tls="off"),
            workers=(Worker(url=worker.url),),
            logging=LoggingConfig(level="error"),
        )
        for face in (Gateway, Sidecar):
            async with face(config) as service, aiohttp.ClientSession() as http:
                while not service.core.capabilities:
                    await asyncio.sleep(0.01)
                body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
                async with http.post(f"http://127.0.0.1:{service.port}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
        async with Epp(config):
            pass
        if sys.argv[1] == "gone":
            try:
                Gateway(msgspec.structs.replace(config, tracing=TracingConfig(enabled=True)))
            except UserError as exc:
                assert "pip install 'warmroute[otel]'" in str(exc), exc
            else:
                raise AssertionError("it started")

asyncio.run(main())
loaded = [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]
assert not loaded, loaded
print("fine")
"""


@pytest.mark.parametrize("extra", ["gone", "there"])
def test_off_nothing_of_it_is_loaded(extra: str) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT, extra], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"


def test_off_is_no_tracing_at_all() -> None:
    assert start(TracingConfig(), "gateway", CollectorRegistry(), scheme=None) is None


async def test_the_sdks_own_switch_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "TRUE")
    assert start(TracingConfig(enabled=True), "gateway", CollectorRegistry(), scheme=None) is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gateway.tracing.otel", None)
    with pytest.raises(UserError, match=r"needs the extra otel: pip install 'warmroute\[otel\]'"):
        start(TracingConfig(enabled=True), "gateway", CollectorRegistry(), scheme=None)
