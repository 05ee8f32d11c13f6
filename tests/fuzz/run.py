"""`python -m tests.fuzz.run`: every target for its share of the time, guided by coverage where atheris is installed.

    python -m tests.fuzz.run --seconds 600              all targets; inputs worth keeping go to .fuzz/<target>/
    python -m tests.fuzz.run --target kv_events         one
    python -m tests.fuzz.run --target kv_events FILE    these inputs again

Ends with 1 when a target found something: the input is in .fuzz/found/, and its line says how to see it again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import logging
import pkgutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.fuzz import targets
from tests.fuzz.mutate import LONGEST_BYTES, mutations

LONGEST_S = 2.0
"""CPU time of one input of at most 64 KiB."""
_MEASURED_S = 10
_FOLDER = Path(".fuzz")

NAMES = sorted(module.name for module in pkgutil.iter_modules(targets.__path__))


class TooSlow(AssertionError):
    """One input took longer than any may."""


def target(name: str) -> ModuleType:
    return importlib.import_module(f"tests.fuzz.targets.{name}")


def timed(fuzz_one: Callable[[bytes], None], data: bytes) -> None:
    """Raises what `fuzz_one` raises, and TooSlow."""
    began_s = time.process_time()
    fuzz_one(data)
    took_s = time.process_time() - began_s
    if took_s > LONGEST_S:
        raise TooSlow(f"{took_s:.1f} s for {len(data)} bytes")


def mutate_for(name: str, seconds: float, number: int) -> int:
    """Without atheris. How many inputs were tried; what is found is kept and raised."""
    module = target(name)
    inputs = mutations(module.SEEDS, module.WORDS, number)
    until_s = time.monotonic() + seconds
    n = 0
    while time.monotonic() < until_s:
        data = next(inputs)
        n += 1
        try:
            timed(module.fuzz_one, data)
        except Exception:
            _keep(name, data)
            raise
    return n


def _keep(name: str, data: bytes) -> None:
    folder = _FOLDER / "found"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}"
    file.write_bytes(data)
    print(f"fuzz: found: python -m tests.fuzz.run --target {name} {file}", file=sys.stderr)


def _guided(name: str, seconds: float) -> int:
    """In a process of its own, which libFuzzer ends."""
    corpus, found = _FOLDER / name, _FOLDER / "found"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    for seed in target(name).SEEDS:
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    before = set(found.iterdir())
    words = _FOLDER / f"{name}.dict"
    words.write_text(
        "".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target(name).WORDS),
        encoding="ascii",
    )
    command = [
        sys.executable, "-m", "tests.fuzz.guided", name, str(corpus), f"-dict={words}", f"-max_len={LONGEST_BYTES}",
        f"-max_total_time={max(1, round(seconds))}", f"-timeout={_MEASURED_S}", "-rss_limit_mb=2048",
        f"-artifact_prefix={found}/{name}-", "-print_final_stats=1", "-verbosity=0",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds + 300)
    tried = [line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line]
    print(f"fuzz: {name}: {tried[0] if tried else '?'} inputs in {seconds:.0f} s, guided by coverage", flush=True)
    if done.returncode:
        print(done.stdout[-3000:] + done.stderr[-6000:], file=sys.stderr)
        for file in sorted(set(found.iterdir()) - before):
            print(f"fuzz: found: python -m tests.fuzz.run --target {name} {file}", file=sys.stderr)
    return done.returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=NAMES, action="append", help="only this one; may be given more than once")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--number", type=int, default=None, help="of the mutations without atheris; else by the time")
    parser.add_argument("files", nargs="*", type=Path, help="inputs to try again")
    arguments = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)  # Every refusal is told, which takes longer than the refusing.
    names = arguments.target or NAMES
    if arguments.files:
        for file in arguments.files:
            timed(target(names[0]).fuzz_one, file.read_bytes())
            print(f"fuzz: {names[0]}: {file}: nothing wrong")
        return 0
    guided = importlib.util.find_spec("atheris") is not None
    if not guided:
        print("fuzz: atheris is not installed: mutations of the seeds, without looking at what they reach")
    failed = []
    for name in names:
        seconds = arguments.seconds / len(names)
        if guided:
            if _guided(name, seconds):
                failed.append(name)
            continue
        number = int(time.time()) if arguments.number is None else arguments.number
        try:
            n = mutate_for(name, seconds, number)
            print(f"fuzz: {name}: {n} inputs in {seconds:.0f} s (--number {number})", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        print(f"fuzz: something is wrong: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
