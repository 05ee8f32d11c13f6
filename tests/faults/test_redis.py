"""What may happen to Redis besides that it is killed. No request notices any of it: nothing is excused here."""

from __future__ import annotations

import asyncio

from tests.faults.fleet import PASSWORD, USER
from tests.faults.trial import Trials

_LASTS_S = 4.0


async def test_redis_is_restarted(trials: Trials) -> None:
    redis = trials.fleet.redis
    async with trials("Redis: restarted"):
        await redis.end()
        await redis.start()


async def test_redis_is_flushed(trials: Trials) -> None:
    async with trials("Redis: FLUSHALL, again and again"):
        for _ in range(8):
            await trials.fleet.redis.command("FLUSHALL")
            await asyncio.sleep(_LASTS_S / 8)


async def test_redis_is_full(trials: Trials) -> None:
    redis = trials.fleet.redis
    async with trials("Redis: full (maxmemory, noeviction)"):
        await redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        await redis.command("CONFIG", "SET", "maxmemory", 1)
        await asyncio.sleep(_LASTS_S)
        await redis.command("CONFIG", "SET", "maxmemory", 0)


async def test_redis_has_another_password(trials: Trials) -> None:
    redis = trials.fleet.redis
    async with trials("Redis: another password for a while"):
        await redis.command("ACL", "SETUSER", USER, "resetpass", ">another")
        await redis.command("CLIENT", "KILL", "USER", USER)
        await asyncio.sleep(_LASTS_S)
        await redis.command("ACL", "SETUSER", USER, "resetpass", f">{PASSWORD}")
