"""SRV records, asked of a name server in this process."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.load import ConfigError, load_config
from gateway.config.schema import Worker
from gateway.discovery import DnsDiscovery
from gateway.discovery import srv as srv_module
from gateway.discovery.srv import Resolv, Target, _candidates, _parse, read_resolv, targets_of

Records = dict[str, list[tuple[int, int, str]]]
"""name -> [(priority, port, target)]"""


def encoded(name: str) -> bytes:
    return b"".join(bytes([len(part)]) + part.encode() for part in name.rstrip(".").split(".") if part) + b"\0"


def answer_to(message: bytes, records: Records, *, code: int = 0, cut: bool = False) -> bytes:
    """Names of the answers are pointers to the question's, and targets to the first target's domain."""
    at = 12
    labels = []
    while message[at]:
        labels.append(message[at + 1 : at + 1 + message[at]].decode())
        at += 1 + message[at]
    found = records.get(".".join(labels))
    question = message[12 : at + 5]
    flags = 0x8180 | (0x0200 if cut else 0) | (code or (3 if found is None else 0))
    body = b""
    for priority, port, target in [] if cut else found or []:
        host, _, domain = target.partition(".")
        where = question.find(encoded(domain))
        name = (
            encoded(target) if where < 0 or not domain else encoded(host)[:-1] + struct.pack("!H", 0xC000 | 12 + where)
        )
        data = struct.pack("!HHH", priority, 1, port) + name
        body += struct.pack("!HHHIH", 0xC00C, 33, 1, 30, len(data)) + data
    n = 0 if cut else len(found or [])
    return message[:2] + struct.pack("!HHHHH", flags, 1, n, 0, 0) + question + body


def _one_port() -> tuple[socket.socket, socket.socket]:
    """Bound to the same number; one that is free for both has to be looked for."""
    while True:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        try:
            return udp, socket.create_server(udp.getsockname())
        except OSError:
            udp.close()


@contextmanager
def name_server(records: Records, *, code: int = 0, cut: bool = False, junk: bool = False) -> Iterator[Resolv]:
    """Over UDP, and (where that is `cut` short) over TCP at the same port."""
    udp, tcp = _one_port()

    def serve_udp() -> None:
        with suppress(OSError):
            while True:
                message, asker = udp.recvfrom(4096)
                if not message:
                    return
                udp.sendto(b"\0\0 of somebody else", asker)
                udp.sendto(message[:2] if junk else answer_to(message, records, code=code, cut=cut), asker)

    def serve_tcp() -> None:
        with suppress(OSError):
            while True:
                connection, _ = tcp.accept()
                with connection:
                    message = connection.recv(4096)[2:]
                    answer = answer_to(message, records, code=code)
                    connection.sendall(struct.pack("!H", len(answer)) + answer)

    threads = [threading.Thread(target=serve_udp), threading.Thread(target=serve_tcp)]
    for thread in threads:
        thread.start()
    try:
        yield Resolv((udp.getsockname(),))
    finally:
        udp.sendto(b"", udp.getsockname())
        tcp.shutdown(socket.SHUT_RDWR)
        tcp.close()
        for thread in threads:
            thread.join()
        udp.close()


NAME = "_http._tcp.vllm.svc"
TWO: Records = {NAME: [(0, 8001, "pod-1.vllm.svc"), (0, 8000, "pod-0.vllm.svc"), (5, 9, "spare.elsewhere")]}


@pytest.mark.parametrize("cut", [False, True])
def test_the_targets_of_the_lowest_priority(cut: bool) -> None:
    with name_server(TWO, cut=cut) as resolv:
        assert targets_of(NAME, resolv) == [Target("pod-0.vllm.svc", 8000), Target("pod-1.vllm.svc", 8001)]


def test_a_name_without_records_has_no_targets_and_a_service_that_is_decidedly_not_there_neither() -> None:
    with name_server({NAME: [], "_no._tcp.svc": [(0, 0, ".")]}) as resolv:
        assert targets_of("_other._tcp.svc", resolv) == []
        assert targets_of(NAME, resolv) == []
        assert targets_of("_no._tcp.svc", resolv) == []


def test_domains_are_searched_as_the_system_does() -> None:
    with name_server({f"{NAME}.cluster.local": [(0, 1, "a.b")]}) as server:
        resolv = server._replace(search=("ns.cluster.local", "cluster.local"), ndots=5)
        assert targets_of(NAME, resolv) == [Target("a.b", 1)]
        assert list(_candidates(NAME, resolv)) == [
            f"{NAME}.ns.cluster.local.",
            f"{NAME}.cluster.local.",
            f"{NAME}.",
        ]
    assert next(_candidates(NAME, resolv._replace(ndots=1))) == f"{NAME}."
    assert list(_candidates(NAME + ".", resolv)) == [f"{NAME}."]


def test_name_servers_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srv_module, "_TIMEOUT_S", 0.2)
    with name_server({}, code=2) as resolv, pytest.raises(OSError, match="the name server says 2"):
        targets_of(NAME, resolv)
    with name_server({}, junk=True) as resolv, pytest.raises(OSError, match="no DNS message"):
        targets_of(NAME, resolv)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="timed out"):
            targets_of(NAME, Resolv((silent.getsockname(),)))
        with name_server(TWO) as good:  # The next one is asked.
            assert targets_of(NAME, Resolv((silent.getsockname(), *good.servers)))
    with pytest.raises(UnicodeError):
        targets_of("_x." + "y" * 64, good)


def test_resolv_conf() -> None:
    text = "# made by hand\nnameserver 10.0.0.10 ; first\nnameserver fd00::1\nsearch a.b c.d\noptions edns0 ndots:5\n"
    assert read_resolv(text) == Resolv((("10.0.0.10", 53), ("fd00::1", 53)), ("a.b", "c.d"), 5)
    assert read_resolv("options ndots:x\nnameserver\n") == Resolv((("127.0.0.1", 53),), (), 1)


@given(st.binary(max_size=120), st.integers(0, 8))
def test_no_answer_breaks_the_reader(tail: bytes, answers: int) -> None:
    question = encoded(NAME) + struct.pack("!HH", 33, 1)
    message = b"\1\2" + struct.pack("!HHHHH", 0x8180, 1, answers, 0, 0) + question + tail
    for given_ in (message, tail):
        with suppress(OSError, ValueError, IndexError, struct.error):
            _parse(question, given_)


def test_a_name_that_points_at_itself_ends() -> None:
    question = encoded(NAME) + struct.pack("!HH", 33, 1)
    at = 12 + len(question)
    loop = struct.pack("!H", 0xC000 | at)
    with pytest.raises(ValueError, match="without an end"):
        _parse(question, b"\1\2" + struct.pack("!HHHHH", 0x8180, 1, 1, 0, 0) + question + loop)


async def test_workers_have_the_addresses_and_ports_of_the_targets() -> None:
    with name_server(TWO) as resolv:
        discovery = DnsDiscovery(
            [Worker(url=f"https://{NAME}", weight=0.5)],
            interval_s=60,
            resolve=lambda name: [{"pod-0.vllm.svc": "10.0.0.1", "pod-1.vllm.svc": "10.0.0.2"}[name]],
            service=lambda name: targets_of(name, resolv),
        )
        changes = discovery.changes()
        found = [await anext(changes), await anext(changes)]
        await changes.aclose()  # type: ignore[attr-defined]
    assert [(change.url, change.server_name, change.weight) for change in found] == [
        ("https://10.0.0.1:8000", "pod-0.vllm.svc", 0.5),
        ("https://10.0.0.2:8001", "pod-1.vllm.svc", 0.5),
    ]


def test_the_port_is_the_records() -> None:
    with pytest.raises(ConfigError, match=r"discovery\.dns\[0\]\.url: names a service by its SRV records"):
        load_config(flags={("discovery", "dns"): f"http://{NAME}:8000"})
    assert load_config(flags={("discovery", "dns"): f"http://{NAME}"}).discovery.dns
