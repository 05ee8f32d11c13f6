"""Indexers to go by: which one now, how to reach it, and how long to wait after it failed."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import grpc

from gateway.auth.token import read
from gateway.config.schema import IndexServiceConfig
from gateway.errors import UserError
from gateway.indexservice.guard import credentials
from gateway.indexservice.server import MOST_MESSAGE_BYTES

_log = logging.getLogger(__name__)
_FIRST_S, _MOST_S = 0.1, 2.0


class Addresses:
    """The first that works is kept until it fails; then the next one has its turn. `wait_s` after each failed round
    grows. Raises UserError for certificates and tokens that cannot be read.
    """

    def __init__(self, config: IndexServiceConfig, rng: random.Random) -> None:
        self._config = config
        self._addresses = config.addresses
        self._server_name = config.server_name
        self._problem = ""
        self._read()
        self._rng = rng
        self._at = 0
        self._failures = 0

    def _read(self) -> None:
        """Raises UserError."""
        config = self._config
        shown = _credentials(config) if config.tls else None
        token = read(
            config.token_file, config.token_env, os.environ, key="index.service.token_file", what="an indexer's token"
        )
        self._problem, self._credentials = "", shown
        self.metadata = credentials(token)
        """Goes with each call."""

    @property
    def current(self) -> str:
        return self._addresses[self._at]

    def worked(self) -> None:
        self._failures = 0

    def failed(self) -> float:
        """The next one is current; how long to wait before it is tried."""
        self._at = (self._at + 1) % len(self._addresses)
        self._failures += 1
        rounds = self._failures // len(self._addresses)
        if not rounds:
            return 0.0
        return min(_MOST_S, _FIRST_S * 2.0 ** min(rounds - 1, 10)) * self._rng.uniform(0.5, 1.0)

    def options(self) -> list[tuple[str, Any]]:
        """Of a channel. Each one is a connection of its own: another address may be of the same host."""
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.enable_http_proxy", 0),
        ]
        if self._server_name is not None:
            options.append(("grpc.ssl_target_name_override", self._server_name))
        return options

    def credentials(self) -> grpc.ChannelCredentials | None:
        """For a new channel; certificates and token are read again for it."""
        try:
            self._read()
        except UserError as exc:
            if str(exc) != self._problem:
                _log.warning("the last good certificates and token for indexers are used: %s", exc)
            self._problem = str(exc)
        return None if self.current.startswith("unix:") else self._credentials


def _credentials(config: IndexServiceConfig) -> grpc.ChannelCredentials:
    def content(key: str, path: str | None) -> bytes | None:
        try:
            return None if path is None else Path(path).read_bytes()
        except OSError as exc:
            raise UserError(f"index.service.{key}: {path}: {exc.strerror or exc}") from None

    ca, cert, key = content("ca", config.ca), content("cert", config.cert), content("key", config.key)
    return grpc.ssl_channel_credentials(ca, key, cert)
