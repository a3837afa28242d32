"""Who may sit where: P1-P6, P9, P13, S1, S2, S5, W4."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimRecord,
    ClaimState,
    Device,
    NodeBudget,
    NodeEntry,
    Reason,
    Role,
    Shape,
    Standing,
    Tier,
)
from openrl_placement.fleet import CANDIDATES_MAX, TIERS_MAX, Fleet, Kind, Need, ceiling_gib
from unit.placement.desk import allocated, entry, node


def shape(
    gib: float = 10, *, role: Role = Role.TRAINER, host_gib: float = 0, exclusive: bool = False, count: int = 1
) -> Shape:
    return Shape(
        role=role, device_bytes=int(gib * GIB), host_bytes=int(host_gib * GIB), exclusive=exclusive, device_count=count
    )


def wanting(gib: float = 10, owner: str = "me", **fields: object) -> Need:
    return Need(shape(gib, **fields), owner)  # type: ignore[arg-type]


def fleet(limit: int = 0, *, affinity: bool = True) -> Fleet:
    made = Fleet(limit=limit, owner_affinity=affinity)
    made.set_node("n1", node())
    return made


def test_P4_smallest_device_first_then_owners_then_seats_then_id() -> None:
    it = fleet()
    it.set_node("n2", node("n2", gib=23))
    it.set_claim("big", allocated({"a1": entry("w1")}))
    it.set_claim(
        "two-owners", allocated({"a2": entry("w2", owner="x"), "a3": entry("w3", owner="y")}, node="n2", gib=23)
    )
    it.set_claim(
        "two-seats", allocated({"a4": entry("w4", owner="x"), "a5": entry("w5", owner="x")}, node="n2", gib=23)
    )
    it.set_claim("one-b", allocated({"a6": entry("w6")}, node="n2", gib=23))
    it.set_claim("one-a", allocated({"a7": entry("w7")}, node="n2", gib=23))
    assert it.candidates(wanting(20)) == ["one-a", "one-b", "two-seats", "two-owners", "big"]
    assert it.candidates(wanting(24)) == ["big"]


@pytest.mark.parametrize(("affinity", "first"), [(True, "partner"), (False, "alone")])
def test_P4_a_partner_goes_before_fewer_owners_among_equal_devices(affinity: bool, first: str) -> None:
    it = fleet(affinity=affinity)
    it.set_claim("alone", allocated({"a1": entry("w1", owner="x")}))
    it.set_claim("partner", allocated({"a2": entry("w2", owner="me"), "a3": entry("w3", owner="x")}))
    assert it.candidates(wanting())[0] == first
    it.set_node("n2", node("n2", gib=23))
    it.set_claim("smaller", allocated({"a4": entry("w4", owner="x")}, node="n2", gib=23))
    assert it.candidates(wanting())[0] == "smaller", "size goes before affinity"


def test_P4_a_request_under_way_puts_no_stranger_before_the_partner() -> None:
    it = fleet()
    it.set_claim("partner", allocated({"a1": entry("w1", owner="me")}))
    for claim in ("busy", "other"):
        it.set_claim(claim, allocated({f"a-{claim}": entry(claim, owner="x")}))
    aimed = {"partner": 2, "busy": 1}
    assert it.candidates(wanting(), aimed=lambda claim: aimed.get(claim, 0)) == ["partner", "other", "busy"]
    it.owner_affinity = False
    assert it.candidates(wanting(), aimed=lambda claim: aimed.get(claim, 0)) == ["other", "busy", "partner"]


def test_P11_at_most_sixteen_candidates_and_each_once() -> None:
    it = fleet()
    for number in range(30):
        it.set_claim(f"c{number:02}", allocated({f"a{number}": entry(f"w{number}", owner="me")}))
    found = it.candidates(wanting())
    assert len(found) == len(set(found)) == CANDIDATES_MAX


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (allocated({"a": entry("w")}, state=ClaimState.RETIRING), "retiring"),
        (allocated({"a": entry("w")}, state=ClaimState.QUARANTINED), "quarantined"),
        (ClaimRecord(state=ClaimState.PENDING, entries={"a": entry("w")}), "pending"),
        (allocated({"a": entry("w", exclusive=True)}), "exclusively"),
        (allocated({"a": entry("w")}, gib=9), "needs 10 GiB, the device has 9 GiB"),
        (allocated({"a": entry("w")}, node="elsewhere"), "unknown"),
        (msgspec.structs.replace(allocated({"a": entry("w")}), devices=("d0", "d1")), "2 devices"),
        (allocated({"a": entry("w"), "b": entry("x")}), "all 2 seats"),
    ],
)
def test_P3_what_may_not_be_joined_is_no_candidate_and_says_why(claim: ClaimRecord, said: str) -> None:
    it = fleet(limit=2)
    it.set_claim("c", claim)
    assert it.candidates(wanting()) == []
    assert said in it.refusal("c", wanting())


def test_P5_device_memory_is_not_summed_over_seats_that_take_turns() -> None:
    """P5, T2: 60 of 80 GiB are taken by one seat, and another of 60 GiB may join: each fits alone."""
    it = fleet()
    it.set_claim("c", allocated({"a": entry("w", gib=60)}))
    assert it.candidates(wanting(60)) == ["c"]
    assert it.refusal("c", wanting(60)) == ""
    assert "needs 81 GiB" in it.refusal("c", wanting(81))


def test_P3_P7_an_exclusive_or_multi_device_workload_joins_nothing() -> None:
    it = fleet()
    it.set_claim("c", allocated({"a": entry("w")}))
    assert it.candidates(wanting(exclusive=True)) == []
    assert it.candidates(wanting(count=2)) == []


@pytest.mark.parametrize("fault", ["suspect", "lost"])
def test_P3_a_suspect_or_lost_node_takes_no_newcomers_until_it_is_back(fault: str) -> None:
    it = fleet()
    it.set_claim("c", allocated({"a": entry("w")}))
    assert it.set_node("n1", msgspec.structs.replace(node(), **{fault: True})) is False
    assert it.candidates(wanting()) == []
    assert it.set_node("n1", node()) is True
    assert it.candidates(wanting()) == ["c"]


@pytest.mark.parametrize("standing", [Standing.SUSPECT, Standing.LOST])
def test_F3_candidates_skip_a_node_that_the_ledger_holds_for_suspect_or_lost(standing: Standing) -> None:
    """F3: whatever order the node's own record and the ledger's word come in; its devices are not free ones either."""
    it = fleet()
    it.set_claim("c", allocated({"a": entry("w")}))
    assert it.set_standing("n1", standing) is False
    assert it.candidates(wanting()) == []
    assert it.set_node("n1", node()) is False
    assert it.candidates(wanting()) == []
    assert "all 0 devices" in it.why(wanting())[1]
    assert it.set_standing("n1", Standing.LIVE) is True
    assert it.candidates(wanting()) == ["c"]
    assert "look free" in it.why(wanting())[1]


def test_P1_a_node_that_is_not_enabled_or_not_complete_does_not_count() -> None:
    it = Fleet(limit=0)
    it.set_node("n1", msgspec.structs.replace(node(), enabled=False))
    it.set_node("n2", msgspec.structs.replace(node("n2"), complete=False))
    assert not it.known
    assert it.tiers(shape()) == ()


def test_P1_role_labels_none_is_both_and_any_is_only_those() -> None:
    it = Fleet(limit=0)
    it.set_node("n1", node(roles=(Role.SAMPLER,)))
    it.set_claim("c", allocated({"a": entry("w")}))
    assert it.candidates(wanting(role=Role.SAMPLER)) == ["c"]
    assert it.candidates(wanting(role=Role.TRAINER)) == []
    assert it.why(wanting(role=Role.TRAINER))[0] is Reason.ROLE_NOT_ACCEPTED


def test_P6_host_memory_equality_passes_one_byte_more_does_not_and_unknown_skips() -> None:
    it = Fleet(limit=0)
    it.set_node("n1", node(host_gib=100))
    it.set_claim("c", allocated({"a": entry("w")}))
    it.set_budget("n1", NodeBudget(entries={"a": NodeEntry(workload="w", claim="c", host_bytes=60 * GIB)}))
    assert it.candidates(wanting(host_gib=40)) == ["c"]
    assert it.candidates(wanting(host_gib=40.001)) == []
    it.set_node("n1", node(host_gib=0))
    assert it.candidates(wanting(host_gib=4_000)) == ["c"]


def test_P6_what_others_reserve_counts_too() -> None:
    it = Fleet(limit=0)
    it.set_node("n1", msgspec.structs.replace(node(host_gib=100), host_reserved_bytes=70 * GIB))
    it.set_claim("c", allocated({"a": entry("w")}))
    assert it.candidates(wanting(host_gib=31)) == []
    assert "30 GiB free" in it.refusal("c", wanting(host_gib=31))


def test_P13_avoided_nodes_and_claims_are_left_out() -> None:
    it = fleet()
    it.set_claim("c", allocated({"a": entry("w")}))
    assert it.candidates(Need(shape(), "me", avoid=frozenset({"c"}))) == []
    assert it.candidates(Need(shape(), "me", avoid=frozenset({"n1"}))) == []


def test_P2_catalogue_names_shapes_by_whole_gib_rounded_up_and_a_mixed_node_has_several() -> None:
    assert [ceiling_gib(int(gib * GIB)) for gib in (22.5, 79.65, 80)] == [23, 80, 80]
    it = Fleet(limit=0)
    mixed = tuple(Device(device=f"d{i}", memory_bytes=int(gib * GIB)) for i, gib in enumerate((80, 23)))
    it.set_node("n1", msgspec.structs.replace(node(), devices=mixed))
    assert [tier.ceiling_gib for tier in it.tiers(shape(20))] == [23, 80]
    assert [tier.ceiling_gib for tier in it.tiers(shape(40))] == [80]
    assert it.impossible(shape(40)) == ""


def test_P10_a_mixed_node_gives_several_devices_of_different_sizes_each_at_least_the_need() -> None:
    """Both backends take them by the tier's floor and ceiling, whatever the sizes between."""
    it = Fleet(limit=0)
    mixed = tuple(Device(device=f"d{i}", memory_bytes=int(gib * GIB)) for i, gib in enumerate((23, 80, 48, 23)))
    it.set_node("n1", msgspec.structs.replace(node(), devices=mixed))
    for gib, count, ceilings in ((20, 1, [23, 48, 80]), (20, 2, [23, 48, 80]), (20, 3, [48, 80]), (20, 4, [80])):
        assert it.impossible(shape(gib, count=count)) == ""
        tiers = it.tiers(shape(gib, count=count))
        assert tiers == tuple(Tier(count=count, floor_bytes=gib * GIB, ceiling_gib=each) for each in ceilings)
    assert [tier.ceiling_gib for tier in it.tiers(shape(40, count=2))] == [80]
    for gib, count in ((50, 2), (40, 3), (20, 5)):
        assert "1 x 80 GiB" in it.impossible(shape(gib, count=count))
    it.set_node("n1", None)
    assert not it.known, "every kind of it is gone"


