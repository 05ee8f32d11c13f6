"""What the supervisor does with what its processes say, and do not say."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gateway.config import Config
from gateway.config.schema import GatewayConfig
from gateway.errors import UserError
from gateway.processes.crew import Place, _wait_s
from gateway.processes.front import SILENT_S, START_S, Front
from gateway.processes.merge import Totals
from gateway.processes.supervisor import _Supervisor
from gateway.reload import Source


class Silent:
    """Processes that say what a test gives them."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    async def metrics(self, process: Any) -> Any:
        return self.said.get(process.life)

    async def has_board(self, process: Any) -> bool:
        return process.life in self.said

    async def forget_all_but(self, processes: Any) -> None:
        pass


def process(life: str, killed: list[str], *, has_started: bool = True) -> Any:
    it = SimpleNamespace(
        life=life,
        gone=asyncio.Event(),
        started=asyncio.Event(),
        began_s=100.0,
        kill=lambda: killed.append(life),
        assignment=SimpleNamespace(name=life, admin_path=__file__, own=lambda socket: __file__),
    )
    if has_started:
        it.started.set()
    return it


async def test_a_process_that_falls_silent_is_killed() -> None:
    now_s = [100.0]
    killed: list[str] = []
    them = [process("0/1", killed), process("1/2", killed), process("2/3", killed)]
    crew: Any = SimpleNamespace(alive=them, answers=lambda each: True, totals=Totals())
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


async def test_a_hub_without_pages_is_asked_for_its_board() -> None:
    now_s = [100.0]
    killed: list[str] = []
    crew: Any = SimpleNamespace(alive=[process("hub/1", killed)], answers=lambda each: False, totals=Totals())
    asking: Any = Silent()
    front = Front(crew, asking, lambda: None, lambda: now_s[0])
    asking.said = {"hub/1": None}
    await front.poll()
    now_s[0] += SILENT_S + 1
    await front.poll()
    asking.said = {}
    await front.poll()
    assert not killed
    now_s[0] += SILENT_S + 1
    await front.poll()
    assert killed == ["hub/1"]


async def test_a_process_that_does_not_start_is_killed() -> None:
    killed: list[str] = []
    crew: Any = SimpleNamespace(alive=[process("0/1", killed, has_started=False)], totals=Totals())
    now_s = [100.0 + START_S]
    asking: Any = Silent()
    front = Front(crew, asking, lambda: None, lambda: now_s[0])
    await front.poll()
    assert not killed
    now_s[0] += 1
    await front.poll()
    assert killed == ["0/1"]


def test_the_time_to_drain_is_that_of_the_configuration_as_it_is_now() -> None:
    now = Config(gateway=GatewayConfig(drain_timeout_s=600.0))
    given: list[Config] = [now]

    def read() -> Config:
        if not given:
            raise UserError("wrong")
        return given.pop()

    supervisor = _Supervisor(Config(), Source(read=read, file=None), [], "/f", [])
    assert supervisor._drain_timeout_s() == 600.0
    assert supervisor._drain_timeout_s() == 600.0, "one that is wrong changes nothing"


def test_pauses_before_another_start_grow_to_ten_seconds() -> None:
    waits = [_wait_s(failures) for failures in range(1, 12)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[-1] == 10.0
    assert Place("hub", 0).name == "the hub"
