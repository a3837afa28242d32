"""K6: a live copy that survives what a watch may do, against the real API server; K3: what is there is applied."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from kube.kube_helpers import DRIVER, H100, Cluster
from openrl_common.quantities import GIB
from openrl_common.records import Tier
from openrl_launcher.kubernetes.api import KubeApi
from openrl_launcher.kubernetes.manifests import resource_claim
from openrl_launcher.kubernetes.objects import Meta, Node
from openrl_launcher.kubernetes.settings import KubernetesSettings
from openrl_launcher.kubernetes.watch import Informer


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[KubeApi]:
    await cluster.add_nodes(("n1", 1, H100, ()))
    made = await KubeApi.connect(kubeconfig=cluster.kubeconfig, namespace="openrl")
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def running(informer: Informer[Node], version: str = "") -> AsyncIterator[None]:
    task = asyncio.create_task(informer.run(version))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_K6_on_410_it_lists_again_and_what_vanished_becomes_a_deletion(cluster: Cluster, api: KubeApi) -> None:
    # one that has just started does not have the versions before its start, however few they are
    await asyncio.to_thread(cluster.plane.restart, "kube-apiserver")
    await asyncio.to_thread(cluster.plane.await_api)
    told: list[tuple[str, bool]] = []
    informer = Informer(api, "/api/v1/nodes", Node, on_change=lambda key, node: told.append((key, node is not None)))
    informer.objects["ghost"] = Node(metadata=Meta(name="ghost"))
    async with running(informer, version="1"):
        await cluster.until(lambda: informer.synced.is_set())
    assert informer.expirations == 1
    assert ("ghost", False) in told
    assert ("n1", True) in told
    assert "ghost" not in informer.objects


async def test_K6_a_silent_watch_is_ended_by_the_client_and_lists_again(cluster: Cluster, api: KubeApi) -> None:
    informer = Informer(
        api, "/apis/resource.k8s.io/v1/resourceslices", Node, on_change=lambda key, node: None, silence_s=0.3
    )
    async with running(informer):
        await cluster.until(lambda: informer.lists >= 3)


async def test_K6_an_ordinary_end_of_a_watch_goes_on_without_a_list(
    cluster: Cluster, api: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openrl_launcher.kubernetes.watch.SERVER_TIMEOUT_S", 1)
    informer = Informer(api, "/api/v1/nodes", Node, on_change=lambda key, node: None)
    async with running(informer):
        await informer.synced.wait()
        await asyncio.sleep(3.5)
        await cluster.add_nodes(("n2", 1, H100, ()))
        await cluster.until(lambda: "n2" in informer.objects)
    assert informer.lists == 1


async def test_K3_an_object_that_is_there_already_is_applied(cluster: Cluster, api: KubeApi) -> None:
    path = "/apis/resource.k8s.io/v1/namespaces/openrl/resourceclaims"
    first, settings = (
        Tier(count=1, floor_bytes=GIB, ceiling_gib=80),
        KubernetesSettings(nats_url="", driver=DRIVER, device_class=DRIVER),
    )
    for _ in range(2):
        made = msgspec.json.decode(await api.ensure(path, resource_claim("twice", (first,), settings)))
        assert made["metadata"]["name"] == "twice"
    assert (api.requests["POST resourceclaims"], api.requests["PATCH resourceclaims"]) == (2, 1)
    assert [each["metadata"]["uid"] for each in await cluster.get("resourceclaims")] == [made["metadata"]["uid"]]
