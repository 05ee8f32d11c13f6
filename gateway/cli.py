"""The `warmroute` command: a table of subcommands, each imported only when it is called."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from gateway.errors import UserError, nearest


class Command(NamedTuple):
    """`target` is `module:function` with `function(args: Sequence[str]) -> int` (the exit code)."""

    target: str
    summary: str


COMMANDS: dict[str, Command] = {
    "advise": Command("gateway.advise.command:main", "does it pay to split prefill from decode for this traffic?"),
    "demo": Command("bench.demo.command:main", "a small fleet of fake engines on this machine, routed and compared"),
    "config": Command("gateway.config.command:main", "print, check or document the configuration"),
    "doctor": Command("gateway.doctor.command:main", "check what cache-aware routing needs of vLLM servers"),
    "epp": Command("gateway.epp.run:main", "pick endpoints for Envoy (ext_proc, Gateway API Inference Extension)"),
    "explain": Command("gateway.debug.explain:main", "ask a running gateway where a request would go, and why"),
    "gateway": Command("gateway.run:main", "serve the OpenAI API in front of vLLM workers"),
    "indexer": Command("gateway.indexservice.run:main", "keep the index for several gateways, and serve it over gRPC"),
    "keys": Command("gateway.auth.command:main", "make, hash or check API keys of the gateway"),
    "record": Command("gateway.record.command:main", "write a trace of what a running gateway is asked"),
    "replay-events": Command("gateway.replay_events:main", "feed recorded KV events (FILE or -) to the index"),
    "sidecar": Command("gateway.sidecar.run:main", "serve the engine of a decode pod; prefill may run elsewhere"),
    "top": Command("gateway.debug.top:main", "the fleet and the last decisions of a running gateway, in the terminal"),
    "workers": Command("gateway.workers_command:main", "list, add, drain and remove workers of a running gateway"),
    "version": Command("gateway.cli:version", "print the version"),
}

_SIGPIPE_EXIT = 141  # what a shell reports for a program that SIGPIPE ended
_SIGINT_EXIT = 130


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and that never guesses an abbreviated flag."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`, but an unknown argument is answered with the nearest known one."""
        options, extras = self.parse_known_args(args)
        if extras:
            known = [flag for action in self._actions for flag in action.option_strings]
            like = nearest(extras[0], known)
            self.error(f"unknown argument {extras[0]}" + (f"; did you mean {like}?" if like else ""))
        return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. User errors are one line per problem on standard error and exit code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    return report_user_errors(lambda: _run(args))


def report_user_errors(run: Callable[[], int]) -> int:
    """What `run` returns, or the exit code of what it raised, which is told on standard error."""
    try:
        code = run()
        sys.stdout.flush()
    except UserError as exc:
        for line in str(exc).splitlines():
            print(f"warmroute: error: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader left (`| head`); nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE_EXIT
    except KeyboardInterrupt:
        return _SIGINT_EXIT
    except OSError as exc:
        print(f"warmroute: error: {exc.filename or 'system'}: {exc.strerror or exc}", file=sys.stderr)
        return 2
    return code


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    name, rest = args[0], args[1:]
    if name == "--version":
        name = "version"
    if name not in COMMANDS:
        like = nearest(name, COMMANDS)
        raise UserError(f"no command named {name}; " + (f"did you mean {like}?" if like else "see warmroute --help"))
    module, _, function = COMMANDS[name].target.partition(":")
    command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    try:
        return command(rest)
    except SystemExit as exc:  # argparse after --help; returning keeps the flush in main() guarded
        return exc.code if isinstance(exc.code, int) else 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return f"usage: warmroute COMMAND ...\n\n{commands}\n\nwarmroute COMMAND --help shows a command's arguments."


def version(args: Sequence[str]) -> int:
    from importlib.metadata import version as installed_version

    Parser(prog="warmroute version", description="Print the version.").parse(args)
    print(f"warmroute {installed_version('warmroute')}")
    return 0
