"""What was decided is carried out before the message that led to it is acknowledged (E6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from nats.js.errors import ServerError

from openrl_common.bus import Bus
from openrl_common.duty import Duty
from openrl_common.errors import Transient
from openrl_common.events import JobCancelled, JobEnded, JobFinished, JobSubmitted, SeatRequested, WorkerExited
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer, Network
from openrl_common.records import DutyRecord, JobKind, JobSpec, WorkloadPhase
from openrl_common.settlement import Delivery
from openrl_placement import jobs
from openrl_placement.outbox import Outbox
from openrl_placement.service import Placement, PlacementSettings, constants_of
from openrl_placement.state import Effects
from unit.placement.desk import SMALL, Desk, node

TRAINER = "default--a--trainer"


class Slow(Network):
    """Keeps what is asked of the server until it is let go."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, ...]] = []

    def ask(self, bus: MemoryBus, apply: Callable[[], Any], answer: asyncio.Future[Any], timeout_s: float) -> None:
        self.kept.append((bus, apply, answer, timeout_s))

    def let_go(self) -> None:
        for request in self.kept:
            super().ask(*request)


def decided() -> tuple[Desk, Effects, WorkerExited]:
    """A record that is to be written because its worker has exited, and that event."""
    it = Desk()
    it.node(node())
    it.submit("a")
    it.book(it.take(SeatRequested)[0])
    effects = Effects()
    effects.workloads[TRAINER] = None
    exited = WorkerExited(
        tenant="default", workload=TRAINER, assignment="a1", claim=f"c-{TRAINER}", node="n1", exit_code=1
    )
    return it, effects, exited


async def a_few_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_E6_a_message_that_comes_twice_at_once_waits_for_what_the_first_led_to() -> None:
    it, effects, exited = decided()
    network = Slow()
    outbox = Outbox(MemoryBus(MemoryServer(network)), it.state, None)
    first = asyncio.create_task(outbox.carry_out(effects))
    await a_few_turns()
    again = asyncio.create_task(outbox.settle(exited))
    await a_few_turns()
    assert network.kept, "the write is on its way"
    assert not again.done()
    network.let_go()
    await first
    await again


async def test_E6_a_message_that_comes_again_is_not_acknowledged_while_its_effects_are_kept() -> None:
    it, effects, exited = decided()
    bus = MemoryBus(MemoryServer())
    nobodys = Duty(bus.store.duties, "placement", holder="this one", clock=lambda: 0.0)
    outbox = Outbox(bus, it.state, nobodys)
    with pytest.raises(Transient):
        await outbox.carry_out(effects)
    with pytest.raises(Transient):
        await outbox.settle(exited)
    await nobodys.look()
    await outbox.carry_out(Effects())
    await outbox.settle(exited)
    assert await bus.store.workloads.get(TRAINER) is not None


async def test_E6_a_replica_that_finds_itself_replaced_leaves_its_message_to_the_successor() -> None:
    """Rejected would acknowledge it: an end that a client had said was lost, and its job ran for ever."""
    it, effects, _ = decided()
    bus = MemoryBus(MemoryServer(Network()))
    duty = Duty(bus.store.duties, "placement", holder="ours", clock=time.monotonic)
    await duty.look()
    held = await bus.store.duties.get("placement")
    assert held is not None
    await bus.store.duties.write("placement", DutyRecord(holder="theirs", renewals=1), last=held.revision)
    await bus.store.workloads.put(TRAINER, it.state.workloads[TRAINER])
    with pytest.raises(Transient, match="another replica has taken over"):
        await Outbox(bus, it.state, duty).carry_out(effects)


async def test_E6_what_is_kept_goes_out_in_the_order_of_the_decisions() -> None:
    """The first of two decisions about one record cannot be said: the second, which waits for it, is not said alone."""
    network = Slow()
    bus = MemoryBus(MemoryServer(network))
    outbox = Outbox(bus, Desk().state, None)

    def ended(outcome: str) -> Effects:
        return Effects(events=[JobEnded(tenant="default", job="a", submission=outcome, outcome=outcome)])

    tries = [asyncio.create_task(outbox.carry_out(ended(outcome))) for outcome in ("first", "second")]
    await a_few_turns()
    (_, _, answer, _) = network.kept.pop()
    answer.set_exception(ServerError(code=500, description="no room"))
    await a_few_turns()
    network.let_go()
    errors = await asyncio.gather(*tries, return_exceptions=True)
    assert [type(error) for error in errors] == [Transient, Transient]
    third = asyncio.create_task(outbox.carry_out(ended("third")))
    await a_few_turns()
    network.let_go()
    await third
    events = bus.server.streams["OPENRL_EVENTS"].messages
    assert [msgspec.json.decode(event.data, type=JobEnded).outcome for event in events] == ["first", "second", "third"]


