"""Connections given by one process to another."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from gateway.processes.handover import Giving, Taking
from gateway.processes.sockets import link, listening, private_folder, remove_folder


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not check():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.005)


async def test_all_arrive_once_however_many_wait() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    giving = Giving(ours)
    n = 100
    far: list[socket.socket] = []
    for i in range(n):
        kept, given = socket.socketpair()
        kept.send(b"%d" % i)
        far.append(kept)
        giving.give(given)
    assert not giving.is_done, "nobody takes them, and its buffer is small"
    found: list[socket.socket] = []
    takers = [Taking(theirs.dup(), found.append), Taking(theirs.dup(), found.append)]
    await until(lambda: len(found) == n)
    assert giving.is_done
    assert giving.n_given == n
    assert sorted(int(each.recv(8)) for each in found) == list(range(n)), "and what was sent on them is there"
    for taker in takers:
        taker.close()
    giving.close()
    for each in (*found, *far, ours, theirs):
        each.close()


async def test_nobody_left_to_take_them_is_no_error() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    giving = Giving(ours)
    kept, given = socket.socketpair()
    giving.give(given)
    assert giving.is_done
    assert kept.recv(1) == b"", "it is closed"
    kept.close()
    giving.close()
    ours.close()


def test_a_name_leads_elsewhere_from_one_moment_to_the_next(tmp_path: object) -> None:
    folder = private_folder({"TMPDIR": str(tmp_path)})
    assert os.stat(folder).st_mode & 0o777 == 0o700
    for target in ("a", "b", "b"):
        link(f"{folder}/{target}", f"{folder}/name")
        assert os.readlink(f"{folder}/name") == target
    remove_folder(folder)
    assert not os.path.exists(folder)


def test_a_name_with_several_addresses_is_listened_on_at_one_port() -> None:
    sockets = listening("localhost", 0)
    assert len({each.getsockname()[1] for each in sockets}) == 1
    for each in sockets:
        each.close()
