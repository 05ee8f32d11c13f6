"""The table of keys read off the structs in `schema.py`, for every reader and writer of configuration."""

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from gateway.config.schema import Config, NonEmpty, Worker

Path = tuple[str | int, ...]

_NAMES: dict[object, str] = {str: "a text", bool: "true or false", int: "an integer", float: "a number"}


class Key(Struct, frozen=True):
    """One field of a struct: a leaf, a section (`section` set), the list of workers or another list."""

    name: str
    type: Any
    default: Any
    description: str
    expected: str
    section: type[Struct] | None = None
    is_live: bool = False
    """Whether a running process takes it from a configuration read again."""

    @property
    def is_workers(self) -> bool:
        return bool(self.type == tuple[Worker, ...])

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def is_required(self) -> bool:
        return self.default is msgspec.NODEFAULT


@cache
def fields_of(struct: type[Struct]) -> dict[str, Key]:
    """The keys directly inside one struct, by name."""
    hints = get_type_hints(struct, include_extras=True)
    return {f.name: _key(f.name, hints[f.name], _default_of(f)) for f in msgspec.structs.fields(struct)}


def leaves(struct: type[Struct] = Config, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Key]]:
    """Every key that takes a value, with its path; the list of workers is one such key."""
    for key in fields_of(struct).values():
        if key.section:
            yield from leaves(key.section, (*above, key.name))
        else:
            yield (*above, key.name), key


def dotted(path: Path) -> str:
    """`("workers", 1, "role")` as `workers[1].role`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def env_name(path: tuple[str, ...]) -> str:
    return "WARMROUTE_" + "__".join(path).upper()


def flag_name(path: tuple[str, ...]) -> str:
    return "--" + "-".join(path).replace("_", "-")


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _key(name: str, hint: Any, default: Any) -> Key:
    is_live = any((meta.extra or {}).get("live") for meta in getattr(hint, "__metadata__", ()))
    description, hint = _split(hint)
    section = hint if isinstance(hint, type) and issubclass(hint, Struct) else None
    expected = "a mapping" if section else _expected(hint)
    description = description or (section.__doc__ if section else "") or ""
    return Key(name, hint, default, description, expected, section, is_live)


def _split(hint: Any) -> tuple[str, Any]:
    """The description, and the type without it. Bounds stay on the type, because they convert and word it."""
    metas = getattr(hint, "__metadata__", ())
    description = next((m.description for m in reversed(metas) if m.description), "")
    bounds = tuple(m for m in metas if m.description is None or _bounds(m))
    base = hint.__origin__ if metas else hint
    return description, Annotated[base, *bounds] if bounds else base


def _bounds(meta: Meta) -> str:
    signs = ((">", meta.gt), (">=", meta.ge), ("<", meta.lt), ("<=", meta.le))
    return " and ".join(f"{sign} {bound}" for sign, bound in signs if bound is not None)


def _expected(hint: Any) -> str:
    """The type in the words of an error message."""
    origin = get_origin(hint)
    if origin is Annotated:
        for meta in hint.__metadata__:
            if meta.extra and "expected" in meta.extra:
                return str(meta.extra["expected"])
        bounds = " and ".join(filter(None, map(_bounds, hint.__metadata__)))
        return f"{_expected(hint.__origin__)} {bounds}".strip()
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is types.NoneType else _expected(arg) for arg in get_args(hint))
    if origin is tuple:
        item = get_args(hint)[0]
        if item is Worker:
            return "a list of URLs or objects"
        return "a list of texts" if item in (str, NonEmpty) else f"a list, each {_expected(item)}"
    if origin is dict:
        return "a mapping of texts to texts"
    return _NAMES[hint]
