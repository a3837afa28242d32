"""A worker that cannot start where its seat is (F2, P13): the seat is given up, the place remembered and avoided.

Placed, the device allocated, and for the whole wedge grace no word of the worker itself: no ready record, which every
worker writes as soon as it is live, before it loads anything. What it does from then on (imports, load, compile) is not
counted, nor is pulling its image, which the launcher reports; one that starts and fails is F4's. Of a worker that was
started again, what its former process said is no word: the grace begins anew with the launch.

The release keeps the incarnation: once SeatReleased is there the workload asks again in the same handling, and what it
avoids is left out of its candidates and told to the launchers with an own claim.
"""

from __future__ import annotations

import msgspec

from openrl_common.quantities import format_seconds
from openrl_common.records import Avoid, WorkerRecord, WorkloadPhase, WorkloadRecord
from openrl_placement.state import Effects, State, release_request

AVOID_S = 600.0
"""How long a place that failed a workload is avoided by it."""
AVOIDS_MAX = 16
CLOCKS_APART_S = 60.0
"""A cluster's API server says when a pod was made, its node's clock when the process started."""
_STARTING = (WorkloadPhase.PLACED, WorkloadPhase.STARTING)


def pulling_s(worker: WorkerRecord, now: float) -> float:
    """Seconds that this assignment's image has taken so far."""
    return worker.pulled_s + (max(0.0, now - worker.pulling_since) if worker.pulling_since is not None else 0.0)


def is_wedged(state: State, record: WorkloadRecord, now: float) -> bool:
    grace_s = state.policy.wedge_grace_s
    if not grace_s or record.phase not in _STARTING or record.placed_at is None:
        return False
    worker, since = state.workers.get(record.assignment), record.placed_at
    if record.assignment in state.ready:
        if worker is None or not _is_of_a_former_process(state, worker):
            return False
        since = max(since, worker.launched_at)
    excused_s = 0.0 if worker is None else pulling_s(worker, now)
    return now - since - excused_s >= grace_s


def _is_of_a_former_process(state: State, worker: WorkerRecord) -> bool:
    """Was the ready record written before this process started?"""
    return 0.0 < state.spoke.get(worker.assignment, 0.0) < worker.started_at - CLOCKS_APART_S


def give_up(state: State, record: WorkloadRecord, now: float, fx: Effects) -> None:
    """Release the seat (said again until it is done) and avoid its claim and node from now on."""
    why = f"its worker did not start within {format_seconds(state.policy.wedge_grace_s)} (--wedge-grace)"
    standing = [avoid for avoid in record.avoid if avoid.until > now]
    if not any(avoid.claim == record.claim for avoid in standing):
        standing.append(Avoid(claim=record.claim, until=now + AVOID_S, why=why))
        if record.node:
            standing.append(Avoid(node=record.node, until=now + AVOID_S, why=why))
        state.put_workload(msgspec.structs.replace(record, avoid=tuple(standing[-AVOIDS_MAX:])))
        fx.workloads[record.workload] = None
    fx.events.append(release_request(record, close=False, why=why))


def nodes_avoided(record: WorkloadRecord, now: float) -> tuple[Avoid, ...]:
    """What an own claim must not be cut on."""
    return tuple(avoid for avoid in record.avoid if avoid.node and avoid.until > now)
