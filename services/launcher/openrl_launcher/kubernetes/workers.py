"""The workers of a cluster: the same life as on one host (``openrl_launcher.workers``), with pods for processes.

What differs: a pod ends when the API server no longer has it, however long its kubelet takes (no regrant before it is
gone); a container that was restarted in place while no launcher looked has ended once all the same; and on a node that
is lost nobody can see anything end, so there a pod is removed by force once a full lease time has passed (F3).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from openrl_common.liveness import LEASE_S
from openrl_common.records import WorkerRecord, WorkerState
from openrl_launcher.backend import Process
from openrl_launcher.core import LocalWorker, Start, Status, Stop
from openrl_launcher.kubernetes.pods import PodBackend
from openrl_launcher.workers import Tracked, Workers

log = logging.getLogger(__name__)

_LOOK_S = 0.5


class ClusterWorkers(Workers):
    """``mark(workload, claim)`` asks for another look; ``silent_s(node)``: for how long a node has not been ready."""

    def __init__(
        self,
        *arguments: Any,
        pods: PodBackend,
        mark: Callable[[str, str], None],
        silent_s: Callable[[str], float],
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._pods = pods
        self._mark = mark
        self._silent_s = silent_s
        self._by_workload: defaultdict[str, set[str]] = defaultdict(set)
        self._by_claim: defaultdict[str, set[str]] = defaultdict(set)
        self._backing_off: set[str] = set()

    # --- by workload and by claim, so that a look at one costs nothing of the others ----------------------------------

    @property
    def workloads(self) -> list[str]:
        return list(self._by_workload)

    def of_workload(self, workload: str) -> tuple[LocalWorker, ...]:
        return tuple(self._local(assignment) for assignment in sorted(self._by_workload.get(workload, ())))

    def of_claim(self, claim: str) -> tuple[LocalWorker, ...]:
        return tuple(self._local(assignment) for assignment in sorted(self._by_claim.get(claim, ())))

    def failed(self, assignment: str) -> bool:
        """Has it ended by itself on this booking?"""
        tracked = self._table.get(assignment)
        return tracked is not None and tracked.record.failures > 0

    @property
    def backing_off(self) -> list[str]:
        return [self._table[assignment].record.workload for assignment in self._backing_off]

    def next_restart_at(self) -> float | None:
        self._backing_off = {
            each for each in self._backing_off if each in self._table and self._table[each].status is Status.BACKING_OFF
        }
        return min((self._table[each].restart_at for each in self._backing_off), default=None)

    def _local(self, assignment: str) -> LocalWorker:
        tracked = self._table[assignment]
        record = tracked.record
        return LocalWorker(assignment, record.workload, record.claim, tracked.status, tracked.restart_at)

    def _index(self, assignment: str) -> None:
        tracked = self._table[assignment]
        self._by_workload[tracked.record.workload].add(assignment)
        self._by_claim[tracked.record.claim].add(assignment)
        if tracked.status is Status.BACKING_OFF:
            self._backing_off.add(assignment)

    async def adopt(self) -> None:
        await super().adopt()
        for assignment in self._table:
            self._index(assignment)

    def start(self, action: Start, devices: tuple[str, ...]) -> None:
        super().start(action, devices)
        self._index(action.assignment)

    def stop(self, action: Stop) -> None:
        super().stop(action)
        self._index(action.assignment)

    async def forget(self, assignment: str) -> None:
        tracked = self._table.get(assignment)
        if tracked is None:
            return
        await super().forget(assignment)
        for index, key in ((self._by_workload, tracked.record.workload), (self._by_claim, tracked.record.claim)):
            index[key].discard(assignment)
            if not index[key]:
                del index[key]

    def note_pull(self, assignment: str, pulling: bool) -> None:
        """The kubelet pulls its image, or is done: no time of a start that is stuck (F2)."""
        tracked = self._table.get(assignment)
        if tracked is None or tracked.status is not Status.RUNNING:
            return
        record = tracked.record
        if pulling is (record.pulling_since is not None):
            return
        now = self._now()
        tracked.record = record = msgspec.structs.replace(
            record,
            pulling_since=now if pulling else None,
            pulled_s=record.pulled_s + (now - record.pulling_since if record.pulling_since is not None else 0.0),
        )
        self._spawn(self._insist(lambda: self._store.workers.put(record.assignment, record)))

    # --- the life of one ----------------------------------------------------------------------------------------------

    async def _on_exit(self, tracked: Tracked, exit_code: int | None, *, why: str = "") -> None:
        await super()._on_exit(tracked, exit_code, why=why)
        if tracked.status is Status.BACKING_OFF:
            self._backing_off.add(tracked.record.assignment)

    def _run(self, tracked: Tracked, work: Coroutine[Any, Any, None]) -> None:
        async def marked() -> None:
            try:
                await work
            finally:
                self._mark(tracked.record.workload, tracked.record.claim)

        super()._run(tracked, marked())

    def _take(self, tracked: Tracked, process: Process) -> None:
        known = tracked.record.pid
        if tracked.record.state is WorkerState.RUNNING and known < process.pid:
            process = Process(process.assignment, process.workload, known, process.started_at)
        super()._take(tracked, process)

    async def _end(self, tracked: Tracked) -> None:
        record = tracked.record = msgspec.structs.replace(tracked.record, state=WorkerState.STOPPING)
        await self._insist(lambda: self._store.workers.put(record.assignment, record))
        forced = False
        while (pod := self._pods.pod(record.assignment)) is not None:
            if not forced and pod.deleting and self._silent_s(pod.spec.node_name) >= LEASE_S:
                log.warning("pod %s is removed by force: its node is lost", pod.metadata.name)
                forced = True
                self._pods.delete(pod, force=True)
            self._pods.delete(pod)
            await self._pods.changed(record.assignment, within_s=_LOOK_S)

    def _is_mine(self, record: WorkerRecord) -> bool:
        return True

    def _node_of(self, claim: str) -> str:
        cut = self._claims.cuts.get(claim)
        return "" if cut is None else cut.node
