"""Commands of the pages that ask servers, run on fake ones: their made-up addresses and files are put in place."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.docs.collect import PAGES, ROOT, Command, of_blocks
from tests.support.gateway_world import Fleet, decode, engine, prefill
from tests.support.token_models import make_model

_ENDS_WITH = {"doctor": (0, 1), "explain": (0,), "record": (0,)}
"""The doctor has something to say of fake engines."""
_MORE = {"explain": ("--admin",), "record": ("--duration-s", "1", "--admin")}

PAGES_THAT_ASK = [
    (page, commands)
    for page in PAGES
    if (commands := [it for it in of_blocks(page) if it.program == "warmroute" and it.words[1] in _ENDS_WITH])
]


def test_they_are_found() -> None:
    assert {command.words[1] for _, commands in PAGES_THAT_ASK for command in commands} == _ENDS_WITH.keys()


@pytest.mark.parametrize(("page", "commands"), PAGES_THAT_ASK, ids=[page.name for page, _ in PAGES_THAT_ASK])
async def test_they_run(page: Path, commands: list[Command], tmp_path: Path) -> None:
    """In order, in one folder: what one writes the next may read."""
    model = make_model(tmp_path / "model", "llama3")
    (tmp_path / "request.json").write_text(json.dumps({"model": "tiny", "prompt": "hello"}), encoding="utf-8")
    apart = any("--prefill" in command.words for command in commands)
    fleet = Fleet(p=prefill(), d=decode()) if apart else Fleet(a=engine(), b=engine())
    async with fleet:
        for command in commands:
            urls = iter([server.url for server in fleet.engines.values()])
            words = [next(urls) if word.startswith("http://") else word for word in command.words[1:]]
            words = [str(model) if word.startswith("/models/") else word for word in words]
            if words[0] in _MORE and "--state" not in words:
                words += [*_MORE[words[0]], fleet.admin]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", *words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            said, _ = await asyncio.wait_for(process.communicate(), 90)
            assert process.returncode in _ENDS_WITH[words[0]], f"{command}: {said.decode()}"
            assert b"Traceback" not in said
