"""``openrl bench kube``: OpenRL's Kubernetes backend on a real control plane with fake kubelets, beside plain pods.

    baseline   plain pods with a claim template each, through the same kube-scheduler: what a user does without OpenRL
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
import urllib.request
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from openrl_client.bench.control_plane import ControlPlane, device_class, missing_assets
from openrl_client.bench.figures import cpu_seconds, machine_busy_s
from openrl_client.bench.kube_load import PlayedProcesses, Pods, connected, node_objects, plain_pods
from openrl_client.bench.machine import Machine, StorePlace, describe, store_place
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
_SETTLE_S = 3.0
_SUBMIT_AT_ONCE = 32


@dataclass(frozen=True)
class Plan:
    num_nodes: int
    num_workers: int
    store: Path | None = None

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


class KubeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``--json``.

    Attributes:
        placed_per_s: workers over the seconds from submission until their pods run, both halves together.
        founders_per_s, joiners_per_s: the same of each half.
        joined: workers that really joined another's claim.
        ready_per_s: until their processes have said ready and placement has heard it.
        api_requests_per_worker: the launcher's, mirror writes included, each watch counted once.
        baseline_pods_per_s: plain pods, created → running. ``ratio``: placed_per_s over it.
        other_cores: cores that processes outside this benchmark kept busy meanwhile.
    """

    nodes: int
    workers: int
    joined: int
    placed_per_s: float
    founders_per_s: float
    joiners_per_s: float
    ready_per_s: float
    api_requests_per_worker: float
    api_requests: dict[str, int]
    launcher_rss_bytes: int
    baseline_pods_per_s: float
    ratio: float
    cpu_s: dict[str, float]
    baseline_cpu_s: dict[str, float]
    other_cores: float
    store: StorePlace
    machine: Machine


@dataclass(frozen=True)
class _Wave:
    placed_s: float
    ready_s: float


async def measure(plan: Plan, *, progress: Progress) -> KubeReport:
    """Run it in a new directory of the store, which is removed afterwards.

    Raises:
        Rejected: the plan cannot be run. TimedOut: pods stopped coming. Unreachable: a program did not become ready.
    """
    plan.check()
    place = store_place(plan.store)
    parent = Path(place.path)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="openrl-bench-", dir=parent) as scratch:
        arguments = {"kwok": ["--node-lease-duration-seconds=120"]}
        async with _control_plane(Path(scratch) / "control-plane", arguments) as plane:
            await asyncio.to_thread(_install, plane, plan)
            progress(f"control plane: {plan.num_nodes} nodes of {DEVICES_PER_NODE} devices")
            async with connected(plane.admin_kubeconfig) as api:
                baseline_per_s, baseline_cpu = await _baseline(plane, api, plan, progress)
                return await _openrl(plane, api, plan, Path(scratch), place, baseline_per_s, baseline_cpu, progress)


@contextlib.asynccontextmanager
async def _control_plane(directory: Path, arguments: dict[str, list[str]]) -> AsyncIterator[ControlPlane]:
    plane = ControlPlane(directory, arguments=arguments)
    try:
        await asyncio.to_thread(plane.start)
        yield plane
    finally:
        plane.stop()


def _install(plane: ControlPlane, plan: Plan) -> None:
    for name in ("namespace", "crds", "rbac"):
        plane.kubectl("apply", "--server-side", "-f", str(_BASE / f"{name}.yaml"))
    size = {"storage": "1Gi"}
    meta = {"name": "openrl-shared", "namespace": "openrl"}
    plane.apply(
        device_class(DRIVER),
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "openrl-shared"},
            "spec": {
                "capacity": size, "accessModes": ["ReadWriteMany"], "hostPath": {"path": "/nowhere"}, "claimRef": meta
            },
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta,
            "spec": {
                "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": "openrl-shared",
                "resources": {"requests": size},
            },
        },
    )  # fmt: skip
    nodes = node_objects(
        plan.num_nodes, driver=DRIVER, devices=DEVICES_PER_NODE, device_bytes=DEVICE_BYTES, host_bytes=HOST_BYTES
    )
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=nodes)
    plane.kubectl("wait", "nodes", "--all", "--for=condition=Ready", "--timeout=120s")


async def _baseline(plane: ControlPlane, api: Any, plan: Plan, progress: Progress) -> tuple[float, dict[str, float]]:
    pods = Pods(api, "default")
    following = asyncio.create_task(pods.follow())
    before = {name: cpu_seconds(pid) for name, pid in plane.pids.items()}
    try:
        seconds = await _beside(
            following, plain_pods(api, pods, count=plan.num_workers, at_once=32, device_class=DRIVER)
        )
        cpu = {name: round(cpu_seconds(pid) - before[name], 2) for name, pid in plane.pids.items()}
        progress(f"baseline: {plan.num_workers / seconds:.1f} plain pods/s")
        await asyncio.to_thread(plane.kubectl, "delete", "pods", "-n", "default", "--all", "--wait=false")
        await _beside(following, pods.until_gone())
        await asyncio.to_thread(
            plane.kubectl, "wait", "resourceclaims", "-n", "default", "--all", "--for=delete", "--timeout=120s"
        )
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return plan.num_workers / seconds, cpu


