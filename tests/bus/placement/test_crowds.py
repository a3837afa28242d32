"""Crowds: many at once for few seats. What must hold whatever the order is asserted; how long it took is not."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from bus.placement.played import System, running
from openrl_common.events import (
    ClaimAllocated,
    JobAdmitted,
    JobEnded,
    JobFailed,
    JobFinished,
    JobReady,
    SeatBooked,
    SeatRefused,
    SeatRequested,
)
from openrl_common.quantities import GIB
from openrl_common.records import ClaimState, Overrides, Role, SeatState, Shape, Tier

pytestmark = pytest.mark.timeout(240)


def request(workload: str, candidates: tuple[str, ...], *, may_found: bool) -> SeatRequested:
    shape = Shape(role=Role.TRAINER, device_bytes=GIB, host_bytes=GIB // 1024)
    tiers = (Tier(count=1, floor_bytes=GIB, ceiling_gib=8),) if may_found else ()
    return SeatRequested(
        tenant="crowd", workload=workload, incarnation=1, attempt=1, owner=workload, shape=shape,
        candidates=candidates, may_found=may_found, tiers=tiers,
    )  # fmt: skip


async def test_S2_L2_of_32_workers_racing_for_one_claim_exactly_the_limit_gets_in(tmp_path: Path) -> None:
    """S2, L2, E11: two ledger replicas; losing a compare-and-swap is no refusal, a full claim is."""
    async with running(tmp_path, seats=16, workers=False) as system:
        await system.start("ledger", "ledger-2")
        await system.kill("placement")
        await system.bus.publish(request("founder", (), may_found=True))
        await system.until(lambda: [each for each in system.seen if isinstance(each, SeatBooked)])
        (booked,) = [each for each in system.seen if isinstance(each, SeatBooked)]
        claim = booked.claim
        await system.node()
        await system.bus.publish(
            ClaimAllocated(claim=claim, node="n1", devices=("d0",), device_bytes=8 * GIB, tier="8GiB")
        )

        async def allocated() -> bool:
            entry = await system.bus.store.ledger_claims.get(claim)
            return entry is not None and entry.value.state is ClaimState.ALLOCATED

        await system.until(allocated)
        racers = [f"racer-{number}" for number in range(32)]
        await asyncio.gather(*(system.bus.publish(request(racer, (claim,), may_found=False)) for racer in racers))
        await system.until(
            lambda: {each.workload for each in system.seen if isinstance(each, SeatBooked | SeatRefused)} >= {*racers},
            within_s=60,
        )
        entry = await system.bus.store.ledger_claims.get(claim)
        assert entry is not None
        assert (len(entry.value.entries), entry.value.seats_peak) == (16, 16)
        seats = {key: seat.value for key, seat in (await system.bus.store.ledger_seats.list()).items()}
        held = [key for key, seat in seats.items() if seat.state is SeatState.HELD]
        assert len(held) == 16
        assert {seats[key].assignment for key in held} == {*entry.value.entries}, "every entry is named"


async def held_by_claim(system: System) -> Counter[str]:
    seats = (await system.bus.store.ledger_seats.list()).values()
    return Counter(entry.value.claim for entry in seats if entry.value.state is SeatState.HELD)


async def test_P11_16_half_device_workers_submitted_at_once_share_8_devices_two_by_two(tmp_path: Path) -> None:
    """P11, S4: the ninth and later ones join what the first eight founded, no device is cut for nothing."""
    async with running(tmp_path, devices=8, seats=2, host_base="1MiB") as system:
        half = Overrides(trainer_device_gib=4.0, sampler_device_gib=4.0)
        names = [f"half-{number}" for number in range(8)]
        await asyncio.gather(*(system.submit(name, overrides=half) for name in names))
        await system.until(lambda: {each.job for each in system.seen if isinstance(each, JobReady)} == {*names}, 90)
        assert sorted((await held_by_claim(system)).values()) == [2] * 8


@pytest.mark.long
async def test_500_workloads_are_submitted_while_500_finish_and_nothing_is_left_over(tmp_path: Path) -> None:
    """Invariants 7, 8, W2: every job gets its seats in the end, and everything is free again."""
    async with running(tmp_path, devices=40, seats=8, host_base="1MiB") as system:

        async def ready(names: list[str]) -> None:
            wanted = {*names}
            await system.until(lambda: wanted <= {each.job for each in system.seen if isinstance(each, JobReady)}, 150)

        first = [f"first-{number}" for number in range(125)]
        await asyncio.gather(*(system.submit(name) for name in first))
        await ready(first)
        second = [f"second-{number}" for number in range(125)]
        finishing = (JobFinished(tenant="default", job=name, submission=f"s-{name}") for name in first)
        await asyncio.gather(
            *(system.submit(name) for name in second), *(system.bus.publish(event) for event in finishing)
        )
        await ready(second)
        for name in second:
            await system.bus.publish(JobFinished(tenant="default", job=name, submission=f"s-{name}"))
        everybody = {*first, *second}
        await system.until(lambda: {each.job for each in system.seen if isinstance(each, JobEnded)} == everybody, 150)
        assert not await held_by_claim(system)
        await system.until(lambda: len(system.free) == 40, 30)


async def test_W1_of_jobs_that_come_at_once_the_first_founds_both_claims_before_the_last_founds_its_first(
    tmp_path: Path,
) -> None:
    """Else devices are cut for the first workers of all, and the first job's second one waits for a later job's end."""
    async with running(tmp_path, workers=False) as system:
        await system.kill("placement")
        jobs = [f"job-{number:02}" for number in range(8)]
        pairs = [
            msgspec.structs.replace(
                request(f"{job}-trainer", (), may_found=True), beside=request(f"{job}-sampler", (), may_found=True)
            )
            for job in jobs
        ]
        await asyncio.gather(*(system.bus.publish(pair) for pair in pairs))

        async def claims() -> dict[str, int]:
            listed = await system.bus.store.ledger_claims.list()
            return {entry.workload: each.revision for each in listed.values() for entry in each.value.entries.values()}

        async def all_founded() -> bool:
            return len(await claims()) == 16

        await system.until(all_founded)
        written = await claims()
        assert written[f"{jobs[0]}-sampler"] < written[f"{jobs[-1]}-trainer"]


async def test_W4_a_job_that_can_never_run_is_told_so_while_hundreds_before_it_wait_for_an_answer(
    tmp_path: Path,
) -> None:
    """At any backlog: the last of 300 that were published while placement was away; those before it keep their turn."""
    async with running(tmp_path, workers=False) as system:
        await system.node()
        await system.kill("placement")
        names = [f"job-{number:03}" for number in range(299)]
        await asyncio.gather(*(system.submit(name) for name in names))
        await system.submit("huge", overrides=Overrides(trainer_device_gib=1_000.0))
        await system.start("placement")

        def answered() -> list[str]:
            return [each.job for each in system.seen if isinstance(each, JobAdmitted | JobFailed)]

        await system.until(lambda: "huge" in answered(), within_s=60)
        assert answered().index("huge") < len(names) / 2
        await system.until(lambda: {*names} <= {*answered()}, within_s=90)
        assert [each.job for each in system.seen if isinstance(each, JobFailed)] == ["huge"]
