"""Command-line flags made from the keys."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.config.keys import Key, env_name, flag_name, leaves
from gateway.config.neighbour_flags import add_neighbours, take_neighbours
from gateway.config.neighbours import prefill_urls
from gateway.config.picker_flags import PICKER_FLAGS
from gateway.config.read import Text

_DEST = "key:"
_WORKERS = ("workers",)
_NOTES = "notes"

Aliases = Mapping[tuple[str, ...], tuple[str, ...]]

_ALIASES: Aliases = {
    _WORKERS: ("--worker",),
    ("pd", "no_hint"): ("--no-hint",),
    ("pd", "on_prefill_failure"): ("--on-prefill-failure",),
    ("scorer", "policy"): ("--policy",),
    ("tokens", "tokenizer"): ("--tokenizer",),
}
"""Shorter names, and those of neighbouring routers, beside the flag that is made from the key."""
GATEWAY_ALIASES: Aliases = {
    ("gateway", "host"): ("--host",),
    ("gateway", "port"): ("--port",),
    ("gateway", "admin_host"): ("--admin-host",),
    ("gateway", "admin_port"): ("--admin-port",),
    ("gateway", "processes"): ("--processes",),
}
SIDECAR_ALIASES: Aliases = {
    ("sidecar", "engine"): ("--engine",),
    ("sidecar", "host"): ("--host",),
    ("sidecar", "port"): ("--port",),
    ("sidecar", "admin_host"): ("--admin-host",),
    ("sidecar", "admin_port"): ("--admin-port",),
    ("sidecar", "data_parallel_size"): ("--data-parallel-size",),
}
EPP_ALIASES: Aliases = {
    ("epp", "host"): ("--host",),
    ("epp", "port"): ("--port", "--grpc-port"),
    ("epp", "health_port"): ("--grpc-health-port",),
    ("epp", "metrics_port"): ("--metrics-port",),
    ("epp", "admin_host"): ("--admin-host",),
    ("epp", "admin_port"): ("--admin-port",),
    ("epp", "fallback_endpoints"): ("--fallback-endpoints",),
    ("epp", "conformance"): ("--conformance",),
}
INDEXER_ALIASES: Aliases = {
    ("indexer", "host"): ("--host",),
    ("indexer", "port"): ("--port",),
    ("indexer", "socket"): ("--socket",),
    ("indexer", "metrics_port"): ("--metrics-port",),
    ("indexer", "admin_host"): ("--admin-host",),
    ("indexer", "admin_port"): ("--admin-port",),
}
_ROLES = {"--prefill": "prefill", "--decode": "decode", "--worker-urls": None}


def add_config_flags(parser: argparse.ArgumentParser, aliases: Aliases = GATEWAY_ALIASES) -> None:
    """`--config FILE` and one flag for each key. `aliases` are those of one face beside the common ones."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with the configuration (WARMROUTE_CONFIG)")
    group = parser.add_argument_group("configuration keys", "each beats its environment variable, which beats the file")
    for path, key in leaves():
        _add_flag(group, path, key, (*_ALIASES.get(path, ()), *aliases.get(path, ())))
    for flag, role in _ROLES.items():
        group.add_argument(
            flag,
            dest=_DEST + ".".join(_WORKERS),
            action=_AddWorkers,
            const=role,
            nargs="+",
            metavar="URL",
            default=argparse.SUPPRESS,
            help=f"workers{f' of role {role}' if role else ''}, beside those of --worker",
        )
    if aliases is GATEWAY_ALIASES:
        add_neighbours(parser)
    elif aliases is EPP_ALIASES:
        add_neighbours(parser, PICKER_FLAGS)


def parse_flags(
    parser: argparse.ArgumentParser, args: Sequence[str]
) -> tuple[argparse.Namespace, dict[tuple[str, ...], Text], list[str]]:
    """The parser's own options, the keys given by flag, and the arguments nobody knows: the last two for `load_config`.

    `parser` went through `add_config_flags`. Unknown arguments are returned, not raised, so that they are reported
    together with every other mistake. What a neighbouring router's flag does differently here is told on standard
    error. Raises UserError for one that cannot be taken.
    """
    options, extras = parser.parse_known_args(args)
    given: dict[tuple[str, ...], Text] = {
        tuple(name.removeprefix(_DEST).split(".")): value
        for name, value in vars(options).items()
        if name.startswith(_DEST)
    }
    unknown = [
        arg.partition("=")[0]
        for before, arg in zip(["", *extras], extras, strict=False)
        if arg.startswith("-") or not before.startswith("-") or "=" in before  # else it is an unknown flag's value
    ]
    for note in [*getattr(options, _NOTES, ()), *take_neighbours(options, given)]:
        print(f"warmroute: note: {note}", file=sys.stderr)
    return options, given, unknown


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Every flag it takes."""
    return [flag for action in parser._actions for flag in action.option_strings]


class _AddWorkers(argparse.Action):
    """Adds the URLs, with the role `const` if there is one, to the same list as `--worker`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        lists = [value for value in values if self.const is None and value.lstrip().startswith("[")]  # YAML
        urls, notes = prefill_urls([value for value in values if value not in lists])
        role = {} if self.const is None else {"role": self.const}
        more = [*lists, *({"url": url, **role} for url in urls)]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *more])
        setattr(namespace, _NOTES, [*getattr(namespace, _NOTES, ()), *notes])


def _add_flag(group: "argparse._ArgumentGroup", path: tuple[str, ...], key: Key, aliases: tuple[str, ...]) -> None:
    dest = _DEST + ".".join(path)
    help_text = f"{key.description} ({key.expected}; {env_name(path)})".replace("%", "%%")
    flags, metavar = (flag_name(path), *aliases), path[-1].upper()
    if key.is_list:
        metavar = "URL[,URL]" if key.is_workers else f"{metavar}[,{metavar}]"
        group.add_argument(
            *flags, dest=dest, action="append", metavar=metavar, default=argparse.SUPPRESS, help=help_text
        )
    elif key.type is bool:
        group.add_argument(
            *flags, dest=dest, nargs="?", const="true", metavar="BOOL", default=argparse.SUPPRESS, help=help_text
        )
    else:
        group.add_argument(*flags, dest=dest, metavar=metavar, default=argparse.SUPPRESS, help=help_text)
