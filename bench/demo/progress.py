"""One line that fills up, on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys


class Progress:
    def __init__(self, title: str, total: int, quiet: bool) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.shown = sys.stderr.isatty() and not quiet

    def step(self) -> None:
        self.done += 1
        if self.shown:
            filled = 30 * self.done // self.total
            sys.stderr.write(f"\r  {self.title:<14} [{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}")
            if self.done == self.total:
                sys.stderr.write("\n")
            sys.stderr.flush()