def placement_on(
    bus: Bus, *, placement_timeout_s: float = 0.0, pass_every_s: float = 10.0, update_method: str = "streamed"
) -> tuple[Placement, Desk]:
    """The service's core parts, and a desk that plays on its state."""
    config = PlacementSettings(
        nats_url="memory", home=Path("home"), log_level="error", log_format="json", health_host="", health_port=0,
        max_seats_per_claim=0, placement_strategy="binpack", owner_affinity=True,
        placement_timeout_s=placement_timeout_s, lora_jobs_per_runtime=1, lora_idle_s=600.0,
        trainer_host_base_bytes=0, sampler_host_base_bytes=0, trainer_device_base_bytes=0,
        sampler_device_base_bytes=0, sampler_cache_tokens=1024, update_method=update_method,
        update_chunk_bytes=1 << 27, update_staging_factor=1.0, scalable_shapes=(), pass_every_s=pass_every_s,
    )  # fmt: skip
    placement = Placement(bus, config)
    it = Desk(constants=constants_of(config))
    it.state = placement.state
    return placement, it


async def test_E6_an_end_that_overtook_its_submission_is_not_acknowledged_before_that_is_written() -> None:
    """The submission comes while the end waits for an earlier write of its record, and is not written itself yet."""
    network = Slow()
    placement, it = placement_on(MemoryBus(MemoryServer(network)))
    it.node(node())
    it.submit("a", "lora", submission="s1")
    it.event(JobCancelled(tenant="default", job="a", submission="s1"))
    earlier = Effects()
    earlier.jobs["default.a"] = None
    writing = asyncio.create_task(placement._outbox.carry_out(earlier))
    await a_few_turns()
    end = JobFinished(tenant="default", job="a", submission="s2")
    delivery = Delivery(end.subject, msgspec.json.encode(end), {}, 9, 1, time.time(), cast(Any, None))
    handling = asyncio.create_task(placement.handle(delivery))
    await a_few_turns()
    assert not handling.done()
    it.submit("a", "lora", submission="s2")
    assert it.state.jobs["default.a"].submission == "s2"
    network.let_go()
    await writing
    with pytest.raises(Transient, match="before its submission"):
        await handling


async def test_E6_the_end_of_a_worker_that_overtook_its_booking_is_not_acknowledged_before_that_is_known() -> None:
    """Kept in memory alone it was lost with a crash: its launcher starts it no more, and its job waited for ever."""
    placement, it = placement_on(cast(Bus, MemoryBus(MemoryServer())))
    it.node(node())
    it.submit("a")
    request = next(each for each in it.take(SeatRequested) if each.workload == TRAINER)
    exited = WorkerExited(
        tenant="default", workload=TRAINER, assignment="a1", claim=f"c-{TRAINER}", node="n1", exit_code=137
    )
    delivery = Delivery(exited.subject, msgspec.json.encode(exited), {}, 9, 1, time.time(), cast(Any, None))
    with pytest.raises(Transient, match="before its booking a1"):
        await placement.handle(delivery)
    assert it.workload(TRAINER).phase is WorkloadPhase.SUBMITTED
    it.book(request)
    assert it.workload(TRAINER).phase is WorkloadPhase.RELEASING, "what came early is acted upon at once"
    await placement.handle(delivery)


async def test_P12_a_runtime_that_only_its_jobs_record_has_is_written_before_that_is_replaced() -> None:
    """A record is written as it stands by then: the job ended and was submitted again while its first write waited."""
    bus = MemoryBus(MemoryServer())
    placement, it = placement_on(bus)
    it.node(node())
    it.submit("a", "lora", submission="s1")
    write = Effects()
    write.jobs["default.a"] = None
    await placement._outbox.carry_out(write)
    runtime = it.state.jobs["default.a"].trainer
    assert await bus.store.workloads.get(runtime) is None, "a job's record carries its new workloads"
    it.event(JobFinished(tenant="default", job="a", submission="s1"))
    it.submit("a", "fft", submission="s2")
    await placement._outbox.carry_out(write)
    standing = await bus.store.jobs.get("default.a")
    assert standing is not None
    assert standing.value.submission == "s2"
    assert await bus.store.workloads.get(runtime) is not None


async def test_P12_a_runtime_is_written_although_its_job_was_replaced_before_any_record_of_it_was() -> None:
    bus = MemoryBus(MemoryServer())
    placement, it = placement_on(bus)
    it.node(node())
    spec = JobSpec(name="a", kind=JobKind.LORA, base_model="/models/m")
    submission = jobs.Submission(JobSubmitted(tenant="default", job="a", submission="s1", spec=spec), 1, it.now)
    admitted = jobs.submitted(it.state, submission, SMALL, it.constants, it.now)
    runtime = it.state.jobs["default.a"].trainer
    it.finish("a", "s1")
    it.submit("a", "fft", submission="s2", sequence=2)
    assert it.state.jobs["default.a"].submission == "s2"
    await placement._outbox.carry_out(admitted)
    assert await bus.store.workloads.get(runtime) is not None
