"""The page in a real headless Chromium: it loads, updates, explains a request, survives a restart."""

import json
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bench.engine.server import FakeVllm
from gateway.config import Config
from gateway.config.schema import (
    EppConfig,
    GatewayConfig,
    HealthConfig,
    IndexerConfig,
    LoggingConfig,
    TracingConfig,
    Worker,
)
from gateway.debug.stream import MOST_VIEWERS
from gateway.epp.run import Epp
from gateway.indexservice.run import Indexer
from gateway.run import Gateway
from gateway.tracing import otel
from tests.support.chromium import Chromium, Page, launched
from tests.support.gateway_world import Fleet, engine, until
from tests.support.sidecar_world import Pod, free_port

LONG = "the quick brown fox jumps over the lazy dog " * 400
LIVE = "document.body.className === 'live'"
MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with launched() as known:
        yield known


@pytest.fixture
async def browser(address: str) -> AsyncIterator[Chromium]:
    async with Chromium(address) as started:
        yield started


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(a=engine(), b=engine()) as started:
        yield started


def rows(n: int) -> str:
    return f"document.querySelectorAll('#decisions tbody tr').length === {n}"


async def streamed(fleet: Fleet, prompt: str) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "stream": True}
    async with fleet.http.post(fleet.url + "/v1/completions", json=body) as response:
        await response.read()


async def asked_only(page: Page, base: str) -> None:
    """It is whole without any other host."""
    hosts = {urlsplit(address).netloc for address in page.addresses if not address.startswith("data:")}
    assert hosts == {urlsplit(base).netloc}


async def test_it_loads_and_updates(browser: Chromium, fleet: Fleet) -> None:
    page = await browser.open(fleet.admin + "/debug")
    await page.until(LIVE)
    await page.until("document.querySelectorAll('#fleet tbody tr').length === 2")
    for text in ("No request was decided yet", "No answer has told its cached tokens yet", "No streamed answer"):
        assert text in await page.value("document.body.innerText")
    for _ in range(2):
        await fleet.complete(LONG)
    await streamed(fleet, LONG)
    await page.until(rows(3))
    await page.until("document.querySelector('#hits').innerText.includes('% actual')")
    await page.until("document.querySelector('#ttft svg path') && document.querySelector('#itl svg path')")
    await page.until("document.querySelectorAll('#prefixes tbody tr').length > 0")
    await page.until("document.querySelectorAll('#decisions [role=img]')[0].ariaLabel.includes('front')")
    assert "fox" not in await page.value("document.documentElement.outerHTML")
    await asked_only(page, fleet.admin)
    assert page.errors == []


async def test_it_explains_a_request_by_keyboard(browser: Chromium, fleet: Fleet) -> None:
    await fleet.complete(LONG)
    page = await browser.open(fleet.admin + "/debug")
    await page.until(rows(1))
    await page.value("document.querySelector('#decisions button').focus()")
    await page.press("Enter", 13)
    await page.until(
        "document.querySelector('#explain').open && document.querySelectorAll('#explain tbody tr').length === 2"
    )
    text = await page.text("#explain")
    assert "chosen: " in text
    assert "prompt tokens cached" in text
    assert await page.value("document.querySelector('#explain').contains(document.activeElement)")
    await page.press("Escape", 27)
    await page.until("!document.querySelector('#explain').open")
    assert await page.value("document.activeElement === document.querySelector('#decisions button')")
    await page.value("explain(999, 'gone')")
    await page.until("document.querySelector('#explain').innerText.includes('Decision 999 is not known')")
    assert [source for source, _ in page.errors] == ["network"]  # The 404 that was asked for.


async def test_with_tracing_an_explanation_names_the_trace(browser: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "new_exporter", InMemorySpanExporter)
    async with Fleet(tracing=TracingConfig(enabled=True), a=engine()) as fleet:
        await fleet.complete("hello")
        (decision,) = fleet.core.decisions.last(1)
        assert decision.record.trace_id is not None
        page = await browser.open(fleet.admin + "/debug")
        await page.until(rows(1))
        await page.value("document.querySelector('#decisions button').click()")
        await page.until(f"document.querySelector('#explain').innerText.includes('{decision.record.trace_id}')")
        assert not page.errors


