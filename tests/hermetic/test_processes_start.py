"""How `warmroute gateway --processes N` starts, or says why it does not."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.engine.server import FakeVllm
from tests.support.command import Command
from tests.support.gateway_world import engine
from tests.support.processes_world import DEADLINE_S, Load, Processes, eventually

HEAD = (sys.executable, "-m", "gateway")


async def run(*args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """(exit code, standard error)"""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WARMROUTE_", "STATE_DIRECTORY"))}
    process = await asyncio.create_subprocess_exec(
        *HEAD, *args, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, env=inherited | (env or {})
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "65", ""])
async def test_what_is_no_number_of_processes_is_refused(value: str) -> None:
    code, said = await run("gateway", f"--processes={value}", "--worker", "http://127.0.0.1:1")
    assert code == 2
    assert "gateway.processes" in said
    assert "Traceback" not in said


async def test_a_port_that_is_taken_is_told_before_anything_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = await run("gateway", "--processes=2", "--host=127.0.0.1", f"--port={port}", "--admin-port=0")
        assert code == 2
        assert "cannot listen" in said
        code, said = await run("gateway", "--processes=2", "--host=127.0.0.1", "--port=0", f"--admin-port={port}")
        assert code == 2
        assert "cannot listen" in said


async def test_what_is_wrong_with_the_configuration_is_told_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text("no keys")
    code, said = await run(
        "gateway", "--processes=4", "--port=0", "--admin-port=0", f"--auth-keys-file={keys}", "--host=127.0.0.1",
        env={"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert code == 2
    assert said.count("must hold `keys:`") == 1
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == ["keys.json"], "its folder is gone"


@pytest.fixture
def short() -> Iterator[Path]:
    """Sockets want short paths, which pytest's are not always."""
    with tempfile.TemporaryDirectory(prefix="wr", dir="/tmp") as folder:
        yield Path(folder)


async def test_a_folder_of_its_own_that_only_it_can_read(short: Path) -> None:
    async with Processes(2, env={"TMPDIR": str(short)}) as them:
        (name,) = os.listdir(short)
        folder = short / name
        assert folder.stat().st_mode & 0o777 == 0o700
        cleaner = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # What systemd-tmpfiles asks before it looks for what is old in there.
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(cleaner)
        them.command.process.kill()
        await them.command.process.wait()

        async def is_gone() -> bool:
            return not folder.exists()

        await eventually(is_gone)  # The processes have seen that their supervisor is gone.


async def test_its_folder_is_made_again_when_somebody_removes_it(short: Path) -> None:
    async with Processes(2, env={"TMPDIR": str(short)}) as them, Load(them, 4) as load:
        await load.more(20)
        (name,) = os.listdir(short)
        before = await them.pids()
        shutil.rmtree(short / name)

        async def all_new() -> bool:
            now = await them.pids()
            return now.keys() == before.keys() and not set(now.values()) & set(before.values())

        await eventually(all_new)
        await them.all_ready()

        async def is_well() -> bool:
            told = (await them.get("/readyz?verbose"))["degraded"]
            return not any(it["what"] == "process_lost" for it in told)

        await eventually(is_well)
        assert (short / name).stat().st_mode & 0o777 == 0o700
        await load.more(20)
        assert load.broken == 0
        assert set(load.statuses) == {200}
        async with them.http.get(them.url + "/metrics") as answer:  # What a data plane asks the supervisor for.
            assert answer.status == 200
        them.command.process.send_signal(signal.SIGTERM)
        log = await them.command.stopped()
        assert f"{short / name}, the folder of the processes' sockets, was removed" in log
        assert os.listdir(short) == []


async def test_one_process_is_as_it_always_was() -> None:
    async def children(pid: int) -> list[str]:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()  # noqa: ASYNC240 - a line

    async with FakeVllm(engine()) as server, Command("gateway", "--processes=1", f"--worker={server.url}") as command:
        assert not await children(command.process.pid)
        async with command.http.get(command.admin + "/debug/processes") as answer:
            assert answer.status == 404
        assert "process 0" not in await command.terminate()


async def test_new_processes_read_the_configuration_anew_and_a_bad_one_stops_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps({"gateway": {"response_headers": True}}))
    async with Processes(2, f"--config={file}") as them:
        before = await them.pids()
        file.write_text(json.dumps({"gateway": {"no_such_key": True}}))
        async with them.http.post(them.admin + "/admin/restart") as answer:
            assert answer.status == 202

        async def is_over() -> bool:
            return not (await them.get("/debug/processes"))["restarting"]

        await eventually(is_over)
        assert await them.pids() == before, "the old ones go on"
        file.write_text(json.dumps({"gateway": {"response_headers": False}}))
        async with them.http.post(them.admin + "/admin/restart") as answer:
            assert answer.status == 202

        async def all_new() -> bool:
            now = await them.pids()
            return now.keys() == before.keys() and not set(now.values()) & set(before.values())

        await eventually(all_new)
        assert not (await them.get("/debug/config"))["gateway"]["response_headers"]
        status, worker = await them.complete(them.http, [1, 2, 3])
        assert (status, worker) == (200, "")
        log = await them.command.terminate()
        assert "the old one goes on" in log


async def test_access_lines_of_all_are_whole() -> None:
    async with Processes(2, "--logging-format=json") as them:
        answers = await asyncio.gather(*(them.complete(them.http, [i, i + 1]) for i in range(60)))
        assert {status for status, _ in answers} == {200}
        log = await them.command.terminate()
    rows: list[dict[str, Any]] = []
    for line in log.splitlines():
        if line.startswith("{"):
            rows.append(json.loads(line))
        else:
            raise AssertionError(f"half a line: {line[:200]}")
    assert sum(row.get("path") == "/v1/completions" for row in rows) == 60
    assert {row["process"] for row in rows if "process" in row} >= {"supervisor", "hub", "process 0", "process 1"}


async def test_when_none_can_start_any_more_it_gives_up_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("{}")
    async with Processes(2, f"--config={file}") as them:
        pids = await them.pids()
        file.write_text(json.dumps({"gateway": {"no_such_key": True}}))
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        code = await asyncio.wait_for(them.command.process.wait(), 2 * DEADLINE_S)
        log = (await them.command._log).decode()
    assert code == 1
    assert "has ended 5 times while it was started, and no process serves" in log
    assert "no_such_key" in log
    assert "Traceback" not in log


async def test_other_faces_say_that_they_are_one_process() -> None:
    code, said = await run("indexer", "--gateway-processes=2", "--indexer-port=0", "--index-source=service",
                           "--index-service-addresses=unix:/x")  # fmt: skip
    assert code == 2
    assert "gateway.processes is for warmroute gateway alone" in said
