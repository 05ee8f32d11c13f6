"""What worlds of several servers have in common."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Self


class Stacked:
    """`_start` enters what the world is made of on `_stack`; it is left again when the world is, or cannot start."""

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        raise NotImplementedError
