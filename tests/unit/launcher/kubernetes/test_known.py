"""B1, K6: what the cluster's launcher knows of claims is what was said last, in whatever order it is said."""

from __future__ import annotations

import msgspec

from openrl_common.quantities import GIB
from openrl_common.records import ClaimEntry, ClaimRecord, ClaimState, Role, SeatRecord, SeatState
from openrl_launcher.kubernetes.claim_looks import Known
from openrl_launcher.kubernetes.manifests import CLAIM
from openrl_launcher.kubernetes.objects import Meta, ResourceClaim


def entry(workload: str) -> ClaimEntry:
    return ClaimEntry(
        workload=workload, tenant="t", owner="t/j", role=Role.TRAINER, device_bytes=GIB, host_bytes=GIB,
        exclusive=False, incarnation=1, reserved_at=1.0,
    )  # fmt: skip


def test_B1_whoever_joins_or_leaves_a_claim_is_looked_at_and_an_entry_is_known_while_it_is_listed() -> None:
    known = Known()
    both = ClaimRecord(state=ClaimState.ALLOCATED, entries={"a-1": entry("w1"), "a-2": entry("w2")})
    assert known.set_record("c-1", both) == {"w1", "w2"}
    assert known.entries["a-2"] == ("c-1", both.entries["a-2"])
    one = msgspec.structs.replace(both, entries={"a-1": both.entries["a-1"]})
    assert known.set_record("c-1", one) == {"w1", "w2"}, "the one that left has something to do"
    assert set(known.entries) == {"a-1"}
    assert known.set_record("c-1", None) == {"w1"}
    assert not known.entries
    assert not known.records


def test_K6_a_resource_claim_of_somebody_else_is_not_ours_and_one_that_never_was_cannot_vanish() -> None:
    known = Known()
    assert not known.set_resource("c-1", ResourceClaim(metadata=Meta(name="c-1")))
    assert not known.set_resource("c-1", None)
    assert known.set_resource("c-1", ResourceClaim(metadata=Meta(name="c-1", labels={CLAIM: "c-1"})))
    assert known.set_resource("c-1", None)
    assert not known.resources


def test_B1_an_empty_seat_is_no_seat() -> None:
    known = Known()
    known.set_seat("w1", SeatRecord(state=SeatState.HELD, claim="c-1", assignment="a-1"))
    assert known.seats["w1"].claim == "c-1"
    known.set_seat("w1", SeatRecord())
    assert not known.seats
