"""What goes wrong on a cluster: B1, B4, F3, F4 with K3, K4 and K6."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from typing import Any

from kube.kube_helpers import H100, Cluster
from openrl_common.events import WorkerExited
from openrl_common.records import WorkloadPhase
from openrl_launcher.kubernetes.manifests import ASSIGNMENT

Make = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]


def steered(**annotations: str) -> dict[str, object]:
    """A pod template that steers the fake kubelet."""
    return {
        "metadata": {"annotations": {f"test.openrl.io/{key.replace('_', '-')}": v for key, v in annotations.items()}}
    }


async def test_K3_F4_an_exit_code_is_reported_and_the_container_restarted_on_its_seat(cluster: Cluster) -> None:
    await cluster.add_nodes(("n1", 2, H100, ()))
    exits = cluster.follow(WorkerExited)
    async with cluster.launcher(template=steered(exit_code="7", run_for="5s")):
        await cluster.submit("crashing")
        await cluster.until(lambda: len(exits) >= 2)
        assert {(event.exit_code, event.will_restart) for event in exits} == {(7, True)}
        await cluster.ready("crashing")
        assignment = (await cluster.workload("crashing")).assignment
        await cluster.until(lambda: cluster.workers.went_live.count(assignment) == 2)  # the gate was opened once more
        assert {event.assignment for event in exits} >= {assignment}, "it kept its seat"


async def test_F4_a_worker_that_fails_too_often_fails_its_job_and_frees_the_device(cluster: Cluster) -> None:
    await cluster.add_nodes(("n1", 2, H100, ()))
    async with cluster.launcher(template=steered(exit_code="3", exits="9", run_for="2s"), restarts_max=1):
        await cluster.submit("hopeless")
        await cluster.until(lambda: cluster.job_message("hopeless"))
        assert "exited with code 3" in await cluster.job_message("hopeless")
        await cluster.nothing_is_left()


async def test_F4_K4_an_evicted_pod_loses_its_device_and_its_worker_gets_another_seat(cluster: Cluster) -> None:
    await cluster.add_nodes(("n1", 2, H100, ()))
    async with cluster.launcher() as launcher:
        launcher.pods.template = steered(evict="true", run_for="1s")
        await cluster.submit("evicted")
        first = await cluster.until(lambda: launched(cluster, "evicted"))
        launcher.pods.template = {}
        await cluster.until(lambda: another_assignment(cluster, "evicted", first))
        await cluster.ready("evicted")


async def test_F2_P13_a_pod_that_hangs_is_given_up_and_its_node_avoided(make_cluster: Make) -> None:
    """Scheduled and never started, for longer than the wedge grace: the next try is on another node."""
    async with make_cluster(WEDGE_GRACE="10s") as cluster, cluster.launcher() as launcher:
        await cluster.add_nodes(("wedged", 4, H100, ()))
        launcher.pods.template = steered(hang="true")
        await cluster.submit("stuck")
        await cluster.until(lambda: launched(cluster, "stuck"))
        launcher.pods.template = {}
        await cluster.add_nodes(("healthy", 4, H100, ()))
        await cluster.ready("stuck", within_s=90)
        assert (await cluster.claim_of("stuck")).node == "healthy"
        avoided = {each.node for each in (await cluster.workload("stuck")).avoid}
        assert "wedged" in avoided


async def test_B4_a_slow_stop_gives_its_device_to_nobody_before_it_is_gone(cluster: Cluster) -> None:
    await cluster.add_nodes(("trainers", 1, H100, ("trainer",)), ("samplers", 4, H100, ("sampler",)))
    async with cluster.launcher(template=steered(stop_delay="4s")):
        await cluster.submit("slow", exclusive=True)
        await cluster.ready("slow")
        slow = (await cluster.workload("slow")).assignment
        await cluster.submit("next", exclusive=True)
        await cluster.cancel("slow")
        while await pod_is_there(cluster, slow):
            assert not await cluster.is_ready("next")
            await asyncio.sleep(0.1)
        await cluster.until(lambda: cluster.is_ready("next"))


async def test_K4_a_claim_deleted_by_hand_is_noticed_and_its_workers_get_another(cluster: Cluster) -> None:
    await cluster.add_nodes(("n1", 4, H100, ()))
    async with cluster.launcher():
        await cluster.submit("robbed")
        await cluster.ready("robbed")
        before = await cluster.workload("robbed")
        await cluster.kubectl("delete", "resourceclaim", before.claim, "-n", "openrl", "--wait=false")
        await cluster.until(lambda: another_assignment(cluster, "robbed", before.assignment))
        await cluster.ready("robbed")
        assert (await cluster.workload("robbed")).claim != before.claim
        await cluster.cancel("robbed")
        await cluster.nothing_is_left()


async def test_F3_a_lost_node_gives_its_seats_back_and_may_return(cluster: Cluster) -> None:
    await cluster.add_nodes(("dying", 4, H100, ()))
    async with cluster.launcher():
        await cluster.submit("bereft")
        await cluster.ready("bereft")
        before = await cluster.workload("bereft")
        await cluster.add_nodes(("other", 4, H100, ()))
        await cluster.cut_off("dying")
        cluster.workers.silent.update(cluster.workers.went_live)
        await cluster.until(lambda: cluster.node_is("dying", lost=True), within_s=30)
        lost_at = time.monotonic()
        await cluster.until(lambda: seat_is_lost(cluster, "bereft", before.assignment))
        assert time.monotonic() - lost_at < 12.0
        await cluster.until(lambda: another_assignment(cluster, "bereft", before.assignment))
        await cluster.ready("bereft")
        assert (await cluster.claim_of("bereft")).node == "other"
        await cluster.bring_back("dying")
        await cluster.until(lambda: cluster.node_is("dying", lost=False, suspect=False), within_s=30)
        await cluster.until(lambda: only_current_pods(cluster), within_s=30)


async def test_F3_a_node_that_only_stopped_answering_for_a_while_keeps_its_workers(cluster: Cluster) -> None:
    """Its kubelet is cut off, its workers renew their leases: suspect, not lost."""
    await cluster.add_nodes(("mute", 4, H100, ()))
    async with cluster.launcher():
        await cluster.submit("alive")
        await cluster.ready("alive")
        before = await cluster.workload("alive")
        await cluster.cut_off("mute")
        await cluster.until(lambda: cluster.node_is("mute", suspect=True), within_s=30)
        await asyncio.sleep(8.0)
        assert (await cluster.workload("alive")).assignment == before.assignment
        await cluster.bring_back("mute")
        await cluster.until(lambda: cluster.node_is("mute", suspect=False), within_s=30)
        assert (await cluster.workload("alive")).assignment == before.assignment


async def test_K6_an_api_server_that_restarts_costs_a_list_at_most(cluster: Cluster) -> None:
    """K6: whether a watch may go on from where it was (or gets 410: test_watch) is the server's choice."""
    await cluster.add_nodes(("n1", 4, H100, ()))
    async with cluster.launcher():
        await cluster.submit("before")
        await cluster.ready("before")
        await asyncio.to_thread(cluster.plane.kill, "kube-apiserver")
        await cluster.submit("meanwhile")
        await asyncio.sleep(1.0)
        await asyncio.to_thread(cluster.plane.start_program, "kube-apiserver")
        await asyncio.to_thread(cluster.plane.await_api)
        await cluster.ready("before", "meanwhile", within_s=120)


