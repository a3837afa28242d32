"""Who may use a shared device now (T1-T6): the arithmetic of one claim's turns. Pure; time comes in as an argument.

    request ─▶ waiting ─settle─▶ resident (epoch + 1) ─pressed─▶ leaves when idle ──────────────┐
                                     │ until passes            ─asked─▶ leaves at a boundary ───┤
                                     │ ignores it past the grace, or its lease lapses           ▼
                                     └───────────────▶ fenced ─▶ its process is gone ─▶ no longer resident

Invariants (``double_hold`` checks the first):
- several are resident only while the sum of what they declare fits the device minus the reserve (T2);
- the next grant goes to the owner served longest ago, and nobody who came later is let in before it: a big workload
  is not starved by small ones, an owner with two workers has one place in the line (T3);
- who loads cannot yield: it is asked after ``load_grace_s`` only, and has a whole turn once it says that it can (T3);
- who is resident stays so until it says it left, or until its entry is off the claim, which the ledger does only after
  its process is seen gone: a fenced worker still counts (T5, T6).

Not here: reading and writing (``turn_steps``), clocks and leases' revisions over the bus (``turns_service``).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from msgspec.structs import replace

from openrl_common.events import Event, TurnGranted, TurnYieldAsked
from openrl_common.records import ClaimEntry, ClaimRecord, Residency, TurnRecord

LAPSE_S = 7.0
"""A holder whose lease did not change for this long, by the arbiter's clock, is dead. Renewals come every 2 s and the
arbiter looks every second, so a dead holder is known within 10 s (T6)."""
START_LAPSE_S = 60.0
"""The same for a process that is starting: it renews nothing until Python is up, which takes long on a busy machine."""


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """``coresidency`` False: strictly one at a time (T2)."""

    coresidency: bool = True
    reserve_bytes: int = 0
    max_turn_s: float = 120.0
    grace_s: float = 30.0
    load_grace_s: float = 1800.0


def request(record: TurnRecord, assignment: str, now: float) -> TurnRecord:
    """It wants the device. Nothing changes when it has it, or waits already."""
    if assignment in record.residents or assignment in record.waiting:
        return record
    return replace(record, waiting={**record.waiting, assignment: now})


def load(record: TurnRecord, assignment: str, epoch: int, loading: bool, policy: TurnPolicy, now: float) -> TurnRecord:
    """It cannot yield yet, so its turn lasts as long as a load may (T3); or it can now, and a whole turn begins.

    A word about the turn it has, which one process has, and which goes on only from loading to loaded: what comes
    twice, late or in the wrong order changes nothing (T4).
    """
    residency = record.residents.get(assignment)
    if residency is None or residency.epoch != epoch or residency.loading in (loading, False):
        return record
    until = now + policy.max_turn_s
    if loading:
        until = max(residency.until, residency.granted_at + policy.load_grace_s)
    said = replace(residency, loading=loading, until=until, asked_at=None)
    return replace(record, residents={**record.residents, assignment: said})


def release(record: TurnRecord, assignment: str, epoch: int) -> TurnRecord:
    """It left the device, under ``epoch``: a late word about an older turn takes nothing away (T4)."""
    residency = record.residents.get(assignment)
    if residency is None or residency.epoch != epoch:
        return record
    return replace(record, residents=_without(record.residents, assignment))


def settle(
    record: TurnRecord, claim: ClaimRecord | None, policy: TurnPolicy, now: float, dead: Set[str] = frozenset()
) -> TurnRecord:
    """What follows at ``now``: who is gone is dropped, who fits is let in, who has to go is asked, then fenced.

    Args:
        claim: as the ledger has it; its entries say who exists and what each declares. None: there is no claim.
        dead: residents whose lease has lapsed.
    """
    record = _drop_gone(record, claim)
    if claim is None:
        return record
    record = _grant(record, claim, policy, now)
    if not record.waiting:
        calm = {a: replace(r, pressed_at=None, asked_at=None) for a, r in record.residents.items()}
        return record if calm == record.residents else replace(record, residents=calm)
    return replace(record, residents=_press(record, claim, policy, now, dead))


def told(before: TurnRecord, after: TurnRecord, claim_id: str, claim: ClaimRecord | None) -> list[Event]:
    """The events of a change: hints for the workers, which read the record (E5)."""
    events: list[Event] = []
    for assignment, residency in after.residents.items():
        entry = None if claim is None else claim.entries.get(assignment)
        if entry is None:
            continue
        tenant, epoch = entry.tenant, residency.epoch
        known = before.residents.get(assignment)
        if known is None or known.epoch != epoch:
            events.append(
                TurnGranted(tenant=tenant, claim=claim_id, assignment=assignment, epoch=epoch, until=residency.until)
            )
            known = replace(residency, pressed_at=None, asked_at=None)
        for asked_at, earlier, at_once in (
            (residency.asked_at, known.asked_at, True),
            (residency.pressed_at, known.pressed_at, False),
        ):
            if asked_at is not None and earlier is None:
                events.append(
                    TurnYieldAsked(
                        tenant=tenant, claim=claim_id, assignment=assignment, epoch=epoch, until=residency.until,
                        now=at_once, asked_at=asked_at,
                    )
                )  # fmt: skip
                break
    return events


def double_hold(record: TurnRecord, claim: ClaimRecord, policy: TurnPolicy) -> bool:
    """Whether more are resident than may be. Never true of a record that ``settle`` made (T7)."""
    held = [claim.entries[a].device_bytes for a in record.residents if a in claim.entries]
    if len(held) < 2:
        return False
    return not policy.coresidency or sum(held) > claim.device_bytes - policy.reserve_bytes


def next_owner(record: TurnRecord, entries: Mapping[str, ClaimEntry]) -> str:
    """The assignment that is let in next: of the owner served longest ago, the one that waits longest (T3)."""
    return min(
        (assignment for assignment in record.waiting if assignment in entries),
        key=lambda a: (record.served.get(entries[a].owner, 0), record.waiting[a], a),
    )


# --- the steps of settle ------------------------------------------------------------------------------------------


def _drop_gone(record: TurnRecord, claim: ClaimRecord | None) -> TurnRecord:
    entries = {} if claim is None else claim.entries
    owners = {entry.owner for entry in entries.values()}
    dropped = replace(
        record,
        residents={a: r for a, r in record.residents.items() if a in entries},
        waiting={a: since for a, since in record.waiting.items() if a in entries and a not in record.residents},
        epochs={a: epoch for a, epoch in record.epochs.items() if a in entries},
        served={owner: number for owner, number in record.served.items() if owner in owners},
        turns={owner: number for owner, number in record.turns.items() if owner in owners},
    )
    return record if dropped == record else dropped


def _grant(record: TurnRecord, claim: ClaimRecord, policy: TurnPolicy, now: float) -> TurnRecord:
    while record.waiting:
        assignment = next_owner(record, claim.entries)
        if _lacking_bytes(record.residents.keys(), assignment, claim, policy) > 0:
            return record
        owner = claim.entries[assignment].owner
        epoch = record.epochs.get(assignment, 0) + 1
        residency = Residency(epoch=epoch, granted_at=now, until=now + policy.max_turn_s)
        record = replace(
            record,
            residents={**record.residents, assignment: residency},
            waiting=_without(record.waiting, assignment),
            epochs={**record.epochs, assignment: epoch},
            served={**record.served, owner: record.grants + 1},
            turns={**record.turns, owner: record.turns.get(owner, 0) + 1},
            grants=record.grants + 1,
        )
    return record


def _lacking_bytes(residents: Set[str], assignment: str, claim: ClaimRecord, policy: TurnPolicy) -> int:
    """How much of what ``residents`` hold has to go before ``assignment`` may come; not positive: it may come now."""
    if not residents:
        return 0  # alone, whatever it declares: it was seated here because it fits the device (P3)
    held = sum(claim.entries[a].device_bytes for a in residents)
    need = claim.entries[assignment].device_bytes
    capacity = claim.device_bytes - policy.reserve_bytes
    if not policy.coresidency or need > capacity:
        return max(1, held)  # everybody has to go
    return held + need - capacity


def _press(
    record: TurnRecord, claim: ClaimRecord, policy: TurnPolicy, now: float, dead: Set[str]
) -> dict[str, Residency]:
    """Somebody waits who does not fit: who is idle should leave, whose turn is over must, who will not is fenced.

    While one loads beside whom the next one does not fit either, nobody is disturbed: leaving would help nobody.
    """
    residents = dict(record.residents)
    waiter = next_owner(record, claim.entries)
    loading = {a for a, r in residents.items() if r.loading and r.fenced_at is None and now < r.until}
    if _lacking_bytes(loading, waiter, claim, policy) <= 0:
        for assignment, residency in residents.items():
            if residency.pressed_at is None:
                residents[assignment] = replace(residency, pressed_at=now)
        staying = [a for a, r in residents.items() if r.asked_at is None and r.fenced_at is None]
        staying.sort(key=lambda a: (residents[a].granted_at, residents[a].epoch, a))
        while staying and _lacking_bytes(set(staying), waiter, claim, policy) > 0:
            over = next((a for a in staying if now >= residents[a].until), None)
            if over is None:
                break
            residents[over] = replace(residents[over], asked_at=now)
            staying.remove(over)
    for assignment, residency in residents.items():
        if residency.fenced_at is not None:
            continue
        ignored_s = 0.0 if residency.asked_at is None else now - residency.asked_at
        if assignment in dead:
            why = "its lease lapsed while it held the turn"
        elif residency.asked_at is not None and ignored_s >= policy.grace_s:
            why = f"it was asked to yield its turn {ignored_s:.0f} s ago, the grace is {policy.grace_s:g} s"
        else:
            continue
        residents[assignment] = replace(residency, fenced_at=now, why=why)
    return residents


def _without(mapping: Mapping[str, Residency] | Mapping[str, float], key: str) -> dict:  # type: ignore[type-arg]
    return {name: value for name, value in mapping.items() if name != key}
