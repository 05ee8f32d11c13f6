"""One source of configuration (a YAML tree, the environment, the flags) -> nested dicts of converted values.

Each source is read on its own, so that a mistake is named with its place even where a later source overrides it. A
mistake never raises: it is added to `problems`, and reading goes on, so that one run shows them all.
"""

import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml
from msgspec import Struct

from gateway.config.keys import Key, Path, dotted, env_name, fields_of, flag_name, leaves
from gateway.config.schema import Config, Worker
from gateway.config.yamltree import load_tree
from gateway.errors import nearest

# Ours, but no keys: WARMROUTE_CONFIG names the file, those of tokens are secrets, WARMROUTE_E2E_* steers
# `make e2e`, which hands it to its servers.
_NO_KEY = re.compile(r"WARMROUTE_(CONFIG|ADMIN_TOKEN|INDEXER_TOKEN|E2E_\w+)")

# Kubernetes puts these into every pod beside a Service named warmroute or warmroute-*; they are not ours. The value of
# *_PORT tells it from a mistyped key of ours.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")

_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])i?B?", re.IGNORECASE)
_SHIFT = {"K": 10, "M": 20, "G": 30, "T": 40}

MOST_BYTES = 4 << 20
"""Of a file: tens of thousands of workers, and some seconds to read."""

_YAML_LIST = re.compile(r"\s*\[.*\]\s*", re.DOTALL)

Values = dict[str, Any]
Text = str | list[str | Values]
"""As given by a flag; an item of a list that is no text is the item itself."""


def file_content(file: str) -> bytes:
    """Of a file that can be read again and again. Raises OSError: also for what is none, such as a pipe, and for more
    than `MOST_BYTES`.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError(None, "is no file that can be read again")
    return _content(file)


def _content(file: str) -> bytes:
    with open(file, "rb") as opened:
        content = opened.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(None, f"is larger than {MOST_BYTES >> 20} MiB")
    return content


class Problem(Struct, frozen=True):
    """One thing wrong: the key's dotted path (may be empty), what is wrong with it, and where it was given."""

    key: str
    message: str
    source: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.source, self.key, self.message)))


class Reader:
    """Reads sources one after the other. `sources` says where each leaf was given last."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.sources: dict[Path, str] = {}

    def yaml_file(self, file: str) -> Values:
        """A whole configuration."""
        tree, where = self._yaml_tree(file)
        return _Source(self, where, is_text=False).struct(Config, tree, ())

    def workers_file(self, file: str) -> tuple[Worker, ...]:
        """A list of workers alone."""
        tree, where = self._yaml_tree(file)
        return _Source(self, lambda path: where(path[1:]), is_text=False).workers(tree, ("workers",))

    def worker(self, given: object, where: str) -> Worker | None:
        """One worker: a URL or an object."""
        values = _Source(self, lambda path: where, is_text=False).worker(given, ())
        return None if self.problems else Worker(**values)

    def _yaml_tree(self, file: str) -> tuple[Any, Callable[[Path], str]]:
        try:
            tree, lines, repeated = load_tree(_content(file).decode())
        except OSError as exc:
            self._fail("", exc.strerror or str(exc), file)
            return None, lambda path: file
        except UnicodeDecodeError:
            self._fail("", "is not UTF-8 text", file)
            return None, lambda path: file
        except yaml.YAMLError as exc:
            mark = getattr(exc, "problem_mark", None)
            reason = " ".join(str(getattr(exc, "problem", None) or exc).split())
            self._fail("", f"not valid YAML: {reason}", f"{file}:{mark.line + 1}" if mark else file)
            return None, lambda path: file
        for path, line in repeated:
            self._fail(dotted(path), "given twice", f"{file}:{line}")

        def where(path: Path) -> str:
            while path and path not in lines:
                path = path[:-1]
            return f"{file}:{lines.get(path, 1)}"

        return tree, where

    def environment(self, env: Mapping[str, str]) -> Values:
        known = {env_name(path): path for path, _ in leaves()}
        tree: Values = {}
        for name in sorted(env):
            if not name.startswith("WARMROUTE_") or _NO_KEY.fullmatch(name) or _is_service_link(name, env[name]):
                continue
            if name in known:
                _put(tree, known[name], env[name])
            else:
                self._unknown("variable", name, nearest(name, [*known, "WARMROUTE_CONFIG"]), "environment")
        return _Source(self, lambda path: env_name(_names(path)), is_text=True).struct(Config, tree, ())

    def flags(
        self, given: Mapping[tuple[str, ...], Text], unknown: Iterable[str], also_known: Iterable[str] = ()
    ) -> Values:
        """`unknown` are answered with the nearest one there is, of the keys' own and of `also_known`."""
        known = [*(flag_name(path) for path, _ in leaves()), *also_known]
        for flag in unknown:
            self._unknown("argument", flag, nearest(flag, known), "command line")
        tree: Values = {}
        for path, text in given.items():
            _put(tree, path, text)
        return _Source(self, lambda path: flag_name(_names(path)), is_text=True).struct(Config, tree, ())

    def _unknown(self, what: str, name: str, like: str | None, source: str) -> None:
        self._fail(name, f"unknown {what}" + (f"; did you mean {like}?" if like else ""), source)

    def _fail(self, key: str, message: str, source: str) -> None:
        self.problems.append(Problem(key, message, source))