async def test_B1_K3_a_launcher_killed_between_claim_and_pod_is_finished_by_the_next(cluster: Cluster) -> None:
    await cluster.add_nodes(("n1", 4, H100, ()))
    async with cluster.launcher() as launcher:
        made: list[str] = []
        ensure = launcher.pods.ensure

        async def dies_first(plan: object) -> object:
            made.append("claim")
            await asyncio.sleep(3600)
            return await ensure(plan)  # type: ignore[arg-type]

        launcher.pods.ensure = dies_first  # type: ignore[method-assign, assignment]
        await cluster.submit("halfway")
        await cluster.until(lambda: len(made) == 2)
        assert len(await cluster.get("resourceclaims")) == 2
        assert await cluster.get("pods") == []
    async with cluster.launcher():
        await cluster.ready("halfway")
        assert len(await cluster.get("pods")) == 2
        assert len(await cluster.get("resourceclaims")) == 2


async def test_B1_a_restarted_launcher_adopts_what_runs_and_stops_what_no_seat_backs(cluster: Cluster) -> None:
    await cluster.add_nodes(("n1", 4, H100, ()))
    async with cluster.launcher():
        await cluster.submit("stays")
        await cluster.submit("leaves")
        await cluster.ready("stays", "leaves")
        await cluster.until(lambda: pod_count(cluster, 4))
        stays = {pod["metadata"]["uid"] for pod in await cluster.get("pods") if "stays" in pod["metadata"]["name"]}
    await cluster.cancel("leaves")
    async with cluster.launcher():
        await cluster.until(lambda: pod_count(cluster, 2))
        left = {pod["metadata"]["uid"] for pod in await cluster.get("pods")}
        assert left == stays, "not started anew"
        assert await cluster.is_ready("stays")
        assert len(set(cluster.workers.went_live)) == len(cluster.workers.went_live) == 4


