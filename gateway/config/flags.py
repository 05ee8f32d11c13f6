"""Command-line flags made from the keys."""

import argparse
from collections.abc import Sequence

from gateway.config.keys import Key, env_name, flag_name, leaves
from gateway.config.read import Text

_DEST = "key:"

ALIASES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("workers",): ("--worker", "--worker-urls"),
    ("gateway", "host"): ("--host",),
    ("gateway", "port"): ("--port",),
    ("scorer", "policy"): ("--policy",),
    ("tokens", "tokenizer"): ("--tokenizer",),
}
"""Shorter names, and those of neighbouring routers, beside the flag that is made from the key."""


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """`--config FILE` and one flag for each key."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with the configuration (WARMROUTE_CONFIG)")
    group = parser.add_argument_group("configuration keys", "each beats its environment variable, which beats the file")
    for path, key in leaves():
        _add_flag(group, path, key)


def parse_flags(
    parser: argparse.ArgumentParser, args: Sequence[str]
) -> tuple[argparse.Namespace, dict[tuple[str, ...], Text], list[str]]:
    """The parser's own options, the keys given by flag, and the arguments nobody knows: the last two for `load_config`.

    `parser` went through `add_config_flags`. Unknown arguments are returned, not raised, so that they are reported
    together with every other mistake.
    """
    options, extras = parser.parse_known_args(args)
    given = {tuple(n.removeprefix(_DEST).split(".")): v for n, v in vars(options).items() if n.startswith(_DEST)}
    unknown = [
        arg.partition("=")[0]
        for before, arg in zip(["", *extras], extras, strict=False)
        if arg.startswith("-") or not before.startswith("-") or "=" in before  # else it is an unknown flag's value
    ]
    return options, given, unknown


def _add_flag(group: "argparse._ArgumentGroup", path: tuple[str, ...], key: Key) -> None:
    dest = _DEST + ".".join(path)
    help_text = f"{key.description} ({key.expected}; {env_name(path)})".replace("%", "%%")
    flags, metavar = (flag_name(path), *ALIASES.get(path, ())), path[-1].upper()
    if key.is_workers:
        group.add_argument(
            *flags, dest=dest, action="append", metavar="URL[,URL]", default=argparse.SUPPRESS, help=help_text
        )
    elif key.type is bool:
        group.add_argument(
            *flags, dest=dest, nargs="?", const="true", metavar="BOOL", default=argparse.SUPPRESS, help=help_text
        )
    else:
        group.add_argument(*flags, dest=dest, metavar=metavar, default=argparse.SUPPRESS, help=help_text)
