"""Ways to the API: the pod's service account, and kubeconfigs."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from gateway.discovery.kubernetes.access import from_kubeconfig, in_cluster
from gateway.errors import UserError

ENV = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def account(tmp_path: Path, ca: trustme.CA) -> Path:
    ca.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("models")
    return tmp_path


def test_the_service_account_of_the_pod(account: Path) -> None:
    access = in_cluster(ENV, account)
    assert (access.server, access.namespace, access.bearer()) == ("https://10.96.0.1:6443", "models", "first")
    assert access.tls is not None
    assert len(access.tls.get_ca_certs()) == 1  # The cluster's, and no public one.
    (account / "token").write_text("second")
    assert access.bearer() == "second"
    assert in_cluster(ENV | {"KUBERNETES_SERVICE_HOST": "fd00::1"}, account).server == "https://[fd00::1]:6443"


def test_outside_of_a_cluster_it_is_said_what_to_do(account: Path) -> None:
    with pytest.raises(UserError, match=r"--kubernetes-kubeconfig"):
        in_cluster({}, account)
    (account / "token").unlink()
    with pytest.raises(UserError, match=r"automountServiceAccountToken"):
        in_cluster(ENV, account)


def test_a_cluster_certificate_that_is_none(account: Path) -> None:
    (account / "ca.crt").write_text("none")
    with pytest.raises(UserError, match=r"ca.crt: its certificates cannot be used"):
        in_cluster(ENV, account)


def config(cluster: dict[str, Any], user: dict[str, Any] | None, **context: Any) -> dict[str, Any]:
    return {
        "current-context": "here",
        "contexts": [
            {"name": "there", "context": {"cluster": "no", "user": "no"}},
            {"name": "here", "context": {"cluster": "c", **({"user": "u"} if user is not None else {}), **context}},
        ],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }


def written(folder: Path, tree: Any) -> str:
    file = folder / "config"
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return str(file)


def test_kubeconfig_with_data_of_certificates(tmp_path: Path, ca: trustme.CA) -> None:
    mine = ca.issue_cert("me")
    pem = base64.b64encode
    user = {
        "client-certificate-data": pem(mine.cert_chain_pems[0].bytes()).decode(),
        "client-key-data": pem(mine.private_key_pem.bytes()).decode(),
    }
    cluster = {
        "server": "https://api.example:6443/",
        "certificate-authority-data": pem(ca.cert_pem.bytes()).decode(),
        "tls-server-name": "kubernetes",
    }
    access = from_kubeconfig(written(tmp_path, config(cluster, user, namespace="models")))
    assert (access.server, access.namespace, access.server_name) == ("https://api.example:6443", "models", "kubernetes")
    assert access.bearer() is None
    assert access.tls is not None
    assert len(access.tls.get_ca_certs()) == 1


def test_kubeconfig_with_files_beside_it(tmp_path: Path, ca: trustme.CA) -> None:
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "token").write_text("t\n")
    cluster = {"server": "https://api:6443", "certificate-authority": "ca.pem"}
    access = from_kubeconfig(written(tmp_path, config(cluster, {"tokenFile": "token"})))
    assert (access.namespace, access.bearer()) == ("default", "t")


def test_kubeconfig_of_kubectl_proxy(tmp_path: Path) -> None:
    access = from_kubeconfig(written(tmp_path, config({"server": "http://127.0.0.1:8001"}, None)))
    assert (access.server, access.tls, access.bearer()) == ("http://127.0.0.1:8001", None, None)


HTTPS = {"server": "https://api:6443"}


def test_yaml_takes_some_tokens_for_numbers(tmp_path: Path) -> None:
    access = from_kubeconfig(written(tmp_path, config(HTTPS, {"token": 12345})))
    assert access.bearer() == "12345"


def test_a_server_below_a_path(tmp_path: Path) -> None:
    server = "https://rancher/k8s/clusters/c-1"
    assert from_kubeconfig(written(tmp_path, config({"server": server + "/"}, None))).server == server


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (": : :", "is no YAML"),
        ([], "no current-context"),
        ({"current-context": "x", "contexts": None}, "no context called x"),
        ({"current-context": "x", "contexts": [{"name": "x", "context": {"cluster": "y"}}]}, "no cluster called y"),
        (config({}, {}), "no server URL"),
        *((config({"server": f"https://{rest}"}, {}), "no server URL") for rest in ("", "api:99999", "[::1", "a b")),
        (config(HTTPS | {"certificate-authority": ["ca.pem"]}, {}), "certificate-authority has to be a text"),
        (config(HTTPS, {"token": {"a": "b"}}), "token has to be a text"),
        (config(HTTPS, {"as": "admin"}), "acts as another"),
        (config(HTTPS, {"exec": {"command": "aws"}}), r"exec, which is not supported; .*kubectl create token"),
        (config(HTTPS, {"auth-provider": {"name": "gcp"}}), "auth-provider, which is not supported"),
        (config(HTTPS, {"username": "a", "password": "b"}), "has a password"),
        (config(HTTPS | {"proxy-url": "http://p"}, {}), "proxy-url is not supported"),
        (config(HTTPS | {"certificate-authority": "gone.pem"}, {}), "certificates cannot be used"),
        (config(HTTPS | {"certificate-authority-data": "%%%"}, {}), "certificates cannot be used"),
        (config(HTTPS, {"client-certificate-data": "bm8=", "client-key-data": "bm8="}), "certificates cannot be used"),
    ],
)
def test_kubeconfigs_that_cannot_be_used(tmp_path: Path, tree: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_kubeconfig(written(tmp_path, tree))


def test_no_kubeconfig(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        from_kubeconfig(str(tmp_path / "none"))
