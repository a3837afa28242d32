"""A whole OpenRL on a real control plane: placement and ledger as processes, the launcher here, workers played.

The launcher runs under the service account of ``deploy/base`` with RBAC on, so that a verb it lacks fails a test. Pods
run on fake kubelets, so no container starts: ``PlayedWorkers`` does what a worker process does with its lease and its
ready record while its pod runs, and nothing when it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from openrl_client.bench.control_plane import ControlPlane, fake_node
from openrl_client.bench.seats import MODEL_CONFIG
from openrl_client.local_system import LocalSystem
from openrl_common.bus import Bus
from openrl_common.errors import Conflict, OpenRLError
from openrl_common.events import JobCancelled, JobSubmitted, SeatRequested
from openrl_common.liveness import RENEW_S
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimRecord,
    ClaimState,
    JobKind,
    JobPhase,
    JobSpec,
    LeaseRecord,
    LeaseState,
    Overrides,
    ReadyRecord,
    Role,
    SeatRecord,
    SeatState,
    Shape,
    Tier,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_launcher.kubernetes.api import KubeApi
from openrl_launcher.kubernetes.cluster import ClusterLauncher
from openrl_launcher.kubernetes.manifests import ASSIGNMENT, WORKLOAD
from openrl_launcher.kubernetes.objects import Pod
from openrl_launcher.kubernetes.settings import KubernetesSettings
from openrl_launcher.kubernetes.watch import Informer

T = TypeVar("T")

NAMESPACE = "openrl"
DRIVER = "gpu.example.com"
TENANT = "team"
H100 = int(79.65 * GIB)
L4 = int(22.5 * GIB)
SETTINGS = {
    "OPEN_RL_TRAINER_HOST_BASE": "1GiB",
    "OPEN_RL_SAMPLER_HOST_BASE": "1GiB",
    "OPEN_RL_PLACEMENT_TIMEOUT": "0",
    "OPEN_RL_PASS_EVERY": "2s",
    "OPEN_RL_VERDICT_WAIT": "2m",  # as in deploy/base
    "OPEN_RL_JANITOR_EVERY": "2s",
}


class PlayedWorkers:
    """What worker processes do on the bus, for as long as their pods' containers run."""

    def __init__(self, bus: Bus, api: KubeApi) -> None:
        self._store = bus.store
        self._pods = Informer(
            api, f"/api/v1/namespaces/{NAMESPACE}/pods", Pod, on_change=lambda key, pod: self._on_pod(key, pod)
        )
        self._running: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self.went_live: list[str] = []
        """Assignments, once per start that passed the gate."""
        self.silent: set[str] = set()
        """Assignments whose leases are not renewed any more, as on a node that is cut off."""

    async def run(self) -> None:
        try:
            await self._pods.run()
        finally:
            for _, task in self._running.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in self._running.values()), return_exceptions=True)

    def _on_pod(self, key: str, pod: Pod | None) -> None:
        starts = -1
        if pod is not None and pod.status.phase == "Running" and ASSIGNMENT in pod.metadata.labels:
            starts = max((each.restart_count for each in pod.status.container_statuses), default=0)
        known = self._running.get(key)
        if known is not None and known[0] != starts:
            known[1].cancel()
            del self._running[key]
        if pod is not None and starts >= 0 and (known is None or known[0] != starts):
            self._running[key] = starts, asyncio.get_running_loop().create_task(self._work(pod))

    async def _work(self, pod: Pod) -> None:
        assignment = pod.metadata.labels[ASSIGNMENT]
        while True:
            lease = await self._store.leases.get(assignment)
            if lease is not None and lease.value.state is LeaseState.TOMBSTONE:
                return
            if lease is not None and lease.value.state is LeaseState.STARTING:
                with contextlib.suppress(Conflict):
                    revision = await self._store.leases.write(
                        assignment, LeaseRecord(state=LeaseState.LIVE, holder=pod.metadata.uid), last=lease.revision
                    )
                    break
            await asyncio.sleep(0.05)
        self.went_live.append(assignment)
        workload = pod.metadata.annotations[WORKLOAD]
        ready = ReadyRecord(assignment=assignment, workload=workload, ready=True, ready_at=time.time())
        await self._store.ready.put(assignment, ready)
        renewals = 0
        while True:
            await asyncio.sleep(RENEW_S)
            if assignment in self.silent:
                continue
            renewals += 1
            record = LeaseRecord(state=LeaseState.LIVE, holder=pod.metadata.uid, renewals=renewals)
            try:
                revision = await self._store.leases.write(assignment, record, last=revision)
            except Conflict:
                return
            except OpenRLError:
                continue


