"""A gateway of several processes in front of the pods of a cluster."""

from __future__ import annotations

from pathlib import Path

from tests.hermetic.test_kubernetes_gateway import HOSTS, Cluster
from tests.hermetic.test_processes import prompt, restarted
from tests.support.kube_server import PODS
from tests.support.pods import pod
from tests.support.processes_world import Processes, eventually


def gateway(folder: Path) -> Processes:
    args = ("--kubernetes-pool=pool", f"--kubernetes-kubeconfig={folder / 'kubeconfig'}")
    return Processes(2, *args, has_engines=False)


async def known(them: Processes, **states: str) -> None:
    """Once every process has these, and no others."""

    async def are() -> bool:
        pages = [await them.get(f"/admin/workers?process={label}") for label in ("hub", "0", "1")]
        return all({it["name"]: it["state"] for it in page["workers"]} == states for page in pages)

    await eventually(are)


async def test_every_process_follows_the_pool(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, gateway(tmp_path) as them:
        await known(them, a="healthy", b="healthy")
        assert (await them.complete(cluster.http, prompt(1)))[0] == 200
        cluster.kube.put(PODS, "a", pod(HOSTS["a"], terminating=True))
        await known(them, a="draining", b="healthy")
        cluster.kube.delete(PODS, "a")
        await known(them, b="healthy")
        for number in range(6):
            assert await them.complete(cluster.http, prompt(number)) == (200, "b")
        cluster.kube.put(PODS, "a", pod(HOSTS["a"]))
        await known(them, a="healthy", b="healthy")
        await restarted(them)
        await known(them, a="healthy", b="healthy")
        assert (await them.complete(cluster.http, prompt(1)))[0] == 200
        await them.command.terminate()


async def test_an_api_that_is_away_is_told_and_processes_that_come_meanwhile_serve_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path) as cluster, gateway(tmp_path) as them:
        await known(them, a="healthy", b="healthy")
        cluster.kube.down = True
        cluster.kube.cut()

        async def is_told() -> bool:
            told = (await them.get("/readyz?verbose"))["degraded"]
            return any(it["what"] == "discovery" and "cannot be asked" in it["detail"] for it in told)

        await eventually(is_told)
        assert (await them.complete(cluster.http, prompt(1)))[0] == 200
        pid = await them.kill("0")

        async def is_another() -> bool:
            return await them.pid("0") != pid

        await eventually(is_another)
        cluster.kube.down = False
        await known(them, a="healthy", b="healthy")
