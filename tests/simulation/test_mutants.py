"""The harness can fail: every step marked † in the design, and more rules, left out one at a time, is caught.

Most are caught by ordinary schedules. Those that need two replicas to meet at one step within microseconds are shown
with a directed stall: handlers of the ledger's core advanced one step at a time to the very place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from openrl_common.events import SeatBooked, SeatReleased, WorkerGone
from openrl_common.records import ClaimState, LeaseRecord, LeaseState, SeatState
from openrl_common.turns import Turns
from openrl_launcher import core as launcher_core
from openrl_launcher import leases
from openrl_launcher.claims import Claims
from openrl_launcher.workers import Workers
from openrl_ledger.core import booking, janitor, nodes, ops, releasing, turns
from openrl_ledger.core.nodes import NodeWatch
from openrl_ledger.core.ops import Read, Table, Write
from openrl_placement import waiting
from simulation.mutation import mutated
from simulation.plan import Plan, draw_plan
from simulation.run import simulate
from unit.ledger.test_booking import booked, founded, gone, release, request
from unit.ledger.world import Handler, World


@dataclass(frozen=True)
class Mutant:
    """One rule broken. ``says``: what the violation must speak of."""

    name: str
    function: Callable[..., Any]
    old: str
    new: str
    says: tuple[str, ...]
    also: tuple[tuple[Callable[..., Any], str, str], ...] = field(default=())
    seeds: Iterable[int] = range(60)

    def broken(self) -> contextlib.ExitStack:
        """The rule, left out for as long as this is entered."""
        return broken((self.function, self.old, self.new), *self.also)


def broken(*mutations: tuple[Callable[..., Any], str, str]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for mutation in mutations:
        stack.enter_context(mutated(*mutation))
    return stack


def _seeds_where(true: Callable[[Plan], bool], seeds: range) -> Iterator[int]:
    return (seed for seed in seeds if true(draw_plan(seed)))


def _orphans(plan: Plan) -> bool:
    return any(each.what == "orphan" for each in plan.faults)


def _limit_is_raised(plan: Plan) -> bool:
    return plan.old_limit != 0 and (plan.limit == 0 or plan.limit > plan.old_limit)


RECORDED_FIRST = "await self._insist(lambda: self._store.workers.put(record.assignment, record))\n    gate"

MUTANTS = [
    Mutant(
        "S2 the limit is not looked at when joining",
        booking._list_on_claim,
        "join_refusal(claim, request.shape, environment.limit)",
        "join_refusal(claim, request.shape, 0)",
        ("invariant 2",),
        also=(
            (booking._read_joinable, "join_refusal(claim, shape, environment.limit)", "join_refusal(claim, shape, 0)"),
        ),
        seeds=range(80, 200),
    ),
    Mutant(
        "P3 nothing is looked at when joining",
        booking._list_on_claim,
        'refusal = "" if claim is None else join_refusal(claim, request.shape, environment.limit)',
        'refusal = ""',
        ("invariant 2", "invariant 3", "P3"),
        also=(
            (
                booking._read_joinable,
                '"there is no such claim" if claim is None else join_refusal(claim, shape, environment.limit)',
                '""',
            ),
        ),
        seeds=range(50, 120),
    ),
    Mutant(
        "L4 the seat is emptied although the claim still lists it",
        releasing.finish,
        "claim, entry = yield from drop_claim_entry(claim_id, assignment)",
        "(claim, _), entry = (yield from read_claim(claim_id)), None",
        ("L4",),
    ),
    Mutant(
        "L5 a move does not kill the assignment that it leaves",
        booking._tombstone_own,
        "lease, revision = yield from read_lease(assignment)",
        "return True\n    lease, revision = yield from read_lease(assignment)",
        ("L5",),
    ),
    Mutant(
        "B4 a seat is granted again before its worker has ended",
        Workers._end,
        "process = tracked.process\n",
        "return\n    process = tracked.process\n",
        ("invariant 6",),
    ),
    Mutant(
        "B7 no start gate",
        leases.open_gate,
        "for _ in range(_TRIES_MAX):",
        "return Gate.OPENED\n    for _ in range(_TRIES_MAX):",
        ("no start gate",),
    ),
    Mutant(
        "L4 the launcher does not fence before it stops",
        Workers._stop,
        "await self._insist(lambda: leases.fence(self._store.leases, record.assignment, why=why))",
        "pass",
        ("without a fence",),
    ),
    Mutant(
        "B8 a device is cut without being held",
        Claims.cut,
        "await self._hold(device, action.claim)",
        "pass",
        ("B8",),
    ),
    Mutant(
        "B8 a device is given back while its claim is cut on it",
        Claims.free,
        "revision = await self._store.cuts.write(claim, record, last=0 if standing is None else standing.revision)",
        "revision = self._cut_revisions.get(claim, 0)",
        ("B8",),
    ),
    Mutant(
        "W2 nobody is woken",
        waiting._takers,
        "if record is None or",
        "if True or record is None or",
        ("although",),
        also=((waiting.wake_seatless, "asked = 0", "return\n    asked = 0"),),
    ),
    Mutant(
        "P6 host memory is not looked at",
        ops.add_node_entry,
        "if inventory is not None and not there:",
        "if False:",
        ("invariant 4",),
        seeds=range(1200, 1300),
    ),
    Mutant(
        "L3 the last entry out does not retire its claim, nor does the janitor",
        ops.drop_claim_entry,
        "state = ClaimState.RETIRING",
        "pass",
        ("claim", "although", "Releasing", "released"),
        also=((janitor._retire_empty, "for tries in range(TRIES_MAX):", "return\n    for tries in range(TRIES_MAX):"),),
    ),
    Mutant(
        "F3 a lost node's seats are released although their leases are renewed",
        NodeWatch.lapsed,
        "if lease is None or fenced_before_it_ran or",
        "if True or",
        ("E13, F3", "invariant 6", "invariant 1", "B7"),
        also=((NodeWatch.judge, "silent_for(policy.suspect_after_s)", "True"),),
    ),
    Mutant(
        "F3 who renewed since it was judged is fenced all the same",
        nodes._fence_from,
        "if now_at != revision:",
        "if False:",
        ("E13, F3", "invariant 6", "invariant 1", "B7"),
        also=(
            (NodeWatch.lapsed, "if lease is None or fenced_before_it_ran or", "if True or"),
            (NodeWatch.judge, "silent_for(policy.suspect_after_s)", "True"),
        ),
    ),
    Mutant(
        "B5 a worker whose lease has lapsed goes on working",
        Turns.hold,
        "held = self._context.lease_held",
        "held = True",
        ("although its lease lapsed",),
        also=((Turns._until_lease_held, "while not self._context.lease_held:", "while False:"),),
        seeds=range(300),
    ),
    Mutant(
        "T2 whoever waits is let in",
        turns._lacking_bytes,
        "if not residents:",
        "if True:",
        ("T2",),
    ),
    Mutant(
        "T3 nobody is asked to leave, nobody is fenced",
        turns._press,
        "residents = dict(record.residents)",
        "return dict(record.residents)",
        ("waits for the device", "is Starting"),
    ),
    Mutant(
        "T4 a worker that left the device stays on it",
        Turns._leave,
        "moved = await self._park()",
        "pass",
        ("T2",),
    ),
    Mutant(
        "L7 a device is freed under a process whose claim nobody knows",
        launcher_core._occupied,
        "worker.status is not Status.GONE",
        'worker.status is not Status.GONE and worker.claim != ""',
        ("invariant 5",),
        also=((Workers._start, RECORDED_FIRST, "gate"),),
        seeds=tuple(_seeds_where(_orphans, range(2000))),
    ),
    Mutant(
        "L7 a worker is started before it is recorded",
        Workers._start,
        RECORDED_FIRST,
        "gate",
        ("T2", "invariant 1", "invariant 5"),
        seeds=tuple(_seeds_where(_orphans, range(13_300, 17_000))),
    ),
    Mutant(
        "S7 a refusal is remembered for ever",
        waiting._was_refused,
        "and now - refused[1] < REFUSED_S",
        "",
        ("although",),
        seeds=tuple(_seeds_where(_limit_is_raised, range(6_990, 7_700))),
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_broken_rule_is_caught_by_a_schedule(mutant: Mutant) -> None:
    with mutant.broken():
        for seed in mutant.seeds:
            violation = simulate(seed).violation
            if violation:
                assert any(words in violation for words in mutant.says), f"seed {seed}: {violation}"
                return
    pytest.fail(f"every schedule was clean although a rule was broken: {mutant.name}")


# --- directed stalls -------------------------------------------------------------------------------------------------


class Stallable(World):
    """The unit tests' world, advanced to the very step that a stall is about."""

    def run_until(self, handler: Handler, reached: Callable[[Any], bool]) -> None:
        """Advance until the next step is one that ``reached`` accepts; that step is not taken."""
        for _ in range(200):
            if handler.done or reached(handler.pending):
                return
            self.step(handler)
        raise AssertionError("the step was never reached")