async def test_B1_of_two_launchers_one_acts_and_the_other_takes_over(cluster: Cluster) -> None:
    await cluster.add_nodes(("n1", 4, H100, ()))
    async with contextlib.AsyncExitStack() as second_stack:
        async with cluster.launcher() as first:
            second = await second_stack.enter_async_context(cluster.launcher(wait=False))
            await cluster.submit("one")
            await cluster.ready("one")
            assert (first.duty.held, second.duty.held) == (True, False)
            assert len(await cluster.get("pods")) == 2
        await cluster.until(lambda: second.ready, within_s=30)
        await cluster.submit("two")
        await cluster.ready("one", "two")
        assert len(cluster.workers.went_live) == 4, "nobody was started twice"


async def test_K3_K4_after_rounds_of_random_deletion_nothing_is_left(make_cluster: Make) -> None:
    """24 workers, five rounds of random deletion of jobs, pods and claims; at the end no claim and no pod."""
    chance = random.Random(7)
    async with make_cluster(MAX_SEATS_PER_CLAIM=2) as cluster, cluster.launcher():
        await cluster.add_nodes(("n1", 8, H100, ()), ("n2", 8, H100, ()))
        serial = 0
        alive: list[str] = []
        for _ in range(5):
            while len(alive) < 12:
                alive.append(f"r{serial}")
                serial += 1
                await cluster.submit(alive[-1], exclusive=chance.random() < 0.2)
            await asyncio.sleep(chance.uniform(0.5, 2.0))
            for pod in chance.sample(await at_least(cluster, "pods", 2), k=2):
                await cluster.kubectl(
                    "delete", "pod", pod["metadata"]["name"], "-n", "openrl", "--wait=false", "--ignore-not-found"
                )
            for claim in chance.sample(await at_least(cluster, "resourceclaims", 1), k=1):
                name = claim["metadata"]["name"]
                await cluster.kubectl(
                    "delete", "resourceclaim", name, "-n", "openrl", "--wait=false", "--ignore-not-found"
                )
            for name in chance.sample(alive, k=6):
                alive.remove(name)
                await cluster.until(lambda n=name: cluster.phase(n))
                await cluster.cancel(name)
        await cluster.ready(*alive, within_s=90)
        for name in alive:
            await cluster.cancel(name)
        await cluster.nothing_is_left(within_s=60)


async def launched(cluster: Cluster, name: str) -> str:
    """The assignment once it has its pod, made as the template was then; "" until then.

    The first booked may have moved to its partner's claim, and its record has a node before its pod is made.
    """
    if await cluster.phase(name) is None:
        return ""
    assignment = (await cluster.workload(name)).assignment
    record = await cluster.bus.store.workers.get(assignment) if assignment else None
    return assignment if record is not None and record.value.started_at > 0 else ""


async def seat_is_lost(cluster: Cluster, name: str, assignment: str) -> bool:
    return (await cluster.workload(name)).assignment != assignment


async def another_assignment(cluster: Cluster, name: str, before: str) -> bool:
    workload = await cluster.workload(name)
    return workload.assignment not in ("", before) and workload.phase is not WorkloadPhase.PENDING


async def pod_is_there(cluster: Cluster, assignment: str) -> bool:
    return any(pod["metadata"]["labels"].get(ASSIGNMENT) == assignment for pod in await cluster.get("pods"))


async def at_least(cluster: Cluster, kind: str, count: int) -> list[dict[str, Any]]:
    async def enough() -> list[dict[str, Any]]:
        found = await cluster.get(kind)
        return found if len(found) >= count else []

    found: list[dict[str, Any]] = await cluster.until(enough)
    return found


async def pod_count(cluster: Cluster, count: int) -> bool:
    return len(await cluster.get("pods")) == count


async def only_current_pods(cluster: Cluster) -> bool:
    named = {seat.assignment for seat in (await cluster.seats()).values()}
    return {pod["metadata"]["labels"].get(ASSIGNMENT) for pod in await cluster.get("pods")} == named
