"""A proxy before a prefill server that changes what it answers, delays it, or answers in its place."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Params = dict[str, Any]
Edit = Callable[[Params], Any]

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


def wrong_engine_id(params: Params) -> Params:
    return {**params, "remote_engine_id": str(uuid.uuid4())}


def out_of_range_blocks(params: Params) -> Params:
    return {**params, "remote_block_ids": [[100_000 + i for i in group] for group in params["remote_block_ids"]]}


class TamperingProxy:
    """Everything is passed on, and back, as it is; only `kv_transfer_params` of answers go through `edit`.

    Attributes:
        edit: from the params to what the answer shall carry in their place; None changes nothing.
        status: answered to prefill legs in place of asking the server; None asks it.
        gate: prefill answers wait until it is set.
        n_answered: prefill answers that have come from the server, gone on or not.
        edited: the params as they were, one for each edited answer.
        bodies: the decoded body of every prefill leg, in the order they came.
    """

    def __init__(self, url: str, port: int) -> None:
        self.target = url
        self.port = port
        self.edit: Edit | None = None
        self.status: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.n_answered = 0
        self.edited: list[Params] = []
        self.bodies: list[dict[str, Any]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def worker(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> TamperingProxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def has_answered(self, n: int) -> bool:
        """Whether the server has answered `n` prefill legs in all."""
        return self.n_answered >= n

    def honest(self) -> None:
        """Pass everything on again."""
        self.edit, self.status = None, None
        self.gate.set()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._pass(b"")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                leg = b"do_remote_decode" in body
                if leg:
                    proxy.bodies.append(json.loads(body))
                if leg and proxy.status is not None:
                    self._answer(proxy.status, [("content-type", "application/json")], b'{"error":{"message":"no"}}')
                else:
                    self._pass(body, leg=leg)

            def _pass(self, body: bytes, *, leg: bool = False) -> None:
                status, headers, data = proxy.forward(self.command, self.path, dict(self.headers), body)
                if leg:
                    proxy.n_answered += 1
                    proxy.gate.wait()
                    data = proxy.tamper(data)
                self._answer(status, headers, data)

            def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
                self.send_response_only(status)  # `date` and `server` are the target's own.
                for name, value in headers:
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        return Handler

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.target).netloc, timeout=120)
        try:
            kept = {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}
            connection.request(method, path, body or None, kept)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def tamper(self, data: bytes) -> bytes:
        if self.edit is None:
            return data
        answer = json.loads(data)
        params = answer.get("kv_transfer_params")
        if params is None:
            return data
        self.edited.append(json.loads(json.dumps(params)))
        answer["kv_transfer_params"] = self.edit(params)
        return json.dumps(answer).encode()