def writes(table: Table) -> Callable[[Any], bool]:
    return lambda step: isinstance(step, Write) and step.table is table


def reads(table: Table) -> Callable[[Any], bool]:
    return lambda step: isinstance(step, Read) and step.table is table


def strict_world(limit: int = 3) -> tuple[Stallable, SeatBooked]:
    world = Stallable(limit=limit, devices=4, host_gib=200)
    return world, founded(world, "w1")


def repair_of(world: World, kind: str, workload: str) -> Handler:
    (leftover,) = [each for each in world.sightings() if (each.kind, each.workload) == (kind, workload)]
    return Handler(None, janitor.repair(leftover, "t", 0))


def clean_meets_a_stalled_replica() -> None:
    """A replica stalls between reserving and naming; the janitor takes its reservation for a leftover."""
    world, first = strict_world()
    stalled = world.deliver(request("w2", first.claim))
    world.run_until(stalled, writes(Table.SEATS))  # reserved on node and claim, about to name
    cleaning = repair_of(world, "reservation", "w2")
    world.step(cleaning)  # it has read the seat, which names nothing yet
    world.finish(stalled)
    world.finish(cleaning)
    assert world.seats()["w2"].state is SeatState.HELD
    assert world.sightings() == set()


def test_L3_clean_writes_the_seat_again_or_takes_a_seat_that_was_named_meanwhile() -> None:
    """† of L3."""
    clean_meets_a_stalled_replica()
    with (
        broken((releasing.clean, "if definite:\n            break", "break")),
        pytest.raises(AssertionError, match="let a held seat go"),
    ):
        clean_meets_a_stalled_replica()


