"""A look at one claim of a cluster: what ``core`` decides about it as things stand, carried out.

Invariants: nothing is decided here; a look begins from ``Known`` as it is at that moment, never from what an event
said; what fails for now is for the caller to look at again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from openrl_common.records import ClaimEntry, ClaimRecord, CutRecord, CutState, SeatRecord, SeatState
from openrl_launcher.backend import Launch
from openrl_launcher.core import Free, SayAllocated, SayFreed, Stop, Unschedulable
from openrl_launcher.kubernetes import core
from openrl_launcher.kubernetes.api import Forbidden, Refused
from openrl_launcher.kubernetes.claims import ClusterClaims
from openrl_launcher.kubernetes.inventory import Inventory, node_name, node_token
from openrl_launcher.kubernetes.manifests import CLAIM, PodPlan
from openrl_launcher.kubernetes.objects import ResourceClaim
from openrl_launcher.kubernetes.pods import PodBackend
from openrl_launcher.kubernetes.settings import KubernetesSettings
from openrl_launcher.kubernetes.workers import ClusterWorkers

log = logging.getLogger(__name__)


@dataclass
class Known:
    """What bus and cluster have said last. ``entries``: the claim and the entry of every assignment listed."""

    seats: dict[str, SeatRecord] = field(default_factory=dict)
    records: dict[str, ClaimRecord] = field(default_factory=dict)
    entries: dict[str, tuple[str, ClaimEntry]] = field(default_factory=dict)
    resources: dict[str, ResourceClaim] = field(default_factory=dict)

    def set_seat(self, workload: str, seat: SeatRecord | None) -> None:
        if seat is None or seat.state is SeatState.EMPTY:
            self.seats.pop(workload, None)
        else:
            self.seats[workload] = seat

    def set_record(self, claim: str, record: ClaimRecord | None) -> set[str]:
        """The workloads that it listed or lists."""
        touched = set()
        before = self.records.pop(claim, None)
        if before is not None:
            for assignment, listed in before.entries.items():
                self.entries.pop(assignment, None)
                touched.add(listed.workload)
        if record is not None:
            self.records[claim] = record
            for assignment, listed in record.entries.items():
                self.entries[assignment] = (claim, listed)
                touched.add(listed.workload)
        return touched

    def set_resource(self, claim: str, resource: ResourceClaim | None) -> bool:
        """Whether it is one of ours, and something is to be looked at."""
        if resource is None:
            return self.resources.pop(claim, None) is not None
        if resource.metadata.labels.get(CLAIM) != claim:
            return False
        self.resources[claim] = resource
        return True


class ClaimLooks:
    """``look(claim)``, for one claim at a time; ``plan`` is what a worker's pod is made of."""

    def __init__(
        self,
        known: Known,
        settings: KubernetesSettings,
        *,
        inventory: Inventory,
        claims: ClusterClaims,
        pods: PodBackend,
        workers: ClusterWorkers,
    ) -> None:
        self._known = known
        self._settings = settings
        self._inventory = inventory
        self._claims = claims
        self._pods = pods
        self._workers = workers
        self._not_pinned: set[str] = set()

    def decide(self, claim: str) -> list[core.ClaimAction]:
        resource = self._known.resources.get(claim)
        return core.decide_claim(
            core.ClaimView(
                claim=claim,
                record=self._known.records.get(claim),
                cut=self._claims.cuts.get(claim),
                resource=resource,
                pods=self._pods.pods_of(claim),
                workers=self._workers.of_claim(claim),
                allocated_node=self._node_of(resource),
            )
        )

    async def look(self, claim: str) -> None:
        """Raises Transient, Refused: the rest is left for the next look."""
        for action in self.decide(claim):
            await self._carry_out(action)

    def plan(self, launch: Launch) -> PodPlan:
        """A worker on an allocated claim: its node is known, so the first try needs no scheduler (K11)."""
        claim, entry = self._known.entries[launch.assignment]
        record = self._known.records[claim]
        node = node_name(record.node) if self._settings.pin and not self._workers.failed(launch.assignment) else ""
        return PodPlan(launch.assignment, claim, entry, record.tiers, node=node)

    def _node_of(self, resource: ResourceClaim | None) -> str:
        for each in () if resource is None else resource.results:
            if name := self._inventory.node_of(each.pool, each.device):
                return node_token(name)
        return ""

    async def _carry_out(self, action: core.ClaimAction) -> None:
        match action:
            case core.Request():
                await self._request(action)
            case core.Unpin():
                self._not_pinned.add(action.claim)
                self._inventory.unpin(action.claim)
                log.info("claim %s is not pinned any more: %s", action.claim, action.pod.unschedulable)
                self._pods.delete(action.pod)
            case core.Allocate():
                self._forget_pin(action.claim)
                await self._claims.allocated(action.claim, self._cut(action))
            case core.DeletePod():
                self._pods.delete(action.pod)
            case core.DeleteClaim():
                await self._claims.delete(action.resource)
            case Free():
                self._forget_pin(action.claim)
                await self._claims.free(action.claim)
            case SayAllocated():
                await self._claims.say_allocated(action.claim)
            case SayFreed():
                await self._claims.say_freed(action.claim)
            case Unschedulable():
                await self._claims.say_unschedulable(action)
            case Stop():
                self._workers.stop(action)

    def _forget_pin(self, claim: str) -> None:
        self._inventory.unpin(claim)
        self._not_pinned.discard(claim)

    async def _request(self, action: core.Request) -> None:
        """The claim first: a pod whose claim is not there is looked at twice by the scheduler."""
        record = self._known.records[action.claim]
        entry = record.entries[action.assignment]
        try:
            if action.claim not in self._known.resources:
                self._known.resources[action.claim] = await self._claims.request(action.claim, record.tiers)
            pinned = ""
            avoid = tuple(sorted(node_name(each.node) for each in record.avoid if each.until > time.time()))
            if self._settings.pin and action.claim not in self._not_pinned:
                self._inventory.unpin(action.claim)
                pinned = self._inventory.pin(
                    action.claim, record.tiers, role=entry.role, host_bytes=entry.host_bytes, avoid=avoid
                )
            plan = PodPlan(action.assignment, action.claim, entry, record.tiers, pinned=pinned, avoid=avoid)
            await self._pods.ensure(plan)
        except (Refused, Forbidden) as error:
            log.error("claim %s: %s", action.claim, error)
            await self._claims.say_unschedulable(
                Unschedulable(action.claim, action.assignment, entry.workload, entry.tenant, str(error))
            )

    def _cut(self, action: core.Allocate) -> CutRecord:
        held = self._known.resources[action.claim].results
        results = [each for each in held if each.driver == self._settings.driver]
        sizes = [self._inventory.device_bytes(each.pool, each.device) for each in results]
        return CutRecord(
            state=CutState.ALLOCATED,
            node=node_token(action.node),
            devices=tuple(each.device for each in results),
            device_bytes=min(sizes, default=0),
            tier=results[0].request.partition("/")[2].removeprefix("t") if results else "",
        )
