"""Random plays of the core (``plays``): what the line promises, and to whom, holds after every step (W1, W2, P6)."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from openrl_common.records import ClaimState, Reason, WorkloadRecord
from openrl_placement import waiting
from openrl_placement.fleet import CANDIDATES_MAX
from openrl_placement.state import Effects, State, alive, need, order
from openrl_placement.waiting import PROMISES_MAX
from unit.placement.plays import Play

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 200


def promises_are_of_requests_under_way(state: State) -> None:
    """And every count is the sum over them."""
    line = state.line
    promises = line._promises
    assert all(alive(state.workloads[workload]) and workload in state.requested_at for workload in promises)
    assert line._aims.keys() <= promises.keys()
    assert state.asked_of.keys() <= promises.keys()
    assert line._promised == Counter(claim for promise in promises.values() for claim in promise.claims)
    assert line._aimed == Counter(line._aims.values())
    bytes_of_nodes: Counter[str] = Counter()
    for promise in promises.values():
        bytes_of_nodes.update(dict.fromkeys(promise.nodes, promise.host_bytes))
    assert +line._promised_bytes == +bytes_of_nodes
    assert all(bytes_of_nodes[node] > 0 for node in line._short)


def what_is_free_is_promised(state: State, now: float) -> None:
    """No claim has room for a waiter that nobody before it is promised, unless the claim has refused it."""
    unheard = {record.claim for record in state.workloads.values() if _is_unlisted(state, record)}
    for claim, record in state.fleet.claims.items():
        if record.state is ClaimState.ALLOCATED and not state.fleet.is_leaving(claim) and claim not in unheard:
            _is_promised_in_order(state, claim, record.node, now)


def _is_unlisted(state: State, record: WorkloadRecord) -> bool:
    claim = state.fleet.claims.get(record.claim)
    return claim is not None and record.assignment not in claim.entries


def _is_promised_in_order(state: State, claim: str, node: str, now: float) -> None:
    free = state.fleet.seats_free(claim)
    for workload in state.line.waiting():
        if state.line.promised(claim) >= (PROMISES_MAX if free is None else free):
            return
        if state.line.is_short(node):  # offered again when what is promised of its memory is given back
            return
        held = state.line.promised_to(workload)
        if not _may_take(state, workload, claim, now) or claim in held.claims or len(held.claims) == CANDIDATES_MAX:
            continue
        pytest.fail(f"{workload} fits {claim}, is promised {held.claims}")


def _may_take(state: State, workload: str, claim: str, now: float) -> bool:
    record = state.workloads[workload]
    if record.reason is Reason.WAITING_FOR_PREDECESSOR or state.fleet.refusal(claim, need(record, now)):
        return False
    refused = state.refused_at.get(workload, {}).get(claim)
    return refused is None or refused[0] != state.fleet.changes(claim)


@contextmanager
def every_request_keeps_the_line(play: Play, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """W1 at the moment of each request: what it names fits no earlier waiter that is not promised it."""
    request = waiting._request

    def checked(state: State, record: WorkloadRecord, candidates: tuple[str, ...], now: float, fx: Effects) -> None:
        assert not state.line.busy(record.workload), "one request at a time"
        named_before = state.asked_of.get(record.workload, {})  # of one that is repeated
        for claim in set(candidates) - named_before.keys():
            if ("claims", claim) not in play.ledger.mirrors:
                _fits_nobody_before(play, state, record, claim, now)
        request(state, record, candidates, now, fx)

    with monkeypatch.context() as patch:
        patch.setattr(waiting, "_request", checked)
        yield


def _fits_nobody_before(play: Play, state: State, record: WorkloadRecord, claim: str, now: float) -> None:
    for workload in state.line.waiting():
        earlier = state.workloads[workload]
        if order(earlier) >= order(record):
            return
        held = state.line.promised_to(workload).claims
        if claim not in held and len(held) < CANDIDATES_MAX and _may_take(state, workload, claim, now):
            refused = play.ledger.refusal(claim, earlier.shape)
            assert refused, f"{record.workload} is offered {claim}, which {workload} fits, promised {held}"


def nothing_is_left_over(play: Play) -> None:
    """At rest nothing is promised, and no waiter fits anything that the ledger would give it."""
    state = play.desk.state
    assert state.line._promises == {}
    left = (state.line._promised, state.line._promised_bytes, state.line._aimed, state.line._short)
    assert not any(left), left
    for workload in state.line.waiting():
        record = state.workloads[workload]
        fits = [each for each in state.fleet.claims if not state.fleet.refusal(each, need(record, play.desk.now))]
        given = [each for each in fits if not play.ledger.refusal(each, record.shape)]
        assert given == [] or record.reason is Reason.WAITING_FOR_PREDECESSOR, f"{workload} could have {given}"


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_W1_W2_P6_what_the_line_promises_holds_after_every_step_of_random_plays(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + 20):
        play = Play(seed)
        with every_request_keeps_the_line(play, monkeypatch):
            for _ in range(STEPS):
                play.step()
                promises_are_of_requests_under_way(play.desk.state)
                what_is_free_is_promised(play.desk.state, play.desk.now)
            play.settle()
            for _ in range(6):  # requests whose answer was missed are asked again
                play.desk.repair()
                play.taken()
                play.settle()
            nothing_is_left_over(play)
