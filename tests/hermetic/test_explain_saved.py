"""`warmroute explain --state`: a saved fleet prices a request as the running gateway did."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config.schema import PdConfig
from gateway.debug import explain
from gateway.debug.saved import load, save
from gateway.errors import UserError
from tests.support.gateway_world import Fleet, decode, engine, prefill, until
from tests.support.token_models import make_model, reference_ids

IDS = list(range(1000, 3000))
Out = Callable[[], str]


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Out:
    return lambda: capsys.readouterr().out


async def command(*arguments: str) -> int:
    return await asyncio.to_thread(explain.main, list(arguments))


async def both(fleet: Fleet, body: dict[str, Any], tmp_path: Path, out: Out) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the gateway says, what the fleet it saved says)"""
    request, state = tmp_path / "body.json", tmp_path / "fleet.json"
    request.write_text(json.dumps(body))
    assert await command("--admin", fleet.admin, "--save-state", str(state)) == 0
    assert await command("--admin", fleet.admin, "--body", str(request), "--json") == 0
    live = json.loads(out())
    assert await command("--state", str(state), "--body", str(request), "--json") == 0
    return live, json.loads(out())


def priced(answer: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        (*row["decode"], *(row["prefill"] or ())): {
            "cached": (row["cached_tokens"], row["prefill_cached_tokens"], row["approximate"]),
            **{name: pytest.approx(value, abs=2e-3, rel=0.02) for name, value in row["price"].items()},
        }
        for row in answer["considered"]
    }


async def test_the_same_prices_as_live(tmp_path: Path, out: Out) -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        used, _ = await fleet.complete(IDS)
        await until(lambda: fleet.core.index.held_tokens().get((used, 0), {}).get("gpu"))
        live, saved = await both(fleet, {"model": "tiny", "prompt": [*IDS, 7, 8]}, tmp_path, out)
        for key in ("model", "prompt_tokens", "token_source", "policy", "choice", "pd_reason", "n_candidates"):
            assert saved[key] == live[key], key
        assert saved["considered"][0]["decode"] == live["considered"][0]["decode"] == [used, 0]
        assert saved["considered"][0]["cached_tokens"] == 2000
        assert priced(saved) == priced(live)


async def test_prefill_workers_and_broken_pairs_too(tmp_path: Path, out: Out) -> None:
    async with Fleet(pd=PdConfig(policy="cost"), p=prefill(), d=decode(), e=decode()) as fleet:
        await fleet.complete(IDS)
        fleet.core.planner.pairs.set_incompatible(("p", "e"), "another version")
        live, saved = await both(fleet, {"model": "tiny", "prompt": list(range(1000, 9000))}, tmp_path, out)
        assert priced(saved) == priced(live)
        broken = {"prefill": "p", "decode": "e", "state": "incompatible", "reason": "another version"}
        assert live["broken_pairs"] == saved["broken_pairs"] == [broken]
        assert await command("--state", str(tmp_path / "fleet.json"), "--prompt", "x", "--model", "tiny") == 0
        assert "no handover from p to e: incompatible (another version)" in out()


async def test_workers_without_events_and_work_under_way(tmp_path: Path, out: Out) -> None:
    async with Fleet(a=engine(events_endpoint=None), b=engine(events_endpoint=None)) as fleet:
        used, _ = await fleet.complete(IDS)
        other = ({"a", "b"} - {used}).pop()
        fleet.engines[other].faults.headers_delay_s = 30
        waiting = [asyncio.create_task(fleet.complete([i] * 500)) for i in range(4)]
        await until(lambda: sum(load.requests for load in fleet.core.fleet.workers[other].loads.values()) >= 1)
        live, saved = await both(fleet, {"model": "tiny", "prompt": [*IDS, 9]}, tmp_path, out)
        by_worker = {row["decode"][0]: row for row in saved["considered"]}
        assert by_worker[used]["cached_tokens"] == 2000
        assert by_worker[used]["approximate"]
        for row in live["considered"]:
            twin = by_worker[row["decode"][0]]
            assert (twin["cached_tokens"], twin["approximate"]) == (row["cached_tokens"], row["approximate"])
            assert twin["price"]["wait_s"] == pytest.approx(row["price"]["wait_s"], abs=0.5)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_text_is_tokenised_here(tmp_path: Path, out: Out) -> None:
    """With the ids that the engine was given: what it holds of them is found again."""
    model = make_model(tmp_path / "model", "chatml")
    text = "def parse(args): return [argument for argument in args]\n" * 40
    async with Fleet(a=engine(), b=engine()) as fleet:
        used, _ = await fleet.complete(reference_ids(text, add_special_tokens=True))
        await until(lambda: fleet.core.index.held_tokens().get((used, 0), {}).get("gpu"))
        state = str(tmp_path / "fleet.json")
        assert await command("--admin", fleet.admin, "--save-state", state) == 0
        asked = ("--state", state, "--model", "tiny", "--prompt", text, "--json")
        assert await command(*asked, "--tokenizer", str(model)) == 0
        with_ids = json.loads(out())
        assert with_ids["token_source"] == "local"
        assert with_ids["considered"][0]["decode"] == [used, 0]
        assert with_ids["considered"][0]["cached_tokens"] > 0.9 * with_ids["prompt_tokens"]
        assert await command(*asked) == 0
        assert json.loads(out())["token_source"] == "estimate"