@dataclass
class Cluster:
    """One test's view: it submits jobs and looks at the bus and at the API server."""

    plane: ControlPlane
    bus: Bus
    system: LocalSystem
    model: Path
    workers: PlayedWorkers
    kubeconfig: Path
    names: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    # --- nodes

    async def add_nodes(self, *nodes: tuple[str, int, int, Iterable[str]], host_gib: int = 512) -> None:
        """(name, number of devices, their bytes, roles that it is labelled for: none = both); each takes pods now.

        A new node is tainted until its kubelet has been heard: what is submitted before is unschedulable.
        """
        objects: list[object] = []
        for name, count, size, roles in nodes:
            self.names.append(name)
            labels = {f"openrl.io/{role}": "true" for role in roles}
            objects += fake_node(
                name, devices_bytes=[size] * count, driver=DRIVER, host_bytes=host_gib * GIB, labels=labels
            )
        await asyncio.to_thread(self.plane.apply, *objects)
        await self.until(lambda: self._take_pods({name for name, *_ in nodes}))

    async def _take_pods(self, names: set[str]) -> bool:
        """Ready, and no taint is left."""
        nodes: list[dict[str, Any]] = json.loads(await self.kubectl("get", "nodes", "-o", "json"))["items"]
        able = {
            node["metadata"]["name"]
            for node in nodes
            if not node["spec"].get("taints")
            and any((c["type"], c["status"]) == ("Ready", "True") for c in node["status"].get("conditions", ()))
        }
        return names <= able

    # --- the launcher

    async def cut_off(self, node: str) -> None:
        """Its kubelet says and does nothing any more. (kwok reads annotations when it starts.)"""
        await self.kubectl("annotate", "node", node, "kwok.x-k8s.io/node-")
        await asyncio.to_thread(self.plane.restart, "kwok")

    async def bring_back(self, node: str) -> None:
        await self.kubectl("annotate", "node", node, "kwok.x-k8s.io/node=fake")
        await asyncio.to_thread(self.plane.restart, "kwok")

    @contextlib.asynccontextmanager
    async def launcher(
        self, *, template: dict[str, Any] | None = None, wait: bool = True, **fields: Any
    ) -> AsyncIterator[ClusterLauncher]:
        """A launcher under its own service account; leaving the block kills it as a crash would."""
        settings = KubernetesSettings(
            nats_url=self.system.nats_url, kubeconfig=self.kubeconfig, namespace=NAMESPACE, driver=DRIVER,
            device_class=DRIVER, shared_volume="test-shared", **{"stop_grace_s": 1.0, **fields},
        )  # fmt: skip
        bus = await Bus.connect(self.system.nats_url, name="launcher")
        api = await KubeApi.connect(kubeconfig=self.kubeconfig, namespace=NAMESPACE)
        launcher = ClusterLauncher(bus, api, settings)
        launcher.pods.template = template or {}
        running = asyncio.create_task(launcher.run())
        try:
            if wait:
                await self.until(lambda: running.done() or launcher.ready)
            yield launcher
            if running.done():
                running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await api.close()
            await bus.close()

    # --- jobs

    async def submit(
        self, name: str, *, trainer_gib: float = 10, sampler_gib: float = 10, exclusive: bool = False, priority: int = 0
    ) -> None:
        spec = JobSpec(
            name=name, kind=JobKind.FFT, base_model=str(self.model), exclusive=exclusive, priority=priority,
            overrides=Overrides(
                trainer_device_gib=trainer_gib, sampler_device_gib=sampler_gib, trainer_host_gib=1, sampler_host_gib=1
            ),
        )  # fmt: skip
        await self.bus.publish(JobSubmitted(tenant=TENANT, job=name, submission=uuid.uuid4().hex, spec=spec))

    async def cancel(self, name: str) -> None:
        job = await self.bus.store.jobs.get(f"{TENANT}.{name}")
        assert job is not None
        await self.bus.publish(JobCancelled(tenant=TENANT, job=name, submission=job.value.submission))

    async def workload(self, name: str, role: str = "trainer") -> WorkloadRecord:
        """As placement shows it; Submitted while nothing is known."""
        key = f"{TENANT}--{name}--{role}"
        entry = await self.bus.store.workloads.get(key)
        if entry is not None:
            return entry.value
        job = await self.bus.store.jobs.get(f"{TENANT}.{name}")
        found = [each for each in (job.value.workloads if job is not None else ()) if each.workload == key]
        assert found, f"{key} is unknown"
        return found[0]

    async def phase(self, name: str, role: str = "trainer") -> WorkloadPhase | None:
        with contextlib.suppress(AssertionError):
            return (await self.workload(name, role)).phase
        return None

    async def ready(self, *names: str, within_s: float = 60.0) -> None:
        for name in names:
            for role in Role:
                await self.until(lambda n=name, r=role: self.is_ready(n, r), within_s=within_s)

    async def is_ready(self, name: str, role: str = "trainer") -> bool:
        return await self.phase(name, role) is WorkloadPhase.READY

    async def job_message(self, name: str) -> str:
        """Why the job failed, "" while it has not."""
        entry = await self.bus.store.jobs.get(f"{TENANT}.{name}")
        return "" if entry is None or entry.value.phase is not JobPhase.FAILED else entry.value.message

    async def book_devices(self, name: str, *, count: int) -> str:
        """A request for several devices, straight to the ledger; the founded claim."""
        workload = f"{TENANT}--{name}--trainer"
        shape = Shape(role=Role.TRAINER, device_bytes=10 * GIB, device_count=count, host_bytes=GIB, exclusive=True)
        await self.bus.publish(
            SeatRequested(
                tenant=TENANT, workload=workload, incarnation=1, attempt=1, owner=f"{TENANT}/{name}", shape=shape,
                candidates=(), may_found=True, tiers=(Tier(count=count, floor_bytes=10 * GIB, ceiling_gib=80),),
            )
        )  # fmt: skip
        seat = await self.until(lambda: self.bus.store.ledger_seats.get(workload))
        claim: str = seat.value.claim
        return claim

    def follow(self, kind: type[T]) -> list[T]:
        """Events of this kind from now on, as they come."""
        found: list[T] = []

        async def follow() -> None:
            subject = "openrl.ev.launcher.>"
            async for delivery in self.bus.tail(stream="OPENRL_EVENTS", subject=subject):
                event = delivery.event()
                if isinstance(event, kind):
                    found.append(event)

        self.tasks.append(asyncio.create_task(follow()))
        return found

    async def node_is(self, node: str, **fields: object) -> bool:
        entry = await self.bus.store.nodes.get(node)
        return entry is not None and all(getattr(entry.value, name) == value for name, value in fields.items())

    async def restart_services(self, **environment: str) -> None:
        """As a roll-out does: the services end and come back with other settings."""
        self.system._settings.update(environment)
        for name in ("ledger", "placement"):
            self.system.kill(name)
        await asyncio.sleep(1.0)
        for name in ("ledger", "placement"):
            await self.system.ready(name)

    async def claim_of(self, name: str, role: str = "trainer") -> ClaimRecord:
        workload = await self.workload(name, role)
        entry = await self.bus.store.ledger_claims.get(workload.claim)
        assert entry is not None
        return entry.value

    async def seats(self) -> dict[str, SeatRecord]:
        return {
            key: entry.value
            for key, entry in (await self.bus.store.ledger_seats.list()).items()
            if entry.value.state is not SeatState.EMPTY
        }

    async def claims(self) -> dict[str, ClaimRecord]:
        return {
            key: entry.value
            for key, entry in (await self.bus.store.ledger_claims.list()).items()
            if entry.value.state is not ClaimState.GONE
        }

    # --- the API server

    async def get(self, kind: str) -> list[dict[str, Any]]:
        text = await asyncio.to_thread(self.plane.kubectl, "get", kind, "-n", NAMESPACE, "-o", "json")
        items: list[dict[str, Any]] = json.loads(text)["items"]
        return items

    async def pod_of(self, name: str, role: str = "trainer") -> dict[str, Any] | None:
        wanted = f"{TENANT}--{name}--{role}"
        pods = [pod for pod in await self.get("pods") if pod["metadata"]["annotations"].get(WORKLOAD) == wanted]
        return pods[-1] if pods else None

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return await asyncio.to_thread(self.plane.kubectl, *arguments, stdin=stdin)

    async def nothing_is_left(self, within_s: float = 60.0) -> None:
        """No seat, no claim, no pod, no ResourceClaim."""

        async def empty() -> bool:
            return not (
                await self.seats() or await self.claims() or await self.get("pods") or await self.get("resourceclaims")
            )

        await self.until(empty, within_s=within_s)

    # --- waiting

    async def until(
        self, look: Callable[[], Awaitable[Any] | Any], *, within_s: float = 60.0, every_s: float = 0.05
    ) -> Any:
        """Look until it gives something true. TimeoutError says what it gave last."""
        deadline = time.monotonic() + within_s
        while True:
            found = look()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"it did not come true within {within_s:g} s: {found!r}")
            await asyncio.sleep(every_s)


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_bytes(msgspec.json.encode(MODEL_CONFIG))
    return directory


def volume() -> list[dict[str, Any]]:
    """The shared volume of the workers, bound. (Not the installation's own name: that one is dry-run beside it.)"""
    size = {"storage": "1Gi"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "test-shared"},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "hostPath": {"path": "/nowhere"},
                "claimRef": {"namespace": NAMESPACE, "name": "test-shared"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "test-shared", "namespace": NAMESPACE},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": "test-shared",
                "resources": {"requests": size},
            },
        },
    ]
