"""Carrying out what ``core`` decided about a cluster's claims: applied, cut as the scheduler allocated, freed.

There are no device holds: kube-scheduler is the mutex (K4), and a ResourceClaim that is gone holds no device. The cut
record is written from what the scheduler decided; the order of writes is the local backend's (record, then event).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from openrl_common.bus import Bus
from openrl_common.errors import Conflict
from openrl_common.events import ClaimAllocated, ClaimFreed
from openrl_common.identity import LedgerIdentity
from openrl_common.records import CutRecord, CutState, Tier
from openrl_common.store import Entry
from openrl_launcher.claims import Claims
from openrl_launcher.core import Unschedulable
from openrl_launcher.kubernetes import manifests
from openrl_launcher.kubernetes.api import Absent, Exists, KubeApi
from openrl_launcher.kubernetes.objects import ResourceClaim
from openrl_launcher.kubernetes.settings import KubernetesSettings

log = logging.getLogger(__name__)

_CLAIM = msgspec.json.Decoder(ResourceClaim)


class ClusterClaims(Claims):
    """``mark(claim)`` asks for another look at a claim."""

    def __init__(
        self,
        bus: Bus,
        api: KubeApi,
        settings: KubernetesSettings,
        *,
        clock: Callable[[], float],
        mark: Callable[[str], None],
        identity: LedgerIdentity,
    ) -> None:
        super().__init__(bus, node="", clock=clock, wake=lambda: None, identity=identity)
        self._ledger = identity
        self._api = api
        self._settings = settings
        self._mark = mark
        self._path = f"/apis/resource.k8s.io/v1/namespaces/{settings.namespace}/resourceclaims"

    async def load(self) -> None:
        self._mirror = await self._store.cuts.mirror(on_change=self._on_cut)

    async def request(self, claim: str, tiers: tuple[Tier, ...]) -> ResourceClaim:
        """Make the ResourceClaim, or apply it where it stands. Raises Refused or Transient."""
        return _CLAIM.decode(await self._api.ensure(self._path, manifests.resource_claim(claim, tiers, self._settings)))

    async def delete(self, resource: ResourceClaim) -> None:
        if await self._store.ledger_claims.get(resource.metadata.name) is None:
            await self._ledger.check()  # no record at all: is it the ledger itself that is lost? (L7)
        body: dict[str, Any] = {"preconditions": {"uid": resource.metadata.uid}}
        try:
            await self._api.call("DELETE", f"{self._path}/{resource.metadata.name}", body=body)
        except (Absent, Exists):
            return

    async def allocated(self, claim: str, record: CutRecord) -> None:
        """Write the cut and say ClaimAllocated; what stands there already stays."""
        try:
            self._learn(claim, record, await self._store.cuts.write(claim, record, last=0))
        except Conflict:
            standing = await self._store.cuts.get(claim)
            if standing is not None:
                self._learn(claim, standing.value, standing.revision)
            self._mark(claim)
            return
        self._causes.pop(claim, None)
        log.info("claim %s is allocated: node %s, devices %s", claim, record.node, ",".join(record.devices))
        await self.say_allocated(claim, first=True)

    async def say_allocated(self, claim: str, *, first: bool = False) -> None:
        cut = self.cuts[claim]
        if cut.state is CutState.ALLOCATED and self._due("allocated", claim, first):
            await self._bus.publish(
                ClaimAllocated(
                    claim=claim, node=cut.node, devices=cut.devices, device_bytes=cut.device_bytes, tier=cut.tier
                )
            )

    async def free(self, claim: str) -> None:
        if await self._store.ledger_claims.get(claim) is None:
            await self._ledger.check()
        standing = await self._store.cuts.get(claim)
        if standing is not None and standing.value.state is CutState.FREED:
            self._learn(claim, standing.value, standing.revision)
        else:
            cut = CutRecord(state=CutState.FREED) if standing is None else standing.value
            record = msgspec.structs.replace(cut, state=CutState.FREED)
            try:
                revision = await self._store.cuts.write(
                    claim, record, last=0 if standing is None else standing.revision
                )
            except Conflict:
                self._mark(claim)
                return
            self._learn(claim, record, revision)
        self._causes.pop(claim, None)
        log.info("claim %s is freed", claim)
        await self.say_freed(claim, first=True)

    async def say_freed(self, claim: str, *, first: bool = False) -> None:
        if self._due("freed", claim, first):
            cut = self.cuts[claim]
            await self._bus.publish(ClaimFreed(claim=claim, node=cut.node, devices=cut.devices))

    async def say_unschedulable(self, action: Unschedulable) -> None:
        if self._causes.get(action.claim) != action.cause:
            await super().say_unschedulable(action)

    def _on_cut(self, key: str, entry: Entry[CutRecord] | None) -> None:
        super()._on_cut(key, entry)
        self._mark(key)