def a_redelivered_request_meets_its_first_handler() -> None:
    """Two replicas handle one request; the slower one is refused and gives its reservation back."""
    world, first = strict_world(limit=2)
    slow = world.deliver(request("w3", first.claim))
    world.run_until(slow, reads(Table.CLAIMS))
    world.run_until(slow, writes(Table.BUDGETS))
    world.step(slow)  # reserved on the node; stalls before it looks at the claim again
    fast = world.deliver(request("w3", first.claim))
    world.finish(fast)
    assert world.seats()["w3"].state is SeatState.HELD
    world.finish(slow)
    world.settle()
    assert world.sightings() == set()
    budget = world.tables[Table.BUDGETS]["n1"].value
    assert world.seats()["w3"].assignment in budget.entries, "a held seat lost its host memory"


NOT_FRESH = (booking._reserve, 'environment.mint("a")', 'f"a-{request.workload}-{request.attempt}"')


def clean_meets_a_booking_that_starts_over() -> None:
    """The janitor stalls in the middle of cleaning; the replica whose reservation that was books again."""
    world, first = strict_world()
    slow = world.deliver(request("w2", first.claim))
    world.run_until(slow, writes(Table.SEATS))
    cleaning = repair_of(world, "reservation", "w2")
    world.run_until(cleaning, reads(Table.CLAIMS))  # it has written the seat again: whatever names it now fails
    world.run_until(slow, lambda step: isinstance(step, Read) and step.table is Table.SEATS)
    world.run_until(slow, writes(Table.SEATS))  # fails to name, cleans up, starts over, is about to name again
    world.step(slow)
    world.run_until(slow, writes(Table.SEATS))
    world.finish(cleaning)
    world.finish(slow)
    world.settle()
    assert world.sightings() == set()


def test_L2_an_assignment_id_is_fresh_or_cleaning_up_hits_a_later_booking() -> None:
    """† of L2: an id that two tries share lets the clean-up of one take what the other booked."""
    clean_meets_a_booking_that_starts_over()
    a_redelivered_request_meets_its_first_handler()
    with broken(NOT_FRESH), pytest.raises(AssertionError, match="let a held seat go"):
        clean_meets_a_booking_that_starts_over()


def an_old_request_comes_after_a_newer_incarnation_has_gone() -> None:
    world, _ = strict_world()
    newer = booked(world, request("w2", incarnation=2))
    world.handle(release("w2", newer.assignment, incarnation=2, close=False))
    assert world.seats()["w2"].state is SeatState.EMPTY
    world.handle(request("w2", incarnation=1))
    assert world.seats()["w2"].state is SeatState.EMPTY, "an older incarnation booked behind a newer one"


