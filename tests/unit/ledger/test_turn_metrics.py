"""What the arbiter counts of a claim, and for how long (T7)."""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import CollectorRegistry

from openrl_common.events import TurnReleased
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer
from openrl_common.records import ClaimEntry, ClaimRecord, ClaimState, Residency, Role, TurnRecord
from openrl_common.store import Entry
from openrl_ledger.core.ops import Environment
from openrl_ledger.core.turns import TurnPolicy
from openrl_ledger.turns_service import Arbiter, Metrics

RELEASED = TurnReleased(
    tenant="t", claim="c1", assignment="a1", epoch=1, session="s", attempt=1, park_seconds=0.5, resume_seconds=0.2,
    hits_hot=3, hits_warm=1,
)  # fmt: skip


def claim(*assignments: str) -> ClaimRecord:
    return ClaimRecord(
        state=ClaimState.ALLOCATED, node="n1", device_bytes=10,
        entries={
            name: ClaimEntry(
                workload=f"t--{name}--trainer", tenant="t", owner=name, role=Role.TRAINER, device_bytes=1,
                host_bytes=0, exclusive=False, incarnation=1, reserved_at=0.0,
            )
            for name in assignments
        },
    )  # fmt: skip


def names_of(registry: CollectorRegistry, claim_id: str) -> set[str]:
    return {
        sample.name
        for metric in registry.collect()
        for sample in metric.samples
        if sample.labels.get("claim") == claim_id
    }


async def test_T7_a_claim_that_nobody_has_to_look_at_is_counted_and_ends_with_its_last_seat() -> None:
    """A lone worker asks once, and an exclusive one never: nobody looks at their claims."""
    bus, registry = MemoryBus(MemoryServer()), CollectorRegistry()
    environment = Environment(limit=3, now=lambda: 0.0, mint=lambda prefix: prefix)
    arbiter = Arbiter(bus, environment, cast(Any, None), TurnPolicy(), registry)
    await bus.store.ledger_claims.put("c1", claim("a1", "a2"))
    await bus.store.ledger_claims.put("c2", claim())
    await bus.store.turns.put("c1", TurnRecord(residents={"a1": Residency(epoch=1, granted_at=0.0, until=9.0)}))
    claims = await bus.store.ledger_claims.mirror()
    await arbiter.start(claims)
    values = {name: registry.get_sample_value(f"openrl_turns_{name}", {"claim": "c1"}) for name in (
        "seats", "seat_limit", "residents", "waiting")}  # fmt: skip
    assert values == {"seats": 2.0, "seat_limit": 3.0, "residents": 1.0, "waiting": 0.0}
    assert registry.get_sample_value("openrl_turns_seats", {"claim": "c2"}) is None
    claims.learn(Entry("c1", claim(), 9))
    assert not names_of(registry, "c1")


def test_T7_switches_and_hits_are_of_a_claim_and_end_with_it() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.released(RELEASED)
    metrics.keep({"c1": Entry("c1", claim("a1"), 1)})
    park = {"claim": "c1", "part": "park"}
    assert registry.get_sample_value("openrl_turns_switch_seconds_sum", park) == 0.5
    assert registry.get_sample_value("openrl_turns_hits_total", {"claim": "c1", "found": "hot"}) == 3.0
    metrics.keep({"c1": Entry("c1", claim(), 2)})
    assert not names_of(registry, "c1")
    metrics.released(RELEASED)  # heard late
    metrics.keep({})
    assert not names_of(registry, "c1")
