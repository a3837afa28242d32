"""K4: kube-scheduler is the device mutex; its verdict is passed on, and what waits stands as pod and claim."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from kube.kube_helpers import H100, Cluster
from openrl_common.records import Reason, WorkloadPhase

Make = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]


async def test_K4_nine_exclusive_trainers_on_eight_devices_one_waits_and_gets_the_freed_one(cluster: Cluster) -> None:
    await cluster.add_nodes(("trainers", 8, H100, ("trainer",)), ("samplers", 9, H100, ("sampler",)))
    names = [f"x{index}" for index in range(9)]
    async with cluster.launcher():
        for name in names:
            await cluster.submit(name, exclusive=True)
        await cluster.until(lambda: ready_count(cluster, names, 8))
        (last,) = [name for name in names if not await cluster.is_ready(name)]
        await cluster.until(lambda: reason_of(cluster, last))
        workload = await cluster.workload(last)
        assert workload.reason in (Reason.WAITING_FOR_DEVICE, Reason.UNSCHEDULABLE)
        pod = await cluster.until(lambda: cluster.pod_of(last))
        assert "nodeName" not in pod["spec"]
        freed = next(name for name in names if name != last)
        await cluster.cancel(freed)
        await cluster.until(lambda: cluster.is_ready(last))
        devices = [(claim.node, device) for claim in (await cluster.claims()).values() for device in claim.devices]
        assert len(devices) == len(set(devices)), "no device is in two claims"


async def test_K4_P8_F1_spread_founds_first_and_shares_on_the_unschedulable_verdict(make_cluster: Make) -> None:
    async with make_cluster(PLACEMENT_STRATEGY="spread") as cluster, cluster.launcher():
        await cluster.add_nodes(("trainers", 2, H100, ("trainer",)), ("samplers", 8, H100, ("sampler",)))
        for name in "abc":
            await cluster.submit(name)
            await cluster.until(lambda n=name: cluster.is_ready(n))
        claims = [(await cluster.workload(name)).claim for name in "abc"]
        assert claims[0] != claims[1], "two devices: each founds its own"
        assert claims[2] in claims[:2], "the third shares once the scheduler has said no"
        waits = (await cluster.workload("c")).waits
        assert Reason.UNSCHEDULABLE in {wait.reason for wait in waits} or waits


async def test_K4_a_late_allocation_is_kept(cluster: Cluster) -> None:
    """Nothing fits, the pod stands; a node comes (as an autoscaler would bring it) and the very claim is allocated."""
    await cluster.add_nodes(("trainers", 1, H100, ("trainer",)), ("samplers", 4, H100, ("sampler",)))
    async with cluster.launcher():
        await cluster.submit("first", exclusive=True)
        await cluster.ready("first")
        await cluster.submit("late", exclusive=True)
        await cluster.until(lambda: reason_of(cluster, "late"))
        standing = (await cluster.workload("late")).claim
        await cluster.add_nodes(("new", 1, H100, ("trainer",)))
        await cluster.until(lambda: cluster.is_ready("late"))
        assert (await cluster.workload("late")).claim == standing
        assert (await cluster.claim_of("late")).node == "new"


async def ready_count(cluster: Cluster, names: list[str], count: int) -> bool:
    return sum([await cluster.is_ready(name) for name in names]) == count


async def reason_of(cluster: Cluster, name: str) -> Reason | None:
    return None if await cluster.phase(name) is None else (await cluster.workload(name)).reason


async def test_K11_a_pin_that_does_not_hold_falls_back_to_the_scheduler(cluster: Cluster) -> None:
    """The launcher believes a node has room; the scheduler knows better (here a taint), and places it elsewhere."""
    await cluster.add_nodes(("n1", 2, H100, ()))
    await cluster.kubectl("taint", "node", "n1", "maintenance=soon:NoSchedule")
    async with cluster.launcher():
        await cluster.submit("moved")
        await cluster.until(lambda: cluster.pod_of("moved"))
        await cluster.add_nodes(("n2", 2, H100, ()))
        await cluster.ready("moved")
        assert (await cluster.claim_of("moved")).node == "n2"
        assert await cluster.phase("moved") is WorkloadPhase.READY


async def test_K11_a_claim_is_born_with_the_schedulers_finalizer_and_goes_without_ever_being_allocated(
    cluster: Cluster,
) -> None:
    """The scheduler then writes only its status; a claim that nobody wants any more is not held back by it."""
    await cluster.add_nodes(("trainers", 1, H100, ("trainer",)), ("samplers", 2, H100, ("sampler",)))
    async with cluster.launcher():
        await cluster.submit("first", exclusive=True)
        await cluster.ready("first")
        listed = await cluster.kubectl("get", "resourceclaims", "-n", "openrl", "-o", "json", "--show-managed-fields")
        for claim in json.loads(listed)["items"]:
            fields = claim["metadata"]["managedFields"]
            schedulers = {each.get("subresource") for each in fields if each["manager"] == "kube-scheduler"}
            assert schedulers == {"status"}
        await cluster.submit("second", exclusive=True)
        await cluster.until(lambda: reason_of(cluster, "second"))
        await cluster.until(lambda: cluster.pod_of("second"))
        await cluster.cancel("second")
        await cluster.cancel("first")
        await cluster.nothing_is_left()
