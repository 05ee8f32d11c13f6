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
    if tls.ca is None and not tls.insecure_skip_verify:
        return True
    try:
        context = ssl.create_default_context(cafile=tls.ca)
    except OSError as exc:
        raise UserError(f"tls.ca: {tls.ca}: {_reason(exc)}") from None
    if tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def scheme_of_workers(tls: TlsConfig) -> str:
    """Of workers that are named by host and port alone."""
    return "https" if tls.ca is not None or tls.insecure_skip_verify else "http"


class ServingCertificate:
    """`context` serves new connections with the `files` (certificate, key) as they are; `refresh` looks whether they
    changed. Files that do not fit together (half replaced) change nothing.
    """

    def __init__(self, cert: str, key: str) -> None:
        """Raises UserError."""
        self.files = (cert, key)
        self.n_taken = 0
        """Certificates that were taken since."""
        self._refused: _Stamp | None = None
        try:
            self._stamp = self._look()
            self.context = self._load()
        except OSError as exc:
            raise UserError(f"tls.cert: {cert}, tls.key: {key}: {_reason(exc)}") from None

    def refresh(self) -> bool:
        """Whether a new certificate was taken. Reads files."""
        try:
            stamp = self._look()
            if stamp in (self._stamp, self._refused):
                return False
            self._refused = stamp
            self._load()  # A context that was given halves of two pairs would serve neither.
            self.context.load_cert_chain(*self.files)
        except OSError as exc:
            _log.warning("the new certificate is not used, the last good one stays: %s", _reason(exc))
            return False
        self._stamp, self._refused = stamp, None
        self.n_taken += 1
        _log.info("serving with the new certificate")
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.files)
        return context

    def _look(self) -> _Stamp:
        stats = [os.stat(file) for file in self.files]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


def serving_certificate(tls: TlsConfig) -> ServingCertificate | None:
    """None: plain HTTP is served. Raises UserError."""
    return None if tls.cert is None or tls.key is None else ServingCertificate(tls.cert, tls.key)


def _reason(exc: OSError) -> str:
    """Of a missing file, or of one that OpenSSL refuses (its errors are OSErrors)."""
    return getattr(exc, "reason", None) or exc.strerror or str(exc)
