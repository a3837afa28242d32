"""Which rule handles which event: the ledger in one function."""

from __future__ import annotations

import msgspec

from openrl_common.events import (
    ClaimAllocated,
    ClaimFreed,
    ClaimQuarantined,
    ClaimRefused,
    Event,
    SeatReleaseRequested,
    SeatRequested,
    WorkerGone,
)
from openrl_common.records import ClaimState
from openrl_ledger.core import booking, releasing
from openrl_ledger.core.ops import Environment, Steps


def separate(event: Event) -> tuple[Event, ...]:
    """The same, but of one message that asks for two seats (``beside``) each request by itself."""
    if isinstance(event, SeatRequested) and event.beside is not None:
        return msgspec.structs.replace(event, beside=None), event.beside
    return (event,)


def decide(event: Event, environment: Environment) -> Steps[None]:
    """The steps that handle ``event``; an event that is not the ledger's business has none."""
    match event:
        case SeatRequested():
            yield from booking.book(event, environment)
            if event.beside is not None:
                yield from booking.book(event.beside, environment)
        case SeatReleaseRequested():
            yield from releasing.request_release(
                event.workload, event.tenant, event.incarnation, event.assignment, close=event.close
            )
        case ClaimAllocated():
            yield from booking.allocate(event.claim, event.node, event.devices, event.device_bytes)
        case ClaimRefused() | ClaimFreed():
            yield from releasing.drop_claim(event.claim, ClaimState.GONE)
        case ClaimQuarantined():
            yield from releasing.quarantine(event.claim)
        case WorkerGone():
            seat = yield from releasing.worker_gone(event.workload, event.tenant, event.assignment, event.claim)
            if seat is not None:
                yield from booking.replace_predecessor(event.workload, event.tenant, seat, environment)
