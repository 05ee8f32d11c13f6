"""Commands of pages: lines of `console` and `bash` blocks, and pieces of text that begin like a command."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^( *)```(console|bash|sh|shell)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"`((?:warmroute|make|python -m bench|python -m gateway) (?!with )[a-z][^`]*)`")
"""`warmroute with KEY: VALUE` is a policy's name and a key."""
_COMMENT = re.compile(r"\s{2,}#\s.*$|\s#\s.*$")
_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")
_BETWEEN = ("&&", "&", ";", "||", "|")


@dataclass(frozen=True)
class Command:
    """One program and its arguments. `said`: the comment behind it. `to`: the file that takes its output."""

    page: str
    line: int
    words: tuple[str, ...]
    said: str = ""
    to: str | None = None
    env: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


class NotACommand(ValueError):
    """A line in a block of commands that is none."""


def of_blocks(page: Path) -> list[Command]:
    """In the order of the page. In a console block only lines that begin with `$` are commands; there must be one."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in _BLOCK.finditer(text):
        first = text[: block.start(3)].count("\n") + 1
        lines = _joined(block.group(3).splitlines(), first)
        if block.group(2) == "console":
            lines = [(n, line.strip()[2:]) for n, line in lines if line.strip().startswith("$ ")]
        if not lines:
            raise NotACommand(f"{page.name}:{first}: a block of commands without a command")
        for n, line in lines:
            found += _commands(page.name, n, line)
    return found


def of_text(page: Path) -> list[Command]:
    """Those named in sentences, with arguments."""
    text = page.read_text(encoding="utf-8")
    blank = _FENCED.sub(lambda block: "\n" * block.group().count("\n"), text)
    return [
        each
        for quoted in _QUOTED.finditer(blank)
        for each in _commands(page.name, blank[: quoted.start()].count("\n") + 1, " ".join(quoted.group(1).split()))
    ]


def _joined(lines: list[str], first: int) -> list[tuple[int, str]]:
    """Lines that end in a backslash with those they go on in; numbered as in the page."""
    out: list[tuple[int, str]] = []
    held = ""
    for n, line in enumerate(lines, first):
        held += line.strip() if held else line
        if held.endswith("\\"):
            held = held[:-1]
            continue
        out.append((n, held))
        held = ""
    return out


def _commands(page: str, line: int, text: str) -> list[Command]:
    said = _COMMENT.search(text)
    lexer = shlex.shlex(_COMMENT.sub("", text), posix=True, punctuation_chars="&;>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    out: list[Command] = []
    words: list[str] = []
    for word in (*lexer, ";"):
        if word not in _BETWEEN:
            words.append(word)
        elif words:
            out.append(_command(page, line, words, "" if said is None else said.group().strip(" #")))
            words = []
    return out


def _command(page: str, line: int, words: list[str], said: str) -> Command:
    env: dict[str, str] = {}
    while (assigned := _ASSIGNMENT.fullmatch(words[0])) is not None:
        env[assigned.group(1)] = assigned.group(2)
        words = words[1:]
    to = None
    redirects = [word for word in (">", ">>") if word in words]
    if redirects:
        at = words.index(redirects[0])
        to, words = words[at + 1], words[:at]
    return Command(page, line, tuple(words), said, to, env)
