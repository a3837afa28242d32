"""``openrl bench kube``: OpenRL's Kubernetes backend on a real control plane with fake kubelets, beside plain pods.

    baseline   plain pods with a claim template each, through the same kube-scheduler: what a user does without OpenRL;
               made as fast as they come to run, which is faster than all at once
    founders   half of the workers, submitted at once: each founds a claim; submitted → its pod runs
    joiners    the other half, when the first half runs: each joins a claim

Placement, ledger and launcher are the real processes, NATS is on a disk, the launcher runs under the role of
``deploy/base``. Both are measured in one run on one control plane; only their ratio means something elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from openrl_client.bench.control_plane import ControlPlane, device_class, missing_assets
from openrl_client.bench.figures import machine_busy_s
from openrl_client.bench.kube_figures import (
    Cpu,
    KubeReport,
    Part,
    Writes,
    requests_by_kind,
    requests_sent,
    settled_requests,
)
from openrl_client.bench.kube_load import PlayedProcesses, Pods, connected, make_nodes
from openrl_client.bench.machine import StorePlace, describe, store_place
from openrl_client.bench.plain_pods import Body, plain_pods
from openrl_client.bench.seats import MODEL_CONFIG
from openrl_client.errors import Rejected, TimedOut
from openrl_client.home import Progress
from openrl_client.local_system import LocalSystem
from openrl_common.bus import Bus
from openrl_common.events import JobSubmitted
from openrl_common.quantities import GIB
from openrl_common.queries import NODES, ListQuery, NodesAnswer
from openrl_common.records import ClaimState, JobKind, JobSpec, Overrides

T = TypeVar("T")

DEVICES_PER_NODE = 8
DEVICE_BYTES = int(79.65 * GIB)
HOST_BYTES = 2048 * GIB
DRIVER = "gpu.example.com"
SEAT_LIMIT = 2
_BASE = Path(__file__).resolve().parents[3] / "deploy" / "base"
_SEEN_S = 120.0
_SUBMIT_AT_ONCE = 32
_TICK_S = 10.0
_SHARED = "openrl-shared"
_ARGUMENTS = {
    # the heartbeats of a thousand kubelets are no part of what is compared, and fall due by time, not by pod
    "kwok": ["--node-lease-duration-seconds=0"],
    "kube-controller-manager": ["--node-monitor-grace-period=4h"],
}


@dataclass(frozen=True)
class Plan:
    num_nodes: int
    num_workers: int
    store: Path | None = None
    plain: Body = "bare"
    plain_waiting_max: int = 128

    def check(self) -> None:
        """Raises Rejected, naming what to change."""
        if why := missing_assets():
            raise Rejected(why, code="usage")
        if not (_BASE / "rbac.yaml").exists():
            raise Rejected("openrl bench kube runs from a checkout of the repository: deploy/base is not there")
        if self.num_workers % 4:
            raise Rejected(
                f"--workers {self.num_workers} is no multiple of 4: jobs have two, half of them join", code="usage"
            )
        if self.num_workers // 2 > self.num_nodes * DEVICES_PER_NODE:
            raise Rejected(f"--workers {self.num_workers} found more claims than --nodes have devices", code="usage")


@dataclass(frozen=True)
class _Setting:
    """Where all of it runs."""

    plane: ControlPlane
    api: Any
    plan: Plan
    scratch: Path
    say: Progress


async def measure(plan: Plan, *, progress: Progress) -> KubeReport:
    """Run it in a new directory of the store, which is removed afterwards.

    Raises:
        Rejected: the plan cannot be run. TimedOut: pods stopped coming. Unreachable: a program did not become ready.
    """
    plan.check()
    place = store_place(plan.store)
    parent = Path(place.path)
    parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def say(line: str) -> None:
        progress(f"[{time.monotonic() - began:5.0f} s] {line}")

    with tempfile.TemporaryDirectory(prefix="openrl-bench-", dir=parent) as scratch:
        async with _control_plane(Path(scratch) / "control-plane") as plane:
            await asyncio.to_thread(_install, plane)
            async with connected(plane.admin_kubeconfig) as api:
                setting = _Setting(plane, api, plan, Path(scratch), say)
                say(f"control plane up; making {plan.num_nodes} nodes of {DEVICES_PER_NODE} devices")
                await _make_nodes(plane, api, plan)
                baseline = await _baseline(setting)
                return await _openrl(setting, place, baseline)


@contextlib.asynccontextmanager
async def _control_plane(directory: Path) -> AsyncIterator[ControlPlane]:
    plane = ControlPlane(directory, arguments=_ARGUMENTS)
    try:
        await asyncio.to_thread(plane.start)
        yield plane
    finally:
        plane.stop()


def _install(plane: ControlPlane) -> None:
    for name in ("namespace", "crds", "rbac"):
        plane.kubectl("apply", "--server-side", "-f", str(_BASE / f"{name}.yaml"))
    plane.apply(device_class(DRIVER), *_volume("openrl"), *_volume("default"))


def _volume(namespace: str) -> list[dict[str, Any]]:
    """What all workers of a namespace mount, bound."""
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    claim = {"name": _SHARED, "namespace": namespace}
    return [
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"{_SHARED}-{namespace}"},
            "spec": {
                "capacity": size, "accessModes": modes, "hostPath": {"path": "/nowhere"}, "claimRef": claim
            },
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": claim,
            "spec": {
                "accessModes": modes, "storageClassName": "", "volumeName": f"{_SHARED}-{namespace}",
                "resources": {"requests": size},
            },
        },
    ]  # fmt: skip


async def _make_nodes(plane: ControlPlane, api: Any, plan: Plan) -> None:
    await make_nodes(
        api, plan.num_nodes, driver=DRIVER, devices=DEVICES_PER_NODE, device_bytes=DEVICE_BYTES, host_bytes=HOST_BYTES
    )
    await asyncio.to_thread(plane.kubectl, "wait", "nodes", "--all", "--for=condition=Ready", "--timeout=170s")


async def _baseline(setting: _Setting) -> Part:
    plane, count = setting.plane, setting.plan.num_workers
    pods = Pods(setting.api, "default")
    following = asyncio.create_task(pods.follow())
    writes = await asyncio.to_thread(Writes, plane)
    cpu = Cpu({**plane.pids, "bench": os.getpid()})
    setting.say(f"baseline: {count} plain pods, {setting.plan.plain}")
    try:
        async with _told(setting.say, "baseline", pods, count):
            seconds = await _beside(
                following,
                plain_pods(
                    setting.api, pods, count=count, at_once=32, waiting_max=setting.plan.plain_waiting_max,
                    device_class=DRIVER, shared_volume=_SHARED, body=setting.plan.plain,
                ),
            )  # fmt: skip
        part = Part(count, seconds, seconds, cpu.ms_each(count), await asyncio.to_thread(writes.each, count))
        setting.say(f"baseline: {count / seconds:.1f} plain pods/s; deleting them")
        await asyncio.to_thread(plane.kubectl, "delete", "pods", "-n", "default", "--all", "--wait=false")
        await _beside(following, pods.until_gone())
        await asyncio.to_thread(
            plane.kubectl, "wait", "resourceclaims", "-n", "default", "--all", "--for=delete", "--timeout=170s"
        )
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return part


@contextlib.asynccontextmanager
async def _told(say: Progress, name: str, pods: Pods, wanted: int) -> AsyncIterator[None]:
    """Say now and then how far it is."""
    before = len(pods.running)

    async def tell() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            say(f"{name}: {len(pods.running) - before} of {wanted} run")

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


async def _beside(background: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """The answer of ``work``; an error of ``background`` ends it."""
    task = asyncio.create_task(work)
    await asyncio.wait({background, task}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        background.result()
        raise TimedOut("what runs beside has ended")
    return task.result()


async def _openrl(setting: _Setting, place: StorePlace, baseline: Part) -> KubeReport:
    kubeconfig = await asyncio.to_thread(setting.plane.kubeconfig_of, "openrl", "openrl-launcher")
    environment = {
        "OPEN_RL_MAX_SEATS_PER_CLAIM": str(SEAT_LIMIT),
        "OPEN_RL_PLACEMENT_TIMEOUT": "0",
        "OPEN_RL_VERDICT_WAIT": "2m",  # as in deploy/base
        "OPEN_RL_TRAINER_HOST_BASE": "1GiB",
        "OPEN_RL_SAMPLER_HOST_BASE": "1GiB",
        "OPEN_RL_BACKEND": "kubernetes",
        "OPEN_RL_KUBECONFIG": str(kubeconfig),
        "OPEN_RL_DRA_DRIVER": DRIVER,
        "OPEN_RL_DEVICE_CLASS": DRIVER,
        "OPEN_RL_LOG_LEVEL": "warning",
    }
    async with LocalSystem(setting.scratch / "home", environment=environment) as system:
        bus = await Bus.connect(system.nats_url, name="openrl-bench")
        try:
            await _fleet_is_seen(bus, setting.plan.num_nodes)
            parts, other_cores, sent, late_ms = await _waves(setting, system, bus)
            claims = [entry.value for entry in (await bus.store.ledger_claims.list()).values()]
        finally:
            await bus.close()
        by_kind = requests_by_kind(system.health_ports["launcher"])
        rss = psutil.Process(system.pids["launcher"]).memory_info().rss
        restarts = sum(system.restarts.values())
    if restarts:
        raise Rejected(f"a service ended {restarts} times while it was measured: the figures mean nothing")
    founders, joiners = parts
    count, baseline_per_s = setting.plan.num_workers, baseline.count / baseline.placed_s
    placed_per_s = count / (founders.placed_s + joiners.placed_s)
    ours_ms = (sum(founders.cpu_ms.values()) + sum(joiners.cpu_ms.values())) / 2
    return KubeReport(
        nodes=setting.plan.num_nodes,
        plain=setting.plan.plain,
        plain_waiting_max=setting.plan.plain_waiting_max,
        workers=count,
        joined=sum(len(claim.entries) - 1 for claim in claims if claim.state is ClaimState.ALLOCATED),
        placed_per_s=round(placed_per_s, 1),
        founders_per_s=round(founders.count / founders.placed_s, 1),
        joiners_per_s=round(joiners.count / joiners.placed_s, 1),
        ready_per_s=round(count / (founders.ready_s + joiners.ready_s), 1),
        api_requests_per_worker=round(sent / count, 2),
        api_requests=by_kind,
        api_writes_per_worker={"plain": baseline.writes, "founders": founders.writes, "joiners": joiners.writes},
        launcher_rss_bytes=rss,
        baseline_pods_per_s=round(baseline_per_s, 1),
        ratio=round(placed_per_s / baseline_per_s, 2),
        cpu_ms_per_worker={
            "plain": baseline.cpu_ms, "founders": founders.cpu_ms, "joiners": joiners.cpu_ms, "afterwards": late_ms
        },
        cpu_ratio=round(sum(baseline.cpu_ms.values()) / ours_ms, 2),
        other_cores=other_cores,
        store=place,
        machine=describe(),
    )  # fmt: skip


async def _waves(setting: _Setting, system: LocalSystem, bus: Bus) -> tuple[list[Part], float, int, dict[str, float]]:
    """Founders, then joiners; cores that others kept busy; requests with the mirror's late ones; the CPU of these."""
    model = setting.scratch / "model"
    model.mkdir()
    (model / "config.json").write_bytes(msgspec.json.encode(MODEL_CONFIG))
    pods = Pods(setting.api, "openrl")
    processes = PlayedProcesses(bus, pods)
    background = asyncio.create_task(_together(pods.follow(), processes.play()))
    port, half = system.health_ports["launcher"], setting.plan.num_workers // 4
    sent_before = requests_sent(port)
    parts = []
    try:
        busy_s, began = machine_busy_s(), time.monotonic()
        for name, first in (("founders", 0), ("joiners", half)):
            setting.say(f"{name}: {half * 2} workers")
            writes = await asyncio.to_thread(Writes, setting.plane)
            cpu = Cpu({**setting.plane.pids, **system.pids, "bench": os.getpid()})
            async with _told(setting.say, name, pods, half * 2):
                placed_s, ready_s = await _wave(bus, model, pods, processes, background, first, half)
            cpu_ms = cpu.ms_each(half * 2)
            parts.append(Part(half * 2, placed_s, ready_s, cpu_ms, await asyncio.to_thread(writes.each, half * 2)))
            setting.say(f"{name}: {half * 2 / placed_s:.1f} pods/s")
        own_s = sum(sum(part.cpu_ms.values()) * part.count for part in parts) / 1000
        other_cores = max(0.0, machine_busy_s() - busy_s - own_s) / (time.monotonic() - began)
        setting.say("waiting for the mirror's last writes")
        late = Cpu(setting.plane.pids | system.pids)
        sent = await settled_requests(port) - sent_before
        return parts, round(other_cores, 2), sent, late.ms_each(setting.plan.num_workers)
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)


