"""SRV records, which the system's resolver does not give: a question to the name servers of /etc/resolv.conf.

RFC 1035 and 2782, as much as one question takes: UDP, and TCP when the answer is cut short. It blocks; call it in a
thread.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_SRV: Final = 33
_IN: Final = 1
_RECURSE: Final = 0x0100
_NO_NAME: Final = 3
_TIMEOUT_S: Final = 2.0
_ATTEMPTS: Final = 2
_LONGEST_BYTES: Final = 65_535
_MOST_JUMPS: Final = 64


class Target(NamedTuple):
    name: str
    port: int


class Resolv(NamedTuple):
    """What /etc/resolv.conf says: servers (address, port), domains to search, and the dots of a name that is whole."""

    servers: tuple[tuple[str, int], ...]
    search: tuple[str, ...] = ()
    ndots: int = 1


def read_resolv(text: str) -> Resolv:
    servers: list[tuple[str, int]] = []
    search: tuple[str, ...] = ()
    ndots = 1
    for line in text.splitlines():
        words = line.split("#")[0].split(";")[0].split()
        if not words:
            continue
        if words[0] == "nameserver" and len(words) > 1:
            servers.append((words[1], 53))
        elif words[0] in ("search", "domain"):
            search = tuple(words[1:])
        elif words[0] == "options":
            ndots = next((int(o[6:]) for o in words[1:] if o.startswith("ndots:") and o[6:].isdigit()), ndots)
    return Resolv(tuple(servers) or (("127.0.0.1", 53),), search, ndots)


def targets_of(name: str, resolv: Resolv | None = None) -> Sequence[Target]:
    """The targets of the lowest priority, none if the name has no such record (any more). Raises OSError."""
    if resolv is None:
        resolv = read_resolv(Path("/etc/resolv.conf").read_text(encoding="utf-8", errors="replace"))
    for full in _candidates(name, resolv):
        found = _ask(full, resolv.servers)
        if found:
            lowest = min(priority for priority, _ in found)
            return sorted({target for priority, target in found if priority == lowest})
    return []


def _candidates(name: str, resolv: Resolv) -> Iterator[str]:
    if name.endswith("."):
        yield name
        return
    searched = [f"{name}.{domain.rstrip('.')}." for domain in resolv.search]
    yield from [f"{name}.", *searched] if name.count(".") >= resolv.ndots else [*searched, f"{name}."]


def _ask(name: str, servers: Sequence[tuple[str, int]]) -> list[tuple[int, Target]]:
    """[(priority, target)]; none for a name that is not there. Raises OSError when no server answers that."""
    error: OSError = OSError("no name server")
    question = _encoded(name) + struct.pack("!HH", _SRV, _IN)
    for _ in range(_ATTEMPTS):
        for server in servers:
            try:
                return _parse(question, _exchange(question, server))
            except (struct.error, IndexError, ValueError):
                error = OSError(f"{server[0]} answered something that is no DNS message")
            except OSError as exc:
                error = exc if exc.args else OSError("no answer")
    raise error


def _exchange(question: bytes, server: tuple[str, int]) -> bytes:
    number = secrets.token_bytes(2)
    message = number + struct.pack("!HHHHH", _RECURSE, 1, 0, 0, 0) + question
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        udp.settimeout(_TIMEOUT_S)
        udp.connect(server)  # Of others nothing is taken.
        udp.send(message)
        answer = udp.recv(_LONGEST_BYTES)
        while answer[:2] != number:
            answer = udp.recv(_LONGEST_BYTES)
    if not answer[2] & 0x02:
        return answer
    with socket.create_connection(server, _TIMEOUT_S) as tcp, tcp.makefile("rb") as stream:
        tcp.sendall(struct.pack("!H", len(message)) + message)
        (size,) = struct.unpack("!H", stream.read(2))
        answer = stream.read(size)
    if answer[:2] != number:
        raise ValueError("another answer")
    return answer


def _encoded(name: str) -> bytes:
    labels = [label.encode("ascii") for label in name.rstrip(".").split(".")]
    if not all(0 < len(label) < 64 for label in labels):
        raise UnicodeError(f"{name} is no DNS name")
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def _parse(question: bytes, answer: bytes) -> list[tuple[int, Target]]:
    flags, questions, answers = struct.unpack_from("!HHH", answer, 2)
    code = flags & 0xF
    if code == _NO_NAME:
        return []
    if code:
        raise OSError(f"the name server says {code}")
    if questions != 1 or answer[12 : 12 + len(question)].lower() != question.lower():
        raise ValueError("another question")
    at = 12 + len(question)
    found: list[tuple[int, Target]] = []
    for _ in range(answers):
        _, at = _name(answer, at)
        kind, class_, _, size = struct.unpack_from("!HHIH", answer, at)
        at += 10
        if (kind, class_) == (_SRV, _IN):
            priority, _, port = struct.unpack_from("!HHH", answer, at)
            target, _ = _name(answer, at + 6)
            if target:  # The root says that the service is decidedly not there.
                found.append((priority, Target(target, port)))
        at += size
    return found


def _name(message: bytes, at: int) -> tuple[str, int]:
    """(name, where it ends), through compression. Raises IndexError or ValueError."""
    labels: list[str] = []
    end: int | None = None
    for _ in range(_MOST_JUMPS * 2):
        size = message[at]
        if size >= 0xC0:
            end = at + 2 if end is None else end
            at = (size & 0x3F) << 8 | message[at + 1]
        elif size:
            labels.append(message[at + 1 : at + 1 + size].decode("ascii"))
            at += 1 + size
        else:
            return ".".join(labels), at + 1 if end is None else end
    raise ValueError("a name without an end")
