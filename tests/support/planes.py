"""The two ways the data plane speaks HTTP, for suites that are to hold on both.

`fast` runs on uvloop, as it does in production; on asyncio's own loop run all other suites.
"""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from tests.support import proxy_world

PLANES = ("fast", "aiohttp")


def on_both(metafunc: pytest.Metafunc) -> None:
    if "http_plane" in metafunc.fixturenames:
        metafunc.parametrize("http_plane", PLANES, indirect=True)


@pytest.fixture
def http_plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Worlds speak HTTP in this way."""
    monkeypatch.setattr(proxy_world, "HTTP", request.param)
    return str(request.param)


@pytest.fixture
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    is_fast = "http_plane" in request.fixturenames and request.getfixturevalue("http_plane") == "fast"
    return uvloop.EventLoopPolicy() if is_fast else asyncio.DefaultEventLoopPolicy()
