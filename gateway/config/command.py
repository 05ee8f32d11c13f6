"""`warmroute config`: show the defaults, check a file, or print the configuration in force."""

import json
import os
from collections.abc import Sequence

import msgspec

from gateway.cli import Parser
from gateway.config.flags import add_config_flags, flags_of, parse_flags
from gateway.config.load import ConfigError, load_config, load_workers
from gateway.config.schema import Config
from gateway.config.show import config_yaml, default_yaml


def main(args: Sequence[str]) -> int:
    parser = Parser(
        prog="warmroute config",
        description="Without an option: print the configuration in force (file, environment and flags together).",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--print-default", action="store_true", help="every key with its default and meaning, as YAML")
    mode.add_argument("--check", metavar="FILE", help="check FILE with the environment; exit code 2 and all problems")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_config_flags(parser)
    options, given, unknown = parse_flags(parser, args)

    if options.print_default:
        if given or unknown:
            parser.error(f"--print-default takes no other argument than --json, got {' '.join(args)}")
        print(_json(Config()) if options.json else default_yaml(), end="")
        return 0
    if options.check and options.config:
        parser.error("--check and --config each name a file; give one of them")
    try:
        config = load_config(options.check or options.config, os.environ, given, unknown, flags_of(parser))
        if options.check and config.workers_file:
            load_workers(config.workers_file)
    except ConfigError as exc:
        if not options.json:
            raise
        print(json.dumps({"ok": False, "problems": msgspec.to_builtins(exc.problems)}, indent=2))
        return 2
    if options.check:
        print('{"ok": true, "problems": []}' if options.json else f"{options.check}: ok")
    else:
        print(_json(config) if options.json else config_yaml(config), end="")
    return 0


def _json(config: Config) -> str:
    return json.dumps(msgspec.to_builtins(config), indent=2) + "\n"