def test_P10_W4_a_claim_of_devices_of_different_sizes_holds_each_of_them() -> None:
    it = Fleet(limit=0)
    mixed = (Device(device="d0", memory_bytes=23 * GIB), Device(device="d1", memory_bytes=80 * GIB))
    it.set_node("n1", msgspec.structs.replace(node(), devices=mixed))
    claim = msgspec.structs.replace(allocated({"a": entry("w", exclusive=True)}, gib=23), devices=("d0", "d1"))
    it.set_claim("c", claim)
    assert it.why(wanting(40))[0] is Reason.WAITING_FOR_DEVICE
    it.set_claim("c", None)
    assert "1 of 1 devices" in it.why(wanting(40))[1]


def test_W4_what_a_scalable_shape_could_hold_waits_for_it_and_is_not_impossible() -> None:
    it = Fleet(limit=0, scalable=(Kind(device_bytes=80 * GIB, num_devices=8),))
    it.set_node("n1", node(gib=23))
    assert it.impossible(shape(40)) == ""
    assert [tier.ceiling_gib for tier in it.tiers(shape(40))] == [80]
    reason, sentence = it.why(Need(shape(40), "me"))
    assert reason is Reason.UNSCHEDULABLE
    assert "--scalable-shapes" in sentence
    assert "8 x 80 GiB" in it.impossible(shape(81))


