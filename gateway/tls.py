"""TLS contexts: one to serve with, which follows its files, and one towards engines and workers."""

from __future__ import annotations

import logging
import os
import ssl

from gateway.config.schema import TlsConfig
from gateway.errors import UserError

_log = logging.getLogger(__name__)

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
    """A context that new connections are made with, and that follows its `files`: `refresh` looks whether they changed.
    Files that do not fit together (half replaced) change nothing.
    """

    files: tuple[str, ...]
    context: ssl.SSLContext
    what = "certificate"

    def _begin(self) -> None:
        """Raises OSError."""
        self.n_taken = 0
        """Times that new files were taken since."""
        self._refused: _Stamp | None = None
        self._stamp = self._look()
        self.context = self._made()

    def refresh(self) -> bool:
        """Whether new files were taken. Reads files."""
        try:
            stamp = self._look()
            if stamp in (self._stamp, self._refused):
                return False
            self._refused = stamp
            self._made()  # A context that was given halves of two pairs would serve neither.
            self._fill(self.context)
        except OSError as exc:
            _log.warning("the new %s is not used, the last good one stays: %s", self.what, _reason(exc))
            return False
        self._stamp, self._refused = stamp, None
        self.n_taken += 1
        _log.info("the new %s is used from now on", self.what)
        return True

    def _made(self) -> ssl.SSLContext:
        raise NotImplementedError

    def _fill(self, context: ssl.SSLContext) -> None:
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
        self.pair = (cert, key)
        self.client_ca = client_ca
        self.files = self.pair if client_ca is None else (*self.pair, client_ca)
        try:
            self._begin()
        except OSError as exc:
            files = f"tls.cert: {cert}, tls.key: {key}" + ("" if client_ca is None else f", client_ca: {client_ca}")
            raise UserError(f"{files}: {_reason(exc)}") from None

    def _made(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._fill(context)
        return context

    def _fill(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(*self.pair)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED


class TrustOfWorkers(_Followed):
    """Follows `tls.ca`, and `tls.client_cert` with its key, for the context that `client_context` has made of them."""

    what = "certificate towards workers"

    def __init__(self, tls: TlsConfig, context: ssl.SSLContext) -> None:
        self._tls = tls
        self.files = tuple(file for file in (tls.ca, tls.client_cert, tls.client_key) if file is not None)
        self._begin()
        self.context = context

    def _made(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._tls.ca)
        self._fill(context)
        return context

    def _fill(self, context: ssl.SSLContext) -> None:
        if self._tls.ca is not None:
            context.load_verify_locations(self._tls.ca)
        if self._tls.client_cert is not None:
            context.load_cert_chain(self._tls.client_cert, self._tls.client_key)


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
