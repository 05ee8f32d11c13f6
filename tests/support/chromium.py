"""A real headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.stacked import Stacked

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync",
    "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-port=0",
)  # fmt: skip


def executable() -> str:
    """Skips the test where there is none, but for CI, which installs it."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        message = "no Chromium here (Debian: apt-get install chromium)"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return found


@contextmanager
def launched() -> Iterator[str]:
    """A browser for several tests; yields its DevTools address."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [executable(), *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        with open(f"{folder}/log", "wb") as log:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            yield _address(process, Path(folder, "log"))
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + 30
    while (found := re.search(r"DevTools listening on (ws://\S+)", log.read_text(errors="replace"))) is None:
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline_s, log.read_text(errors="replace")
        time.sleep(0.02)
    return found.group(1)


class Chromium(Stacked):
    """In a test: ``async with Chromium(address) as browser: page = await browser.open(url)``. Pages are closed with
    it.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    async def _start(self) -> None:
        http = await self._stack.enter_async_context(aiohttp.ClientSession())
        self._socket = await self._stack.enter_async_context(http.ws_connect(self._address, max_msg_size=0))
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}
        self._contexts: list[str] = []
        self._listening = asyncio.create_task(self._listen())
        self._stack.push_async_callback(self._leave)

    async def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Page:
        """A page in a context of its own; `scheme` light or dark."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        self._contexts.append(context)
        target = {"url": "about:blank", "browserContextId": context}
        target_id = (await self.call("Target.createTarget", **target))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target_id, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await page.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await page.call("Emulation.setEmulatedMedia", features=features)
        await page.call("Page.navigate", url=url)
        await page.until("document.readyState === 'complete'")
        return page

    async def call(self, method: str, *, session: str | None = None, **params: Any) -> Any:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        await self._socket.send_json(message)
        async with asyncio.timeout(20):
            return await answer

    async def _listen(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            answer = self._answers.pop(message.get("id"), None)
            if answer is not None and not answer.done():
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]))
                else:
                    answer.set_result(message["result"])
            elif message.get("sessionId") in self._pages:
                self._pages[message["sessionId"]].happened(message["method"], message["params"])

    async def _leave(self) -> None:
        for context in self._contexts:
            await self.call("Target.disposeBrowserContext", browserContextId=context)
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)


class Page:
    """`errors`: what the console shows as an error, as (source, text)."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[tuple[str, str]] = []
        self.addresses: set[str] = set()
        """Of everything it has asked for."""

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, session=self._session, **params)

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression, awaited; what it throws is an AssertionError."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        told = await self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, expression: str, within_s: float = 60.0) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not await self.value(f"!!({expression})"):  # noqa: ASYNC110 - nothing signals it
                    await asyncio.sleep(0.03)
        except TimeoutError:
            text = await self.value("document.body.innerText")
            raise AssertionError(f"never true: {expression}\n{text}\n{self.errors}") from None

    async def text(self, selector: str) -> str:
        return str(await self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def press(self, key: str, code: int) -> None:
        """A key, as a keyboard sends it."""
        for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind != "keyUp" else {}
            asked = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, **text}
            await self.call("Input.dispatchKeyEvent", **asked)

    async def screenshot(self, *, whole: bool = False) -> bytes:
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(told["data"])

    def happened(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(("exception", details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.errors.append(("console", str([each.get("value") for each in params["args"]])))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            entry = params["entry"]
            self.errors.append((entry["source"], f"{entry['text']} {entry.get('url', '')}"))
        elif method == "Network.requestWillBeSent":
            self.addresses.add(params["request"]["url"])
