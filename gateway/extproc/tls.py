"""Certificates of the picker's port: given ones, which may change while it serves, or one made at the start."""

from __future__ import annotations

import datetime
import ssl

import grpc

from gateway.tls import ServingCertificate, load_pair

_NAME = "warmroute"
_YEARS = 10
_ALPN = "h2"


class Given:
    """Of files that may change."""

    def __init__(self, certificate: ServingCertificate) -> None:
        self._certificate = certificate

    def context(self) -> ssl.SSLContext:
        """Whoever owns the certificate refreshes it."""
        self._certificate.context.set_alpn_protocols([_ALPN])
        return self._certificate.context

    def credentials(self) -> grpc.ServerCredentials:
        """Each handshake looks whether the files have changed; halves of two pairs change nothing."""
        certificate, served = self._certificate, self._certificate.n_taken

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            certificate.refresh()
            if certificate.n_taken == served:
                return None
            served = certificate.n_taken
            return _configured(certificate)

        return grpc.dynamic_ssl_server_credentials(
            _configured(certificate),
            fetch,  # type: ignore[arg-type]
            require_client_authentication=certificate.client_ca is not None,
        )


class SelfSigned:
    """For proxies that encrypt without checking whom they talk to (Envoy AI Gateway, agentgateway, llm-d's charts)."""

    def __init__(self) -> None:
        self._key, self._certificate = _new_pair()

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        load_pair(context, self._certificate, self._key)
        context.set_alpn_protocols([_ALPN])
        return context

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self._key, self._certificate)])


Identity = Given | SelfSigned


def _configured(certificate: ServingCertificate) -> grpc.ServerCertificateConfiguration:
    """What is in force: files that are on their way to be replaced are not looked at."""
    cert, key, *cas = certificate.contents
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=cas[0] if cas else None)


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