def test_W4_what_is_impossible_by_little_or_for_host_memory_says_what_is_missing() -> None:
    it = fleet()
    sentence = "needs a device of 80 GiB: the largest shape of the fleet is 3 x 80 GiB on a node, 614.4 KiB less"
    assert it.impossible(shape(80 + 0.6 / 1024)) == sentence
    assert it.impossible(shape(81)).endswith("is 3 x 80 GiB on a node")
    it.set_node("n1", node(host_gib=16))
    assert it.impossible(shape(10, role=Role.SAMPLER, host_gib=24)) == (
        "needs 24 GiB of host memory beside a device of 10 GiB: the most that such a node has is 16 GiB "
        "(on a small host: a lower --sampler-host-base)"
    )


def test_P9_tiers_are_every_shape_that_fits_tightest_first_whatever_is_free() -> None:
    it = fleet()
    it.set_node("n2", node("n2", gib=22.5))
    it.set_node("n3", node("n3", gib=39.5))
    for number in range(3):
        it.set_claim(f"c{number}", allocated({f"a{number}": entry("w", exclusive=True)}))
    floor = 20 * GIB
    assert it.tiers(shape(20)) == tuple(Tier(count=1, floor_bytes=floor, ceiling_gib=size) for size in (23, 40, 80))


@pytest.mark.parametrize("count", [7, 8, 9, 12])
def test_P9_however_many_sizes_there_are_the_largest_is_a_tier(count: int) -> None:
    it = Fleet(limit=0)
    sizes = [10 + number for number in range(count)]
    for size in sizes:
        it.set_node(f"n{size}", node(f"n{size}", gib=size))
    ceilings = [tier.ceiling_gib for tier in it.tiers(shape(10))]
    assert ceilings == (sizes if count <= TIERS_MAX else [*sizes[: TIERS_MAX - 1], sizes[-1]])


