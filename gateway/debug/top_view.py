"""A snapshot of `/debug/state` as lines of a terminal."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_DECISIONS = 10
_MOST_WARNINGS = 3
_SPARK_S = 30
_LONGEST_ID = 16
_PARTS = 3
"""Of a price, the largest that are named."""


class Line(NamedTuple):
    """`style`: bold, dim, warn, bad or nothing."""

    text: str
    style: str = ""


def view(state: Mapping[str, Any], width: int | None = None, height: int | None = None) -> list[Line]:
    """At most `height` lines of at most `width` columns; None: whatever it takes."""
    top = [*_head(state), *_warnings(state["warnings"], state["more_warnings"], height is None), Line("")]
    fleet = _fleet(state["workers"])
    if height is None:
        decisions = _decisions(state["decisions"][:_PLAIN_DECISIONS])
    else:
        room = max(0, height - len(top) - 1)
        decisions = _decisions(state["decisions"])
        # Both have their half; what one does not need the other gets.
        for_fleet = min(len(fleet), max(room - len(decisions), room // 2))
        fleet, left = _cut_to(fleet, for_fleet, "workers"), room - for_fleet
        decisions = decisions[:left]
    lines = [*top, *fleet, Line(""), *decisions]
    return lines if height is None else [Line(clip(line.text, width), line.style) for line in lines[:height]]


def _head(state: Mapping[str, Any]) -> list[Line]:
    head, hits = state["head"], state["hits"]
    standing = "draining" if head["draining"] else "live"
    now = time.strftime("%H:%M:%S", time.localtime(state["at_s"]))
    title = (
        f"warmroute {clean(head['face'])}  {standing}  {now}  version {clean(head['version'])}, up "
        f"{_age(state['at_s'] - head['started_s'])}, policy {clean(head['policy'])} / {clean(head['pd_policy'])}"
    )
    load = (
        f"{head['decisions_per_s']:g} decisions/s, {head['in_flight']} in flight, {head['queued']} waiting for room; "
        f"cached tokens: {_share(hits['predicted_tokens'], hits['prompt_tokens'])} predicted, "
        f"{_share(hits['actual_tokens'], hits['prompt_tokens'])} actual"
    )
    paces = (_pace("first token", state["ttft_ms"]), _pace("between tokens", state["itl_ms"]))
    return [Line(title, "bold"), Line(load), Line("   ".join(paces))]


def _pace(name: str, series: Sequence[Sequence[float] | None]) -> str:
    last = next((pair for pair in reversed(series) if pair is not None), None)
    if last is None:
        return f"{name}: no streamed answer in two minutes"
    shown = [None if pair is None else pair[1] for pair in series[-_SPARK_S:]]
    highest = max((value for value in shown if value is not None), default=0.0)
    return f"{name} p50 {_ms(last[0])} p95 {_ms(last[1])} {_spark(shown, highest)}"


def _spark(values: Sequence[float | None], highest: float) -> str:
    steps = len(_SPARKS) - 1
    return "".join(" " if v is None else _SPARKS[round(steps * v / highest) if highest else 0] for v in values)


def _warnings(warnings: Sequence[Mapping[str, Any]], more: int, all_of_them: bool) -> list[Line]:
    shown = warnings if all_of_them else warnings[:_MOST_WARNINGS]
    lines = []
    for each in shown:
        about = f" {clean(each['about'])}" if each.get("about") else ""
        lines.append(Line(f"! {clean(each['what'])}{about}: {clean(each['detail'])}", "warn"))
    if left := len(warnings) - len(shown) + more:
        lines.append(Line(f"! and {left} more; see /readyz?verbose or warmroute doctor --admin", "warn"))
    return lines


def _fleet(workers: Sequence[Mapping[str, Any]]) -> list[Line]:
    if not workers:
        return [Line("No worker is known: name them with --worker URL, workers_file or discovery.dns.", "warn")]
    heads = ("WORKER", "ROLE", "STATE", "PREFILL", "STREAMS", "RUNNING", "WAITING", "KV", "CACHED", "EVENTS", "EPOCH")
    rows = [(*heads, "GAPS", "HITS")]
    styles = ["bold"]
    for worker in workers:
        ranks = worker.get("ranks", [])
        states = {rank.get("events", "none") for rank in ranks} or {"none"}
        tokens = [sum(rank.get(f"{tier}_tokens", 0) for rank in ranks) for tier in ("gpu", "cpu", "disk")]
        epochs = [rank["epoch"] for rank in ranks if rank.get("epoch") is not None]
        prompt_tokens = worker.get("prompt_tokens", 0)
        rows.append(
            (
                clean(worker["name"]),
                worker["role"],
                worker["state"],
                str(worker["prefills"]),
                str(worker["streams"]),
                _count(worker.get("running")),
                _count(worker.get("waiting")),
                _bar(worker.get("kv_usage")),
                "/".join(map(_count, tokens if any(tokens[1:]) else tokens[:1])),
                "+".join(sorted(clean(each) for each in states)),
                str(max(epochs)) if epochs else "-",
                str(sum(rank.get("gaps", 0) for rank in ranks)),
                f"{_share(worker.get('predicted_tokens', 0), prompt_tokens)} "
                f"{_share(worker.get('actual_tokens', 0), prompt_tokens)}",
            )
        )
        styles.append(
            "" if worker["state"] == "healthy" else "warn" if worker["state"] in ("draining", "asleep") else "bad"
        )
    return _table(rows, styles, right={3, 4, 5, 6, 8, 10, 11})


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> list[Line]:
    if not decisions:
        return [Line("No request was decided yet.", "dim")]
    rows = [("TIME", "REQUEST", "PROMPT", "WHERE", "WHY", "FIRST TOKEN", "CACHED", "PRICE", "OUTCOME")]
    styles = ["bold"]
    for each in decisions:
        status = each.get("status")
        again = each.get("tried_again", False)
        outcome = "tried again" if again else each.get("cut") or ("under way" if status is None else str(status))
        if each.get("duration_ms") is not None:
            outcome += f" {_ms(each['duration_ms'])}"
        where = clean(each["worker"]) + (f":{each['rank']}" if each["rank"] else "")
        became = f" ({clean(each['became'])})" if each.get("became") else ""
        largest = sorted(each["prices_ms"].items(), key=lambda part: -abs(part[1]))[:_PARTS]
        rows.append(
            (
                time.strftime("%H:%M:%S", time.localtime(each["at_s"])),
                _end(clean(each["request_id"])),
                _count(each["prompt_tokens"]),
                where + (f" < {clean(each['prefill'])}" if each.get("prefill") else ""),
                f"{each['choice']}: {each['reason']}{became}",
                f"{_ms(each['predicted_ttft_ms'])} {_ms(each.get('ttft_ms'))}",
                f"{_count(each['predicted_cached_tokens'])} {_count(each.get('cached_tokens'))}",
                f"{_ms(each['total_ms'])} ({', '.join(f'{name} {_ms(value)}' for name, value in largest)})",
                outcome,
            )
        )
        styles.append("bad" if again or each.get("cut") or (status or 0) >= 400 else "")
    return _table(rows, styles, right={2})


def _table(rows: Sequence[Sequence[str]], styles: Sequence[str], right: set[int]) -> list[Line]:
    widths = [max(columns(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row, style in zip(rows, styles, strict=True):
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            gap = " " * (width - columns(cell))
            cells.append(gap + cell if i in right else cell + gap)
        lines.append(Line("  ".join(cells).rstrip(), style))
    return lines


def _cut_to(lines: list[Line], n: int, what: str) -> list[Line]:
    if len(lines) <= n:
        return lines
    return [*lines[: n - 1], Line(f"... and {len(lines) - n + 1} more {what}", "dim")] if n > 0 else []


# ---- words -----------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Names come from clients and engines: nothing in them may steer the terminal."""
    return "".join(c if c.isprintable() and unicodedata.category(c)[0] not in "CM" else "?" for c in str(text))


