"""No command in the README or the docs that was not run or looked at."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.docs.checks import check, check_mention
from tests.docs.collect import PAGES, Command, NotACommand, of_blocks, of_text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARMROUTE_CONFIG", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    for command in of_blocks(page):
        check(command, tmp_path)
    for command in of_text(page):
        check_mention(command, tmp_path)


def test_what_is_run_and_what_is_not(tmp_path: Path) -> None:
    """Enough of them are found, and some are run for real."""
    commands = [command for page in PAGES for command in of_blocks(page)]
    assert len(commands) > 60
    programs = Counter(command.program for command in commands)
    assert programs["warmroute"] > 15
    assert programs["curl"] > 8
    (printed,) = (each for each in commands if each.to == "warmroute.yaml" and "--print-default" in each.words)
    assert check(printed, tmp_path) is None
    assert "budget_bytes" in (tmp_path / "warmroute.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words",
    [
        ("frobnicate", "--now"),
        ("warmroute", "gatewy"),
        ("warmroute", "gateway", "--no-such-flag", "1"),
        ("warmroute", "gateway", "--worker", "not a url"),
        ("warmroute", "doctor", "--no-such-flag"),
        ("warmroute", "workers", "drain"),
        ("make", "no-such-target"),
        ("python", "-m", "bench", "none"),
        ("python", "-m", "bench", "trace", "run", "--no-such-flag"),
        ("vllm", "serve", "--kv-events-config", '{"enable_kv_cache_evens": true}'),
        ("kubectl", "apply", "-k", "deploy/none"),
        ("helm", "install", "a", "deploy/helm/warmroute", "--set", "gateway.none=1"),
        ("docker", "compose", "--profile", "none", "up"),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_found(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises((AssertionError, OSError)):
        check(Command("page.md", 1, words), tmp_path)


@pytest.mark.parametrize(
    "words", [("warmroute", "record", "--none"), ("warmroute", "workers", "list|none")], ids=" ".join
)
def test_a_mention_names_what_is_there(words: tuple[str, ...], tmp_path: Path) -> None:
    check_mention(Command("page.md", 1, ("warmroute", "workers", "list|add")), tmp_path)
    with pytest.raises(AssertionError):
        check_mention(Command("page.md", 1, words), tmp_path)


def test_commands_are_taken_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ A=1 B='2 3' one --a 'b c' \\\n    --d > out.txt && two &     # said\n"
        "output\n$ three | four\n```\n"
        'and `make test ARGS="-k x"` in text\n'
    )
    found = of_blocks(page)
    assert [(it.line, it.words, it.to, it.env) for it in found] == [
        (3, ("one", "--a", "b c", "--d"), "out.txt", {"A": "1", "B": "2 3"}),
        (3, ("two",), None, {}),
        (5, ("three",), None, {}),
        (5, ("four",), None, {}),
    ]
    assert found[0].said == "said"
    assert [it.words for it in of_text(page)] == [("make", "test", "ARGS=-k x")]
    page.write_text("```console\n--flag-only\n```\n")
    with pytest.raises(NotACommand):
        of_blocks(page)
