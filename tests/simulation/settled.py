"""Invariants 7 to 10 once faults have stopped: true waits, nothing left over, nobody skipped.

Everything is judged from the truth (the server's last values, the machines), not from what placement believes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from openrl_common.records import (
    ClaimRecord,
    ClaimState,
    CutState,
    JobPhase,
    JobRecord,
    LeaseState,
    NodeRecord,
    Reason,
    SeatState,
    Shape,
    Standing,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_common.seating import accepts_role, host_refusal, join_refusal
from simulation.virtual_time import EPOCH

if TYPE_CHECKING:
    from simulation.world import World

_SKEW_S = 5.0
_YIELD_S = 10.0
"""A worker asked to leave has left, or was fenced and is gone, within this time."""
_KNOWN_S = 0.01
"""What placement goes by is at most this old in calm times."""
_ENDED = (WorkloadPhase.FINISHED, WorkloadPhase.FAILED)
_HIGHEST = (Reason.IMPOSSIBLE, Reason.ROLE_NOT_ACCEPTED)


class Settled:
    def __init__(self, world: World) -> None:
        self._world = world
        self._truth = world.truth
        self._asked_at: dict[str, float] = {}
        """When each workload last asked for a seat."""
        self._host_log: dict[str, list[tuple[float, int]]] = {}
        """How much host memory of each node was reserved, from when."""

    def asked(self, workload: str) -> None:
        self._asked_at[workload] = self._world.loop.now_s

    def budget_written(self, node: str) -> None:
        self._host_log.setdefault(node, []).append((self._world.loop.now_s, self._host_used(node)))

    # --- true waits -----------------------------------------------------------------------------------------------

    def waits_are_true(self) -> list[str]:
        """Invariant 7: every workload is placed and its worker runs, or has ended, or waits for a reason that holds."""
        found = []
        for record in self._truth.workloads().values():
            if record.phase in _ENDED:
                continue
            if record.phase is WorkloadPhase.READY:
                found += self._placed(record)
            elif record.phase is WorkloadPhase.PENDING and record.reason is not None:
                found += self._waits(record)
            else:
                found.append(f"{record.workload} is {record.phase} {record.reason or ''}")
        found += [f"job {job.job} is {job.phase}" for job in self._truth.jobs().values() if not self._at_rest(job)]
        return found + self._disagreements() + self._starved()

    def _starved(self) -> list[str]:
        """T3: nobody waits for a device longer than everybody else's turn takes."""
        now = EPOCH + self._world.loop.now_s
        found = []
        for claim, record in self._truth.all("$KV.openrl_turns.").items():
            longest_s = (len(record.residents) + len(record.waiting)) * (self._world.plan.max_turn_s + _YIELD_S)
            found += [
                f"{assignment} waits for the device of {claim} since {now - since:.0f} s"
                for assignment, since in record.waiting.items()
                if now - since > longest_s + _SKEW_S
            ]
        return found

    def _at_rest(self, job: JobRecord) -> bool:
        return job.phase.ended or job.phase in (JobPhase.ADMITTED, JobPhase.READY)

    def _placed(self, record: WorkloadRecord) -> list[str]:
        seat = self._truth.seat(record.workload)
        claim = self._truth.claim(record.claim)
        if seat.state is not SeatState.HELD or seat.assignment != record.assignment:
            return [f"{record.workload} is Ready but its seat is {seat.state} {seat.assignment}"]
        if claim is None or record.assignment not in claim.entries:
            return [f"{record.workload} is Ready but claim {record.claim} does not list it"]
        runs = [each for m in self._world.machines.values() for each in m.alive()]
        if not any(each.launch.assignment == record.assignment and each.touching for each in runs):
            return [f"{record.workload} is Ready but no process of it runs"]
        return []

    def _waits(self, record: WorkloadRecord) -> list[str]:
        name, shape, reason = record.workload, record.shape, record.reason
        room = [
            claim_id
            for claim_id, claim in self._truth.claims().items()
            if self._would_take(claim, shape) and not self._avoids(record, claim_id, claim.node)
        ]
        if room:
            return [f"{name} waits ({reason}) although claim {room[0]} would take it"]
        if record.claim and self._truth.claim(record.claim) is None:
            return [f"{name} waits on claim {record.claim}, which does not exist"]
        free = self._free_device(record)
        if free:
            return [f"{name} waits ({reason}) although {free} is free"]
        if reason is Reason.WAITING_FOR_SEAT:
            limit = self._world.plan.limit
            full = any(
                self._would_take(claim, shape, limit=0) and not self._avoids(record, claim_id, claim.node)
                for claim_id, claim in self._truth.claims().items()
            )
            return [] if limit and full else [f"{name} says WaitingForSeat, but no claim is full for it"]
        if reason is Reason.WAITING_FOR_DEVICE:
            return [] if self._nodes_for(shape) else [f"{name} says WaitingForDevice, but no node could hold it"]
        if reason is Reason.WAITING_FOR_HOST_MEMORY:
            return self._waits_for_memory(record)
        if reason is Reason.ROLE_NOT_ACCEPTED:
            fits = [node for node in self._nodes().values() if accepts_role(node, shape.role)]
            able = [node for node in fits if _could_hold(node, shape)]
            return [f"{name} says RoleNotAccepted, but {able[0].node} accepts it"] if able else []
        if reason is Reason.UNSCHEDULABLE and "has not" in record.message:
            return []  # the launcher's own words, with numbers
        return [f"{name} waits for {reason}: {record.message}"]

    def _waits_for_memory(self, record: WorkloadRecord) -> list[str]:
        """Some node has a device or a seat for it, and not the memory."""
        for node in self._nodes_for(record.shape):
            if host_refusal(node, self._host_used(node.node), record.shape.host_bytes):
                return []
        return [f"{record.workload} says WaitingForHostMemory, but every node has enough"]

    def _would_take(self, claim: ClaimRecord, shape: Shape, limit: int | None = None) -> bool:
        node = self._nodes().get(claim.node)
        limit = self._world.plan.limit if limit is None else limit
        return (
            claim.state is ClaimState.ALLOCATED
            and node is not None
            and self._standing(claim.node) is Standing.LIVE
            and accepts_role(node, shape.role)
            and join_refusal(claim, shape, limit) == ""
            and host_refusal(node, self._host_used(node.node), shape.host_bytes) == ""
        )

    def _avoids(self, record: WorkloadRecord, claim: str, node: str) -> bool:
        """P13, by the clock of whoever asks: an avoidance that ends about now counts as both."""
        now = EPOCH + self._world.loop.now_s
        return any(
            avoid.until > now - _SKEW_S and (avoid.claim == claim or (avoid.node != "" and avoid.node == node))
            for avoid in record.avoid
        )

    def _standing(self, node: str) -> Standing:
        budget = self._truth.budgets().get(node)
        return Standing.LIVE if budget is None else budget.standing

    def _free_device(self, record: WorkloadRecord) -> str:
        """A device that a claim founded for this workload would get."""
        shape, holds = record.shape, self._truth.holds()
        for node in self._nodes_for(shape):
            if (
                host_refusal(node, self._host_used(node.node), shape.host_bytes)
                or self._standing(node.node) is not Standing.LIVE
                or self._avoids(record, "-", node.node)
            ):
                continue
            for device in node.devices:
                hold = holds.get(f"{node.node}.{device.device}")
                if shape.device_bytes <= device.memory_bytes and (hold is None or not hold.claim):
                    return f"device {device.device} of {node.node}"
        return ""

    def _nodes_for(self, shape: Shape) -> list[NodeRecord]:
        return [n for n in self._nodes().values() if accepts_role(n, shape.role) and _could_hold(n, shape)]

    def _nodes(self) -> dict[str, NodeRecord]:
        return self._truth.all("$KV.openrl_nodes.")

    def _host_used(self, node: str) -> int:
        budget = self._truth.budgets().get(node)
        return 0 if budget is None else sum(entry.host_bytes for entry in budget.entries.values())

    # --- agreement of the ledger's keys ---------------------------------------------------------------------------

    def _disagreements(self) -> list[str]:
        """No reservation that nobody named, no seat unlisted, no memory held for nothing, no device cut for nothing."""
        found = []
        claims, seats, budgets = self._truth.claims(), self._truth.seats(), self._truth.budgets()
        for claim_id, claim in claims.items():
            for assignment, entry in claim.entries.items():
                seat = seats.get(entry.workload)
                if seat is None or (seat.assignment, seat.claim) != (assignment, claim_id) or seat.state != "held":
                    found.append(f"claim {claim_id} lists {assignment}, which no seat names")
                budget = budgets.get(claim.node)
                if claim.state is ClaimState.ALLOCATED and (budget is None or assignment not in budget.entries):
                    found.append(f"{assignment} holds no memory of node {claim.node}")
            if claim.state is ClaimState.RETIRING:
                found.append(f"claim {claim_id} is {claim.state}")
            if claim.state is ClaimState.PENDING and not claim.entries:
                found.append(f"claim {claim_id} is pending for nobody")
        for workload, seat in seats.items():
            holder = claims.get(seat.claim)
            if seat.state is not SeatState.EMPTY and (holder is None or seat.assignment not in holder.entries):
                found.append(f"seat {workload} names {seat.assignment}, which nobody lists")
            if seat.state is SeatState.RELEASING:
                found.append(f"seat {workload} is releasing")
        for node, budget in budgets.items():
            for assignment, reserved in budget.entries.items():
                holder = claims.get(reserved.claim)
                if holder is None or assignment not in holder.entries:
                    found.append(f"node {node} keeps memory for {assignment}, which nobody lists")
        return found + self._machine_disagreements()

    def _machine_disagreements(self) -> list[str]:
        found = []
        claims = self._truth.claims()
        for device, hold in self._truth.holds().items():
            if hold.claim:
                claim = claims.get(hold.claim)
                if claim is None or claim.state not in (ClaimState.ALLOCATED, ClaimState.QUARANTINED):
                    found.append(f"device {device} is held for claim {hold.claim}")
        for claim_id, cut in self._truth.cuts().items():
            claim = claims.get(claim_id)
            if cut.state is CutState.ALLOCATED and (claim is None or claim.state is not ClaimState.ALLOCATED):
                found.append(f"cut {claim_id} stands for a claim that is not allocated")
        for machine in self._world.machines.values():
            for each in machine.alive():
                lease = self._truth.lease(each.launch.assignment)
                if self._world.invariants.claim_of(each) == "" or lease is None or lease.state is LeaseState.TOMBSTONE:
                    found.append(f"worker {each.launch.assignment} runs without a seat")
        return found

    # --- the end ------------------------------------------------------------------------------------------------

    def nothing_is_left(self) -> list[str]:
        """Every job is over: no seat, no claim, no memory, no device, no process, no message under way."""
        found = [f"job {job.job} is {job.phase}" for job in self._truth.jobs().values() if not job.phase.ended]
        found += [f"{w.workload} is {w.phase}" for w in self._truth.workloads().values() if w.phase not in _ENDED]
        found += [f"seat {key} is {s.state}" for key, s in self._truth.seats().items() if s.state != "empty"]
        claims = self._truth.claims()
        for key, claim in claims.items():
            if claim.state is not ClaimState.GONE and (claim.state is not ClaimState.QUARANTINED or claim.entries):
                found.append(f"claim {key} is {claim.state}")
        found += [f"node {key} keeps {len(b.entries)} entries" for key, b in self._truth.budgets().items() if b.entries]
        for key, hold in self._truth.holds().items():
            holder = claims.get(hold.claim)
            if hold.claim and (holder is None or holder.state is not ClaimState.QUARANTINED):
                found.append(f"device {key} is held for {hold.claim}")
        for machine in self._world.machines.values():
            found += [f"worker {each.launch.assignment} runs" for each in machine.alive()]
        turns = self._truth.all("$KV.openrl_turns.").items()
        found += [f"turns of claim {key} are left" for key, each in turns if each.residents or each.waiting]
        events = self._world.server.streams["OPENRL_EVENTS"]
        found += [f"consumer {name} is behind" for name, each in events.consumers.items() if not each.idle]
        letters = self._world.server.streams["OPENRL_DLQ"].messages
        found += [f"dead letter {letter.headers.get('openrl-dlq-error')}" for letter in letters[:1]]
        return found

    # --- the line -----------------------------------------------------------------------------------------------

    def waiting(self) -> dict[str, WorkloadRecord]:
        return {
            key: record
            for key, record in self._truth.workloads().items()
            if record.phase is WorkloadPhase.PENDING and record.reason is not None
        }

    def placed_jobs(self) -> list[JobRecord]:
        ready = {key for key, record in self._truth.workloads().items() if record.phase is WorkloadPhase.READY}
        return [
            job
            for job in self._truth.jobs().values()
            if not job.phase.ended and (job.trainer in ready or job.sampler in ready)
        ]

    def skipped(self, before: dict[str, WorkloadRecord]) -> list[str]:
        """W1: of those who waited, a later one got a claim that an earlier one, still waiting, could have used."""
        now = self._truth.workloads()
        claims = self._truth.claims()
        found = []
        for key, waiter in before.items():
            later = now.get(key)
            if later is None or later.phase is not WorkloadPhase.READY or later.assignment == waiter.assignment:
                continue
            claim = claims.get(later.claim)
            if claim is None or claim.state is not ClaimState.ALLOCATED:
                continue
            without = {a: e for a, e in claim.entries.items() if a != later.assignment}
            for other_key, other in before.items():
                still = now.get(other_key)
                if (
                    other_key == key
                    or still is None
                    or still.phase is not WorkloadPhase.PENDING
                    or (-other.priority, other.incarnation) >= (-waiter.priority, waiter.incarnation)
                    or not without
                ):
                    continue
                node = self._nodes()[claim.node]
                bytes_used = self._host_used_when_asked(node.node, key, later)
                room = ClaimRecord(
                    state=claim.state, node=claim.node, devices=claim.devices, device_bytes=claim.device_bytes,
                    entries=without,
                )  # fmt: skip
                if (
                    join_refusal(room, other.shape, self._world.plan.limit) == ""
                    and accepts_role(node, other.shape.role)
                    and host_refusal(node, bytes_used, other.shape.host_bytes) == ""
                ):
                    found.append(f"{key} got claim {later.claim} before {other_key}, which is earlier in line (W1)")
        return found

    def _host_used_when_asked(self, node: str, workload: str, record: WorkloadRecord) -> int:
        """What others had reserved when this workload asked for its seat; the most, where it changed about then.

        Memory that came free afterwards was nobody's to wait for: a job that ends gives back in two steps.
        """
        at_s = self._asked_at.get(workload, self._world.loop.now_s)
        known = [entry for entry in self._host_log.get(node, []) if entry[0] <= at_s]
        about_then = [used for when, used in known if when > at_s - _KNOWN_S] or [used for _, used in known[-1:]]
        now = self._host_used(node) - record.shape.host_bytes
        return max([now, *about_then])


def _could_hold(node: NodeRecord, shape: Shape) -> bool:
    return (
        max(device.memory_bytes for device in node.devices) >= shape.device_bytes
        and host_refusal(node, 0, shape.host_bytes) == ""
    )
