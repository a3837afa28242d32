"""The seat limit on a real cluster: S1, S2, S4, S5, S7 with K4 and K5 (what kubectl shows)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from kube.kube_helpers import H100, Cluster
from openrl_common.records import Reason, WorkloadPhase

Make = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]


async def trainers_on_two_devices(cluster: Cluster, names: list[str], **fields: object) -> None:
    """Trainers share two devices, samplers are out of their way; one after the other, so that order is certain."""
    await cluster.add_nodes(("trainers", 2, H100, ("trainer",)), ("samplers", 8, H100, ("sampler",)))
    await cluster.until(lambda: cluster.node_is("trainers", lost=False))
    for name in names:
        await cluster.submit(name, **fields)
        await cluster.until(lambda n=name: settled(cluster, n))


async def settled(cluster: Cluster, name: str) -> bool:
    if await cluster.phase(name) is None:
        return False
    trainer = await cluster.workload(name)
    return trainer.phase is WorkloadPhase.READY or trainer.reason is not None


async def are_ready(cluster: Cluster, names: str, expected: list[bool]) -> bool:
    return [await cluster.is_ready(name) for name in names] == expected


async def test_S4_S5_K5_with_limit_2_the_fifth_waits_for_a_seat_and_gets_the_freed_one(make_cluster: Make) -> None:
    """Five trainers on two devices: four run, the fifth says the limit, and sits within 5 s of a release."""
    async with make_cluster(MAX_SEATS_PER_CLAIM=2) as cluster, cluster.launcher() as launcher:
        await trainers_on_two_devices(cluster, ["a", "b", "c", "d", "e"])
        await cluster.until(lambda: are_ready(cluster, "abcde", [True] * 4 + [False]))
        waiting = await cluster.until(lambda: waits_for_seat(cluster, "e"))
        assert "2 seats taken (--max-seats-per-claim 2)" in waiting
        shown = await cluster.until(lambda: mirrored(cluster, "team--e--trainer", "WaitingForSeat"))
        assert "--max-seats-per-claim 2" in shown
        await cluster.until(lambda: trainer_pods(cluster, 5))  # its own pod stands, for autoscalers

        released = asyncio.get_running_loop().create_future()

        async def watch_release() -> None:
            while "team--b--trainer" in await cluster.seats():  # noqa: ASYNC110 (in another process)
                await asyncio.sleep(0.01)
            released.set_result(time.monotonic())

        watching = asyncio.create_task(watch_release())
        await cluster.cancel("b")
        await cluster.until(lambda: placed(cluster, "e"), every_s=0.01)
        placed_at = time.monotonic()
        assert placed_at - await released < 5.0
        await watching
        await cluster.until(lambda: cluster.is_ready("e"))
        for claim in (await cluster.claims()).values():
            assert len(claim.entries) <= 2
        assert launcher.duty.held


async def test_S1_with_limit_1_every_claim_holds_its_founder_alone(make_cluster: Make) -> None:
    async with make_cluster(MAX_SEATS_PER_CLAIM=1) as cluster, cluster.launcher():
        await trainers_on_two_devices(cluster, ["a", "b", "c"])
        await cluster.until(lambda: are_ready(cluster, "abc", [True, True, False]))
        assert all(len(claim.entries) == 1 for claim in (await cluster.claims()).values())
        await cluster.cancel("a")
        await cluster.until(lambda: cluster.is_ready("c"))


async def test_S7_a_lowered_limit_evicts_nobody_and_admits_nobody(make_cluster: Make) -> None:
    async with make_cluster(MAX_SEATS_PER_CLAIM=3) as cluster, cluster.launcher():
        await cluster.add_nodes(("trainers", 1, H100, ("trainer",)), ("samplers", 8, H100, ("sampler",)))
        for name in "abc":
            await cluster.submit(name)
            await cluster.until(lambda n=name: cluster.is_ready(n))
        await cluster.restart_services(OPEN_RL_MAX_SEATS_PER_CLAIM="2")
        assert all([await cluster.is_ready(name) for name in "abc"])
        await cluster.submit("d")
        await cluster.until(lambda: waits_for_seat(cluster, "d"))
        await cluster.cancel("a")
        await cluster.until(lambda: entries_of(cluster, "b", 2))
        assert await cluster.phase("d") is not WorkloadPhase.READY, "two seats are the limit now"
        await cluster.cancel("b")
        await cluster.until(lambda: cluster.is_ready("d"))


async def entries_of(cluster: Cluster, name: str, count: int) -> bool:
    return len((await cluster.claim_of(name)).entries) == count


async def placed(cluster: Cluster, name: str) -> bool:
    workload = await cluster.workload(name)
    return workload.phase in (WorkloadPhase.PLACED, WorkloadPhase.STARTING, WorkloadPhase.READY)


async def trainer_pods(cluster: Cluster, count: int) -> bool:
    return sum("--trainer" in pod["metadata"]["name"] for pod in await cluster.get("pods")) == count


async def waits_for_seat(cluster: Cluster, name: str) -> str:
    if await cluster.phase(name) is None:
        return ""
    workload = await cluster.workload(name)
    return workload.message if workload.reason is Reason.WAITING_FOR_SEAT else ""


async def mirrored(cluster: Cluster, name: str, reason: str) -> str:
    text = await cluster.kubectl("get", "workloads", "-n", "openrl", "--no-headers")
    return next((line for line in text.splitlines() if line.startswith(f"{name} ") and reason in line), "")