async def _wave(
    bus: Bus,
    model: Path,
    pods: Pods,
    processes: PlayedProcesses,
    background: asyncio.Task[None],
    first: int,
    num_jobs: int,
) -> tuple[float, float]:
    """Submit jobs of two workers; seconds until all their pods run, and until all are ready."""
    running, ready = len(pods.running) + 2 * num_jobs, len(processes.ready) + 2 * num_jobs
    gate = asyncio.Semaphore(_SUBMIT_AT_ONCE)

    async def submit(index: int) -> None:
        spec = JobSpec(
            name=f"j{index}", kind=JobKind.FFT, base_model=str(model), exclusive=False,
            overrides=Overrides(trainer_device_gib=30, sampler_device_gib=30, trainer_host_gib=1, sampler_host_gib=1),
        )  # fmt: skip
        async with gate:
            await bus.publish(JobSubmitted(tenant="bench", job=spec.name, submission=uuid.uuid4().hex, spec=spec))

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for index in range(first, first + num_jobs):
            tasks.create_task(submit(index))
        await _beside(background, pods.until_running(running))
    placed_s = time.monotonic() - began
    await _beside(background, processes.until_ready(ready))
    return placed_s, time.monotonic() - began


async def _together(*parts: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for part in parts:
            tasks.create_task(part)


async def _fleet_is_seen(bus: Bus, num_nodes: int) -> None:
    async with asyncio.timeout(_SEEN_S):
        while True:
            answer = await bus.request(NODES, ListQuery(), NodesAnswer, timeout_s=10.0)
            if len(answer.nodes) >= num_nodes:
                return
            await asyncio.sleep(0.2)
