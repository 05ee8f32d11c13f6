"""What the supervisor tells a process it starts: what it is, and which descriptors it was given."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

VERSION: Final = 2
"""Of all that processes of one gateway tell each other but what has a version of its own."""
INDEX_SOCKET = "index.sock"
BOARD_SOCKET = "board.sock"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A command-line argument of the process, as JSON. `number` is that of its place (0 is the first), which it shares
    with whom it succeeds; `seat` is its own. Sockets are in `folder`.
    """

    version: int = VERSION
    kind: Literal["data", "hub"]
    number: int
    of: int
    seat: int
    folder: str
    control_fd: int
    table_fd: int
    listen_fds: tuple[int, ...] = ()
    give_fd: int = -1
    """Connections go here to who goes on with them,"""
    take_fd: int = -1
    """and come from here."""

    @property
    def name(self) -> str:
        return "hub" if self.kind == "hub" else f"process {self.number}"

    @property
    def admin_path(self) -> str:
        return f"{self.folder}/admin-{self.seat}.sock"

    @property
    def last_metrics_path(self) -> str:
        """What it counted, written when it ends well."""
        return f"{self.folder}/metrics-{self.seat}"

    @property
    def handover_path(self) -> str:
        """What a hub leaves to who succeeds it."""
        return f"{self.folder}/handover"

    def own(self, socket: str) -> str:
        """Where a hub listens: `socket` links there while it is the hub in force."""
        return f"{self.folder}/{self.seat}-{socket}"

    def shared(self, socket: str) -> str:
        return f"{self.folder}/{socket}"


def encode(it: Assignment) -> str:
    return msgspec.json.encode(it).decode()


def decode(text: str) -> Assignment:
    """Raises msgspec.MsgspecError."""
    return msgspec.json.decode(text, type=Assignment)
