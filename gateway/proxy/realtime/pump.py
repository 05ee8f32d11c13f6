"""One way of a session: messages passed on as they come."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
from aiohttp import WSMsgType

from gateway.proxy.access import Record
from gateway.proxy.realtime.ending import Close, Socket, broke, ending


async def pump(
    source: Socket,
    sink: Socket,
    record: Record | None = None,
    forbids: Callable[[aiohttp.WSMessage], Close | None] | None = None,
) -> Close:
    """Pass messages on, each when the one before it was taken, until one side ends. `record` counts their bytes; what
    `forbids` says ends the session.
    """
    while True:
        message = await source.receive()
        if (close := ending(message, source)) is not None:
            return close
        if forbids is not None and (close := forbids(message)) is not None:
            return close
        try:
            await send(sink, message)
        except (ConnectionError, aiohttp.ClientError):
            return broke(sink)
        if record is not None:
            record.sent_bytes += len(message.data)


async def send(sink: Socket, message: aiohttp.WSMessage) -> None:
    if message.type is WSMsgType.TEXT:
        await sink.send_str(message.data)
    else:
        await sink.send_bytes(message.data)
