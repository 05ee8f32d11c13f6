"""`warmroute top`: what the page shows, in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.admin_client import ADDRESS, Refused, ask
from gateway.cli import Parser
from gateway.debug.top_view import Line, clip, view
from gateway.errors import UserError

PATH = "/debug/state"
_REFUSED = 1
_LOOK_S = 0.2
"""So often for a key, and for another size of the window."""
_TIMEOUT_S = 5.0
_QUIT = frozenset({"q", "Q"})
_CTRL_C = "\x03"
_STYLES = {"bold": "\x1b[1m", "dim": "\x1b[2m", "warn": "\x1b[33m", "bad": "\x1b[31m"}
_END = "\x1b[0m"
_UNKNOWN_SIZE = os.terminal_size((80, 24))
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The screen beside the one with the shell's lines, without a cursor; and back."""


def main(args: Sequence[str]) -> int:
    parser = Parser(
        prog="warmroute top",
        description="The fleet and the last decisions of a running gateway or sidecar; q ends it. What is no terminal "
        "gets it once. Exit code 1: the server said no; 2: it could not be asked.",
    )
    parser.add_argument("--admin", default=ADDRESS, metavar="URL", help=f"the gateway's admin address ({ADDRESS})")
    parser.add_argument("--interval-s", type=float, default=1.0, metavar="S", help="between two looks (1)")
    parser.add_argument("--once", action="store_true", help="once, as plain text")
    parser.add_argument("--json", action="store_true", help="once, as the gateway told it")
    options = parser.parse(args)
    if not 0.1 <= options.interval_s <= 3600:
        parser.error("--interval-s is between 0.1 and 3600")
    url = options.admin.rstrip("/") + PATH
    try:
        state = _state(url)
    except Refused as exc:
        print(f"warmroute: error: {exc}", file=sys.stderr)
        return _REFUSED
    if options.json:
        print(json.dumps(state, indent=2))
    elif options.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        print("\n".join(line.text for line in view(state)))
    else:
        _watch(url, state, options.interval_s)
    return 0


def _state(url: str) -> Any:
    state = ask(url, timeout_s=_TIMEOUT_S)
    if not isinstance(state, dict) or not {"head", "workers", "decisions"} <= state.keys():
        raise UserError(f"{url} does not answer as a warmroute gateway; is its version another?")
    return state


def _watch(url: str, state: Mapping[str, Any], interval_s: float) -> None:
    """Until somebody ends it. Raises KeyboardInterrupt for Ctrl-C."""
    problem: str | None = None
    due_s = time.monotonic() + interval_s
    with _screen():
        shown: tuple[object, ...] | None = None
        while True:
            size = _size()
            if shown != (size, id(state), problem):
                shown = (size, id(state), problem)
                _draw(state, problem, size)
            key = _key(min(_LOOK_S, max(0.0, due_s - time.monotonic())))
            if key == _CTRL_C:
                raise KeyboardInterrupt
            if key is not None and (key in _QUIT or not key):
                return
            if time.monotonic() >= due_s:
                try:
                    state, problem = _state(url), None
                except UserError as exc:
                    problem = str(exc)
                due_s = time.monotonic() + interval_s


def _size() -> os.terminal_size:
    """Of the window as it is now, whatever the environment said at the start."""
    size = os.get_terminal_size(sys.stdout.fileno())
    return size if size.columns and size.lines else _UNKNOWN_SIZE


def _draw(state: Mapping[str, Any], problem: str | None, size: os.terminal_size) -> None:
    lines = view(state, size.columns, size.lines)
    if problem is not None:  # What is shown is old then.
        told = clip(f"trying again: {problem}", size.columns)
        lines = [Line(told, "bad"), *(Line(line.text, "dim") for line in lines[: size.lines - 1])]
    out = ["\x1b[H"]
    out += [f"{_styled(line)}\x1b[K" + ("" if i == size.lines - 1 else "\r\n") for i, line in enumerate(lines)]
    sys.stdout.write("".join(out) + "\x1b[J")
    sys.stdout.flush()


def _styled(line: Line) -> str:
    if not line.style or (line.style in ("warn", "bad") and os.environ.get("NO_COLOR")):
        return line.text
    return f"{_STYLES[line.style]}{line.text}{_END}"


def _key(within_s: float) -> str | None:
    """What was typed; "" when the terminal is gone, None for nothing."""
    ready, _, _ = select.select([sys.stdin], [], [], within_s)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else None


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Keys come one by one and are not shown; however it is left, the terminal is as it was."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        sys.stdout.write(_ENTER)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
