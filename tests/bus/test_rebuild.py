"""A rebuild of the ledger's bucket whose writes come late (L7, E7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer, Network, outcome
from openrl_common.records import ClaimRecord, ClaimState
from openrl_ledger import rebuild
from openrl_ledger.core.rebuild import Rebuilt


class LateOnce(Network):
    """The first write of a claim gets no answer, and arrives when it is let in."""

    def __init__(self) -> None:
        self.late: Callable[[], Any] | None = None

    def ask(self, bus: MemoryBus, apply: Callable[[], Any], answer: asyncio.Future[Any], timeout_s: float) -> None:
        if self.late is None and "openrl_ledger.claim." in repr(apply) and "publish" in repr(apply):
            self.late = apply
            answer.set_exception(TimeoutError())
        else:
            super().ask(bus, apply, answer, timeout_s)


async def test_E7_a_write_given_up_as_lost_does_not_land_on_what_the_ledger_made_of_it() -> None:
    network = LateOnce()
    bus = MemoryBus(MemoryServer(network))
    await rebuild.write(bus, Rebuilt(claims={"c1": ClaimRecord(state=ClaimState.RETIRING, node="n1")}))
    claim = await bus.store.ledger_claims.get("c1")
    assert claim is not None
    await bus.store.ledger_claims.write("c1", ClaimRecord(state=ClaimState.GONE, node="n1"), last=claim.revision)
    assert network.late is not None
    _, refused = outcome(network.late)
    assert refused is not None
    claim = await bus.store.ledger_claims.get("c1")
    assert claim is not None
    assert claim.value.state is ClaimState.GONE


async def test_L7_a_rebuild_may_be_done_again() -> None:
    """Also with fewer records, over what stands there."""
    bus = MemoryBus(MemoryServer())
    retiring = ClaimRecord(state=ClaimState.RETIRING, node="n1")
    await rebuild.write(bus, Rebuilt(claims={"c1": retiring, "c2": retiring}))
    await rebuild.write(bus, Rebuilt(claims={"c2": retiring}))
    assert list(await bus.store.ledger_claims.list()) == ["c2"]
    assert await bus.store.ledger_meta.get("identity") is not None