async def test_focus_stays_and_the_list_can_be_held(browser: Chromium, fleet: Fleet) -> None:
    await fleet.complete("first")
    page = await browser.open(fleet.admin + "/debug")
    await page.until(rows(1))
    await page.value("window.kept = document.querySelector('#decisions button'), window.kept.focus()")
    await fleet.complete("second")
    await page.until(rows(2))
    assert await page.value("document.activeElement === window.kept")
    await page.value("document.querySelector('#pause').click()")
    await fleet.complete("third")
    await page.until("state.decisions.size === 3")
    assert await page.value(rows(2))
    assert await page.value("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    await page.value("document.querySelector('#pause').click()")
    await page.until(rows(3))
    assert page.errors == []


async def test_it_survives_a_restart(browser: Chromium) -> None:
    async with FakeVllm(engine()) as vllm:
        config = Config(
            gateway=GatewayConfig(host="127.0.0.1", port=0, admin_port=free_port()),
            workers=(Worker(url=vllm.url, name="a"),),
            health=HealthConfig(scrape_interval_s=0.1),
            logging=LoggingConfig(level="error"),
        )
        async with Gateway(config) as gateway:
            page = await browser.open(f"http://127.0.0.1:{gateway.admin_port}/debug")
            await page.until(LIVE)
            await page.until("document.querySelector('#fleet').innerText.includes('healthy')")
            started = await page.value("state.head.started_s")
        await page.until("document.body.className === 'lost'")
        assert await page.text("#link") == "Reconnecting"
        async with Gateway(config) as gateway:
            await page.until(f"{LIVE} && state.head.started_s > {started}")
            assert await page.text("#link") == "Live"
            assert {source for source, _ in page.errors} <= {"network"}  # The browser says that nobody answered.


async def test_o8_hostile_names_are_text_and_prompts_are_nowhere(browser: Chromium) -> None:
    """O8: names come from clients, engines and files; none of them becomes markup."""
    async with Fleet(**{MARKUP: engine(model=MARKUP)}) as fleet:  # type: ignore[arg-type]
        headers = {"X-Request-Id": MARKUP}
        body = {"model": MARKUP, "prompt": LONG, "max_tokens": 2}
        async with fleet.http.post(fleet.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        page = await browser.open(fleet.admin + "/debug")
        await page.until(rows(1))
        await page.value("document.querySelector('#decisions button').click()")
        await page.until("document.querySelector('#explain table')")
        for selector in ("#fleet", "#decisions", "#explain"):
            assert MARKUP in await page.value(f"document.querySelector('{selector}').textContent")
        assert await page.value("document.querySelectorAll('img, body script').length") == 1
        assert await page.value("typeof window.hacked") == "undefined"
        # Even what somehow became markup could do nothing.
        with pytest.raises(AssertionError, match="TrustedHTML"):
            await page.value(f"document.body.innerHTML = {json.dumps(MARKUP)}")
        assert "fox" not in await page.value("document.documentElement.outerHTML")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_narrow_screen_has_all_of_it(browser: Chromium, fleet: Fleet, scheme: str) -> None:
    await fleet.complete(LONG)
    page = await browser.open(fleet.admin + "/debug", width=360, height=740, scheme=scheme)
    await page.until(rows(1))
    assert await page.value("document.documentElement.scrollWidth") <= 360
    await page.value("document.querySelector('#decisions button').click()")
    await page.until("document.querySelector('#explain table')")
    assert await page.value("document.querySelector('#explain').getBoundingClientRect().width") <= 360
    lightness = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0]"
    assert (await page.value(lightness) > 128) == (scheme == "light")
    assert page.errors == []


async def test_text_can_be_read_in_both_schemes(browser: Chromium, fleet: Fleet) -> None:
    """WCAG AA: a contrast of 4.5 between each text and what is behind it."""
    await streamed(fleet, LONG)
    contrast = """(() => {
      const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
      const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) =>
        v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
      const back = (node) => { for (; node; node = node.parentElement) {
        const found = rgb(getComputedStyle(node).backgroundColor);
        if (found.length < 4 || found[3] > 0) return found; } return [255, 255, 255]; };
      const bad = [];
      for (const node of document.querySelectorAll('body *')) {
        if (!node.checkVisibility() || node.closest('.map')) continue;
        if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
        const [a, b] = [light(rgb(getComputedStyle(node).color)), light(back(node))];
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (ratio < 4.5) bad.push([node.outerHTML.slice(0, 120), ratio.toFixed(2)]);
      }
      return bad;
    })()"""
    for scheme in ("light", "dark"):
        page = await browser.open(fleet.admin + "/debug", scheme=scheme)
        await page.until(rows(1))
        await page.until("document.querySelector('#ttft svg path')")
        await page.value("document.querySelector('details').open = true")
        assert await page.value(contrast) == []


async def test_a_screen_reader_finds_its_way(browser: Chromium, fleet: Fleet) -> None:
    await fleet.complete(LONG)
    page = await browser.open(fleet.admin + "/debug")
    await page.until(rows(1))
    tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
    named = [(each["role"]["value"], each.get("name", {}).get("value", "")) for each in tree if not each["ignored"]]
    roles = [role for role, _ in named]
    for role in ("banner", "main", "contentinfo", "table", "columnheader", "rowheader", "status"):
        assert role in roles, role
    headings = [name for role, name in named if role == "heading"]
    assert [name.split(" (")[0] for name in headings[:3]] == ["warmroute gateway", "Warnings", "Requests"]
    assert [name for role, name in named if role in ("button", "region", "image", "img", "table") and not name] == []
    assert any("front" in name and "ms" in name for role, name in named if role in ("image", "img"))
    assert await page.value("document.querySelectorAll('[aria-live], [role=status], [role=alert]').length") == 1
    assert await page.value("document.documentElement.lang") == "en"


async def test_who_is_one_too_many_is_told_and_tries_again(browser: Chromium, fleet: Fleet) -> None:
    fleet.gateway.faces.stream._most = 0
    page = await browser.open(fleet.admin + "/debug")
    await page.until("document.querySelector('#why').textContent.includes('viewers watch already')")
    fleet.gateway.faces.stream._most = MOST_VIEWERS
    await page.until(LIVE)


async def test_the_sidecar_serves_it_too(browser: Chromium) -> None:
    async with Pod() as pod:
        page = await browser.open(f"http://127.0.0.1:{pod.sidecar.admin_port}/debug")
        await page.until(LIVE)
        assert "sidecar" in await page.text("h1")
        await until(lambda: pod.sidecar.faces.stream.viewers == 1)
        assert page.errors == []


async def test_the_picker_serves_it_too(browser: Chromium) -> None:
    async with FakeVllm(engine()) as vllm:
        own = EppConfig(host="127.0.0.1", port=0, health_port=0, metrics_port=0, admin_port=0, tls="off")
        config = Config(epp=own, workers=(Worker(url=vllm.url, name="a"),), logging=LoggingConfig(level="error"))
        async with Epp(config) as epp:
            page = await browser.open(f"http://127.0.0.1:{epp.admin_port}/debug")
            await page.until(LIVE)
            assert "epp" in await page.text("h1")
            await page.until("document.querySelectorAll('#fleet tbody tr').length === 1")
            assert page.errors == []


async def test_an_indexer_serves_it_without_what_it_does_not_do(browser: Chromium) -> None:
    async with FakeVllm(engine()) as vllm:
        own = IndexerConfig(host="127.0.0.1", port=0, metrics_port=0, admin_port=0)
        config = Config(indexer=own, workers=(Worker(url=vllm.url, name="a"),), logging=LoggingConfig(level="error"))
        async with Indexer(config) as indexer:
            page = await browser.open(f"http://127.0.0.1:{indexer.admin_port}/debug")
            await page.until(LIVE)
            await page.until("document.querySelectorAll('#fleet tbody tr').length === 1")
            shown = await page.value(
                "[...document.querySelectorAll('h2')].filter((h) => h.checkVisibility()).map((h) => h.innerText)"
            )
            assert shown == ["Warnings", "Requests", "Fleet"]
            assert "An indexer decides nothing" in await page.text("main")
            assert page.errors == []


async def test_long_names_that_begin_alike_are_told_apart(browser: Chromium) -> None:
    names = [f"pool-eu-west-1-vllm-qwen3-coder-480b-instruct-fp8-decode-7d9f8c6b5-{end}" for end in ("x4k2v", "b9zzq")]
    async with Fleet(**dict.fromkeys(names, engine())) as fleet:
        worker, _ = await fleet.complete(LONG)
        page = await browser.open(fleet.admin + "/debug")
        await page.until(rows(1))
        await page.value("document.querySelector('#decisions button').click()")
        await page.until("document.querySelector('#explain table')")
        cut_off = """(node) => node.scrollWidth > node.clientWidth ||
            node.getBoundingClientRect().right > node.parentElement.getBoundingClientRect().right + 1"""
        for selector, n in (
            ("#map b", 2),
            ("#fleet .cut", 2),
            ("#decisions td > .cut:first-child", 1),
            ("#explain .cut", 2),
        ):
            nodes = f"[...document.querySelectorAll('{selector}')]"
            ends = [text[-5:] for text in await page.value(f"{nodes}.map((node) => node.textContent)")]
            assert len(ends) == n
            assert {*ends} <= {"x4k2v", "b9zzq"}
            last = f"{nodes}.map((node) => node.lastElementChild || node)"
            assert await page.value(f"{last}.filter({cut_off}).length") == 0
        whole = await page.value("[...document.querySelectorAll('#fleet .cut')].map((node) => node.textContent)")
        assert sorted(whole) == sorted(names)
        assert await page.value("document.querySelector('#decisions td > .cut').title") == worker
