"""How the Kubernetes API is reached: inside the cluster by the pod's service account, outside by a kubeconfig."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from yarl import URL

from gateway.errors import UserError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_DEFAULT_NAMESPACE = "default"
_TEXTS = frozenset(
    {"tls-server-name", "token", "tokenFile"}
    | {f"{what}{of}" for what in ("certificate-authority", "client-certificate", "client-key") for of in ("", "-data")}
)


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """`server` is the API's base URL. `token_file` is read again for every request, because tokens of service accounts
    are replaced every hour.
    """

    server: str
    namespace: str = _DEFAULT_NAMESPACE
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    ca_file: Path | None = None
    token: str | None = None
    token_file: Path | None = None

    def bearer(self) -> str | None:
        """The token to send now. Raises OSError."""
        if self.token_file is None:
            return self.token
        return self.token_file.read_text(encoding="utf-8", errors="replace").strip()

    def trust_anew(self) -> None:
        """The cluster's certificate was not trusted: its CA may have been replaced since it was read."""
        if self.tls is not None and self.ca_file is not None:
            with suppress(OSError):
                self.tls.load_verify_locations(self.ca_file)


def in_cluster(env: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT) -> Access:
    """By the service account of this pod. Raises UserError."""
    host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise UserError(
            "kubernetes: this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set); "
            "name a kubeconfig with --kubernetes-kubeconfig"
        )
    token, namespace = folder / "token", folder / "namespace"
    if not token.is_file():
        raise UserError(
            f"kubernetes: {token} is not there; let the pod have a service account "
            "(serviceAccountName, automountServiceAccountToken: true)"
        )
    ca = folder / "ca.crt"
    return Access(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=namespace.read_text(encoding="utf-8").strip() if namespace.is_file() else _DEFAULT_NAMESPACE,
        tls=_context(f"kubernetes: {ca}", {"certificate-authority": str(ca)}, folder),
        ca_file=ca,
        token_file=token,
    )


def from_kubeconfig(file: str) -> Access:
    """By the file's current context. Raises UserError."""
    import yaml

    path = Path(file).expanduser()
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UserError(f"kubernetes.kubeconfig: {path}: {exc.strerror or exc}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise UserError(f"kubernetes.kubeconfig: {path}: is no YAML: {str(exc).splitlines()[0]}") from None
    return _read(_mapping(tree), path)


def _read(tree: Mapping[str, Any], path: Path) -> Access:
    where = f"kubernetes.kubeconfig: {path}"
    name = tree.get("current-context")
    if not name:
        raise UserError(f"{where}: has no current-context; set one with kubectl config use-context")
    context = _named(tree, "contexts", "context", name, where)
    cluster = _named(tree, "clusters", "cluster", context.get("cluster"), where)
    user = _named(tree, "users", "user", context.get("user"), where) if context.get("user") else {}
    server = str(cluster.get("server") or "").rstrip("/")
    if not _is_url(server):
        raise UserError(f"{where}: its cluster has no server URL")
    for key in ("exec", "auth-provider"):
        if user.get(key):
            raise UserError(
                f"{where}: its user is authenticated by {key}, which is not supported; "
                "put a token there (kubectl create token SERVICE_ACCOUNT), or run kubectl proxy and name that server"
            )
    if user.get("username"):
        raise UserError(f"{where}: its user has a password, which Kubernetes takes no more; put a token there")
    if user.get("as"):
        raise UserError(f"{where}: its user acts as another (as), which is not supported")
    if cluster.get("proxy-url"):
        raise UserError(f"{where}: proxy-url is not supported")
    cluster, user = _texts(cluster, where), _texts(user, where)
    token_file = user.get("tokenFile")
    return Access(
        server=server,
        namespace=str(context.get("namespace") or _DEFAULT_NAMESPACE),
        tls=_context(where, {**cluster, **user}, path.parent) if server.startswith("https:") else None,
        server_name=cluster.get("tls-server-name"),
        token=user.get("token"),
        token_file=path.parent / str(token_file) if token_file else None,
    )


def _is_url(server: str) -> bool:
    try:
        url = URL(server)
        return url.scheme in ("http", "https") and bool(url.host) and not set(server) & set(" ?#")
    except ValueError:
        return False


def _texts(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """YAML takes some tokens and names for numbers. Raises UserError for what is no text at all."""
    texts = dict(given)
    for key in _TEXTS & given.keys():
        value = given[key]
        if isinstance(value, bool | list | dict):
            raise UserError(f"{where}: {key} has to be a text")
        texts[key] = None if value is None else str(value)
    return texts


def _named(tree: Mapping[str, Any], kind: str, key: str, name: object, where: str) -> Mapping[str, Any]:
    entries = tree.get(kind)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name:
            return _mapping(entry.get(key))
    raise UserError(f"{where}: has no {key} called {name}")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _context(where: str, given: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    """Of the keys that a kubeconfig's cluster and user have; files are relative to `folder`. Raises UserError."""
    try:
        ca, ca_data = given.get("certificate-authority"), given.get("certificate-authority-data")
        context = ssl.create_default_context(
            cafile=str(folder / ca) if ca and not ca_data else None,
            cadata=_plain(ca_data).decode("ascii") if ca_data else None,
        )
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Many clusters' certificates name no key identifiers.
        if given.get("insecure-skip-tls-verify"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if given.get("client-certificate") or given.get("client-certificate-data"):
            with tempfile.TemporaryDirectory() as scratch:  # OpenSSL reads certificates from files only.
                certificate, key = (
                    _as_file(
                        given.get(f"client-{what}-data"), given.get(f"client-{what}"), folder, Path(scratch) / what
                    )
                    for what in ("certificate", "key")
                )
                context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", None) or getattr(exc, "strerror", None) or exc
        raise UserError(f"{where}: its certificates cannot be used: {reason}") from None
    return context


def _as_file(data: str | None, file: str | None, folder: Path, scratch: Path) -> str:
    if not data:
        return str(folder / (file or ""))
    scratch.touch(mode=0o600)
    scratch.write_bytes(_plain(data))
    return str(scratch)


def _plain(data: str) -> bytes:
    """Raises ValueError for what is no base64."""
    return base64.b64decode("".join(str(data).split()), validate=True)
