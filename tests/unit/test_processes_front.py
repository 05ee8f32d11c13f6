"""What the supervisor does with what its processes say, and do not say."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gateway.processes.crew import Place, _wait_s
from gateway.processes.front import SILENT_S, Front
from gateway.processes.merge import Totals


class Silent:
    """Processes that say what a test gives them."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    async def metrics(self, process: Any) -> Any:
        return self.said.get(process.life)

    async def forget_all_but(self, processes: Any) -> None:
        pass


def process(life: str, killed: list[str]) -> Any:
    return SimpleNamespace(
        life=life, gone=asyncio.Event(), kill=lambda: killed.append(life), assignment=SimpleNamespace(name=life)
    )


async def test_a_process_that_falls_silent_is_killed() -> None:
    now_s = [100.0]
    killed: list[str] = []
    them = [process("0/1", killed), process("1/2", killed), process("2/3", killed)]
    crew: Any = SimpleNamespace(answering=them, totals=Totals())
    asking: Any = Silent()
    front = Front(crew, asking, lambda: None, lambda: now_s[0])
    asking.said = {"0/1": [], "1/2": []}
    await front.poll()
    asking.said = {"0/1": []}
    now_s[0] += SILENT_S - 1
    await front.poll()
    assert not killed
    now_s[0] += 2
    await front.poll()
    assert killed == ["1/2", "2/3"], "one that never spoke too: it said that it answers before it was asked"


def test_pauses_before_another_start_grow_to_ten_seconds() -> None:
    waits = [_wait_s(failures) for failures in range(1, 12)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[-1] == 10.0
    assert Place("hub", 0).name == "the hub"
