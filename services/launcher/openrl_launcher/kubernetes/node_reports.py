"""What the bus is told of the cluster's nodes: a record per node whenever it changes, NodeJoined and NodeChanged (K2).

Nobody beats for these nodes (beat 0): the cluster's own NotReady is what makes one suspect and lost, and the ledger
waits for its workers' leases to lapse before it releases a seat (F3).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

from openrl_common.bus import Bus
from openrl_common.errors import Transient
from openrl_common.events import NodeChanged, NodeJoined
from openrl_common.records import NodeRecord
from openrl_launcher.kubernetes.inventory import Inventory, node_token
from openrl_launcher.kubernetes.objects import Node

log = logging.getLogger(__name__)

_AT_ONCE = 32


class NodeReports:
    """``load`` first; ``tell`` whenever ``inventory.changed`` is not empty."""

    def __init__(self, bus: Bus, inventory: Inventory) -> None:
        self._bus = bus
        self._inventory = inventory
        self._told: dict[str, NodeRecord] = {}
        self._not_ready_since: dict[str, float] = {}
        self._session = uuid.uuid4().hex[:12]
        self._count = 0

    def __len__(self) -> int:
        return len(self._told)

    async def load(self) -> None:
        """What an earlier launcher of this cluster has told; nodes that beat are other launchers'."""
        listed = await self._bus.store.nodes.list()
        self._told = {token: entry.value for token, entry in listed.items() if entry.value.beat == 0}

    def note(self, name: str, node: Node | None) -> None:
        if node is not None and node.ready:
            self._not_ready_since.pop(name, None)
        else:
            self._not_ready_since.setdefault(name, time.monotonic())

    def silent_s(self, name: str) -> float:
        """For how long the node has not been ready; 0 while it is."""
        since = self._not_ready_since.get(name)
        return 0.0 if since is None else time.monotonic() - since

    async def tell(self) -> None:
        """Say what has changed. Raises Transient; what was not said is said the next time."""
        names, self._inventory.changed = self._inventory.changed, set()
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str) -> None:
            try:
                async with gate:
                    await self._tell(name)
            except Transient:
                self._inventory.changed.add(name)
                raise

        answers = await asyncio.gather(*(one(name) for name in sorted(names)), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _tell(self, name: str) -> None:
        record, token = self._inventory.record(name), node_token(name)
        known = self._told.get(token)
        if record == known or (known is None and not (record.enabled or record.devices)):
            return
        await self._bus.store.nodes.put(token, record)
        self._told[token] = record
        if known is None or known.lost is not record.lost:
            state = "not ready" if record.lost else "ready"
            level = logging.WARNING if record.lost else logging.INFO
            log.log(level, "node %s: %d devices, %s", name, len(record.devices), state)
        self._count += 1
        if known is None or (known.lost and not record.lost):
            joined = NodeJoined(node=token, session=f"{self._session}-{self._count}", record=record)
            await self._bus.publish(joined)
        else:
            changed = NodeChanged(node=token, session=self._session, beat=self._count, record=record)
            await self._bus.publish(changed)
