"""What the launcher decides from the present alone (B1, B2, B4, B7, B8, W1, L4, F4, F5)."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from openrl_common.quantities import GIB
from openrl_common.records import (
    Avoid,
    ClaimEntry,
    ClaimRecord,
    ClaimState,
    CutRecord,
    CutState,
    Device,
    NodeBudget,
    NodeEntry,
    Role,
    SeatRecord,
    SeatState,
    Standing,
    Tier,
)
from openrl_launcher.core import (
    Cut,
    Forget,
    Free,
    LocalWorker,
    ReleaseDevice,
    SayAllocated,
    SayFreed,
    SayGone,
    Start,
    Status,
    Stop,
    Unschedulable,
    View,
    decide,
    judge_exit,
)

NODE = "here"
DEVICES = (
    Device(device="dev0", memory_bytes=80 * GIB),
    Device(device="dev1", memory_bytes=22 * GIB),
    Device(device="dev2", memory_bytes=22 * GIB),
)


def entry(
    workload: str = "t--j--trainer",
    *,
    host_gib: int = 0,
    role: Role = Role.TRAINER,
    owner: str = "t/j",
    incarnation: int = 1,
) -> ClaimEntry:
    return ClaimEntry(
        workload=workload,
        tenant="t",
        owner=owner,
        role=role,
        device_bytes=10 * GIB,
        host_bytes=host_gib * GIB,
        exclusive=False,
        incarnation=incarnation,
        reserved_at=0.0,
    )


def pending(
    *tiers: tuple[int, int, int], order: tuple[int, int] = (0, 1), assignment: str = "a1", **fields: object
) -> ClaimRecord:
    return ClaimRecord(
        state=ClaimState.PENDING,
        tiers=tuple(
            Tier(count=count, floor_bytes=floor * GIB, ceiling_gib=ceiling)
            for count, floor, ceiling in tiers or ((1, 10, 23), (1, 10, 80))
        ),
        entries={assignment: entry(**fields)},  # type: ignore[arg-type]
        order=order,
    )


def allocated(*assignments: str, node: str = NODE, state: ClaimState = ClaimState.ALLOCATED) -> ClaimRecord:
    return ClaimRecord(
        state=state,
        node=node,
        devices=("dev1",),
        device_bytes=22 * GIB,
        entries={assignment: entry() for assignment in assignments},
    )


def cut(*devices: str, node: str = NODE, state: CutState = CutState.ALLOCATED) -> CutRecord:
    return CutRecord(state=state, node=node, devices=devices)


def held(assignment: str = "a1", claim: str = "c1", state: SeatState = SeatState.HELD) -> SeatRecord:
    return SeatRecord(state=state, incarnation=1, assignment=assignment, claim=claim)


def worker(assignment: str = "a1", status: Status = Status.RUNNING, restart_at: float = 0.0) -> dict[str, LocalWorker]:
    return {assignment: LocalWorker(assignment, "t--j--trainer", "c1", status, restart_at)}


def view(**fields: object) -> View:
    empty = View(now=100.0, node=NODE, devices=DEVICES, claims={}, seats={}, cuts={}, holds={}, workers={})
    return replace(empty, **fields)  # type: ignore[arg-type]


SEATED = view(
    claims={"c1": allocated("a1")},
    seats={"t--j--trainer": held()},
    cuts={"c1": cut("dev1")},
    holds={"dev1": "c1"},
)


# --- allocation ---------------------------------------------------------------------------------------------------


def test_a_pending_claim_gets_the_smallest_device_of_its_tightest_tier_P9() -> None:
    assert decide(view(claims={"c1": pending()})) == [Cut("c1", ("dev1",), 22 * GIB, "1x23")]


def test_a_larger_device_is_used_when_the_tight_ones_are_taken_P9() -> None:
    taken = view(
        claims={"c1": pending(), "x": allocated("ax"), "y": allocated("ay")},
        holds={"dev1": "x", "dev2": "y"},
        cuts={"x": cut("dev1"), "y": cut("dev2")},
    )
    assert decide(taken) == [Cut("c1", ("dev0",), 80 * GIB, "1x80")]


def test_a_device_is_never_given_to_two_claims_of_one_pass_B8() -> None:
    claims = {f"c{index}": pending(order=(0, index), assignment=f"a{index}") for index in range(1, 6)}
    actions = decide(view(claims=claims))
    devices = [device for action in actions if isinstance(action, Cut) for device in action.devices]
    assert devices == ["dev1", "dev2", "dev0"]
    assert [action.claim for action in actions if isinstance(action, Unschedulable)] == ["c4", "c5"]


def test_pending_claims_are_served_in_line_order_W1() -> None:
    line = {"late": pending(order=(0, 9)), "early": pending(order=(0, 3)), "urgent": pending(order=(-5, 20))}
    assert [action.claim for action in decide(view(claims=line))] == ["urgent", "early", "late"]  # type: ignore[union-attr]


def test_the_second_worker_of_a_job_goes_before_the_first_of_others_W1() -> None:
    """Two jobs with one of two devices each waited for each other until the placement timeout ended one of them."""
    line = {
        "urgent": pending(order=(-5, 20), owner="t/urgent"),
        "second": pending(order=(0, 9), owner="t/half"),
        "earlier": pending(order=(0, 3), owner="t/none"),
        "stale": pending(order=(0, 30), owner="t/again", incarnation=2),
    }
    seated = msgspec.structs.replace(
        allocated(), entries={"a8": entry(owner="t/half"), "a9": entry(owner="t/again", incarnation=1)}
    )
    actions = decide(view(claims={**line, "seated": seated}))
    assert [action.claim for action in actions if isinstance(action, Cut | Unschedulable)] == [
        "second",
        "urgent",
        "earlier",
        "stale",
    ]


def test_a_large_waiter_at_the_head_does_not_hold_back_a_small_one_W1() -> None:
    busy = view(
        claims={"large": pending((1, 60, 80), order=(0, 1)), "small": pending(order=(0, 2)), "x": allocated("ax")},
        holds={"dev0": "x"},
        cuts={"x": cut("dev0")},
    )
    actions = decide(busy)
    assert isinstance(actions[0], Unschedulable)
    assert actions[1] == Cut("small", ("dev1",), 22 * GIB, "1x23")


def test_several_devices_are_all_or_nothing_P10() -> None:
    two = pending((2, 10, 23))
    assert decide(view(claims={"c1": two})) == [Cut("c1", ("dev1", "dev2"), 22 * GIB, "2x23")]
    one_taken = view(claims={"c1": two, "x": allocated("ax")}, holds={"dev1": "x"}, cuts={"x": cut("dev1")})
    (action,) = decide(one_taken)
    assert isinstance(action, Unschedulable)
    assert "2 devices of at least 10.00 GiB free: 1 of the 2 that fit" in action.cause


def test_the_cause_of_waiting_has_numbers_and_names_the_founder_W4() -> None:
    (action,) = decide(view(claims={"c1": pending((1, 100, 120))}))
    assert action == Unschedulable(
        "c1",
        "a1",
        "t--j--trainer",
        "t",
        "node here has not 1 device of at least 100.00 GiB: 0 of its 3 fit, the largest has 80.00 GiB",
    )


def test_host_memory_is_looked_at_before_cutting_and_equality_passes_P6_B8() -> None:
    budget = NodeBudget(entries={"z": NodeEntry(workload="w", claim="c", host_bytes=10 * GIB)})
    fits = view(claims={"c1": pending(host_gib=6)}, host_allocatable_bytes=16 * GIB, host_budget=budget)
    assert isinstance(decide(fits)[0], Cut)
    (action,) = decide(replace(fits, claims={"c1": pending(host_gib=7)}))
    assert isinstance(action, Unschedulable)
    assert "needs 7.00 GiB, 6.00 GiB of 16.00 GiB left" in action.cause


def test_claims_of_one_pass_share_the_host_budget_P6() -> None:
    claims = {
        "c1": pending(host_gib=6, order=(0, 1)),
        "c2": pending(host_gib=6, order=(0, 2), assignment="a2"),
    }
    actions = decide(view(claims=claims, host_allocatable_bytes=10 * GIB))
    assert [type(action) for action in actions] == [Cut, Unschedulable]


def waits_for_memory(**fields: object) -> View:
    """Of 10 GiB 2 are taken. ``first`` needs 8 and more than any free device, but fits a claim that others share."""
    shared = msgspec.structs.replace(allocated("s1"), devices=("dev0",), device_bytes=80 * GIB)
    first = pending((1, 40, 80), host_gib=8, order=(0, 1), assignment="a1", owner="t/f")
    (large,) = first.entries.values()
    claims = {
        "shared": shared,
        "first": msgspec.structs.replace(first, entries={"a1": msgspec.structs.replace(large, device_bytes=40 * GIB)}),
        "later": pending((1, 10, 23), host_gib=1, order=(0, 2), assignment="a2", owner="t/k"),
    }
    state = view(
        claims=claims,
        holds={"dev0": "shared"},
        cuts={"shared": cut("dev0")},
        seats={"t--s--trainer": held("s1", "shared")},
        workers=worker("s1"),
        host_allocatable_bytes=10 * GIB,
        host_budget=NodeBudget(entries={"s1": NodeEntry(workload="w", claim="shared", host_bytes=2 * GIB)}),
    )
    return replace(state, **fields)  # type: ignore[arg-type]


def cut_or_not(state: View) -> dict[str, Cut | Unschedulable]:
    return {action.claim: action for action in decide(state) if isinstance(action, Cut | Unschedulable)}


def test_memory_that_an_earlier_waiter_fits_beside_others_is_not_given_with_a_device_to_a_later_one_W1_P6() -> None:
    """Placement has heard that it is free, its request for the first is on the way."""
    later = cut_or_not(waits_for_memory())["later"]
    assert isinstance(later, Unschedulable)
    assert later.cause.endswith("needs 1.00 GiB, 0.00 GiB of 10.00 GiB left, 8.00 GiB set aside for who came first")


def test_what_the_earlier_one_cannot_use_is_not_kept_from_a_later_one_W1() -> None:
    state = waits_for_memory()
    shared, first = state.claims["shared"], state.claims["first"]

    def with_claims(**claims: ClaimRecord) -> View:
        return replace(state, claims={**state.claims, **claims})

    (entry_of_first,) = first.entries.values()
    exclusive = {"a1": msgspec.structs.replace(entry_of_first, exclusive=True)}
    too_much = {"a1": msgspec.structs.replace(entry_of_first, host_bytes=9 * GIB)}
    avoid = (Avoid(node=NODE, until=500.0, why="it did not start"),)
    full = msgspec.structs.replace(first, limit=1, founded_at=9.0)
    for other in (
        with_claims(first=msgspec.structs.replace(first, entries=exclusive)),
        with_claims(first=msgspec.structs.replace(first, entries=too_much)),
        with_claims(first=msgspec.structs.replace(first, avoid=avoid)),
        with_claims(first=full),
        with_claims(shared=msgspec.structs.replace(shared, device_bytes=30 * GIB)),
        with_claims(shared=msgspec.structs.replace(shared, node="elsewhere")),
        with_claims(first=msgspec.structs.replace(first, order=(0, 3))),
        replace(state, host_budget=msgspec.structs.replace(state.host_budget, standing=Standing.SUSPECT)),
        replace(state, host_allocatable_bytes=11 * GIB),
    ):
        assert isinstance(cut_or_not(other)["later"], Cut)


def test_the_limit_in_force_is_that_of_claims_that_stand_S7_W1() -> None:
    state = waits_for_memory()
    full = msgspec.structs.replace(state.claims["first"], limit=1, founded_at=9.0, entries={})
    for ended in (ClaimState.GONE, ClaimState.RETIRING, ClaimState.QUARANTINED):
        claims = {**state.claims, "ended": msgspec.structs.replace(full, state=ended)}
        assert isinstance(cut_or_not(replace(state, claims=claims))["later"], Unschedulable)


def test_a_claim_cut_but_not_yet_counted_by_the_ledger_counts_on_the_host_P6() -> None:
    state = view(
        claims={
            "c1": pending(host_gib=6, order=(0, 1)),
            "c2": pending(host_gib=6, order=(0, 2), assignment="a2"),
        },
        cuts={"c1": cut("dev1")},
        holds={"dev1": "c1"},
        host_allocatable_bytes=10 * GIB,
    )
    assert [type(action) for action in decide(state)] == [SayAllocated, Unschedulable]


def test_memory_of_a_seat_heard_of_before_its_node_is_in_use_P6_W1() -> None:
    """The ledger reserves the node first, and may be heard of last; a later claim would get what is gone already."""
    seated = msgspec.structs.replace(pending(host_gib=6), state=ClaimState.ALLOCATED, node=NODE, devices=("dev1",))
    state = view(
        claims={"c1": seated, "c2": pending(host_gib=6, order=(0, 2), assignment="a2")},
        cuts={"c1": cut("dev1")},
        holds={"dev1": "c1"},
        host_allocatable_bytes=10 * GIB,
    )
    assert isinstance(cut_or_not(state)["c2"], Unschedulable)


def test_unknown_host_memory_skips_the_check_P6() -> None:
    assert isinstance(decide(view(claims={"c1": pending(host_gib=10_000)}))[0], Cut)


def test_a_node_for_one_role_refuses_the_other_P1() -> None:
    (action,) = decide(view(claims={"c1": pending()}, roles=(Role.SAMPLER,)))
    assert isinstance(action, Unschedulable)
    assert action.cause == "node here takes sampler workers only, this is a trainer"


def test_a_node_that_its_founder_avoids_does_not_cut_the_claim_until_that_expires_F2_P13() -> None:
    wanted = msgspec.structs.replace(pending(), avoid=(Avoid(node=NODE, until=500.0, why="it did not start"),))
    (action,) = decide(view(claims={"c1": wanted}, unix_now=440.0))
    assert isinstance(action, Unschedulable)
    assert action.cause == f"node {NODE} is avoided by it for 60 s more: it did not start"
    assert isinstance(decide(view(claims={"c1": wanted}, unix_now=501.0))[0], Cut)
    assert isinstance(decide(view(claims={"c1": wanted}, node="elsewhere", unix_now=440.0))[0], Cut)


def test_nothing_is_allocated_while_draining_B2() -> None:
    assert decide(view(claims={"c1": pending()}, draining=True)) == []


# --- interrupted cuts (B8) -----------------------------------------------------------------------------------------


def test_a_device_held_for_a_claim_without_a_record_is_used_to_finish_it_B8() -> None:
    assert decide(view(claims={"c1": pending()}, holds={"dev2": "c1"})) == [Cut("c1", ("dev2",), 22 * GIB, "1x23")]


def test_a_device_held_for_a_claim_that_cannot_be_finished_is_freed_B8() -> None:
    claims = {"c1": pending((2, 10, 23)), "x": allocated("ax")}
    half = view(claims=claims, holds={"dev1": "c1", "dev2": "x"}, cuts={"x": cut("dev2")})
    actions = decide(half)
    assert isinstance(actions[0], Unschedulable)
    assert actions[1:] == [ReleaseDevice("dev1", "c1")]


def test_a_device_held_for_a_claim_that_is_gone_freed_or_allocated_elsewhere_is_freed_B8() -> None:
    state = view(
        claims={"c3": replace_state(pending(), ClaimState.GONE)},
        holds={"dev0": "c1", "dev1": "c2", "dev2": "c3"},
        cuts={"c1": cut("dev0", state=CutState.FREED), "c2": cut("dev1", node="there")},
    )
    assert set(decide(state)) == {
        ReleaseDevice("dev0", "c1"),
        ReleaseDevice("dev1", "c2"),
        ReleaseDevice("dev2", "c3"),
    }


def test_a_quarantined_device_stays_held_B4() -> None:
    assert decide(view(holds={"dev0": "c1"}, cuts={"c1": cut("dev0", state=CutState.QUARANTINED)})) == []


def replace_state(claim: ClaimRecord, state: ClaimState) -> ClaimRecord:
    return ClaimRecord(state=state, tiers=claim.tiers, order=claim.order)


# --- freeing --------------------------------------------------------------------------------------------------------


def test_a_retiring_claim_is_freed_once_its_workers_are_gone_B4() -> None:
    retiring = view(claims={"c1": allocated(state=ClaimState.RETIRING)}, cuts={"c1": cut("dev1")}, holds={"dev1": "c1"})
    assert decide(retiring) == [Free("c1")]
    running = replace(retiring, workers=worker(status=Status.BUSY))
    assert decide(running) == []
    gone = replace(retiring, workers=worker(status=Status.GONE))
    assert decide(gone) == [Forget("a1"), Free("c1")]


def test_no_device_is_freed_while_a_process_runs_whose_claim_nobody_knows_B4_L7() -> None:
    unknown = {"a9": LocalWorker("a9", "t--k--trainer", "", Status.BUSY)}
    state = view(
        claims={"c1": allocated(state=ClaimState.RETIRING)},
        cuts={"c1": cut("dev1")},
        holds={"dev1": "c1", "dev2": "c2"},
        workers=unknown,
    )
    assert decide(state) == []
    assert set(decide(replace(state, workers={}))) == {Free("c1"), ReleaseDevice("dev2", "c2")}


def test_a_retiring_claim_that_was_never_cut_is_written_off_B8() -> None:
    assert decide(view(claims={"c1": replace_state(pending(), ClaimState.RETIRING)})) == [Free("c1")]


def test_the_allocation_of_a_claim_that_was_withdrawn_meanwhile_is_given_back_L5() -> None:
    state = view(claims={"c1": replace_state(pending(), ClaimState.GONE)}, cuts={"c1": cut("dev1")})
    assert decide(state) == [Free("c1")]


def test_a_claim_whose_record_was_deleted_by_hand_is_freed_once_its_workers_are_gone_B8() -> None:
    orphan = view(cuts={"c1": cut("dev1")}, holds={"dev1": "c1"})
    assert decide(orphan) == [Free("c1")]
    assert decide(replace(orphan, workers=worker(status=Status.BUSY))) == []
    assert decide(view(cuts={"c1": cut("dev1", node="there")})) == []


def test_another_nodes_claim_is_left_alone() -> None:
    state = view(
        claims={"c1": allocated(node="there", state=ClaimState.RETIRING), "c2": allocated("a1", node="there")},
        seats={"t--j--trainer": held(claim="c2")},
        cuts={"c1": cut("dev1", node="there"), "c2": cut("dev1", node="there")},
    )
    assert decide(state) == []


def test_facts_that_the_ledger_has_not_acted_on_are_said_again_E5() -> None:
    assert decide(view(claims={"c1": pending()}, cuts={"c1": cut("dev1")}, holds={"dev1": "c1"})) == [
        SayAllocated("c1")
    ]
    freed = view(claims={"c1": allocated(state=ClaimState.RETIRING)}, cuts={"c1": cut("dev1", state=CutState.FREED)})
    assert decide(freed) == [SayFreed("c1")]
    gone = replace(SEATED, seats={"t--j--trainer": held(state=SeatState.RELEASING)}, workers=worker(status=Status.GONE))
    assert decide(gone) == [SayGone("a1", "t--j--trainer", "c1")]


# --- workers --------------------------------------------------------------------------------------------------------


def test_a_held_seat_without_a_process_is_started_B7() -> None:
    assert decide(SEATED) == [Start("a1", "c1", entry())]


def test_a_running_worker_is_not_started_twice_B1() -> None:
    for status in (Status.RUNNING, Status.BUSY, Status.EXITED):
        assert decide(replace(SEATED, workers=worker(status=status))) == []


def test_nothing_starts_on_a_seat_that_its_claim_does_not_list_or_on_a_claim_not_allocated_B7() -> None:
    unlisted = replace(SEATED, claims={"c1": allocated("other")})
    quarantined = replace(SEATED, claims={"c1": allocated("a1", state=ClaimState.QUARANTINED)})
    still_pending = replace(SEATED, claims={"c1": pending()}, cuts={"c1": cut("dev1")})
    for state in (unlisted, quarantined, still_pending):
        assert not any(isinstance(action, Start) for action in decide(state))


def test_a_failed_worker_starts_again_when_its_back_off_is_over_F4() -> None:
    assert decide(replace(SEATED, workers=worker(status=Status.BACKING_OFF, restart_at=100.5))) == []
    assert decide(replace(SEATED, workers=worker(status=Status.BACKING_OFF, restart_at=99.5))) == [
        Start("a1", "c1", entry())
    ]


def test_the_deletion_wins_over_a_restart_F5() -> None:
    releasing = replace(SEATED, seats={"t--j--trainer": held(state=SeatState.RELEASING)})
    for status in (Status.RUNNING, Status.BACKING_OFF, Status.EXITED, Status.IDLE):
        (action,) = decide(replace(releasing, workers=worker(status=status)))
        assert isinstance(action, Stop)


def test_a_releasing_seat_of_which_nothing_ever_ran_is_still_ended_L4() -> None:
    releasing = replace(SEATED, seats={"t--j--trainer": held(state=SeatState.RELEASING)})
    assert decide(releasing) == [Stop("a1", "t--j--trainer", "c1", "its seat is being released")]


def test_a_releasing_seat_on_a_pending_claim_is_left_to_the_ledger_L4() -> None:
    state = view(
        claims={"c1": pending()}, seats={"t--j--trainer": held(state=SeatState.RELEASING)}, cuts={"c1": cut("dev1")}
    )
    assert not any(isinstance(action, Stop) for action in decide(state))


def test_a_process_that_no_seat_backs_is_stopped_B1() -> None:
    for seats in ({}, {"t--j--trainer": held("a2")}, {"t--j--trainer": SeatRecord()}):
        actions = decide(replace(SEATED, claims={}, cuts={}, holds={}, seats=seats, workers=worker()))
        assert actions == [Stop("a1", "t--j--trainer", "c1", "no seat backs it")]


def test_a_process_whose_seat_was_given_a_new_assignment_is_replaced_F6() -> None:
    moved = replace(SEATED, claims={"c1": allocated("a2")}, seats={"t--j--trainer": held("a2")}, workers=worker("a1"))
    assert [type(action) for action in decide(moved)] == [Stop, Start]


def test_draining_stops_no_seat_but_starts_nothing_B2() -> None:
    assert decide(replace(SEATED, draining=True)) == []


# --- F4 -------------------------------------------------------------------------------------------------------------


def test_restarts_back_off_and_end_F4() -> None:
    verdicts = [judge_exit(failures_before=before, ran_s=1.0, restarts_max=3).restart_in_s for before in range(4)]
    assert verdicts == [1.0, 2.0, 4.0, None]


def test_a_long_healthy_run_starts_the_count_anew_F4() -> None:
    assert judge_exit(failures_before=3, ran_s=3600.0, restarts_max=3).failures == 1


def test_no_restarts_means_the_first_exit_is_final_F4() -> None:
    assert judge_exit(failures_before=0, ran_s=1.0, restarts_max=0).restart_in_s is None
