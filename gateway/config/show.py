"""Configuration as text: the commented default, and one `Config` as YAML that reads back equal."""

import textwrap
from typing import Any

import msgspec
import yaml

from gateway.config.keys import Key, fields_of
from gateway.config.schema import Config, Worker

_HEAD = """\
# warmroute configuration: every key with its default. Leave out what you do not change.
# A key may also be given as an environment variable (index.budget_bytes: WARMROUTE_INDEX__BUDGET_BYTES)
# or a flag (--index-budget-bytes); a flag beats the environment, which beats this file.
# Units are the end of the name: _s seconds, _ms milliseconds, _bytes bytes (2GiB is understood).
# Keys marked live are taken from a changed file, or on SIGHUP, without a restart.
"""


def default_yaml() -> str:
    """Every key, its default and its meaning, as YAML that reads back as the default."""
    lines = [_HEAD]
    for key in fields_of(Config).values():
        lines += _lines(key)
        if key.is_workers:
            lines += [f"#   {line}" for k in fields_of(Worker).values() for line in _key_lines(k)]
        lines.append("")
    return "\n".join(lines)


def config_yaml(config: Config) -> str:
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True)


def _lines(key: Key) -> list[str]:
    """Of a key, or of a section and all in it."""
    if not key.section:
        return _key_lines(key)
    inner = [line for inner in fields_of(key.section).values() for line in _lines(inner)]
    return [f"# {key.description}", f"{key.name}:", *(f"  {line}" for line in inner)]


def _key_lines(key: Key) -> list[str]:
    value = "..." if key.is_required else _scalar(key.default)
    live = "; live" if key.is_live else ""
    comment = textwrap.wrap(
        f"{key.description} ({key.expected}{live})", width=100, initial_indent="# ", subsequent_indent="# "
    )
    return [*comment, f"{key.name}: {value}"]


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(msgspec.to_builtins(value), default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")