def test_W4_impossible_names_the_need_and_the_largest_shape_and_never_means_busy() -> None:
    it = fleet()
    assert it.impossible(shape(80)) == ""
    sentence = it.impossible(shape(81))
    assert "81 GiB" in sentence
    assert "3 x 80 GiB" in sentence
    assert it.impossible(shape(10, count=4)) != ""
    assert it.why(wanting(81))[0] is Reason.IMPOSSIBLE
    assert Fleet(limit=0).impossible(shape(81)) == "", "nobody knows yet what the fleet has"


def test_W4_host_memory_that_no_node_has_is_impossible() -> None:
    it = Fleet(limit=0)
    it.set_node("n1", node(host_gib=64))
    assert "64 GiB" in it.impossible(shape(10, host_gib=65))
    assert it.impossible(shape(10, host_gib=64)) == ""


def test_W4_host_memory_that_others_reserve_now_is_busy_and_not_impossible() -> None:
    """On Kubernetes: what the pods of others request. They end, and none of them makes another kind of node."""
    it = Fleet(limit=0)
    it.set_node("n1", node(host_gib=100))
    kinds = it.kinds
    it.set_node("n1", msgspec.structs.replace(node(host_gib=100), host_reserved_bytes=70 * GIB))
    assert it.kinds == kinds
    assert it.impossible(shape(host_gib=40)) == ""
    assert [tier.ceiling_gib for tier in it.tiers(shape(host_gib=40))] == [80]
    reason, sentence = it.why(wanting(host_gib=40))
    assert reason is Reason.WAITING_FOR_HOST_MEMORY
    assert "needs 40 GiB of host memory, node n1 has 30 GiB free" in sentence
    assert it.why(wanting(host_gib=101))[0] is Reason.IMPOSSIBLE


