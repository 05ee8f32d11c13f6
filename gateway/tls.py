"""TLS contexts: one to serve with, which follows its files, and one towards engines and workers."""

from __future__ import annotations

import logging
import os
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.config.schema import TlsConfig
from gateway.errors import UserError

_log = logging.getLogger(__name__)

_FDS = "/proc/self/fd"
_Stamp = tuple[tuple[int, int, int], ...]
"""(inode, time of the last write in ns, size) of each file."""


def client_context(tls: TlsConfig) -> ssl.SSLContext | bool:
    """For https URLs of engines and workers, as aiohttp takes it (True: the system's CAs). Raises UserError."""
    if tls.ca is None and tls.client_cert is None and not tls.insecure_skip_verify:
        return True
    try:
        context = ssl.create_default_context(cafile=tls.ca)
    except OSError as exc:
        raise UserError(f"tls.ca: {tls.ca}: {_reason(exc)}") from None
    if tls.client_cert is not None:
        try:
            context.load_cert_chain(tls.client_cert, tls.client_key)
        except OSError as exc:
            raise UserError(f"tls.client_cert: {tls.client_cert}, tls.client_key: {_reason(exc)}") from None
    if tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def scheme_of_workers(tls: TlsConfig) -> str:
    """Of workers that are named by host and port alone."""
    checked = tls.ca is not None or tls.client_cert is not None
    return "https" if checked or tls.insecure_skip_verify else "http"


class _Followed:
    """A context that new connections are made with, and that follows its `files`. What they hold is read once, tried on
    a context of its own and only then given to that one, so that files that do not fit together (half replaced), or
    change meanwhile, change nothing. They count once they were the same at two looks: of a file that is being written
    the first half may make sense.
    """

    files: tuple[str, ...]
    context: ssl.SSLContext
    what = "certificate"

    def _begin(self, context: ssl.SSLContext | None = None) -> None:
        """Raises OSError."""
        self.n_taken = 0
        """Times that new files were taken since."""
        self.problem: str | None = None
        """Why the files as they are now are not in force."""
        self._refused: _Stamp | None = None
        self._stamp = self._seen = self._look()
        self.contents = _contents(self.files)
        """Of the files that are in force."""
        self._found: tuple[_Stamp, tuple[bytes, ...]] | None = None
        self._lock = threading.Lock()
        made = self._made(self.contents)
        self.context = made if context is None else context

    def look(self, *, at_once: bool = False) -> bool:
        """Whether there are new files to `take`. Reads files. `at_once`: somebody says that they are all there."""
        with self._lock:
            try:
                return self._find(at_once=at_once)
            except OSError as exc:
                problem = _reason(exc)
                if problem != self.problem:
                    _log.warning("the new %s is not used, the last good one stays: %s", self.what, problem)
                self.problem = problem
                return False

    def _find(self, *, at_once: bool) -> bool:
        stamp = self._look()
        settled, self._seen = at_once or stamp == self._seen, stamp
        if self._found is not None and self._found[0] == stamp:
            return True
        self._found = None
        if stamp == self._stamp:
            self.problem = None
        if not settled or stamp in (self._stamp, self._refused):
            return False
        contents = _contents(self.files)
        if self._look() != stamp:
            return False
        self._refused = stamp
        self._made(contents)
        self._found = stamp, contents
        return True

    def take(self) -> None:
        """What `look` has found. Where the context is in use on an event loop, from there: a handshake in the middle
        would meet half of a pair. Waits for no file.
        """
        with self._lock:
            if self._found is None:
                return
            stamp, contents = self._found
            self._found = None
            self._fill(self.context, contents)
            self.contents = contents
            self._stamp, self._refused, self.problem = stamp, None, None
            self.n_taken += 1
        _log.info("the new %s is used from now on", self.what)

    def refresh(self) -> bool:
        """Both. Whether new files were taken."""
        found = self.look()
        if found:
            self.take()
        return found

    def _made(self, contents: tuple[bytes, ...]) -> ssl.SSLContext:
        """A new one of these. Raises OSError."""
        raise NotImplementedError

    def _fill(self, context: ssl.SSLContext, contents: tuple[bytes, ...]) -> None:
        raise NotImplementedError

    def _look(self) -> _Stamp:
        stats = [os.stat(file) for file in self.files]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


