"""The admin port: engine controls fanned out, the debug pages, `warmroute explain`."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.debug import explain
from gateway.errors import UserError
from tests.support.gateway_world import Fleet, engine, until

LONG = "the quick brown fox jumps over the lazy dog " * 400


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(a=engine(), b=engine()) as started:
        yield started


def held_blocks(fleet: Fleet, worker: str) -> int:
    ranks = fleet.core.index.stats()["workers"].get(worker, {})
    return sum(sum(rank["blocks"].values()) for rank in ranks.values())


async def test_a_cache_reset_through_us_is_known_at_once(fleet: Fleet) -> None:
    worker, _ = await fleet.complete(LONG)
    await until(lambda: held_blocks(fleet, worker))
    status, answer, _ = await fleet.post(fleet.admin + "/reset_prefix_cache")
    assert (status, answer) == (200, {"results": {name: {"status": 200, "body": None} for name in ("a", "b")}})
    assert held_blocks(fleet, worker) == 0
    _, page, _ = await fleet.post(fleet.admin + "/debug/explain", {"model": "tiny", "prompt": LONG})
    assert {row["cached_tokens"] for row in page["considered"]} == {0}
    _, usage = await fleet.complete(LONG)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_controls_reach_only_the_workers_named(fleet: Fleet) -> None:
    status, answer, _ = await fleet.post(fleet.admin + "/sleep?level=2&worker=b")
    assert (status, list(answer["results"])) == (200, ["b"])
    assert [fleet.engines[name].sleep_level for name in ("a", "b")] == [None, 2]
    status, answer = await fleet.get(fleet.admin + "/is_sleeping")
    assert {name: row["body"]["is_sleeping"] for name, row in answer["results"].items()} == {"a": False, "b": True}
    await until(lambda: not fleet.core.available("b"))
    assert {(await fleet.complete(f"{i}"))[0] for i in range(4)} == {"a"}
    await fleet.post(fleet.admin + "/wake_up?worker=b")
    await until(lambda: fleet.core.available("b"))


async def test_adapters_are_known_soon_after_they_are_loaded(fleet: Fleet) -> None:
    lora = {"lora_name": "l9", "lora_path": "/adapters/l9"}
    status, answer, _ = await fleet.post(fleet.admin + "/load_lora_adapter?worker=b", lora)
    assert (status, answer["results"]["b"]["status"]) == (200, 200)
    await until(lambda: "l9" in fleet.core.fleet.workers["b"].adapters, within_s=30)
    assert (await fleet.complete("x", model="l9"))[0] == "b"
    status, answer, _ = await fleet.post(fleet.admin + "/v1/unload_lora_adapter?worker=b", {"lora_name": "l9"})
    assert status == 200
    await until(lambda: "l9" not in fleet.core.fleet.workers["b"].adapters, within_s=30)
    status, _, _ = await fleet.post(fleet.url + "/v1/completions", {"model": "l9", "prompt": "x"})
    assert status == 404


async def test_what_workers_refuse_is_told_by_worker(fleet: Fleet) -> None:
    status, answer, _ = await fleet.post(fleet.admin + "/unload_lora_adapter", {"lora_name": "none"})
    assert status == 404
    assert answer["results"]["a"]["body"]["error"]["message"] == "The lora adapter 'none' cannot be found."
    await fleet.engines["b"].stop()
    status, answer, _ = await fleet.post(fleet.admin + "/reset_prefix_cache")
    assert (status, answer["results"]["a"]["status"], answer["results"]["b"]["status"]) == (502, 200, None)


async def test_bad_calls_are_explained(fleet: Fleet) -> None:
    status, answer, _ = await fleet.post(fleet.admin + "/sleep?worker=zz")
    assert (status, answer["error"]["code"]) == (404, "unknown_worker")
    assert (await fleet.get(fleet.admin + "/sleep"))[0] == 405
    assert (await fleet.get(fleet.admin + "/nope"))[0] == 404
    assert (await fleet.post(fleet.admin + "/v1/completions", {"prompt": "x"}))[0] == 404


async def test_the_main_port_has_none_of_it(fleet: Fleet) -> None:
    for path in ("/sleep", "/reset_prefix_cache", "/load_lora_adapter", "/v1/load_lora_adapter", "/debug/explain"):
        assert (await fleet.post(fleet.url + path))[0] == 404
    for path in ("/debug/cache", "/debug/config", "/is_sleeping"):
        assert (await fleet.get(fleet.url + path))[0] == 404
    assert [server.sleep_level for server in fleet.engines.values()] == [None, None]


async def test_explain_is_the_decision_and_books_nothing(fleet: Fleet) -> None:
    worker, _ = await fleet.complete(LONG)
    await until(lambda: held_blocks(fleet, worker))
    body = {"model": "tiny", "prompt": LONG}
    status, page, _ = await fleet.post(fleet.admin + "/debug/explain", body)
    assert status == 200
    assert (page["token_source"], page["n_candidates"], page["unavailable"]) == ("engine", 2, [])
    chosen, other = page["considered"]
    assert (chosen["decode"], other["cached_tokens"]) == ([worker, 0], 0)
    assert chosen["cached_tokens"] > 3000
    assert chosen["price"]["total_s"] < other["price"]["total_s"]
    assert fleet.core.planner.in_flight() == 0
    assert fleet.core.hits.workers[worker].requests == 1
    assert (await fleet.complete(LONG))[0] == worker
    for bad, code in (({"model": "zz", "prompt": "x"}, 404), ([1], 400)):
        assert (await fleet.post(fleet.admin + "/debug/explain", bad))[0] == code


async def test_the_config_page_shows_what_is_in_force(fleet: Fleet) -> None:
    status, page = await fleet.get(fleet.admin + "/debug/config")
    assert (status, page["health"]["scrape_interval_s"]) == (200, 0.1)
    assert [worker["name"] for worker in page["workers"]] == ["a", "b"]


async def test_the_explain_command(fleet: Fleet, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}))
    arguments = ["--admin", fleet.admin]
    assert await asyncio.to_thread(explain.main, [*arguments, "--prompt", LONG, "--model", "tiny"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[0].isdigit()
    assert "prompt tokens (engine) for tiny" in table[0]
    assert table[1].split()[:3] == ["worker", "rank", "cached"]
    assert sorted(row.split()[0] for row in table[2:]) == ["a", "b"]
    assert await asyncio.to_thread(explain.main, [*arguments, "--body", str(body), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "tiny"
    for wrong, text in (
        (["--admin", "http://127.0.0.1:9", "--prompt", "x"], "no gateway answers"),
        (["--admin", "ftp://x", "--prompt", "x"], "no http"),
        (["--admin", fleet.url, "--prompt", "x"], "Is it the main port?"),
        (arguments, "give one of"),
    ):
        with pytest.raises(UserError, match=text):
            await asyncio.to_thread(explain.main, wrong)
    assert await asyncio.to_thread(explain.main, [*arguments, "--prompt", "x", "--model", "zz"]) == 1
    assert "`zz` does not exist" in capsys.readouterr().err


async def test_o8_prompts_show_nowhere(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """O8: no page and no log line holds prompt text, and the pages that tell hits are not on the main port."""
    caplog.set_level(logging.DEBUG)
    for _ in range(3):
        await fleet.complete(LONG, user="zebra")
    pages = [str((await fleet.get(base + path))[1]) for base, path in (
        (fleet.admin, "/debug/cache"), (fleet.admin, "/debug/config"), (fleet.url, "/metrics"), (fleet.url, "/health"),
        (fleet.url, "/readyz?verbose"),
    )]  # fmt: skip
    shown = "".join(pages) + caplog.text
    assert "fox" not in shown
    assert "zebra" not in shown


async def test_pages_are_only_read(fleet: Fleet) -> None:
    for base in (fleet.url, fleet.admin):
        for path in ("/metrics", "/health", "/livez", "/readyz"):
            for method in ("DELETE", "POST"):
                async with fleet.http.request(method, base + path) as response:
                    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
            async with fleet.http.head(base + path) as response:
                assert response.status == 200
