"""`warmroute top` as text: within the window, whatever names there are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.debug.top_view import clean, clip, columns, view


def worker(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "role": "both", "state": "healthy", "prefills": 1, "streams": 2, "kv_tokens": 9, **fields}


def decision(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "number": number, "at_s": 1e9, "request_id": f"id-{number}", "model": "m", "prompt_tokens": 12_345,
        "tokens": "local", "worker": "a", "rank": 0, "choice": "local", "reason": "cost", "total_ms": 1234.0,
        "prices_ms": {"front": 10.0, "comp": 1200.0, "decode": 20.0, "wait": 4.0}, "predicted_ttft_ms": 9.5,
        "predicted_cached_tokens": 16, **fields,
    }  # fmt: skip


def state(
    workers: list[dict[str, Any]], decisions: list[dict[str, Any]], warnings: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {
        "at_s": 1e9,
        "head": {
            "face": "gateway", "version": "1", "started_s": 1e9 - 90, "draining": False, "in_flight": 3, "queued": 0,
            "decisions": 9, "decisions_per_s": 1.5, "policy": "warmroute", "pd_policy": "cost",
        },
        "workers": workers, "decisions": decisions, "warnings": warnings or [], "more_warnings": 0,
        "hits": {"prompt_tokens": 100, "predicted_tokens": 75, "actual_tokens": 50},
        "ttft_ms": [None] * 118 + [[80.0, 200.0], [90.0, 100.0]], "itl_ms": [None] * 120,
    }  # fmt: skip


def test_what_matters_is_there() -> None:
    ranks = [
        {"rank": 0, "requests": 1, "gpu_tokens": 20_000, "cpu_tokens": 5, "events": "live", "epoch": 2, "gaps": 1},
        {"rank": 1, "requests": 1, "gpu_tokens": 20_000, "events": "live, partial", "epoch": 3},
    ]
    lines = view(
        state(
            [worker("a", kv_usage=0.42, ranks=ranks), worker("b", state="ejected")],
            [decision(2, prefill="p", choice="remote", ttft_ms=11.0, cached_tokens=8, status=200, duration_ms=90.0)],
            [{"what": "worker_ejected", "about": "b", "detail": "refused", "remedy": "look"}],
        )
    )
    text = "\n".join(line.text for line in lines)
    for part in (
        "warmroute gateway  live", "up 90 s", "1.5 decisions/s", "75.0% predicted, 50.0% actual",
        "first token p50 90ms p95 100ms", "between tokens: no streamed answer", "! worker_ejected b: refused",
        "####......  42%", "40.0k/5/0", "live+live, partial", "a < p", "remote: cost", "9.5ms 11ms", "16 8",
        "1.23s (comp 1.20s, decode 20ms, front 10ms)", "200 90ms",
    ):  # fmt: skip
        assert part in text, part
    (ejected,) = [line for line in lines if line.text.startswith("b ")]
    assert ejected.style == "bad"


def test_empty_fleets_are_told_what_to_do() -> None:
    text = "\n".join(line.text for line in view(state([], [])))
    assert "name them with --worker URL" in text
    assert "No request was decided yet" in text


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\nb", "\x07bell", "\u202eright", "\ud800", "e\u0301", "\x9b2J"])
def test_names_do_not_steer_the_terminal(name: str) -> None:
    for line in view(state([worker(name)], [decision(1, worker=name, request_id=name)]), 200, 50):
        assert line.text.isprintable()
        line.text.encode()


names = st.text(max_size=40)


@given(
    st.lists(names, max_size=30, unique=True), st.lists(names, max_size=40),
    st.integers(1, 250), st.integers(1, 80), st.lists(names, max_size=6),
)  # fmt: skip
def test_it_fits_the_window(workers: list[str], ids: list[str], width: int, height: int, warned: list[str]) -> None:
    shown = state(
        [worker(name) for name in workers],
        [decision(i, request_id=name, worker=name) for i, name in enumerate(ids)],
        [{"what": "x", "detail": name, "remedy": ""} for name in warned],
    )
    lines = view(shown, width, height)
    assert len(lines) <= height
    assert max(columns(line.text) for line in lines) <= width
    whole = view(shown)
    named = sum(name.startswith("!") for name in workers)  # Their rows look like warnings.
    assert len(warned) <= sum(line.text.startswith("!") for line in whole) <= len(warned) + named
    assert all(any(line.text.startswith(clean(name).rstrip()) for line in whole) for name in workers)


def test_a_small_window_says_that_there_is_more() -> None:
    lines = view(state([worker(f"w{i:02}") for i in range(64)], [decision(i) for i in range(40)]), 160, 30)
    text = [line.text for line in lines]
    assert len(text) == 30
    assert any("more workers" in line for line in text)
    assert sum("local: cost" in line for line in text) >= 8


def test_wide_characters_take_two_columns() -> None:
    assert columns("日本") == 4
    assert clip("日本語", 5) == "日本"
