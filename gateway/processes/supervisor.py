"""The parent of a gateway's processes: it opens what they listen on, starts them, starts again what ends, answers on
the admin port for all of them, and decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gateway.auth.admin import is_loopback
from gateway.config import Config
from gateway.core import engine_headers
from gateway.debug.faces import AdminPort
from gateway.errors import UserError
from gateway.processes import control as words
from gateway.processes.asking import Asking
from gateway.processes.books import BYTES
from gateway.processes.crew import Crew, RestartFailedError
from gateway.processes.derived import has_board, has_index
from gateway.processes.front import Front
from gateway.processes.internal import FRONT_SOCKET
from gateway.processes.process import Process
from gateway.processes.seats import Table
from gateway.processes.sockets import kept, listening, make_again, private_folder, remove_folder
from gateway.processes.unix_server import UnixServer
from gateway.proxy.server import HttpServer
from gateway.reload import Source
from gateway.service import admin_token_of, set_up_process
from gateway.tls import ServingCertificate, admin_certificate

_log = logging.getLogger(__name__)
_POLL_S = 5.0
_FAILED = 1


def supervise(config: Config, source: Source, args: Sequence[str]) -> int:
    """Until SIGTERM or SIGINT, then drain; a second signal cuts at once. SIGHUP: all read the configuration again.
    SIGUSR2: all are replaced, one after the other. Raises UserError.
    """
    set_up_process(config, "supervisor")
    folder = private_folder(os.environ)
    keeping = [kept(folder)]
    try:
        return asyncio.run(_Supervisor(config, source, args, folder, keeping).run())
    except OSError as exc:
        raise UserError(f"cannot listen: {exc.strerror or exc}") from exc
    finally:
        for fd in keeping:
            os.close(fd)
        remove_folder(folder)


class _Supervisor:
    def __init__(self, config: Config, source: Source, args: Sequence[str], folder: str, keeping: list[int]) -> None:
        """`keeping`: descriptors by which `folder` is kept, which the caller closes."""
        self._config = config
        self._source = source
        self._args = args
        self._folder = folder
        self._keeping = keeping
        self._stop, self._cut = asyncio.Event(), asyncio.Event()
        self._restarting: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Raises UserError and OSError before it serves."""
        settings = self._config.gateway
        token = admin_token_of(self._config, settings.admin_host, "gateway.admin_host")
        self._sockets = listening(settings.host, settings.port)
        asking = Asking()
        self._crew = crew = Crew(
            n_data=settings.processes,
            has_hub=has_index(self._config) or has_board(self._config),
            hub_answers=has_index(self._config),
            args=self._args,
            folder=self._folder,
            table=Table.create(BYTES),
            sockets=self._sockets,
            drain_timeout_s=self._drain_timeout_s,
            greet=self._greet,
        )
        self._front = front = Front(crew, asking, self._begin_restart)
        certificate = (
            None
            if is_loopback(settings.admin_host)
            else admin_certificate(self._config.tls, self._config.admin.client_ca)
        )
        port = AdminPort(front.pages(), settings.admin_host, token, engine_headers(self._config))
        port.prefixes[""] = front.other
        tls = None if certificate is None else certificate.context
        self._admin = HttpServer(port.handle, settings.admin_host, settings.admin_port, tls)
        within = AdminPort({"/metrics": front.metrics})
        self._within = UnixServer(within.handle, f"{self._folder}/{FRONT_SOCKET}")
        self._handle_signals()
        polling: asyncio.Task[None] | None = None
        try:
            await self._within.start()
            await self._admin.start()
            code = await self._start(crew)
            if code is not None:
                return code
            self._tell_start()
            polling = asyncio.create_task(self._poll(certificate), name="poll")
            stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait({stopped, crew.failed}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if crew.failed.done():
                print(f"warmroute: error: {crew.failed.result()}", file=sys.stderr)
                return _FAILED
            _log.info("draining for up to %g s", self._drain_timeout_s())
            return 0
        finally:
            if self._restarting is not None:
                self._restarting.cancel()
            await crew.stop(self._cut)
            if polling is not None:
                polling.cancel()
            front.recording.recorder.end("the gateway is going down")
            await self._admin.close()
            await self._within.close()
            await asking.close()
            for sock in self._sockets:
                sock.close()

    async def _start(self, crew: Crew) -> int | None:
        """The code to end with, if it is not to serve."""
        starting = asyncio.create_task(crew.start())
        stopped: asyncio.Task[Any] = asyncio.create_task(self._stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        return starting.result()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        loop.add_signal_handler(signal.SIGUSR2, self._begin_restart)

    def _on_stop(self) -> None:
        (self._cut if self._stop.is_set() else self._stop).set()

    def _on_hangup(self) -> None:
        self._crew.say(words.RELOAD)

    def _begin_restart(self) -> None:
        if self._restarting is not None and not self._restarting.done():
            _log.info("the processes are being replaced already")
            return
        self._restarting = asyncio.create_task(self._restart(), name="restart")

    async def _restart(self) -> None:
        _log.info("replacing all processes, one after the other")
        try:
            await self._crew.restart()
        except RestartFailedError as exc:
            _log.error("the processes are not all replaced: %s", exc)
        except Exception:
            _log.exception("unexpected; the processes go on as they are")

    async def _greet(self, process: Process) -> None:
        await self._front.greet(process)

    async def _poll(self, certificate: ServingCertificate | None) -> None:
        """So that what a killed process had counted is known but for the last seconds."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._look_after_folder()
                await self._front.poll()
                if certificate is not None and await asyncio.to_thread(certificate.look):
                    certificate.take()
            except Exception:
                _log.exception("unexpected; going on")

    async def _look_after_folder(self) -> None:
        """Make it again where somebody has removed it. What its processes listen on is gone for good: they go on with
        the connections they have, and all get successors.
        """
        front, ours = self._front, [f"{self._folder}/{FRONT_SOCKET}", *self._crew.links]
        if self._crew.is_restarting:
            return
        if all(map(os.path.lexists, ours)):
            front.sockets_lost = False
            return
        if not front.sockets_lost:
            _log.error(
                "%s, the folder of the processes' sockets, was removed or emptied: it is made again, and all processes "
                "are replaced. Keep it out of what cleans %s, or give it a folder of its own (RUNTIME_DIRECTORY)",
                self._folder, os.path.dirname(self._folder),
            )  # fmt: skip
        front.sockets_lost = True
        try:
            make_again(self._folder)
            self._keeping.append(kept(self._folder))
            await self._within.close()
            await self._within.start()
        except OSError as exc:
            _log.error("%s cannot be made again: %s; restart the gateway", self._folder, exc.strerror or exc)
            return
        self._begin_restart()

    def _drain_timeout_s(self) -> float:
        """As the processes have it, who see by themselves when the file changes."""
        with suppress(UserError):  # They say what is wrong with it.
            self._config = self._source.read()
        return self._config.gateway.drain_timeout_s

    def _tell_start(self) -> None:
        host = self._config.gateway.host
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self._config.tls.cert is None else "https"
        port = self._sockets[0].getsockname()[1]
        n = self._config.gateway.processes
        if n > (n_cores := len(os.sched_getaffinity(0))):
            _log.warning("%d processes have %d cores to share, which is slower than %d processes", n, n_cores, n_cores)
        _log.info("serving on %s://%s:%d by %d processes, admin on %s", scheme, shown, port, n, self._admin.url)
