"""A rebuild of the ledger's bucket whose writes come late (L7, E7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from openrl_common.errors import Conflict
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer, Network, outcome
from openrl_common.records import ClaimRecord, ClaimState
from openrl_ledger import rebuild
from openrl_ledger.core.rebuild import Rebuilt
from openrl_ledger.founding import Founding
from unit.placement.desk import Desk, node


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
    await rebuild.write(
        bus, Rebuilt(claims={"c1": ClaimRecord(state=ClaimState.RETIRING, node="n1")}), await rebuild.begin(bus)
    )
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
    await rebuild.write(bus, Rebuilt(claims={"c1": retiring, "c2": retiring}), await rebuild.begin(bus))
    await rebuild.write(bus, Rebuilt(claims={"c2": retiring}), await rebuild.begin(bus))
    assert list(await bus.store.ledger_claims.list()) == ["c2"]
    assert await bus.store.ledger_meta.get("identity") is not None


async def test_L7_a_bucket_that_is_being_rebuilt_is_not_taken_for_a_new_one() -> None:
    """A ledger that starts in between (it ended when its identity was gone) would book into half of a bucket."""
    bus, stopping = MemoryBus(MemoryServer()), asyncio.Event()
    founding = Founding(bus)
    began = await rebuild.begin(bus)
    waiting = asyncio.create_task(founding.wait(stopping))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert "being rebuilt" in str(founding.problem())
    await rebuild.write(bus, Rebuilt(), began)
    await waiting
    assert founding.problem() is None


async def test_L7_of_two_rebuilds_at_once_the_one_that_began_last_gives_the_identity() -> None:
    """The other one has looked at what ran before that, and may have dropped what the later one wrote."""
    bus = MemoryBus(MemoryServer())
    first = await rebuild.begin(bus)
    second = await rebuild.begin(bus)
    with pytest.raises(Conflict):
        await rebuild.write(bus, Rebuilt(), first)
    await rebuild.write(bus, Rebuilt(), second)
    identity = await bus.store.ledger_meta.get("identity")
    assert identity is not None
    assert identity.value.id


async def test_L7_a_job_that_was_submitted_again_is_rebuilt_as_it_is_now() -> None:
    """Its new workloads stand in its own record first, the old ones still under their keys."""
    bus, it = MemoryBus(MemoryServer()), Desk()
    it.node(node())
    it.submit("a")
    old, new = it.workload("default--a--trainer"), it.state.jobs["default.a"]
    await bus.store.workloads.put(old.workload, old)
    newer = msgspec.structs.replace(old, incarnation=9)
    await bus.store.jobs.put("default.a", msgspec.structs.replace(new, workloads=(newer,)))
    assert (await rebuild.workloads_of(bus))[old.workload].incarnation == 9
