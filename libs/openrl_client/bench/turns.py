"""``openrl bench turns``: what it costs to pass a device from a trainer to a sampler and back (T5, T7).

A real FFT job on one declared device that holds either of its workers but not both. The client trains and samples in
alternation, so that every request finds its worker parked; then the same on a device that holds both. Parking on a CPU
means a file: the figures are of that, not of a GPU's bus.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import msgspec

from openrl_client.bench.figures import milliseconds, percentile
from openrl_client.bench.machine import Machine, StorePlace, describe, store_place
from openrl_client.bench.scratch import scratch_with_model
from openrl_client.connection import connect
from openrl_client.home import Progress
from openrl_client.job import Job
from openrl_client.local_system import LocalSystem
from openrl_common.bus import Bus
from openrl_common.events import TurnReleased
from openrl_common.records import JobKind, JobSpec, Overrides
from openrl_common.wire import Datum, SamplingParams

_EACH_GIB = 4.0
_READY_S = 180.0


class Switching(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds, median and worst twentieth. ``parked_mb``: MB of 10^6 bytes that one park moves, the most seen."""

    switches: int
    park_p50_ms: float
    park_p95_ms: float
    resume_p50_ms: float
    resume_p95_ms: float
    parked_mb: float


class TurnsReport(msgspec.Struct, frozen=True, kw_only=True):
    """``round_*``: one training request and one sampling request, one after the other.

    ``round_turns_p50_ms - round_together_p50_ms`` is two switches: what is asked, parked, granted and resumed.
    """

    rounds: int
    round_turns_p50_ms: float
    round_together_p50_ms: float
    switch_p50_ms: float
    trainer: Switching
    sampler: Switching
    store: StorePlace
    machine: Machine


async def measure(store: Path | None, *, num_rounds: int, model: Path | None, progress: Progress) -> TurnsReport:
    """Raises what LocalSystem and the client raise; Rejected for a store in memory."""
    place = store_place(store)
    async with scratch_with_model(place, model, progress) as (scratch, model):
        turns_s, events = await _rounds(scratch / "turns", model, 1.5 * _EACH_GIB, num_rounds, progress)
        together_s, none = await _rounds(scratch / "together", model, 3 * _EACH_GIB, num_rounds, progress)
    assert not none, "workers that fit together parked (T2)"
    extra_s = median(turns_s) - median(together_s)
    return TurnsReport(
        rounds=num_rounds,
        round_turns_p50_ms=milliseconds(median(turns_s)),
        round_together_p50_ms=milliseconds(median(together_s)),
        switch_p50_ms=milliseconds(extra_s / 2),
        trainer=_switching([event for role, event in events if role == "trainer"]),
        sampler=_switching([event for role, event in events if role == "sampler"]),
        store=place,
        machine=describe(),
    )


async def _rounds(
    home: Path, model: Path, device_gib: float, num_rounds: int, progress: Progress
) -> tuple[list[float], list[tuple[str, TurnReleased]]]:
    """Seconds of each round, and what the workers, by role, said when they left the device."""
    sizes = Overrides(
        trainer_device_gib=_EACH_GIB, sampler_device_gib=_EACH_GIB, trainer_host_gib=0.5, sampler_host_gib=0.5
    )
    spec = JobSpec(
        name="bench", kind=JobKind.FFT, base_model=str(model), dtype="float32", overrides=sizes, exclusive=False
    )
    async with LocalSystem(home, devices=f"1x{device_gib:g}GiB") as system, connect(system.nats_url) as client:
        job = await client.submit(spec)
        await job.ready(_READY_S)
        workers = (await client.bus.store.workers.list()).values()
        roles = {worker.value.assignment: worker.value.workload.rsplit("--", 1)[-1] for worker in workers}
        await _round(job)
        began = time.time()
        seconds = []
        for number in range(num_rounds):
            seconds.append(await _round(job))
            progress(f"{device_gib:g} GiB: round {number + 1} of {num_rounds} took {seconds[-1]:.3f} s")
        events = [(roles[event.assignment], event) for event in await _released(client.bus, since=began)]
        await job.finish()
    return seconds, events


async def _round(job: Job) -> float:
    began = time.monotonic()
    await job.forward_backward([Datum(tokens=[1, 2, 3, 4, 5, 6])], loss="cross_entropy")
    await job.sample([[1, 2, 3]], params=SamplingParams(n=1, max_tokens=4, seed=1))
    return time.monotonic() - began


async def _released(bus: Bus, *, since: float) -> list[TurnReleased]:
    last = await bus.last(stream="OPENRL_EVENTS", subject="openrl.ev.worker.>")
    found: list[TurnReleased] = []
    if last is None:
        return found
    async for delivery in bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.worker.>"):
        event = delivery.event()
        if isinstance(event, TurnReleased) and event.resaid == 0 and delivery.published_at >= since:
            found.append(event)
        if delivery.sequence >= last.sequence:
            break
    return found


def _switching(events: list[TurnReleased]) -> Switching:
    park = [event.park_seconds for event in events]
    resume = [event.resume_seconds for event in events if event.resume_seconds]
    return Switching(
        switches=len(events),
        park_p50_ms=milliseconds(percentile(park, 50)),
        park_p95_ms=milliseconds(percentile(park, 95)),
        resume_p50_ms=milliseconds(percentile(resume, 50)),
        resume_p95_ms=milliseconds(percentile(resume, 95)),
        parked_mb=round(max((event.bytes_parked for event in events), default=0) / 1e6, 2),
    )