class _Source:
    """Walks one source along the structs. `is_text`: leaf values are text still to be parsed."""

    def __init__(self, reader: Reader, where: Callable[[Path], str], *, is_text: bool) -> None:
        self._reader = reader
        self._where = where
        self._is_text = is_text

    def struct(self, struct: type[Struct], given: object, path: Path) -> Values:
        if given is None:  # a section with all its lines commented out
            given = {}
        if not isinstance(given, dict):
            self._fail(path, f"expected a mapping, got {_shown(given)}")
            return {}
        fields = fields_of(struct)
        values: Values = {}
        for name, value in given.items():
            at = (*path, name)
            key = fields.get(name)
            if key is None:
                like = _nearest_key(name, path, fields)
                self._fail(at, "unknown key" + (f"; did you mean {like}?" if like else ""))
            elif key.section:
                values[name] = self.struct(key.section, value, at)
            elif key.is_workers:
                values[name] = self.workers(value, at)
            elif key.is_list:
                values[name] = self._list(key, value, at)
            else:
                values[name] = self._leaf(key, value, at)
        for key in fields.values():
            if key.is_required and key.name not in given:
                self._fail((*path, key.name), f"is missing; expected {key.expected}")
        return values

    def workers(self, given: object, path: Path) -> tuple[Worker, ...]:
        items = self._items(given, path)
        if not isinstance(items, list):
            self._fail(path, f"expected a list of URLs or objects, got {_shown(items)}")
            return ()
        self._reader.sources[path] = self._where(path)
        plain = _Source(self._reader, self._where, is_text=False)
        before = len(self._reader.problems)
        read = [plain.worker(item, (*path, i)) for i, item in enumerate(items)]
        return tuple(Worker(**values) for values in read) if len(self._reader.problems) == before else ()

    def worker(self, given: object, path: Path) -> Values:
        if isinstance(given, str):
            given = {"url": given}
        elif not isinstance(given, dict):
            self._fail(path, f"expected a URL or an object, got {_shown(given)}")
            return {}
        values = self.struct(Worker, given, path)
        url = values.get("url")
        problem = _problem_of_url(url) if isinstance(url, str) else None
        if problem is not None:
            self._fail((*path, "url"), problem)
        return values

    def _list(self, key: Key, given: object, path: Path) -> tuple[object, ...]:
        items = self._items(given, path)
        try:
            values: tuple[object, ...] = msgspec.convert(items, key.type, strict=not self._is_text)
        except msgspec.ValidationError:
            values = ()
        if not isinstance(items, list) or len(values) < len(items):
            got = _shown(given)
            if isinstance(items, list):
                got = "a list of " + ", ".join(map(_shown, items[:3])) + (", ..." if items[3:] else "")
            self._fail(path, f"expected {key.expected}, got {got}")
            return ()
        self._reader.sources[path] = self._where(path)
        for i in range(len(items)):
            self._reader.sources[*path, i] = self._where((*path, i))
        return values

    def _items(self, given: object, path: Path) -> object:
        """What should be a list; of a text, its parts."""
        if not self._is_text:
            return [] if given is None else given
        items: list[object] = []
        for part in given if isinstance(given, list) else [given]:
            items += self._parts(part, path) if isinstance(part, str) else [part]
        return items

    def _parts(self, text: str, path: Path) -> list[object]:
        """`http://a:1,http://b:1`, or a YAML list in one line (an address in brackets is none)."""
        if not _YAML_LIST.fullmatch(text):
            return list(filter(None, (part.strip() for part in text.split(","))))
        try:
            return list(load_tree(text)[0])
        except yaml.YAMLError as exc:
            self._fail(path, f"not valid YAML: {getattr(exc, 'problem', None) or exc}")
            return []

    def _leaf(self, key: Key, given: object, path: Path) -> object:
        if self._is_text and given in ("", "null") and key.expected.endswith("null"):
            given = None
        if key.name.endswith("_bytes") and isinstance(given, str) and (size := _BYTES.fullmatch(given)):
            given = int(float(size[1]) * (1 << _SHIFT[size[2].upper()]))
        try:
            value: object = msgspec.convert(given, key.type, strict=not self._is_text)
        except msgspec.ValidationError:
            value = math.nan
        if isinstance(value, float) and not math.isfinite(value):
            self._fail(path, f"expected {key.expected}, got {_shown(given)}")
        self._reader.sources[path] = self._where(path)
        return value

    def _fail(self, path: Path, message: str) -> None:
        self._reader.problems.append(Problem(dotted(path), message, self._where(path)))


def _problem_of_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:  # An address in brackets that is none, a port above 65535.
        return str(exc)
    try:
        (parts.hostname or "").encode("idna")
    except UnicodeError:
        return "its host is no name that can be looked up (an empty or too long part, or a character that no name has)"
    return "0 is no port" if port == 0 else None


def _nearest_key(name: str, path: Path, fields: Mapping[str, Key]) -> str | None:
    """The likeliest key meant: in the same section, else the same name in another, else the most similar of all."""
    if like := nearest(name, fields):
        return dotted((*path, like))
    elsewhere = {dotted(p): p[-1] for p, _ in leaves()}
    return next((full for full, last in elsewhere.items() if last == name), None) or nearest(name, elsewhere)


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(name) or (name.endswith("_PORT") and _SERVICE_URL.match(value)))


def _names(path: Path) -> tuple[str, ...]:
    """The part of a path that has a variable or flag of its own: `workers[1].role` is given by `workers`."""
    names: list[str] = []
    for part in path:
        if isinstance(part, int):
            break
        names.append(part)
    return tuple(names)


def _put(tree: Values, path: tuple[str, ...], value: object) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _shown(value: object) -> str:
    """A value in an error message; long text and text that may hold credentials is not repeated."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 60 and "@" not in value else "another text"
    if isinstance(value, dict):
        odd = next((f" where {key} is {_shown(item)}" for key, item in value.items() if not isinstance(item, str)), "")
        return f"a mapping{odd}"
    return f"a {type(value).__name__}"
