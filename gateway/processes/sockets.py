"""What the supervisor opens before there is any process, and keeps open whatever becomes of them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.errors import UserError

_BACKLOG = 4096
_USUAL = ("/tmp", "/dev/shm")  # noqa: S108  # nosec B108
"""Where a folder of our own is made, that only we can look into."""
_LONGEST_PATH = 70
"""A socket's path has 107 bytes at most."""
_PREFIX = "warmroute-"


def listening(host: str, port: int) -> list[socket.socket]:
    """On every address of `host`; port 0 takes a free one. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    problem = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, address in dict.fromkeys((each[0], each[4]) for each in found):
        try:
            sock = _listening(family, (address[0], port, *address[2:]))
        except OSError as exc:
            problem = exc
            if exc.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # A name has addresses of kinds that this machine may not have.
            for each in sockets:
                each.close()
            raise
        sockets.append(sock)
        port = sock.getsockname()[1]
    if not sockets:
        raise problem
    return sockets


def _listening(family: int, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.setblocking(False)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def private_folder(env: Mapping[str, str]) -> str:
    """A new one that only we can look into. Raises UserError."""
    given = env.get("RUNTIME_DIRECTORY", "").partition(":")[0], env.get("TMPDIR", "")
    for parent in (*given, *_USUAL):
        if parent and len(os.fsencode(parent)) <= _LONGEST_PATH and os.path.isdir(parent):
            try:
                return tempfile.mkdtemp(prefix=_PREFIX, dir=parent)  # Mode 0700.
            except OSError:
                continue
    raise UserError(
        "gateway.processes: its processes need a folder for their sockets, and none of RUNTIME_DIRECTORY, TMPDIR, /tmp "
        "and /dev/shm can be written to (or its path is too long): mount a tmpfs on /tmp"
    )


def kept(folder: str) -> int:
    """While this descriptor is open, systemd-tmpfiles leaves alone what is in there (tmpfiles.d(5)): else the links to
    the hub, which nobody touches for days, go with what is old in /tmp, in a private one too.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # On a file system without locks there is no such service either.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def make_again(folder: str) -> None:
    """A private folder that somebody has removed, or emptied. Raises OSError: also where it is not ours."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "somebody else has made it meanwhile")


def remove_folder(folder: str) -> None:
    if Path(folder).name.startswith(_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def link(target: str, name: str) -> None:
    """`name` leads to `target` from now on, without a moment in between when it leads nowhere."""
    temporary = name + ".new"
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(os.path.basename(target), temporary)
    os.replace(temporary, name)