async def _beside(background: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """The answer of ``work``; an error of ``background`` ends it."""
    task = asyncio.create_task(work)
    await asyncio.wait({background, task}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        background.result()
        raise TimedOut("what runs beside has ended")
    return task.result()


async def _openrl(
    plane: ControlPlane,
    api: Any,
    plan: Plan,
    scratch: Path,
    place: StorePlace,
    baseline_per_s: float,
    baseline_cpu: dict[str, float],
    progress: Progress,
) -> KubeReport:
    kubeconfig = await asyncio.to_thread(plane.kubeconfig_of, "openrl", "openrl-launcher")
    home, model = scratch / "home", scratch / "model"
    model.mkdir()
    (model / "config.json").write_bytes(msgspec.json.encode(MODEL_CONFIG))
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
    async with LocalSystem(home, environment=environment) as system:
        bus = await Bus.connect(system.nats_url, name="openrl-bench")
        pods = Pods(api, "openrl")
        processes = PlayedProcesses(bus, pods)
        background = asyncio.create_task(_together(pods.follow(), processes.play()))
        try:
            await _fleet_is_seen(bus, plan.num_nodes)
            pids = {**plane.pids, **system.pids, "bench": os.getpid()}
            before, busy_s, began = {n: cpu_seconds(p) for n, p in pids.items()}, machine_busy_s(), time.monotonic()
            sent_before = _metric(system.health_ports["launcher"], "openrl_launcher_api_requests ")
            half = plan.num_workers // 4
            waves = []
            for name, first in (("founders", 0), ("joiners", half)):
                waves.append(await _wave(bus, model, pods, processes, background, first, half))
                progress(f"{name}: {half * 2 / waves[-1].placed_s:.1f} pods/s")
            seconds = time.monotonic() - began
            cpu = {name: round(cpu_seconds(pid) - before[name], 2) for name, pid in pids.items()}
            others_s = machine_busy_s() - busy_s - sum(cpu.values())
            sent = await _settled(system.health_ports["launcher"]) - sent_before
            by_kind = _requests(system.health_ports["launcher"])
            rss = psutil.Process(system.pids["launcher"]).memory_info().rss
            claims = [
                entry.value
                for entry in (await bus.store.ledger_claims.list()).values()
                if entry.value.state is ClaimState.ALLOCATED
            ]
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            await bus.close()
        restarts = sum(system.restarts.values())
    if restarts:
        raise Rejected(f"a service ended {restarts} times while it was measured: the figures mean nothing")
    placed_per_s = plan.num_workers / sum(wave.placed_s for wave in waves)
    return KubeReport(
        nodes=plan.num_nodes,
        workers=plan.num_workers,
        joined=sum(len(claim.entries) - 1 for claim in claims),
        placed_per_s=round(placed_per_s, 1),
        founders_per_s=round(half * 2 / waves[0].placed_s, 1),
        joiners_per_s=round(half * 2 / waves[1].placed_s, 1),
        ready_per_s=round(plan.num_workers / sum(wave.ready_s for wave in waves), 1),
        api_requests_per_worker=round(sent / plan.num_workers, 2),
        api_requests=by_kind,
        launcher_rss_bytes=rss,
        baseline_pods_per_s=round(baseline_per_s, 1),
        ratio=round(placed_per_s / baseline_per_s, 2),
        cpu_s=cpu,
        baseline_cpu_s=baseline_cpu,
        other_cores=round(max(0.0, others_s) / seconds, 2),
        store=place,
        machine=describe(),
    )


async def _wave(
    bus: Bus,
    model: Path,
    pods: Pods,
    processes: PlayedProcesses,
    background: asyncio.Task[None],
    first: int,
    num_jobs: int,
) -> _Wave:
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
    while len(processes.ready) < ready:
        await asyncio.sleep(0.02)
        if background.done():
            background.result()
    return _Wave(placed_s, time.monotonic() - began)


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


async def _settled(port: int) -> int:
    """Requests once no more are sent: the mirror's writes come later, and are counted."""
    sent = -1
    while (now := await asyncio.to_thread(_metric, port, "openrl_launcher_api_requests ")) != sent:
        sent = now
        await asyncio.sleep(_SETTLE_S)
    return sent


def _metrics(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        lines: list[str] = answer.read().decode().splitlines()
        return lines


def _metric(port: int, name: str) -> int:
    for line in _metrics(port):
        if line.startswith(name):
            return int(float(line.split()[1]))
    raise TimedOut(f"the launcher's /metrics do not have {name}")


def _requests(port: int) -> dict[str, int]:
    """Requests by verb and resource."""
    prefix = 'openrl_launcher_api_requests_by{request="'
    lines = [line.removeprefix(prefix) for line in _metrics(port) if line.startswith(prefix)]
    return {line.split('"')[0]: int(float(line.split()[-1])) for line in lines}