async def test_who_is_not_available_is_not_chosen(tmp_path: Path, out: Out) -> None:
    async with Fleet(a=engine(), b=engine()) as fleet:
        await fleet.post(fleet.admin + "/sleep?level=1&worker=a")
        await until(lambda: not fleet.core.available("a"))
        _, saved = await both(fleet, {"model": "tiny", "prompt": IDS}, tmp_path, out)
        assert saved["unavailable"] == ["a"]
        assert [row["decode"] for row in saved["considered"]] == [["b", 0]]


async def test_blocks_left_out_are_told(tmp_path: Path, out: Out) -> None:
    async with Fleet(a=engine()) as fleet:
        await fleet.complete(IDS)
        await until(lambda: fleet.core.index.blocks("a") >= 125)
        await until(lambda: not list(fleet.core.planner.holdings.optimistic.held_blocks()))
        file = tmp_path / "fleet.json"
        file.write_bytes(await save(fleet.core, most_blocks=25))
        assert load(str(file)).blocks_left_out == fleet.core.index.blocks("a") - 25
        body = tmp_path / "body.json"
        body.write_text(json.dumps({"model": "tiny", "prompt": IDS}))
        assert await command("--state", str(file), "--body", str(body)) == 0
        assert "blocks were not saved" in out()
        status, _ = await fleet.get(fleet.admin + "/debug/fleet?blocks=x")
        assert status == 400


async def test_o8_no_text_is_saved(tmp_path: Path) -> None:
    async with Fleet(a=engine()) as fleet:
        await fleet.complete("the quick brown fox " * 200)
        assert b"fox" not in await save(fleet.core)


async def test_exit_codes_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with Fleet(a=engine()) as fleet:
        state = tmp_path / "fleet.json"
        assert await command("--admin", fleet.admin, "--save-state", str(state)) == 0
        for where in (["--admin", fleet.admin], ["--state", str(state)]):
            assert await command(*where, "--prompt", "x", "--model", "zz") == 1
            assert "`zz` does not exist" in capsys.readouterr().err
        odd = tmp_path / "odd.json"
        bad = json.loads(state.read_text())
        blocks = {"worker": "a", "rank": 0, "tier": "x", "block_size": 1, "keys": ""}
        for content, text in (
            ("{", "is no saved fleet"),
            ("{}", "is no saved fleet"),
            (json.dumps({**bad, "warmroute_fleet_version": 9}), "of another format"),
            (json.dumps({**bad, "policy": "guess"}), "not known here"),
            (json.dumps({**bad, "blocks": [blocks]}), "cannot be"),
        ):
            odd.write_text(content)
            with pytest.raises(UserError, match=text):
                await command("--state", str(odd), "--prompt", "x", "--model", "tiny")
        for wrong, text in (
            (["--state", str(tmp_path / "none"), "--prompt", "x"], "No such file"),
            (["--state", str(state), "--prompt", "x", "--tokenizer", str(tmp_path / "none")], "no such file or folder"),
            (["--prompt", "x", "--tokenizer", "y"], "goes with --state"),
            (["--prompt", "x", "--header", "nocolon"], "NAME:VALUE"),
            (["--save-state", "-", "--prompt", "x"], "saves and asks nothing"),
        ):
            with pytest.raises(UserError, match=text):
                await command(*wrong)
