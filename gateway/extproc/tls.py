"""Certificates of the picker's port: given ones, which may change while it serves, or one made at the start."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

import grpc

from gateway.tls import ServingCertificate

_log = logging.getLogger(__name__)
_NAME = "warmroute"
_YEARS = 10


def given(certificate: ServingCertificate) -> grpc.ServerCredentials:
    """Each handshake looks whether the files have changed; halves of two pairs change nothing."""

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return _of_files(certificate) if certificate.refresh() else None

    demands = certificate.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(_of_files(certificate), fetch, demands)  # type: ignore[arg-type]


def self_signed() -> grpc.ServerCredentials:
    """For proxies that encrypt without checking whom they talk to (Envoy AI Gateway, agentgateway, llm-d's charts)."""
    return grpc.ssl_server_credentials([_new_pair()])


def _of_files(certificate: ServingCertificate) -> grpc.ServerCertificateConfiguration:
    cert, key = (Path(file).read_bytes() for file in certificate.pair)
    roots = None if certificate.client_ca is None else Path(certificate.client_ca).read_bytes()
    return grpc.ssl_server_certificate_configuration([(key, cert)], roots)


def _new_pair() -> tuple[bytes, bytes]:
    """(key, certificate), both PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME), x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem, certificate.public_bytes(serialization.Encoding.PEM)