def test_S5_the_reason_names_the_limit_only_when_the_limit_binds() -> None:
    it = fleet(limit=1)
    for number in range(3):
        it.set_claim(f"c{number}", allocated({f"a{number}": entry(f"w{number}")}))
    reason, sentence = it.why(wanting())
    assert reason is Reason.WAITING_FOR_SEAT
    assert "--max-seats-per-claim 1" in sentence
    assert it.why(wanting(exclusive=True))[0] is Reason.WAITING_FOR_DEVICE
    for number in range(3):
        it.set_claim(f"c{number}", allocated({f"a{number}": entry(f"w{number}", exclusive=True)}))
    assert it.why(wanting())[0] is Reason.WAITING_FOR_DEVICE, "the claims are refused for another reason than the limit"


@pytest.mark.parametrize("avoid", [frozenset(), frozenset({"n1"})])
def test_S5_a_full_claim_is_no_reason_while_a_device_is_free(avoid: frozenset[str]) -> None:
    """The launcher knows why its device is not given; also where the free ones are on a node that is avoided."""
    it = fleet(limit=1)
    it.set_node("n2", node("n2", devices=1))
    it.set_claim("c1", allocated({"a1": entry("w1")}))
    it.set_claim("c2", allocated({"a2": entry("w2")}, node="n2"))
    need = Need(shape(), "me", avoid=avoid)
    assert it.why(need, "the driver is gone") == (Reason.UNSCHEDULABLE, "the driver is gone")
    assert it.why(need) == (Reason.RETRYING, "2 of 4 devices of at least 10 GiB look free: asking again")


def test_S1_no_limit_never_names_one() -> None:
    it = Fleet(limit=0)
    it.set_node("n1", node(host_gib=100, devices=1))
    it.set_claim("c", allocated({"a": entry("w")}))
    it.set_budget("n1", NodeBudget(entries={"a": NodeEntry(workload="w", claim="c", host_bytes=99 * GIB)}))
    reason, sentence = it.why(wanting(host_gib=2))
    assert reason is Reason.WAITING_FOR_HOST_MEMORY
    assert "1 GiB free" in sentence


def test_W4_a_free_device_without_the_host_memory_beside_it_is_a_wait_for_host_memory() -> None:
    it = Fleet(limit=0)
    it.set_node("n1", node(host_gib=24, devices=2))
    it.set_claim("c", allocated({"a": entry("w", exclusive=True)}))
    it.set_budget("n1", NodeBudget(entries={"a": NodeEntry(workload="w", claim="c", host_bytes=20 * GIB)}))
    assert it.why(wanting(exclusive=True, host_gib=8))[0] is Reason.WAITING_FOR_HOST_MEMORY
    it.set_node("n2", node("n2", host_gib=24, devices=1))
    assert it.why(wanting(exclusive=True, host_gib=8))[0] is Reason.RETRYING, "the other node has room"


def test_W4_devices_that_no_claim_can_get_do_not_look_free() -> None:
    """P1, P2: a trainer's node for a sampler, the small device of a mixed node."""
    it = Fleet(limit=0)
    it.set_node("n1", node(devices=1, roles=(Role.TRAINER,)))
    mixed = (Device(device="d0", memory_bytes=8 * GIB), Device(device="d1", memory_bytes=80 * GIB))
    it.set_node("n2", msgspec.structs.replace(node("n2"), devices=mixed))
    it.set_claim("c", allocated({"a": entry("w", exclusive=True)}, node="n2", gib=80))
    reason, sentence = it.why(wanting(role=Role.SAMPLER))
    assert reason is Reason.WAITING_FOR_DEVICE
    assert "all 1 devices" in sentence


def test_W4_the_launchers_cause_is_told_when_nothing_more_specific_holds() -> None:
    assert fleet().why(wanting(), "the driver is gone") == (Reason.UNSCHEDULABLE, "the driver is gone")
    assert Fleet(limit=0).why(wanting())[0] is Reason.WAITING_FOR_DEVICE


