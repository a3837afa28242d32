"""The shell of ``core.nodes``: looks at the beats twice a second, at leases where beats are missed, and acts (B5, F3).

One replica does it at a time (``liveness.Duty``). A look that could not read, and a time in which the connection was
away or this process stood still, forget what was seen before: a bus outage expires nobody (E13).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from openrl_common.bus import Bus
from openrl_common.duty import Duty
from openrl_common.errors import Transient
from openrl_common.pause import pause
from openrl_common.records import LeaseRecord, NodeBudget, NodeRecord, Standing
from openrl_common.store import Entry, Mirror
from openrl_ledger.core import nodes
from openrl_ledger.core.nodes import NodePolicy, NodeWatch
from openrl_ledger.core.ops import Environment, Steps

log = logging.getLogger(__name__)

LOOK_S = 0.5
_STOOD_STILL_S = 2.0

Drive = Callable[[Steps[Any]], Awaitable[Any]]


class NodeJudge:
    """``drive`` runs steps and gives their result. ``watch`` lasts until the bus is stopping."""

    def __init__(
        self,
        bus: Bus,
        environment: Environment,
        drive: Drive,
        policy: NodePolicy,
        registry: CollectorRegistry,
        *,
        records: Mirror[NodeRecord],
        budgets: Mirror[NodeBudget],
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._environment = environment
        self._drive = drive
        self._records = records
        self._budgets = budgets
        self._clock = clock
        self._seen = NodeWatch(policy)
        self._looked_at: float | None = None
        self._reconnects = bus.reconnects
        self._released = Counter(
            "openrl_ledger_node_loss_releases", "Seats released because their node is lost", registry=registry
        )
        gauge = Gauge("openrl_ledger_nodes", "Nodes by standing", ["standing"], registry=registry)
        for standing in Standing:
            gauge.labels(standing).set_function(partial(self._count, standing))

    def _count(self, standing: Standing) -> float:
        known = [self._budgets.entries.get(node) for node in self._records.entries]
        return sum((Standing.LIVE if entry is None else entry.value.standing) is standing for entry in known)

    async def watch(self, duty: Duty) -> None:
        while not self._bus.stopping.is_set():
            if duty.held:
                try:
                    await self.look()
                except Transient as error:
                    self._cut_off()
                    log.warning("nodes are looked at again: %s", error)
            else:
                self._cut_off()
            await pause(self._bus.stopping, LOOK_S)

    async def look(self) -> None:
        """One look at every node. Raises Transient when the bus cannot be read: nobody was judged by it then."""
        now = self._clock()
        stood_still = self._looked_at is not None and now - self._looked_at > _STOOD_STILL_S + LOOK_S
        if not self._bus.connected or self._bus.reconnects != self._reconnects or stood_still:
            self._reconnects = self._bus.reconnects
            self._cut_off()
        self._looked_at = now
        if not self._bus.connected:
            return
        silent = set(self._seen.silent(self._records.entries, now))
        looked_at: set[str] = set()
        for node in sorted(silent):
            looked_at |= await self._judge(node)
        self._seen.forget_leases(looked_at)
        for node, budget in list(self._budgets.entries.items()):
            known = self._records.entries.get(node)
            away = budget.value.standing is not Standing.LIVE
            if away and known is not None and node not in silent and self._seen.heard(known):
                await self._declare(known, Standing.LIVE)
        self._looked_at = self._clock()

    async def _judge(self, node: str) -> set[str]:
        entry = await self._bus.store.nodes.get(node)  # the mirror may be blind for a while (E15)
        if entry is None:
            return set()
        self._records.learn(entry)
        budget = await self._bus.store.ledger_nodes.get(node)
        listed = () if budget is None else tuple(budget.value.entries)
        leases: dict[str, Entry[LeaseRecord] | None] = {
            assignment: await self._bus.store.leases.get(assignment) for assignment in listed
        }
        now = self._clock()
        standing = self._seen.judge(entry, leases, now)
        before = Standing.LIVE if budget is None else budget.value.standing
        if standing is Standing.LIVE and before is not Standing.LIVE:
            return set(listed)  # it has been silent for too short a time to say either: as it was
        if standing is not before:
            await self._declare(entry, standing)
        if standing is Standing.LOST and listed:
            over = self._seen.lapsed(leases, now)
            revisions = {a: 0 if lease is None else lease.revision for a, lease in leases.items() if a in over}
            released = await self._drive(nodes.release_lost(node, revisions))
            if released:
                self._released.inc(released)
                log.warning("node %s is lost: %d seats released", node, released)
        return set(listed)

    async def _declare(self, entry: Entry[NodeRecord], standing: Standing) -> None:
        record = entry.value
        if standing is Standing.LIVE:
            why = "it beats again"
        elif record.suspect or record.lost:
            why = "its launcher reports it so"
        else:
            why = "it missed heartbeats" + (" and no worker of it renews" if standing is Standing.LOST else "")
        if await self._drive(nodes.declare(entry.key, standing, why, self._environment)):
            log.warning("node %s is %s: %s", entry.key, standing, why)

    def _cut_off(self) -> None:
        self._seen.cut_off()
        self._looked_at = None