class ServingCertificate(_Followed):
    """Serves with certificate and key. With `client_ca` nobody comes in without a certificate of one of these CAs; a CA
    that is added counts at once, one that is taken out until the next start.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        """Raises UserError."""
        self.client_ca = client_ca
        self.files = (cert, key) if client_ca is None else (cert, key, client_ca)
        try:
            self._begin()
        except OSError as exc:
            files = f"tls.cert: {cert}, tls.key: {key}" + ("" if client_ca is None else f", client_ca: {client_ca}")
            raise UserError(f"{files}: {_reason(exc)}") from None

    def _made(self, contents: tuple[bytes, ...]) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._fill(context, contents)
        return context

    def _fill(self, context: ssl.SSLContext, contents: tuple[bytes, ...]) -> None:
        cert, key, *rest = contents
        load_pair(context, cert, key)
        for ca in rest:
            load_cas(context, ca)
            context.verify_mode = ssl.CERT_REQUIRED


class TrustOfWorkers(_Followed):
    """Follows `tls.ca`, and `tls.client_cert` with its key, for the context that `client_context` has made of them."""

    what = "certificate towards workers"

    def __init__(self, tls: TlsConfig, context: ssl.SSLContext) -> None:
        self._n_cas = 0 if tls.ca is None else 1
        self.files = tuple(file for file in (tls.ca, tls.client_cert, tls.client_key) if file is not None)
        self._begin(context)

    def _made(self, contents: tuple[bytes, ...]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._fill(context, contents)
        return context

    def _fill(self, context: ssl.SSLContext, contents: tuple[bytes, ...]) -> None:
        for ca in contents[: self._n_cas]:
            load_cas(context, ca)
        pair = contents[self._n_cas :]
        if pair:
            load_pair(context, pair[0], pair[-1])


def load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """A certificate with its chain, and its key, both PEM, or both in each. Raises OSError."""
    with _as_file(cert) as cert_file, _as_file(key) as key_file:
        context.load_cert_chain(cert_file, key_file)


def load_cas(context: ssl.SSLContext, ca: bytes) -> None:
    """PEM. Raises OSError."""
    with _as_file(ca) as file:
        context.load_verify_locations(file)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """OpenSSL takes keys from files only; this one is in memory, and no other process's, where the system has such."""
    if sys.platform == "linux" and os.path.isdir(_FDS):
        fd = os.memfd_create("warmroute", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            yield f"{_FDS}/{fd}"
    else:
        with tempfile.NamedTemporaryFile(prefix="warmroute-") as named:  # Which only its owner may read.
            named.write(content)
            named.flush()
            yield named.name


def _contents(files: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(Path(file).read_bytes() for file in files)


def trust_of_workers(tls: TlsConfig, context: ssl.SSLContext | bool) -> TrustOfWorkers | None:
    """None: `context`, which `client_context` made, has no files."""
    if isinstance(context, bool) or (tls.ca is None and tls.client_cert is None):
        return None
    return TrustOfWorkers(tls, context)


def serving_certificate(tls: TlsConfig) -> ServingCertificate | None:
    """None: plain HTTP is served. Raises UserError."""
    return None if tls.cert is None or tls.key is None else ServingCertificate(tls.cert, tls.key, tls.client_ca)


def admin_certificate(tls: TlsConfig, client_ca: str | None) -> ServingCertificate | None:
    """Of the admin port, which knows its clients by other CAs. Raises UserError."""
    return None if tls.cert is None or tls.key is None else ServingCertificate(tls.cert, tls.key, client_ca)


def name_in(certificate: dict[str, object] | None) -> str | None:
    """Whom a client's certificate names (as `SSLSocket.getpeercert` gives it): by a URI (SPIFFE), else by its common
    name. None: nobody, or several.
    """
    if not certificate:
        return None
    others, subject = certificate.get("subjectAltName", ()), certificate.get("subject", ())
    uris = [value for kind, value in others if kind == "URI"]  # type: ignore[attr-defined]
    names = uris or [value for rdn in subject for kind, value in rdn if kind == "commonName"]  # type: ignore[attr-defined]
    return str(names[0]) if len(names) == 1 and names[0] else None


def _reason(exc: OSError) -> str:
    """Of a missing file, or of one that OpenSSL refuses (its errors are OSErrors)."""
    return getattr(exc, "reason", None) or exc.strerror or str(exc)
