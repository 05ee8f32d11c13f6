"""Which addresses are nobody's worker, however they are written and whoever names them."""

from __future__ import annotations

import asyncio
import socket

import pytest
from yarl import URL

from gateway import addresses
from gateway.addresses import GuardedResolver, endpoint_leads_to_metadata, is_metadata, leads_to_metadata, usable
from gateway.config import ConfigError
from gateway.config.load import read_worker
from gateway.proxy.peer import PoolSettings, UpstreamError
from gateway.proxy.upstream import new_upstream
from gateway.sidecar.allow import AllowList
from gateway.sidecar.endpoint import parse_endpoint

NEVER = [
    "169.254.169.254",
    "169.254.0.1",
    "169.254.170.2",
    "fe80::1",
    "fe80::1%eth0",
    "febf::1",
    "::ffff:169.254.169.254",
    "2002:a9fe:a9fe::1",
    "64:ff9b::a9fe:a9fe",
    "::169.254.169.254",
    "::a9fe:a9fe",
    "0:0:0:0:0:0:169.254.169.254",
    "::ffff:0:169.254.169.254",
    "64:ff9b:1::a9fe:a9fe",
    "64:ff9b:1:a9fe:a9:fe00::",
    "64:ff9b:1:00a9:fe:a9fe::",
    "64:ff9b:1:0:a9:fea9:fe00:0",
    "fe80::5efe:a9fe:a9fe",
    "2001:db8::5efe:169.254.169.254",
    "2001:db8::200:5efe:a9fe:a9fe",
    "2001:0:a9fe:a9fe::",
    "2001:0:102:304::5601:5601",
    "2002:6464:64c8::",
    "fd00:ec2::254",
    "fd20:ce::254",
    "100.100.100.200",
    "168.63.129.16",
]
WIDE = "".join(chr(ord(each) + 0xFEE0) for each in "169.254.169.254")
IDEOGRAPHIC = "169.254.169.254".replace(".", "\N{IDEOGRAPHIC FULL STOP}")
CIRCLED = "169.254.169.25\N{CIRCLED DIGIT FOUR}"
SPELLED = ["2852039166", "169.254.43518", "0251.0376.0251.0376", "0xa9fea9fe", "169.254.169.254.", WIDE, IDEOGRAPHIC,
           CIRCLED, "\N{FULLWIDTH DIGIT TWO}852039166"]  # fmt: skip
"""Names to `ipaddress`, 169.254.169.254 to what connects."""
FINE = ["10.0.0.1", "127.0.0.1", "169.253.1.1", "170.0.0.1", "192.168.1.1", "::1", "fd00::1", "fec0::1", "name", "",
        "64:ff9b::a00:1", "64:ff9b:1::a00:1", "64:ff9b:1:a00:0:100::", "2002:a00:1::1", "::10.0.0.1",
        "2001:db8::5efe:10.0.0.1", "2001:db8::a9fe:a9fe", "fd00:ec2::253"]  # fmt: skip


@pytest.mark.parametrize("host", [WIDE, IDEOGRAPHIC, CIRCLED])
def test_clients_read_other_widths_as_digits(host: str) -> None:
    """And ask no resolver then: aiohttp takes the address as it is."""
    assert URL(f"http://{host}:8000").host == "169.254.169.254"


@pytest.mark.parametrize(("address", "expected"), [(a, True) for a in NEVER + SPELLED] + [(a, False) for a in FINE])
def test_an_address(address: str, expected: bool) -> None:
    assert is_metadata(address) is expected
    if address and "%" not in address:
        host = f"[{address}]" if ":" in address else address
        assert leads_to_metadata(f"http://{host}:8000/v1") is expected


@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "168.63.129.16"])
def test_any_is_not_meant_to_cover_them_but_a_network_of_its_own_does(host: str) -> None:
    target = parse_endpoint(f"{host}:80")
    assert not AllowList(["*"]).allows(target)
    assert AllowList([f"{host}:80"]).allows(target)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://169.254.169.254:5557", True),
        ("tcp://2852039166:5557", True),
        ("tcp://[::ffff:169.254.169.254]:5557", True),
        ("tcp://[fe80::1%eth0]:5557", True),
        ("tcp://eth0;169.254.169.254:5557", True),
        ("tcp://10.0.0.1:0;169.254.169.254:80", True),
        ("tcp://169.254.169.254:0;10.0.0.1:80", False),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://[::1]:5557", False),
        ("tcp://engine:5557", False),
        ("ipc:///169.254.169.254:80", False),
        ("tcp://", False),
    ],
)
def test_an_endpoint_of_events(endpoint: str, expected: bool) -> None:
    assert endpoint_leads_to_metadata(endpoint) is expected


def info(address: str) -> tuple[object, ...]:
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)


def test_of_what_a_name_leads_to_only_the_rest_is_used() -> None:
    assert usable([info("169.254.169.254"), info("10.0.0.1")]) == [info("10.0.0.1")]
    assert usable([]) == []
    with pytest.raises(OSError, match="link-local"):
        usable([info("169.254.169.254"), info("fe80::1")])


@pytest.mark.parametrize("http", ["fast", "aiohttp"])
@pytest.mark.parametrize("host", ["rebound.example", "2852039166", "0xa9fea9fe"])
async def test_a_name_that_leads_there_is_not_connected_to(
    http: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS that answers differently the second time is no way around: what is connected to is what was looked at."""
    loop = asyncio.get_running_loop()

    async def rebound(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [info("169.254.169.254")]

    async def connects(*_: object, **__: object) -> None:
        raise AssertionError("it was connected to")

    monkeypatch.setattr(type(loop), "getaddrinfo", rebound)
    monkeypatch.setattr(type(loop), "sock_connect", connects)
    settings = PoolSettings(connect_timeout_s=2.0, pool_idle_s=1.0, request_timeout_s=5.0, http=http)  # type: ignore[arg-type]
    upstream = new_upstream(f"http://{host}:80", settings)
    with pytest.raises(UpstreamError):
        await upstream.send("GET", "/latest/meta-data", {}, b"")  # type: ignore[arg-type]
    await upstream.close()


async def test_the_resolver_of_scrapes_and_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = GuardedResolver()
    assert [each["host"] for each in await names.resolve("127.0.0.1", 80)] == ["127.0.0.1"]
    with pytest.raises(OSError, match="leads to"):
        await names.resolve("169.254.169.254", 80)
    await names.close()
    assert addresses.resolver(link_local=True) is None


@pytest.mark.parametrize(
    "url",
    [
        "ftp://10.0.0.1", "file:///etc/passwd", "gopher://x", "unix:///run/x", "//10.0.0.1", "10.0.0.1:8000",
        "http://user@10.0.0.1", "http://user:secret@10.0.0.1", "http://10.0.0.1@evil.example", "http://",
        "http://10.0.0.1/#x", "http://10.0.0.1/?x", "http://10.0.0.1\r\nX: y", "http://10.0.0.1:99999", "http://a b",
        "HTTP://10.0.0.1", "javascript:alert(1)",
    ],
)  # fmt: skip
def test_what_is_no_address_of_a_worker_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        read_worker({"url": url})
