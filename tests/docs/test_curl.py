"""Every `curl` of the README and the docs, sent to a real gateway before fake engines; comments tell the status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.engine.config import FakeVllmConfig
from tests.docs.collect import PAGES, Command, of_blocks
from tests.support.gateway_world import Fleet, engine

MODEL = "Qwen/Qwen3-8B"
ADMIN, MAIN, PROXY = "localhost:8001", "localhost:8000", "localhost:8080"
NAMES = ("10.0.0.3:8000", "a", "b")
"""Workers that pages name."""


def blocks() -> list[tuple[Path, list[Command]]]:
    """(page, what its lines in a row ask)"""
    out: list[tuple[Path, list[Command]]] = []
    for page in PAGES:
        for command in of_blocks(page):
            if command.program != "curl":
                continue
            if out and out[-1][0] == page and command.line - out[-1][1][-1].line == 1:
                out[-1][1].append(command)
            else:
                out.append((page, [command]))
    return out


CURLS = blocks()


class Curl:
    """A command line of curl, as far as pages use it."""

    def __init__(self, command: Command) -> None:
        self.method: str | None = None
        self.headers: dict[str, str] = {}
        self.data: str | None = None
        self.url = ""
        words = iter(command.words[1:])
        for word in words:
            match word:
                case "-X":
                    self.method = next(words)
                case "-H":
                    name, _, value = next(words).partition(":")
                    self.headers[name.strip()] = value.strip()
                case "-d":
                    self.data = next(words)
                case _:
                    assert not word.startswith("-"), f"{command}: unknown flag {word}"
                    assert not self.url, f"{command}: two URLs"
                    self.url = word.removeprefix("http://")
        if self.method is None:
            self.method = "GET" if self.data is None else "POST"


def fleet_of(commands: list[Command]) -> Fleet:
    """With the workers that the commands name, but without those that they add."""
    said = [json.loads(text) for command in commands if (text := Curl(command).data)]
    models = {body["model"] for body in said if "model" in body}
    added = {str(body["url"]).removeprefix("http://") for body in said if "url" in body}
    config: FakeVllmConfig = engine(model=models.pop() if models else MODEL)
    return Fleet(**{name: config for name in NAMES if name not in added})


async def sent(fleet: Fleet, curl: Curl) -> tuple[int, Any]:
    for host, base in ((ADMIN, fleet.admin), (MAIN, fleet.url), (PROXY, fleet.url)):
        if curl.url.startswith(host + "/"):
            url = base + curl.url.removeprefix(host)
            break
    else:
        raise AssertionError(f"no such host: {curl.url}")
    headers = {"Content-Type": "application/x-www-form-urlencoded", **curl.headers} if curl.data else curl.headers
    async with fleet.http.request(curl.method or "GET", url, data=curl.data, headers=headers) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    ("page", "commands"), CURLS, ids=[f"{page.name}:{commands[0].line}" for page, commands in CURLS]
)
async def test_they_do_what_the_page_says(page: Path, commands: list[Command]) -> None:
    async with fleet_of(commands) as fleet:
        for command in commands:
            status, text = await sent(fleet, Curl(command))
            told = re.match(r"(\d{3})\b", command.said)
            wanted = {int(told.group(1))} if told else {200}
            if "/admin/workers" in str(command) and "-d" in command.words:
                wanted |= {200, 201}
            assert status in wanted, f"{command}: {status} {text}"


def test_they_are_found() -> None:
    assert {page.name for page, _ in CURLS} >= {"README.md", "workers.md", "deploy.md", "epp.md"}
