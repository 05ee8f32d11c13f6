"""`python -m tests.support.screenshots docs`: the pictures of the page in docs/, of fake engines under some load."""

from __future__ import annotations

import asyncio
import io
import random
import sys
from pathlib import Path

from PIL import Image

from bench.engine.timing import preset
from gateway.config.schema import PdConfig
from tests.support.chromium import Chromium, launched
from tests.support.gateway_world import Fleet, decode, prefill

_COLORS = 224
_WORDS = [
    "the",
    "a",
    "cache",
    "block",
    "prompt",
    "token",
    "model",
    "worker",
    "answer",
    "route",
    "warm",
    "cold",
    "near",
    "far",
    "load",
]


async def _chat(fleet: Fleet, rng: random.Random, system: list[str], turns: int) -> None:
    prompt = [*rng.choice(system).split()]
    for _ in range(turns):
        prompt += rng.choices(_WORDS, k=rng.randrange(20, 160))
        body = {"model": "qwen3-8b", "prompt": " ".join(prompt), "max_tokens": rng.randrange(20, 90), "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with fleet.http.post(fleet.url + "/v1/completions", json=body) as response:
            await response.read()
        await asyncio.sleep(rng.expovariate(2.0))


async def _take(folder: Path, address: str) -> None:
    rng = random.Random(3)
    engines = {f"decode-{i}": decode(model="qwen3-8b") for i in range(5)} | {
        f"prefill-{i}": prefill(model="qwen3-8b") for i in range(2)
    }
    timing = preset("h200-7b")
    engines = {name: each.with_engine(timing=timing, num_gpu_blocks=3000) for name, each in engines.items()}
    system = [" ".join(rng.choices(_WORDS, k=rng.randrange(300, 1500))) for _ in range(6)]
    async with (
        Fleet(pd=PdConfig(policy="cost"), scrape_interval_s=1.0, **engines) as fleet,
        Chromium(address) as browser,
    ):
        chats = [asyncio.create_task(_chat(fleet, rng, system, 40)) for _ in range(12)]
        await asyncio.sleep(25)
        for scheme in ("light", "dark"):
            page = await browser.open(fleet.admin + "/debug", width=1280, height=1360, scheme=scheme)
            await page.until("document.querySelector('#itl svg path')")
            _write(folder / f"debug-page-{scheme}.png", await page.screenshot())
        await page.value("document.querySelectorAll('#decisions button')[8].click()")
        await page.until("document.querySelector('#explain table')")
        await page.call("Emulation.setDeviceMetricsOverride", width=1280, height=620, deviceScaleFactor=1, mobile=False)
        _write(folder / "debug-page-explain.png", await page.screenshot())
        for chat in chats:
            chat.cancel()
        await asyncio.gather(*chats, return_exceptions=True)


def _write(path: Path, png: bytes) -> None:
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


if __name__ == "__main__":
    with launched() as known:
        asyncio.run(_take(Path(sys.argv[1]), known))
