"""One look at a claim's turns, as steps: read, decide (``turns``), compare-and-swap, tell; fence who must be fenced.

Level-triggered: a look finishes whatever an earlier one could not. The record is written before anything is told, and
workers read the record, so a crash in between costs them the hint only.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from openrl_common.events import FenceRequested
from openrl_common.records import ClaimRecord, SeatState, TurnRecord
from openrl_ledger.core import releasing
from openrl_ledger.core.ops import (
    TRIES_MAX,
    Contended,
    Emit,
    Environment,
    Pause,
    Read,
    Steps,
    Table,
    Write,
    names,
    read_claim,
    read_seat,
)
from openrl_ledger.core.turns import TurnPolicy, settle, told

Change = Callable[[TurnRecord], TurnRecord]


def look(
    claim_id: str,
    environment: Environment,
    policy: TurnPolicy,
    change: Change = lambda record: record,
    dead: Set[str] = frozenset(),
) -> Steps[TurnRecord]:
    """Apply ``change`` (a request, a release), settle, write, tell. Returns the record as it stands."""
    for tries in range(TRIES_MAX):
        entry = yield Read(Table.TURNS, claim_id)
        before, revision = (TurnRecord(), 0) if entry is None else (entry.value, entry.revision)
        claim, _ = yield from read_claim(claim_id)
        after = settle(change(before), claim, policy, environment.now(), dead)
        if after != before:
            landed = yield Write(Table.TURNS, claim_id, after, revision)
            if not isinstance(landed, int):
                yield Pause(tries)
                continue
            for event in told(before, after, claim_id, claim):
                yield Emit(event)
        if claim is not None:
            yield from _fence(claim_id, claim, after)
        return after
    raise Contended(f"turns of claim {claim_id}")


def _fence(claim_id: str, claim: ClaimRecord, record: TurnRecord) -> Steps[None]:
    """FENCE (B7) through the launcher: the lease is a tombstone, the seat releasing; then the launcher stops it (L4).

    The resident counts until its entry is off the claim, which happens after WorkerGone only.
    """
    for assignment, residency in record.residents.items():
        entry = claim.entries.get(assignment)
        if residency.fenced_at is None or entry is None:
            continue
        seat, _ = yield from read_seat(entry.workload)
        if not names(seat, assignment, claim_id) or seat.state is not SeatState.HELD:
            continue
        yield Emit(
            FenceRequested(
                tenant=entry.tenant,
                workload=entry.workload,
                incarnation=seat.incarnation,
                assignment=assignment,
                claim=claim_id,
                why=residency.why,
            )
        )
        yield from releasing.fence(assignment, residency.why)
        yield from releasing.request_release(entry.workload, entry.tenant, seat.incarnation, assignment, close=False)
