"""The configuration of each process, made of the one that was given."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.config import Config
from gateway.config.schema import IndexerConfig, IndexServiceConfig, RedisConfig
from gateway.processes.assignment import INDEX_SOCKET, Assignment

_TOLD_EVERY_MS = 5.0
_ANSWERS_WITHIN_MS = 1000.0
"""The hub has a core to share; its death shows by its closed connections."""


def has_index(config: Config) -> bool:
    """Whether the hub follows the engines; else another indexer does."""
    return config.index.source == "local"


def has_board(config: Config) -> bool:
    """Whether processes tell each other through the hub; else through Redis, with those of other machines."""
    return config.redis.url is None


def redis_of_board(config: Config) -> RedisConfig:
    """By which processes and board name the same keys."""
    return RedisConfig(interval_ms=_TOLD_EVERY_MS, op_timeout_ms=_ANSWERS_WITHIN_MS, ttl_s=config.redis.ttl_s)


def of_data(config: Config, it: Assignment) -> Config:
    """For a data plane."""
    index, redis = config.index, config.redis
    if has_index(config):
        service = IndexServiceConfig(addresses=(f"unix:{it.shared(INDEX_SOCKET)}",))
        index = replace(index, source="service", service=service)
    if has_board(config):
        redis = redis_of_board(config)
    queue = replace(
        config.queue,
        max_requests=share(config.queue.max_requests, it),
        max_tokens=max(1, share(config.queue.max_tokens, it)),
    )
    return replace(config, index=index, redis=redis, queue=queue)


def of_hub(config: Config, it: Assignment) -> Config:
    indexer = IndexerConfig(
        port=None,
        socket=it.own(INDEX_SOCKET),
        history_bytes=config.indexer.history_bytes,
        digest_interval_s=config.indexer.digest_interval_s,
        write_timeout_s=config.indexer.write_timeout_s,
        warm_up_s=config.indexer.warm_up_s,
    )
    return replace(config, indexer=indexer, index=replace(config.index, source="local"))


def share(whole: int, it: Assignment) -> int:
    """Its part of a bound that holds for all; the parts make up the whole."""
    return whole // it.of + (it.number < whole % it.of)
