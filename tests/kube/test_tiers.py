"""B3, K1: a claim's tiers decide which device it gets; K2: what the fleet looks like; P1: who may go where."""

from __future__ import annotations

import asyncio
from typing import Any

from kube.kube_helpers import H100, L4, Cluster
from openrl_common.records import Role


async def test_K1_the_tightest_device_that_fits_wins_and_the_tier_is_told(cluster: Cluster) -> None:
    """A 5 GiB trainer takes the 24 GB card, a 23.6 GiB sampler the 80 GB one, at the exact-byte floor of each."""
    await cluster.add_nodes(("l4", 2, L4, ()), ("h100", 2, H100, ()))
    async with cluster.launcher():
        await cluster.submit("tight", trainer_gib=5, sampler_gib=23.6)
        await cluster.ready("tight")
    trainer, sampler = await cluster.claim_of("tight"), await cluster.claim_of("tight", "sampler")
    assert (trainer.node, trainer.device_bytes) == ("l4", L4)
    assert (sampler.node, sampler.device_bytes) == ("h100", H100)
    cuts = await cluster.bus.store.cuts.list()
    assert sorted(entry.value.tier for entry in cuts.values()) == ["1x23", "1x80"]


async def test_K1_a_floor_in_exact_bytes_and_a_full_device_are_told_apart(cluster: Cluster) -> None:
    """A device of 79.65 GiB takes 79.65 GiB and no byte more: 79.66 is impossible, and said so with both numbers."""
    await cluster.add_nodes(("h100", 2, H100, ()))
    async with cluster.launcher():
        await cluster.submit("exact", trainer_gib=H100 / 2**30, sampler_gib=79.6)
        await cluster.ready("exact")
        await cluster.submit("over", trainer_gib=79.66, sampler_gib=1)
        await cluster.until(lambda: cluster.job_message("over"))
        message = await cluster.job_message("over")
    assert "79.66 GiB" in message
    assert "79.65 GiB" in message


async def test_K1_P1_role_labels_are_a_requirement_of_the_pod(cluster: Cluster) -> None:
    """Each role lands on the node that is labelled for it, although the other one is as good; unlabelled takes both."""
    await cluster.add_nodes(("only-trainers", 2, H100, ("trainer",)), ("only-samplers", 2, H100, ("sampler",)))
    async with cluster.launcher(pin=False):
        await cluster.submit("split")
        await cluster.ready("split")
        terms = (await cluster.pod_of("split"))["spec"]["affinity"]["nodeAffinity"]
        assert (await cluster.claim_of("split")).node == "only-trainers"
        assert (await cluster.claim_of("split", "sampler")).node == "only-samplers"
    required = terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert len(required) == 2, "a node of the role, or one without role labels"


async def test_K10_several_devices_are_one_claim_with_a_count_on_one_node(cluster: Cluster) -> None:
    """Asked of the ledger itself: no job setting asks for several devices yet."""
    await cluster.add_nodes(("small", 2, H100, ()), ("large", 4, H100, ()))
    async with cluster.launcher() as launcher:
        claim = await cluster.book_devices("wide", count=3)
        await cluster.until(lambda: claim in launcher.claims.cuts)
        cut = launcher.claims.cuts[claim]
        pods = await cluster.until(lambda: cluster.get("pods"))
    assert (cut.node, len(set(cut.devices)), cut.tier) == ("large", 3, "3x80")
    volumes = {volume["name"]: volume for volume in pods[0]["spec"]["volumes"]}
    assert volumes["openrl-shm"]["emptyDir"]["medium"] == "Memory", "room for collectives"


async def test_K2_the_inventory_follows_labels_slices_and_what_other_pods_request(cluster: Cluster) -> None:
    """A node is one of the fleet while it is enabled, counts devices of a complete pool, and what others reserve."""
    nodes = cluster.bus.store.nodes
    await cluster.add_nodes(("n1.example", 2, H100, ()))
    async with cluster.launcher():
        record = (await cluster.until(lambda: nodes.get("n1_example"))).value
        assert [device.memory_bytes for device in record.devices] == [H100, H100]
        assert (record.enabled, record.complete, record.beat) == (True, True, 0)

        other = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "other", "namespace": "default"},
            "spec": {
                "nodeName": "n1.example",
                "containers": [{"name": "x", "image": "x", "resources": {"requests": {"memory": "5Gi"}}}],
            },
        }
        await asyncio.to_thread(cluster.plane.apply, other)
        await cluster.until(lambda: field_is(nodes, "n1_example", host_reserved_bytes=5 << 30))
        await cluster.kubectl("delete", "pod", "other", "-n", "default", "--force", "--grace-period=0")
        await cluster.until(lambda: field_is(nodes, "n1_example", host_reserved_bytes=0))

        await cluster.kubectl("label", "node", "n1.example", "openrl.io/sampler=true")
        await cluster.until(lambda: field_is(nodes, "n1_example", roles=(Role.SAMPLER,)))
        patch = '{"spec":{"pool":{"name":"n1.example","generation":2,"resourceSliceCount":2}}}'
        await cluster.kubectl("patch", "resourceslice", "n1.example-gpu", "--type=merge", "-p", patch)
        await cluster.until(lambda: field_is(nodes, "n1_example", complete=False))
        await cluster.kubectl("label", "node", "n1.example", "openrl.io/enabled-")
        await cluster.until(lambda: field_is(nodes, "n1_example", enabled=False))


async def field_is(nodes: Any, token: str, **fields: object) -> bool:
    record = (await nodes.get(token)).value
    return all(getattr(record, name) == value for name, value in fields.items())
