"""What is kept no longer (L6): records of things that are over, once no message that speaks of them can come any more.

An empty seat keeps the highest incarnation that may never book again, a gone claim says that its id was used, a
tombstone that its assignment was fenced. A late message is what they guard against; the events stream keeps none for
longer than seven days, so a record that nobody has written for longer than that guards nothing. Ids are never reused
(E9): claims and assignments are drawn at random, not counted, so a deleted key is not given out again.

Pure. Not here: jobs and workloads (placement forgets those it has ended), what still holds anything.
"""

from __future__ import annotations

from openrl_common.records import (
    ClaimRecord,
    ClaimState,
    CutRecord,
    CutState,
    LeaseRecord,
    LeaseState,
    SeatRecord,
    SeatState,
)

KEEP_S_MIN = 7 * 86_400.0
"""How long the events stream keeps a message; no shorter retention is right."""


def is_over(value: object) -> bool:
    """Whether a record says of itself that nothing is left of what it tells."""
    match value:
        case SeatRecord():
            return value.state is SeatState.EMPTY
        case ClaimRecord():
            return value.state is ClaimState.GONE
        case LeaseRecord():
            return value.state is LeaseState.TOMBSTONE
        case CutRecord():
            return value.state in (CutState.FREED, CutState.REFUSED)
        case _:
            return False
