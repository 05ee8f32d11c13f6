"""Decisions asked of one planner process, beside those of processes that decide by themselves, as a gateway's do.

`central`: N processes ask one that has the planner, index and bookings, over a Unix socket (uvloop), with block keys
they have hashed, and tell it of first tokens and ends. Its answer is the choice alone, and no token in between is told
of: less than a gateway would need. `own`: N processes decide with copies of the index and what others have in flight,
by the classes that serve; a hub has the index and the board. Either way engines' events come in: half of each prompt's
blocks are new, and push out as many. HTTP, tokenising and ZeroMQ are in neither.

CPU time is that of all processes together, at a fixed rate, with events and without. `full at`: requests a second of
all when the busiest process has no CPU time left. That of the planner is from a run where it always has requests, with
the events added; that of the others from what hub and processes take at the fixed rate, as requests that are over at
once have little to tell. Medians of rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

import msgspec

from bench.decision import DECODERS, PREFILLERS
from bench.goals import Goal, judged
from bench.kv_frames import BLOCK_SIZE

SIZES = {"2kb": 512, "8k": 8192}
"""Tokens of a prompt; 2 KB of text are some 500."""
RATES = {"2kb": 250.0, "8k": 50.0}
"""Requests a second of each process; more of 8k would be more than 72 workers compute."""
WINDOW = 16
"""Requests each process has under way where the planner is to be full."""
TARGETS: list[Goal] = [
    *((f"{size}_{n}_own_over_central_cpu", "<=", 1.0) for size in SIZES for n in (2, 4)),
    *((f"{size}_{n}_own_over_central_full_at", ">=", 1.0) for size in SIZES for n in (2, 4)),
    *((f"{size}_{n}_own_below_central_p50_us", ">=", 0.0) for size in SIZES for n in (2, 4)),
]


class Setting(msgspec.Struct, frozen=True):
    """What each process is told: tokens of a prompt, how many processes decide or ask, where the sockets are."""

    prompt_tokens: int
    processes: int
    folder: str

    @property
    def new_blocks(self) -> int:
        """Of each prompt."""
        return self.prompt_tokens // BLOCK_SIZE // 2


class _Process:
    """Does as lines on its stdin say, and answers with a line of JSON."""

    def __init__(self, role: str, setting: Setting, number: int) -> None:
        command = [sys.executable, "-m", "gateway.measure", role, msgspec.json.encode(setting).decode(), str(number)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self.role = role

    def answer(self) -> dict[str, Any]:
        out: IO[str] | None = self._process.stdout
        line = "" if out is None else out.readline()
        if not line:
            raise RuntimeError(f"a process that {self.role} has ended, as above")
        found: dict[str, Any] = json.loads(line)
        return found

    def order(self, *words: object) -> None:
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Crew:
    """One arm: the process in the middle, and those that ask or decide."""

    def __init__(self, setting: Setting, middle: str, others: str, stack: contextlib.ExitStack) -> None:
        self._setting = setting
        self.middle = self._start(middle, 0, stack)
        self.middle.answer()
        self.others = [self._start(others, i, stack) for i in range(setting.processes)]
        self.scheduled: str = [each.answer()["scheduled"] for each in self.others][-1]

    def _start(self, role: str, number: int, stack: contextlib.ExitStack) -> _Process:
        process = _Process(role, self._setting, number)
        stack.callback(process.end)
        return process

    def run(self, how: str, amount: float, seconds: float, *, events: bool) -> dict[str, float]:
        """CPU us a request of all, and of the one in the middle; microseconds until a decision is there."""
        blocks_per_s = 2 * self._setting.new_blocks * self._setting.processes * amount if events else 0.0
        self.middle.order("begin", blocks_per_s, how)
        self.middle.answer()
        for each in self.others:
            each.order(how, amount, seconds)
        told = [each.answer() for each in self.others]
        self.middle.order("end")
        middle = self.middle.answer()
        latencies_us = sorted(us for each in told for us in each["latencies_us"])
        n = len(latencies_us)
        return {
            "requests": n,
            "cpu_us": (middle["cpu_s"] + sum(each["cpu_s"] for each in told)) / n * 1e6,
            "middle_cpu_us": middle["cpu_s"] / n * 1e6,
            "feeding_us": middle["feeding_cpu_s"] / n * 1e6,
            "fed_share": middle["blocks"] / (blocks_per_s * seconds) if events else 1.0,
            "p50_us": latencies_us[n // 2],
            "p99_us": latencies_us[int(n * 0.99)],
        }


def measure(counts: Sequence[int], rounds: int, seconds: float) -> tuple[dict[str, float], str]:
    """Figures, and how the processes were scheduled. Raises RuntimeError where a process ends."""
    figures: dict[str, float] = {}
    scheduled = ""
    for size, prompt_tokens in SIZES.items():
        for n in counts:
            with contextlib.ExitStack() as stack:
                crews = dict(_crews(prompt_tokens, n, stack))
                taken: dict[str, list[dict[str, float]]] = {}
                for _ in range(rounds):
                    for name, crew in crews.items():
                        scheduled = crew.scheduled
                        rate = RATES[size]
                        runs = {
                            name: crew.run("paced", rate, seconds, events=True),
                            f"{name}_quiet": crew.run("paced", rate, seconds, events=False),
                        }
                        if name == "central":
                            runs["full"] = crew.run("full", WINDOW, seconds, events=False)
                        for arm, found in runs.items():
                            taken.setdefault(arm, []).append(found)
            figures |= {f"{size}_{n}_{key}": value for key, value in _figures(taken, n).items()}
    return figures, scheduled


def _crews(prompt_tokens: int, n: int, stack: contextlib.ExitStack) -> Iterator[tuple[str, _Crew]]:
    for name, middle, others in (("central", "planner", "asks"), ("own", "hub", "decides")):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-"))
        yield name, _Crew(Setting(prompt_tokens, n, folder), middle, others, stack)


def _figures(taken: dict[str, list[dict[str, float]]], n: int) -> dict[str, float]:
    def middle(arm: str, key: str) -> float:
        return statistics.median(each[key] for each in taken[arm])

    out: dict[str, float] = {}
    for arm in ("central", "own"):
        out |= {
            f"{arm}_{key}": middle(arm, key) for key in ("cpu_us", "middle_cpu_us", "p50_us", "p99_us", "fed_share")
        }
        out[f"{arm}_events_us"] = out[f"{arm}_cpu_us"] - middle(f"{arm}_quiet", "cpu_us")
        out[f"{arm}_events_share"] = out[f"{arm}_events_us"] / out[f"{arm}_cpu_us"]
    planner_us = middle("full", "middle_cpu_us")
    out["central_full_at_without_events_per_s"] = 1e6 / planner_us
    out["central_full_at_per_s"] = 1e6 / (planner_us + middle("central", "feeding_us"))
    each_us = (out["own_cpu_us"] - out["own_middle_cpu_us"]) / n
    out["own_full_at_per_s"] = 1e6 / max(out["own_middle_cpu_us"], each_us)
    out["own_over_central_cpu"] = out["own_cpu_us"] / out["central_cpu_us"]
    out["own_over_central_full_at"] = out["own_full_at_per_s"] / out["central_full_at_per_s"]
    out["own_below_central_p50_us"] = out["central_p50_us"] - out["own_p50_us"]
    out["own_below_central_p99_us"] = out["central_p99_us"] - out["own_p99_us"]
    return out


def report(counts: Sequence[int], *, quick: bool, as_json: bool) -> None:
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before it began"
    figures, scheduled = measure(counts, *((1, 0.4) if quick else (3, 2.0)))
    print(f"{load}; {DECODERS} decode x {PREFILLERS} prefill workers, {scheduled}")
    print(f"requests/s of each process: {', '.join(f'{rate:g} of {size}' for size, rate in RATES.items())}")
    heads = ("CPU us each", "of the middle", "of events", "p50 us", "p99 us", "full at/s")
    print(f"{'':<24}" + "".join(f"{head:>15}" for head in heads))
    keys = ("cpu_us", "middle_cpu_us", "events_us", "p50_us", "p99_us", "full_at_per_s")
    for size in SIZES:
        for n in counts:
            for arm in ("central", "own"):
                shown = "".join(f"{figures[f'{size}_{n}_{arm}_{key}']:>15.0f}" for key in keys)
                print(f"{size:<5} {n} processes, {arm:<7}{shown}")
    targets = judged(figures, TARGETS)
    for each in targets:
        print(f"{'met ' if each['met'] else 'MISS'} {each['name']}: {each['measured']} (goal {each['goal']})")
    if as_json:
        rounded = {name: round(value, 3) for name, value in figures.items()}
        told = {"bench": "processes --central", "setting": f"{load}; {scheduled}", "figures": rounded}
        print(json.dumps(told | {"targets": targets}))
