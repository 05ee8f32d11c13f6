"""Warnings about proxies that are set up wrongly: they have the same fault with every request."""

from __future__ import annotations

import logging

_MOST = 64


class Complaints:
    """`about`: what happens to whom. Each reason is told once, and no more than 64 of them."""

    def __init__(self, log: logging.Logger, about: str) -> None:
        self._log = log
        self._about = about
        self.told: set[str] = set()

    def tell(self, reason: str) -> None:
        if reason not in self.told and len(self.told) < _MOST:
            self.told.add(reason)
            self._log.warning("%s, and others for the same reason later: %s", self._about, reason)