def columns(text: str) -> int:
    """Of a terminal, that it takes."""
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def _columns_of(char: str) -> int:
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def clip(text: str, width: int | None) -> str:
    if width is None or columns(text) <= width:
        return text
    out, used = [], 0
    for char in text:
        used += _columns_of(char)
        if used > width:
            break
        out.append(char)
    return "".join(out)


def _end(name: str) -> str:
    """Ids of one origin begin alike."""
    return name if columns(name) <= _LONGEST_ID else ".." + name[-_LONGEST_ID + 2 :]


def _bar(share: float | None) -> str:
    if share is None:
        return "-"
    full = round(10 * min(1.0, max(0.0, share)))
    return f"{'#' * full}{'.' * (10 - full)} {share:4.0%}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value / 1000:.2f}s"
    return f"{value:.1f}ms" if abs(value) < 10 else f"{value:.0f}ms"


_UNITS: tuple[tuple[float, str], ...] = ((1e9, "G"), (1e6, "M"), (1e4, "k"))
_SIZE: Callable[[str], float] = {"G": 1e9, "M": 1e6, "k": 1e3}.__getitem__


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    unit = next((unit for least, unit in _UNITS if value >= least), "")
    return f"{value / _SIZE(unit):.1f}{unit}" if unit else f"{value:g}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _age(seconds: float) -> str:
    for least, size, unit in ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
