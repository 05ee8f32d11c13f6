"""What a gateway process learned of its engines, and what the next one makes of it."""

import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engine.config import FakeVllmConfig
from bench.engine.server import FakeVllm
from bench.engine.timing import preset
from gateway.config import Config
from gateway.config.schema import GatewayConfig, LearningConfig, LoggingConfig
from gateway.debug.health import degradations
from gateway.run import Gateway
from scorer.calibrate import MIN_SAMPLES
from scorer.cost import Constants
from tests.support.command import Command
from tests.support.gateway_world import engine

FLOOR_S = Constants().comp_floor_s
SLOW = replace(preset("instant"), prefill_floor_s=2 * FLOOR_S, front_base_s=Constants().front_base_s)
"""Its prefills take about twice what is thought at first."""


def slow(port: int = 0, **changes: Any) -> FakeVllmConfig:
    config = engine(port=port, **changes)
    return config.with_engine(timing=SLOW)


async def teach(face: Command, n: int) -> None:
    """Prefills with the worker to themselves, of prompts that have nothing in common."""
    for i in range(n):
        body = {"model": "tiny", "prompt": [i] * 20, "max_tokens": 2, "stream": True}
        async with face.http.post(face.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()


async def page(face: Command, path: str) -> Any:
    async with face.http.get(face.admin + path) as answer:
        text = await answer.text()
        return json.loads(text) if text.startswith("{") else text


async def comp_s(face: Command) -> float:
    """What computing a short new prompt is thought to take."""
    body = {"model": "tiny", "prompt": [7_777] * 20}
    async with face.http.post(face.admin + "/debug/explain", json=body) as answer:
        found: float = (await answer.json())["considered"][0]["price"]["comp_s"]
        return found


@pytest.mark.parametrize("face", ["gateway", "sidecar"])
async def test_the_first_decision_after_a_restart_uses_what_was_learned(face: str, tmp_path: Path) -> None:
    file = tmp_path / "learned.json"
    async with FakeVllm(slow()) as fake:
        args = [face, "--worker" if face == "gateway" else "--engine", fake.url, "--learning-file", str(file)]
        async with Command(*args) as first:
            assert await comp_s(first) == pytest.approx(FLOOR_S)
            assert (await page(first, "/debug/learned"))["taken_over"] == 0
            await teach(first, MIN_SAMPLES + 10)
            learned_s = await comp_s(first)
            assert learned_s > 1.5 * FLOOR_S
            told = await page(first, "/debug/learned")
            (worker,) = told["workers"]
            assert told["factors"]["floor"]["own"][worker]["used"]
            assert told["workers"][worker]["floor"] == pytest.approx(learned_s / FLOOR_S)
            await first.terminate()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        async with Command(*args) as second:
            assert await comp_s(second) == pytest.approx(learned_s)
            again = await page(second, "/debug/learned")
            assert again["factors"] == told["factors"]
            assert again["taken_over"] == sum(
                len(part["own"]) + (part["fleet"] is not None) for part in told["factors"].values()
            )
            metrics = await page(second, "/metrics")
            (value,) = re.findall(r'warmroute_learned_factor\{part="floor",worker="[^"]+"\} (\S+)', metrics)
            assert float(value) == pytest.approx(learned_s / FLOOR_S)
            assert f"learned factors from {file}" in await second.terminate()


async def test_another_engine_at_the_same_place_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    args = ["gateway", "--learning-file", str(tmp_path / "learned.json"), "--worker"]
    async with FakeVllm(slow()) as fake:
        async with Command(*args, fake.url) as first:
            await teach(first, MIN_SAMPLES + 10)
            (worker,) = (await page(first, "/debug/learned"))["workers"]
            await first.terminate()
        port = fake.port
    async with FakeVllm(slow(port=port, root="/models/other")) as fake, Command(*args, fake.url) as second:
        told = await page(second, "/debug/learned")
        assert list(told["workers"]) == [worker]
        assert not any(part["own"].get(worker) for part in told["factors"].values())
        assert await comp_s(second) == pytest.approx(FLOOR_S)
        assert f"{worker} is another kind of engine" in await second.terminate()


async def test_a_file_that_is_of_no_use_is_told_and_stops_nothing(tmp_path: Path) -> None:
    file = tmp_path / "learned.json"
    file.write_text("apiVersion: v1\n")
    config = Config(
        gateway=GatewayConfig(host="127.0.0.1", port=0, admin_port=0),
        learning=LearningConfig(file=str(file)),
        logging=LoggingConfig(level="error"),
    )
    async with Gateway(config) as gateway:
        (found,) = [each for each in degradations(gateway.core) if each.what == "learning_not_kept"]
        assert str(file) in found.detail
    assert file.read_text() == "apiVersion: v1\n"
