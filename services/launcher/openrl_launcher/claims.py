"""Carrying out what ``core`` decided about claims: devices held, claims cut, freed, quarantined (B8).

Order of writes, so that a crash between any two is finished by the next pass: cutting holds the devices, writes the
record, says ClaimAllocated; freeing writes the record, releases the devices, says ClaimFreed. The bucket is the truth;
``holds`` and ``cuts`` here are this launcher's newest knowledge of it (own writes at once, everything through mirrors:
also an own write that was given up as lost, and landed after the connection was back).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from openrl_common.bus import Bus
from openrl_common.errors import Conflict
from openrl_common.events import ClaimAllocated, ClaimFreed, ClaimQuarantined, WorkerUnschedulable
from openrl_common.identity import LedgerIdentity
from openrl_common.records import CutRecord, CutState, DeviceHold
from openrl_common.store import Entry, Mirror
from openrl_launcher.core import Cut, Unschedulable

log = logging.getLogger(__name__)

_SAY_AGAIN_S = 5.0


class Claims:
    """The claims of one node. Used by one task (the reconcile loop), but for ``quarantine``."""

    def __init__(
        self,
        bus: Bus,
        *,
        node: str,
        clock: Callable[[], float],
        wake: Callable[[], None],
        identity: LedgerIdentity | None = None,
    ) -> None:
        self._bus = bus
        self._identity = identity
        self._store = bus.store
        self._node = node
        self._clock = clock
        self._wake = wake
        self._holds: dict[str, Entry[DeviceHold]] = {}
        self.cuts: dict[str, CutRecord] = {}
        self._cut_revisions: dict[str, int] = {}
        self._said_at: dict[tuple[str, str], float] = {}
        self._causes: dict[str, str] = {}
        self._mirrors: list[Mirror[Any]] = []

    async def load(self) -> None:
        """Follow the devices of this node and the cuts of all."""
        self._mirrors.append(await self._store.devices.mirror(f"{self._node}.", on_change=self._on_hold))
        self._mirrors.append(await self._store.cuts.mirror(on_change=self._on_cut))

    async def close(self) -> None:
        for mirror in self._mirrors:
            await mirror.close()

    @property
    def holds(self) -> dict[str, str]:
        """Device → claim, taken devices only."""
        return {device: entry.value.claim for device, entry in self._holds.items() if entry.value.claim}

    async def cut(self, action: Cut) -> None:
        """Hold every device, then write the claim as allocated: all or nothing. A lost race releases what it held."""
        try:
            for device in action.devices:
                await self._hold(device, action.claim)
            record = CutRecord(
                state=CutState.ALLOCATED,
                node=self._node,
                devices=action.devices,
                device_bytes=action.device_bytes,
                tier=action.tier,
            )
            self._learn(action.claim, record, await self._store.cuts.write(action.claim, record, last=0))
        except Conflict:
            standing = await self._store.cuts.get(action.claim)
            if standing is not None:
                self._learn(action.claim, standing.value, standing.revision)
            if standing is None or standing.value.node != self._node or standing.value.state is not CutState.ALLOCATED:
                for device in action.devices:
                    await self.release(device, action.claim)
                self._wake()
                return
        self._causes.pop(action.claim, None)
        log.info("claim %s is cut: devices %s, tier %s", action.claim, ",".join(action.devices), action.tier)
        await self.say_allocated(action.claim, first=True)

    async def say_allocated(self, claim: str, *, first: bool = False) -> None:
        cut = self.cuts.get(claim)
        if cut is not None and self._due("allocated", claim, first):
            await self._bus.publish(
                ClaimAllocated(
                    claim=claim, node=self._node, devices=cut.devices, device_bytes=cut.device_bytes, tier=cut.tier
                )
            )

    async def free(self, claim: str) -> None:
        """Write the claim off, release its devices, say so. Another node's claim is left alone.

        Raises Rejected (``ledger-replaced``) when there is no such claim because the ledger's bucket is lost (L7).
        """
        if self._identity is not None and await self._store.ledger_claims.get(claim) is None:
            await self._identity.check()
        standing = await self._store.cuts.get(claim)
        if standing is not None:
            self._learn(claim, standing.value, standing.revision)
            if standing.value.node != self._node or standing.value.state is not CutState.ALLOCATED:
                return
        cut = CutRecord(state=CutState.ALLOCATED) if standing is None else standing.value
        record = CutRecord(
            state=CutState.FREED, node=cut.node, devices=cut.devices, device_bytes=cut.device_bytes, tier=cut.tier
        )
        try:
            revision = await self._store.cuts.write(claim, record, last=0 if standing is None else standing.revision)
        except Conflict:
            self._wake()
            return
        self._learn(claim, record, revision)
        for device, holder in self.holds.items():
            if holder == claim:
                await self.release(device, claim)
        self._causes.pop(claim, None)
        log.info("claim %s is freed: devices %s", claim, ",".join(cut.devices) or "none")
        await self.say_freed(claim, first=True)
        self._wake()

    async def say_freed(self, claim: str, *, first: bool = False) -> None:
        cut = self.cuts.get(claim)
        if cut is not None and self._due("freed", claim, first):
            await self._bus.publish(ClaimFreed(claim=claim, node=self._node, devices=cut.devices))

    async def release(self, device: str, claim: str) -> None:
        """Make a device free again, if it still names ``claim``."""
        held = self._holds.get(device)
        if held is None or held.value.claim != claim:
            return
        await self._write_hold(device, DeviceHold(), held.revision)

    async def say_unschedulable(self, action: Unschedulable) -> None:
        """Once per cause: a cause that comes back after another is said again."""
        if self._causes.get(action.claim) == action.cause:
            return
        self._causes[action.claim] = action.cause
        log.info("claim %s waits: %s", action.claim, action.cause)
        await self._bus.publish(
            WorkerUnschedulable(
                tenant=action.tenant,
                workload=action.workload,
                assignment=action.assignment,
                claim=action.claim,
                node=self._node,
                cause=action.cause,
            )
        )

    async def quarantine(self, claim: str, why: str) -> None:
        """The claim's device is not trusted any more: never granted again until somebody looks (B4)."""
        while (
            standing := await self._store.cuts.get(claim)
        ) is not None and standing.value.state is CutState.ALLOCATED:
            cut = standing.value
            record = CutRecord(
                state=CutState.QUARANTINED,
                node=cut.node,
                devices=cut.devices,
                device_bytes=cut.device_bytes,
                tier=cut.tier,
                why=why,
            )
            try:
                self._learn(claim, record, await self._store.cuts.write(claim, record, last=standing.revision))
            except Conflict:
                continue
            break
        log.error("claim %s is quarantined: %s", claim, why)
        await self._bus.publish(ClaimQuarantined(claim=claim, node=self._node, why=why))

    # --- internals -------------------------------------------------------------------------------------------------

    async def _hold(self, device: str, claim: str) -> None:
        """Raises Conflict when another claim holds it: a hold that was given up as lost can be heard of after the look
        that found the device free, and only a look that knows of it may release it (B8)."""
        held = self._holds.get(device)
        if held is not None and held.value.claim == claim:
            return
        if held is not None and held.value.claim:
            raise Conflict(f"device {device} of node {self._node} is held by claim {held.value.claim}")
        await self._write_hold(device, DeviceHold(claim=claim), 0 if held is None else held.revision)

    async def _write_hold(self, device: str, hold: DeviceHold, last: int) -> None:
        key = f"{self._node}.{device}"
        try:
            revision = await self._store.devices.write(key, hold, last=last)
        except Conflict:
            standing = await self._store.devices.get(key)
            if standing is not None:
                self._on_hold(key, standing)
            raise
        self._on_hold(key, Entry(key, hold, revision))

    def _on_hold(self, key: str, entry: Entry[DeviceHold] | None) -> None:
        device = key.removeprefix(f"{self._node}.")
        known = self._holds.get(device)
        if entry is None:
            self._holds.pop(device, None)
        elif known is None or entry.revision > known.revision:
            self._holds[device] = entry
        self._wake()

    def _on_cut(self, key: str, entry: Entry[CutRecord] | None) -> None:
        if entry is not None:
            self._learn(key, entry.value, entry.revision)
        else:
            self.cuts.pop(key, None)
            self._cut_revisions.pop(key, None)
        self._wake()

    def _learn(self, claim: str, record: CutRecord, revision: int) -> None:
        if revision > self._cut_revisions.get(claim, 0):
            self.cuts[claim] = record
            self._cut_revisions[claim] = revision

    def _due(self, fact: str, claim: str, first: bool) -> bool:
        """Say a fact again only every few seconds while the ledger has not acted on it."""
        now = self._clock()
        if not first and now - self._said_at.get((fact, claim), -_SAY_AGAIN_S) < _SAY_AGAIN_S:
            return False
        if len(self._said_at) > 4096:
            self._said_at = {key: at for key, at in self._said_at.items() if now - at < _SAY_AGAIN_S}
        self._said_at[fact, claim] = now
        return True
