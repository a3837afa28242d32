"""Claims on devices: cut once, in line order, given back, finished after a crash (B2, B8, W1, L5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from bus.launcher.launcher_helpers import Ledger, until
from openrl_common.events import ClaimAllocated, ClaimFreed, NodeJoined, WorkerUnschedulable
from openrl_common.quantities import GIB
from openrl_common.records import ClaimState, CutRecord, CutState, DeviceHold
from openrl_launcher.claims import Claims
from openrl_launcher.core import Cut
from openrl_launcher.service import Launcher

Launch = Callable[..., AbstractAsyncContextManager[Launcher]]


async def holds(ledger: Ledger) -> dict[str, str]:
    entries = await ledger.bus.store.devices.list("here.")
    return {key.removeprefix("here."): entry.value.claim for key, entry in entries.items() if entry.value.claim}


async def test_B2_declared_devices_are_reported_and_the_node_beats(ledger: Ledger, launch: Launch) -> None:
    async with launch(devices=(8, 24), host_memory_bytes=64 * GIB):
        joined = await ledger.event(NodeJoined, node="here")
        assert [device.memory_bytes // GIB for device in joined.record.devices] == [8, 24]
        assert joined.record.host_allocatable_bytes == 64 * GIB
        first = await ledger.bus.store.nodes.get("here")
        assert first is not None

        async def beaten() -> bool:
            entry = await ledger.bus.store.nodes.get("here")
            return entry is not None and entry.value.beat > first.value.beat

        await until(beaten, deadline_s=5.0)


async def test_B8_a_pending_claim_is_cut_holding_its_device_and_said_once(ledger: Ledger, launch: Launch) -> None:
    async with launch(devices=(24, 8)):
        _, claim, _ = await ledger.found("sleep")
        allocated = await ledger.event(ClaimAllocated, claim=claim)
        assert (allocated.node, allocated.devices, allocated.device_bytes) == ("here", ("dev1",), 8 * GIB)
        assert await holds(ledger) == {"dev1": claim}
        assert len(await ledger.events(ClaimAllocated)) == 1


async def test_W1_a_freed_device_goes_to_the_first_in_line(ledger: Ledger, launch: Launch) -> None:
    async with launch(devices=(8,)):
        workload, claim, _, _ = await ledger.run("sleep")
        _, later, _ = await ledger.found("later", order=(0, 9))
        _, sooner, _ = await ledger.found("sooner", order=(0, 5))
        waiting = await ledger.event(WorkerUnschedulable, claim=later)
        assert waiting.cause == "node here has not 1 device of at least 8.00 GiB free: 0 of the 1 that fit"
        await ledger.event(WorkerUnschedulable, claim=sooner)
        await ledger.release(workload)
        await until(lambda: gone(ledger, "assignment-1"))
        await ledger.drop(workload, claim)
        await ledger.event(ClaimFreed, claim=claim)
        await ledger.event(ClaimAllocated, claim=sooner)
        assert await holds(ledger) == {"dev0": sooner}
        assert await ledger.events(ClaimAllocated, claim=later) == []
        assert len(await ledger.events(WorkerUnschedulable, claim=later)) == 1


async def gone(ledger: Ledger, assignment: str) -> bool:
    from openrl_common.events import WorkerGone

    return bool(await ledger.events(WorkerGone, assignment=assignment))


async def test_P6_host_memory_is_looked_at_before_cutting(ledger: Ledger, launch: Launch) -> None:
    async with launch(devices=(8, 8), host_memory_bytes=16 * GIB):
        _, first, _ = await ledger.found("sleep", host_gib=10, order=(0, 1))
        await ledger.event(ClaimAllocated, claim=first)
        _, second, _ = await ledger.found("other", host_gib=10, order=(0, 2))
        waiting = await ledger.event(WorkerUnschedulable, claim=second)
        assert waiting.cause == ("node here has not enough host memory: needs 10.00 GiB, 6.00 GiB of 16.00 GiB left")
        assert len(await holds(ledger)) == 1


async def test_B8_a_retiring_claim_that_was_never_cut_gets_a_freed_record(ledger: Ledger, launch: Launch) -> None:
    _, claim, _ = await ledger.found("sleep")
    await ledger.change_claim(claim, state=ClaimState.RETIRING, entries={})
    async with launch():
        await ledger.event(ClaimFreed, claim=claim)
        cut = await ledger.bus.store.cuts.get(claim)
        assert cut is not None
        assert cut.value.state is CutState.FREED
        assert await holds(ledger) == {}


async def test_B8_a_cut_interrupted_before_its_record_is_finished(ledger: Ledger, launch: Launch) -> None:
    _, claim, _ = await ledger.found("sleep")
    await ledger.bus.store.devices.write("here.dev1", DeviceHold(claim=claim), last=0)
    async with launch():
        allocated = await ledger.event(ClaimAllocated, claim=claim)
        assert allocated.devices == ("dev1",)


async def test_B8_a_device_whose_hold_is_heard_of_after_the_look_is_not_cut_for_another_claim(ledger: Ledger) -> None:
    """A hold that an outage had kept back lands between a look that found its device free and the cut it decided."""
    woken = asyncio.Event()
    claims = Claims(ledger.bus, node="here", clock=lambda: 0.0, wake=woken.set)
    await claims.load()
    try:
        await ledger.bus.store.devices.write("here.dev0", DeviceHold(claim="late"), last=0)
        await until(lambda: _knows(claims, {"dev0": "late"}))
        woken.clear()
        await claims.cut(Cut("mine", ("dev1", "dev0"), 8 * GIB, "1x8"))
        assert await holds(ledger) == claims.holds == {"dev0": "late"}
        assert await ledger.bus.store.cuts.get("mine") is None
        assert woken.is_set()  # to look again, with the hold
    finally:
        await claims.close()


async def _knows(claims: Claims, held: dict[str, str]) -> bool:
    return claims.holds == held


async def test_B8_a_device_held_for_a_withdrawn_claim_is_freed_and_used(ledger: Ledger, launch: Launch) -> None:
    await ledger.bus.store.devices.write("here.dev0", DeviceHold(claim="withdrawn"), last=0)
    async with launch(devices=(8,)):
        _, claim, _ = await ledger.found("sleep")
        allocated = await ledger.event(ClaimAllocated, claim=claim)
        assert allocated.devices == ("dev0",)


async def test_E6_an_allocation_written_but_not_said_is_said_after_a_restart(ledger: Ledger, launch: Launch) -> None:
    _, claim, _ = await ledger.found("sleep")
    await ledger.bus.store.devices.write("here.dev0", DeviceHold(claim=claim), last=0)
    record = CutRecord(state=CutState.ALLOCATED, node="here", devices=("dev0",), device_bytes=8 * GIB, tier="1x80")
    await ledger.bus.store.cuts.write(claim, record, last=0)
    async with launch():
        assert (await ledger.event(ClaimAllocated, claim=claim)).devices == ("dev0",)


async def test_two_nodes_never_cut_one_claim_twice(ledger: Ledger, launch: Launch) -> None:
    async with launch(node="here"), launch(node="there"):
        claims = [(await ledger.found(f"job{index}", order=(0, index)))[1] for index in range(4)]
        await asyncio.gather(*(ledger.event(ClaimAllocated, claim=claim) for claim in claims))
        cuts = {claim: await ledger.bus.store.cuts.get(claim) for claim in claims}

        async def settled() -> bool:
            held: dict[str, Any] = {
                key: entry.value.claim for key, entry in (await ledger.bus.store.devices.list()).items()
            }
            wanted = {
                f"{cut.value.node}.{device}": claim
                for claim, cut in cuts.items()
                if cut
                for device in cut.value.devices
            }
            return {key: claim for key, claim in held.items() if claim} == wanted

        await until(settled)
