"""The shell of a cluster's launcher: bus mirrors and Kubernetes watches around ``core``, whose answers it carries out.

One launcher serves all nodes; of several replicas the one that holds the duty acts, the others stand by with nothing
but the duty in mind. A replica that loses the duty ends its process, and comes back as a stand-by: nothing of its view
can be left over.

Work is by key: whatever changes marks a claim or a workload, which is looked at once more, several at a time, one look
per claim at a time; a slow pass marks all (E5). So the cost of a change does not grow with the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from openrl_common.bus import Bus, Delivery
from openrl_common.duty import Duty
from openrl_common.errors import Rejected, Transient
from openrl_common.events import FenceRequested
from openrl_common.health import Check, check
from openrl_common.identity import LedgerIdentity
from openrl_common.records import ClaimRecord, CutState, SeatRecord
from openrl_common.store import Entry, Mirror
from openrl_launcher.core import Forget, SayGone, Start, Stop
from openrl_launcher.kubernetes import core
from openrl_launcher.kubernetes.api import KubeApi, Refused
from openrl_launcher.kubernetes.claim_looks import ClaimLooks, Known
from openrl_launcher.kubernetes.claims import ClusterClaims
from openrl_launcher.kubernetes.inventory import Inventory
from openrl_launcher.kubernetes.manifests import ASSIGNMENT, CLAIM, read_template
from openrl_launcher.kubernetes.mirror import StatusMirror
from openrl_launcher.kubernetes.node_reports import NodeReports
from openrl_launcher.kubernetes.objects import Node, Pod, ResourceClaim, ResourceSlice
from openrl_launcher.kubernetes.pods import PodBackend, is_worker
from openrl_launcher.kubernetes.settings import KubernetesSettings
from openrl_launcher.kubernetes.watch import Informer
from openrl_launcher.kubernetes.workers import ClusterWorkers

log = logging.getLogger(__name__)

PASS_S = 5.0
DUTY = "launcher-kubernetes"
_AT_ONCE = 32
_RETRY_S = 0.5
_SYNC_S = 60.0
_GAP_S = 0.005


class ClusterLauncher:
    """``run`` lasts until it is cancelled or the duty is lost; workers go on running (E17)."""

    def __init__(self, bus: Bus, api: KubeApi, settings: KubernetesSettings) -> None:
        self._bus = bus
        self._api = api
        self._settings = settings
        self._tasks: asyncio.TaskGroup | None = None
        self._session = uuid.uuid4().hex[:12]
        self.duty = Duty(bus.store.duties, DUTY, holder=self._session, clock=time.monotonic)
        self.inventory = Inventory(driver=settings.driver, namespace=settings.namespace)
        self.nodes = NodeReports(bus, self.inventory)
        self._identity = LedgerIdentity(bus)
        self.claims = ClusterClaims(
            bus, api, settings, clock=time.monotonic, mark=self._mark_claim, identity=self._identity
        )
        self.pods = PodBackend(
            api,
            settings,
            template=read_template(settings.pod_template),
            spawn=self._spawn,
            plan=lambda launch: self._looks.plan(launch),
        )
        self.workers = ClusterWorkers(
            bus,
            self.pods,
            self.claims,
            node="",
            stop_grace_s=settings.stop_grace_s,
            restarts_max=settings.restarts_max,
            clock=time.monotonic,
            now=time.time,
            wake=self._wake,
            spawn=self._spawn,
            identity=self._identity,
            pods=self.pods,
            mark=self._mark,
            silent_s=self.nodes.silent_s,
        )
        self.mirror = StatusMirror(bus, api, settings)
        self._known = Known()
        self._looks = ClaimLooks(
            self._known, settings, inventory=self.inventory, claims=self.claims, pods=self.pods, workers=self.workers
        )
        self._dirty_claims: set[str] = set()
        self._dirty_workloads: set[str] = set()
        self._looking: set[str] = set()
        self._changed = asyncio.Event()
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._mirrors: list[Mirror[Any]] = []
        self._synced = False
        self.informers: dict[str, Informer[Any]] = {}

    def readiness(self) -> dict[str, Check]:
        """A stand-by is ready: it can take over."""
        return {"caches": check(lambda: self._synced or not self.duty.held, "the cluster has not been read yet")}

    @property
    def ready(self) -> bool:
        """Has the duty, and has read the cluster and the bus."""
        return self.duty.held and self._synced

    # --- life cycle ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        stopping = self._bus.stopping
        keeping = asyncio.create_task(self.duty.keep(stopping), name="duty")
        try:
            while not self.duty.held:
                if keeping.done():
                    return
                await asyncio.sleep(0.1)
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._start(tasks)
                tasks.create_task(self._watch_duty(), name="watch duty")
                tasks.create_task(self._slow_pass(), name="slow pass")
                await self._reconcile()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self.claims.close()
            await self.mirror.close()
            for mirror in self._mirrors:
                await mirror.close()

    async def _watch_duty(self) -> None:
        while self.duty.held or self._bus.stopping.is_set():  # noqa: ASYNC110 (time alone ends it)
            await asyncio.sleep(0.25)
        raise Rejected("another launcher has taken over: this one starts again as a stand-by", code="duty-lost")

    async def _watch_identity(self) -> None:
        """A ledger's bucket that was lost ends this process: no missing seat of it stops a worker (L7)."""
        await self._identity.watch(self._bus.stopping)

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        namespace = self._settings.namespace
        self._inform(tasks, "/api/v1/nodes", Node, self._on_node)
        self._inform(tasks, "/apis/resource.k8s.io/v1/resourceslices", ResourceSlice, self.inventory.set_slice)
        self._inform(tasks, "/apis/resource.k8s.io/v1/resourceclaims", ResourceClaim, self._on_resource)
        self._inform(tasks, "/api/v1/pods", Pod, self._on_pod)
        async with asyncio.timeout(_SYNC_S):
            for informer in self.informers.values():
                await informer.synced.wait()
        store = self._bus.store
        await self._identity.wait(self._bus.stopping)
        tasks.create_task(self._watch_identity(), name="ledger's identity")
        await self.claims.load()
        self._mirrors.append(await store.ledger_claims.mirror(on_change=self._on_claim))
        self._mirrors.append(await store.ledger_seats.mirror(on_change=self._on_seat))
        await self.nodes.load()
        await self.workers.adopt()
        await self.nodes.tell()
        if self._settings.mirror:
            await self.mirror.start(tasks)
        tasks.create_task(
            self._bus.consume(
                stream="OPENRL_EVENTS",
                durable="launcher-kubernetes",
                subjects=["openrl.ev.ledger.*.seat.*.fence-requested"],
                handler=self._on_fence,
                from_now=True,
            ),
            name="fences",
        )
        self._mark_all()
        self._synced = True
        log.info(
            "cluster read: %d nodes, %d workers adopted, namespace %s",
            len(self.nodes),
            self.workers.running,
            namespace,
        )

    def _inform(
        self, tasks: asyncio.TaskGroup, path: str, kind: type[Any], on_change: Callable[[str, Any], None]
    ) -> None:
        informer: Informer[Any] = Informer(self._api, path, kind, on_change=on_change)
        self.informers[path.rsplit("/", 1)[1]] = informer
        tasks.create_task(informer.run(), name=f"watch {path}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    # --- what changed -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._changed.set()

    def _mark(self, workload: str, claim: str) -> None:
        self._dirty_workloads.add(workload)
        if claim:
            self._dirty_claims.add(claim)
        self._wake()

    def _mark_claim(self, claim: str) -> None:
        self._dirty_claims.add(claim)
        self._wake()

    def _mark_all(self) -> None:
        self._dirty_claims.update(self._known.records, self.claims.cuts, self._known.resources, self.pods.claims)
        self._dirty_workloads.update(self._known.seats, self.workers.workloads)
        self._wake()

    def _on_seat(self, workload: str, entry: Entry[SeatRecord] | None) -> None:
        self._known.set_seat(workload, None if entry is None else entry.value)
        self._mark(workload, "")

    def _on_claim(self, claim: str, entry: Entry[ClaimRecord] | None) -> None:
        record = None if entry is None else entry.value
        self._dirty_workloads |= self._known.set_record(claim, record)
        self._mark_claim(claim)
        if self._settings.mirror:
            self.mirror.note_claim(claim, record)

    def _on_node(self, name: str, node: Node | None) -> None:
        self.inventory.set_node(name, node)
        self.nodes.note(name, node)
        self._wake()

    def _on_resource(self, key: str, resource: ResourceClaim | None) -> None:
        self.inventory.set_claim(key, resource)
        namespace, _, claim = key.partition("/")
        if namespace == self._settings.namespace and self._known.set_resource(claim, resource):
            self._mark_claim(claim)

    def _on_pod(self, key: str, pod: Pod | None) -> None:
        before = self.informers["pods"].objects.get(key) if pod is None else None
        self.inventory.set_pod(key, pod)
        shown = pod or before
        if shown is None:
            return
        if not is_worker(shown, self._settings.namespace):
            return
        assignment, claim = shown.metadata.labels[ASSIGNMENT], shown.metadata.labels.get(CLAIM, "")
        if pod is None:
            self.pods.forget_pod(assignment, shown.metadata.uid)
        else:
            self.pods.set_pod(pod)
            self.workers.note_pull(assignment, pod.pulling)
        self._mark_claim(claim)

    async def _on_fence(self, delivery: Delivery) -> None:
        event = delivery.event()
        if isinstance(event, FenceRequested):
            self.workers.note_fence(event.assignment, event.why)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _slow_pass(self) -> None:
        while True:
            await asyncio.sleep(PASS_S)
            self.pods.drop_unseen()
            self._mark_all()

    async def _reconcile(self) -> None:
        while True:
            self._changed.clear()
            if self.inventory.changed:
                with contextlib.suppress(Transient):
                    await self.nodes.tell()
            workloads, self._dirty_workloads = self._dirty_workloads, set()
            self._look_at_workers(workloads)
            claims, self._dirty_claims = self._dirty_claims, set()
            for claim in claims:
                if claim in self._looking:
                    self._dirty_claims.add(claim)
                elif self._looks.decide(claim):  # decided once more when it is this one's turn
                    self._looking.add(claim)
                    self._spawn(self._look_at_claim(claim))
            await asyncio.sleep(_GAP_S)
            if not (self._dirty_workloads or self._dirty_claims - self._looking):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._changed.wait()

    def _pause_s(self) -> float:
        restart_at = self.workers.next_restart_at()
        if restart_at is None:
            return PASS_S
        pause_s = max(0.0, restart_at - time.monotonic())
        if pause_s == 0.0:
            self._dirty_workloads.update(self.workers.backing_off)
        return min(PASS_S, max(_GAP_S, pause_s))

    def _look_at_workers(self, workloads: set[str]) -> None:
        for workload in workloads:
            seat = self._known.seats.get(workload, SeatRecord())
            record = self._known.records.get(seat.claim)
            for action in core.decide_worker(
                workload, seat, record, self.workers.of_workload(workload), time.monotonic()
            ):
                match action:
                    case Start():
                        assert record is not None
                        cut = self.claims.cuts.get(action.claim)
                        if cut is not None and cut.state is CutState.ALLOCATED:
                            self.workers.start(action, record.devices)
                    case Stop():
                        self.workers.stop(action)
                    case SayGone():
                        self._spawn(self._try(self.workers.say_gone(action.assignment)))
                    case Forget():
                        self._spawn(self._try(self.workers.forget(action.assignment)))

    async def _try(self, call: Coroutine[Any, Any, None]) -> None:
        """What the slow pass tries again."""
        with contextlib.suppress(Transient):
            await call

    async def _look_at_claim(self, claim: str) -> None:
        try:
            async with self._at_once:
                await self._looks.look(claim)
        except Transient as error:
            log.warning("claim %s: %s; trying again", claim, error)
            asyncio.get_running_loop().call_later(_RETRY_S, self._mark_claim, claim)
        except Refused as error:
            log.error("claim %s: %s", claim, error)
        finally:
            self._looking.discard(claim)
            if claim in self._dirty_claims:
                self._wake()