def test_L2_naming_closes_older_incarnations() -> None:
    """† of L2. An emptied seat keeps its incarnation, which alone refuses older ones: the rule stands twice."""
    closed = (booking._name, "closed=max(seat.closed, request.incarnation - 1)", "closed=seat.closed")
    older = (booking._settle_without_booking, " or request.incarnation < seat.incarnation", "")
    an_old_request_comes_after_a_newer_incarnation_has_gone()
    for one_of_both in (closed, older):
        with broken(one_of_both):
            an_old_request_comes_after_a_newer_incarnation_has_gone()
    with broken(closed, older), pytest.raises(AssertionError, match="older incarnation"):
        an_old_request_comes_after_a_newer_incarnation_has_gone()


def the_limit_on_the_path_of_a_retry() -> None:
    """Two join at once; the loser's second try finds the claim full."""
    world, first = strict_world(limit=2)
    racers = [world.deliver(request(f"r{index}", first.claim, found=False)) for index in range(2)]
    for racer in racers:
        world.run_until(racer, writes(Table.CLAIMS))
    for racer in racers:
        world.finish(racer)
    assert len(world.claims()[first.claim].entries) == 2


def test_S2_the_limit_is_looked_at_on_every_path_also_after_a_conflict() -> None:
    the_limit_on_the_path_of_a_retry()
    with (
        broken(
            (
                booking._list_on_claim,
                'refusal = "" if claim is None else join_refusal(claim, request.shape, environment.limit)',
                'refusal = "" if claim is None else join_refusal(claim, request.shape, 0)',
            )
        ),
        pytest.raises(AssertionError, match="seat limit"),
    ):
        the_limit_on_the_path_of_a_retry()


def late_words_about_an_old_assignment() -> None:
    world, first = strict_world()
    world.handle(release("w1", first.assignment, close=False))
    world.handle(gone(first))
    second = founded(world, "w1", "d1", attempt=2)
    world.put(Table.LEASES, second.assignment, LeaseRecord(state=LeaseState.LIVE))
    world.handle(release("w1", first.assignment, close=False))
    world.handle(gone(first))
    assert world.seats()["w1"].state is SeatState.HELD, "a late word about an old assignment hit a newer one"


@pytest.mark.parametrize(
    "mutation",
    [
        (releasing.request_release, 'and (close or assignment in ("", seat.assignment))', ""),
        (releasing.worker_gone, "if seat.assignment != assignment or seat.claim != claim_id:", "if False:"),
    ],
    ids=["release", "gone"],
)
def test_L4_release_is_by_assignment_never_by_name(mutation: tuple[Callable[..., Any], str, str]) -> None:
    late_words_about_an_old_assignment()
    with broken(mutation), pytest.raises(AssertionError, match="a late word"):
        late_words_about_an_old_assignment()


def a_seat_is_released_while_its_claim_is_being_allocated() -> None:
    """The release reads a pending claim; before it fences, the launcher cuts the claim and starts the worker."""
    world, _ = strict_world()
    own = booked(world, request("w2"))
    releasing_it = world.deliver(release("w2", own.assignment))
    world.run_until(releasing_it, writes(Table.SEATS))
    world.step(releasing_it)
    world.run_until(releasing_it, reads(Table.LEASES))
    world.put(Table.LEASES, own.assignment, LeaseRecord(state=LeaseState.STARTING))  # the start gate was first
    world.finish(releasing_it)
    assert not [each for each in world.published if isinstance(each, SeatReleased)], "freed while it starts"
    assert world.tables[Table.LEASES][own.assignment].value.state is LeaseState.TOMBSTONE
    world.handle(WorkerGone(tenant="t", workload="w2", assignment=own.assignment, claim=own.claim, node="n1"))
    assert world.seats()["w2"].state is SeatState.EMPTY
    assert world.claims()[own.claim].state in (ClaimState.RETIRING, ClaimState.GONE)


def test_L4_a_start_that_had_begun_is_waited_for() -> None:
    """† of L4: fence, and believe what the fence found."""
    a_seat_is_released_while_its_claim_is_being_allocated()
    with (
        broken(
            (
                releasing._carry_on_releasing,
                'if (yield from fence(seat.assignment, "released before it started")) == "none":',
                "if True:",
            )
        ),
        pytest.raises(AssertionError, match="freed while it starts"),
    ):
        a_seat_is_released_while_its_claim_is_being_allocated()
