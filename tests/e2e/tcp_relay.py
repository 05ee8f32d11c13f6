"""A relay before a server that lets nothing through to it while it is shut, as a network that stalls."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.parse


class TcpRelay:
    """Bytes both ways, as they come. With `open` cleared, what clients send stays here until it is set again."""

    def __init__(self, url: str, port: int) -> None:
        parts = urllib.parse.urlsplit(url)
        self._target = parts.hostname or "", parts.port or 80
        self.port = port
        self.open = threading.Event()
        self.open.set()
        self.n_stalled_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self._closed = False
        self._sockets: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> TcpRelay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        self.open.set()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                server = socket.create_connection(self._target)
                self._sockets |= {client, server}
                for source, sink, stalls in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._copy, args=(source, sink, stalls), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, stalls: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65_536):
                if stalls and not self.open.is_set():
                    self.n_stalled_bytes += len(piece)
                    self.open.wait()
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            if stalls:
                self.open.wait()  # The end comes after the bytes before it.
            sink.shutdown(socket.SHUT_WR)
        self._sockets.discard(source)
