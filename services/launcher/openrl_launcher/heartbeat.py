"""The node's record and its beat (B5): what the node offers, said again every 2 s, and who may speak for the node.

    join    another machine's launcher beats for this name ─▶ refused · silent for three beats ─▶ taken over
    beat    by compare-and-swap: a launcher that was taken over meanwhile learns it here, and ends
    holds   only while the last beat that succeeded was sent lately does this launcher act for the node

So of two launchers with one name the second is refused, or, when the first was cut off or stood still, the first one
does nothing any more from before the second begins. On one machine the lock of the home says it at once.

A changed inventory is said as NodeChanged; one that makes no sense marks the node incomplete (P1) and is logged, it
ends nothing that runs.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

import msgspec

from openrl_common.bus import Bus
from openrl_common.errors import Conflict, Rejected, Transient
from openrl_common.events import NodeChanged, NodeJoined
from openrl_common.liveness import BEATS_MISSED_MAX
from openrl_common.names import check_name
from openrl_common.records import NodeRecord, Role
from openrl_common.store import Entry
from openrl_launcher.backend import Backend, Inventory

log = logging.getLogger(__name__)

_LOOK_S = 0.25


def inventory_problem(inventory: Inventory) -> str:
    """ "" when the inventory can be offered, else what is wrong with it, naming the device."""
    seen: set[str] = set()
    for device in inventory.devices:
        try:
            check_name("device id", device.device, 80)
        except Rejected as error:
            return str(error)
        if device.device in seen:
            return f"device {device.device} is listed twice"
        if device.memory_bytes <= 0:
            return f"device {device.device} has {device.memory_bytes} bytes of memory"
        seen.add(device.device)
    if not inventory.devices:
        return "there is no device"
    return "" if inventory.host_allocatable_bytes >= 0 else "the host's memory is negative"


class Heartbeat:
    """``join`` once, then ``run`` until cancelled.

    Args:
        host: the machine and home: who has it may take the node over without waiting.
        clock: monotonic seconds.
        on_inventory: called with the inventory at every beat; without devices while it makes no sense.
    """

    def __init__(
        self,
        bus: Bus,
        backend: Backend,
        *,
        node: str,
        host: str,
        roles: tuple[Role, ...],
        beat_s: float,
        clock: Callable[[], float],
        on_inventory: Callable[[Inventory], None],
    ) -> None:
        self._bus = bus
        self._backend = backend
        self._node = node
        self._host = host
        self._roles = roles
        self._beat_s = beat_s
        self._clock = clock
        self._on_inventory = on_inventory
        self._session = uuid.uuid4().hex[:12]
        self._record = NodeRecord(node=node, devices=())
        self._revision = 0
        self._sent_at = -1e9
        self._joins = 0
        self._joined_again = False
        self._said = ""

    @property
    def holds(self) -> bool:
        """May this launcher act for the node?"""
        return self._clock() - self._sent_at < BEATS_MISSED_MAX * self._beat_s

    def note_lost(self) -> None:
        """The ledger holds this node for lost: say that it is here with the next beat."""
        self._joined_again = True

    async def join(self) -> NodeRecord:
        """Take the node and say NodeJoined.

        Raises:
            Rejected: ``node-taken``: a launcher on another machine or home beats for it.
        """
        while True:
            standing = await self._bus.store.nodes.get(self._node)
            if standing is not None and standing.value.beat and standing.value.host not in ("", self._host):
                await self._expect_silence(standing)
            self._record = self._described(1 if standing is None else standing.value.beat + 1)
            sent_at = self._clock()
            try:
                self._revision = await self._bus.store.nodes.write(
                    self._node, self._record, last=0 if standing is None else standing.revision
                )
            except Conflict:
                continue
            self._sent_at = sent_at
            await self._say_joined()
            return self._record

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self.beat()
            except Transient as error:
                log.warning("heartbeat missed: %s", error)

    async def beat(self) -> None:
        """One beat. Raises Rejected (``node-taken``) when another launcher has taken the node over."""
        before = self._record
        record = self._described(before.beat + 1)
        sent_at = self._clock()
        try:
            self._revision = await self._bus.store.nodes.write(self._node, record, last=self._revision)
        except Conflict:
            await self._look_who()
            return
        self._record, self._sent_at = record, sent_at
        if _offer(record) != _offer(before):
            log.warning(
                "node %s has changed: %d devices, complete: %s", self._node, len(record.devices), record.complete
            )
            await self._bus.publish(
                NodeChanged(node=self._node, session=self._session, beat=record.beat, record=record)
            )
        if self._joined_again:
            self._joined_again = False
            await self._say_joined()

    # --- internals -------------------------------------------------------------------------------------------------

    async def _expect_silence(self, standing: Entry[NodeRecord]) -> None:
        """Return once nobody has beaten for three beats, by this reader's clock."""
        log.info("node %s was on %s: waiting whether it still beats", self._node, standing.value.host)
        deadline = self._clock() + BEATS_MISSED_MAX * self._beat_s + 2 * _LOOK_S
        while self._clock() < deadline:
            await asyncio.sleep(_LOOK_S)
            now = await self._bus.store.nodes.get(self._node)
            if now is not None and now.revision != standing.revision:
                raise Rejected(
                    f"node {self._node} already has a launcher, on {now.value.host}: stop that one, or give this one "
                    "another --node-name",
                    code="node-taken",
                )

    async def _look_who(self) -> None:
        standing = await self._bus.store.nodes.get(self._node)
        if standing is not None and standing.value.session != self._session:
            raise Rejected(
                f"node {self._node} was taken over by a launcher on {standing.value.host or 'another machine'}: "
                "this one ends (give it another --node-name)",
                code="node-taken",
            )
        self._revision = 0 if standing is None else standing.revision  # an own beat landed late, or was deleted by hand

    async def _say_joined(self) -> None:
        self._joins += 1
        await self._bus.publish(
            NodeJoined(node=self._node, session=f"{self._session}-{self._joins}", record=self._record)
        )

    def _described(self, beat: int) -> NodeRecord:
        """The node as it is now. What cannot be offered is not: the node is incomplete for as long (P1)."""
        try:
            inventory = self._backend.inventory()
            problem = inventory_problem(inventory)
        except (Rejected, OSError) as error:
            inventory, problem = Inventory((), self._record.host_allocatable_bytes, self._record.declared), str(error)
        if problem != self._said:
            self._said = problem
            if problem:
                log.error("node %s has no complete inventory: %s", self._node, problem)
        self._on_inventory(
            Inventory((), inventory.host_allocatable_bytes, inventory.declared) if problem else inventory
        )
        return NodeRecord(
            node=self._node,
            devices=self._record.devices if problem else inventory.devices,
            host_allocatable_bytes=inventory.host_allocatable_bytes,
            roles=self._roles,
            complete=not problem,
            declared=inventory.declared,
            beat=beat,
            host=self._host,
            session=self._session,
        )


def _offer(record: NodeRecord) -> NodeRecord:
    """What of a record is inventory."""
    return msgspec.structs.replace(record, beat=0)