def test_W2_only_more_room_is_reported_as_a_wake_up() -> None:
    it = fleet(limit=2)
    one, two = {"a": entry("w")}, {"a": entry("w"), "b": entry("x")}
    assert it.set_claim("c", ClaimRecord(state=ClaimState.PENDING, entries=one)) is False
    assert it.set_claim("c", allocated(one)) is True
    assert it.set_claim("c", allocated(two)) is False, "SeatBooked wakes nobody"
    assert it.set_claim("c", allocated(one)) is True
    assert it.set_claim("c", allocated({}, state=ClaimState.RETIRING)) is False
    assert it.set_node("n1", msgspec.structs.replace(node(), beat=9)) is False, "a heartbeat is no change"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["c1", "c2", "c3", "c4"]),
            st.sampled_from(list(ClaimState)),
            st.integers(0, 3),
            st.sampled_from([23.0, 80.0]),
            st.booleans(),
            st.sampled_from(["n1", "n2"]),
        ),
        max_size=30,
    ),
    st.integers(0, 3),
)
def test_P3_the_index_holds_exactly_what_a_scan_would_find(
    changes: list[tuple[str, ClaimState, int, float, bool, str]], limit: int
) -> None:
    it = Fleet(limit=limit)
    it.set_node("n1", node("n1"))
    for count, (claim, state, seats, gib, exclusive, on) in enumerate(changes):
        entries = {f"{claim}-{i}": entry(f"w{i}", owner=f"o{i % 2}", exclusive=exclusive) for i in range(seats)}
        it.set_claim(claim, allocated(entries, gib=gib, node=on, state=state))
        if count % 5 == 4:
            it.set_node("n2", node("n2", gib=gib, roles=(Role.TRAINER,) if exclusive else ()))
    for role in Role:
        wanted = wanting(20, role=role)
        scan = {claim for claim in it.claims if it.refusal(claim, wanted) == ""}
        assert set(it.candidates(wanted)) == scan


def test_L1_W1_memory_of_a_seat_heard_of_before_its_node_is_in_use() -> None:
    """The node is reserved first, and may be heard of later: until then the seat's memory looked free."""
    it = Fleet(limit=0)
    it.set_node("n1", node(devices=2, host_gib=10))
    seat = entry("w", host_gib=8)
    it.set_claim("c1", allocated({"a": seat}))
    assert (it.host_fits("c1", 2 * GIB), it.host_fits("c1", 3 * GIB)) == (True, False)
    listed = NodeBudget(entries={"a": NodeEntry(workload="w", claim="c1", host_bytes=8 * GIB)})
    assert not it.set_budget("n1", listed), "nothing came free"
    assert (it.host_fits("c1", 2 * GIB), it.host_fits("c1", 3 * GIB)) == (True, False)
    it.set_claim("c1", allocated({}))
    assert not it.host_fits("c1", 3 * GIB), "the node lists it still"
    assert it.set_budget("n1", NodeBudget())
    assert it.host_fits("c1", 10 * GIB)


def test_L1_W1_memory_of_a_seat_heard_of_before_its_claim_is_in_use() -> None:
    it = Fleet(limit=0)
    it.set_node("n1", node(devices=2, host_gib=10))
    it.set_claim("c1", allocated({}))
    it.set_seat("w", "c1", "a", 8 * GIB)
    assert (it.host_fits("c1", 2 * GIB), it.host_fits("c1", 3 * GIB)) == (True, False)
    it.set_claim("c1", allocated({"a": entry("w", host_gib=8)}))
    assert (it.host_fits("c1", 2 * GIB), it.host_fits("c1", 3 * GIB)) == (True, False)
    it.set_seat("w", "c1", "a", 8 * GIB)
    assert it.host_fits("c1", 2 * GIB), "counted once"


def test_L4_a_seat_that_its_claim_was_never_heard_to_list_ends_with_its_memory() -> None:
    it = Fleet(limit=0)
    it.set_node("n1", node(devices=2, host_gib=10))
    it.set_claim("c1", allocated({}))
    it.set_seat("w", "c1", "a", 8 * GIB)
    it.drop_seat("w", "c1")
    assert it.host_fits("c1", 10 * GIB)
