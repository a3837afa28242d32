"""Reading ahead in a backlog of submissions: what can never run is told before its turn (W4)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from openrl_common.bus import Bus
from openrl_common.events import EVENT_DECODER, JobAdmitted, JobFailed, JobSubmitted
from openrl_common.memory import MemoryBus
from openrl_common.memory_server import MemoryServer
from openrl_common.records import JobKind, JobPhase, JobSpec, Overrides
from openrl_common.settlement import Delivery
from openrl_placement.look_ahead import BEHIND_MIN
from openrl_placement.service import Placement
from unit.placement.desk import node
from unit.placement.test_outbox import placement_on

HUGE_GIB = 1_000.0
CONFIG = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 300,
}  # fmt: skip


class Backlog:
    """Submissions that stand in the stream, and a placement whose consumer has taken none of them."""

    def __init__(self, directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(CONFIG))
        self.model = str(directory)
        self.bus = MemoryBus(MemoryServer())
        self.placement, desk = placement_on(cast(Bus, self.bus))
        desk.node(node(gib=80))
        self.events: list[JobSubmitted] = []

    async def submit(self, name: str, gib: float, submission: str = "") -> None:
        overrides = Overrides(trainer_device_gib=gib, sampler_device_gib=gib)
        spec = JobSpec(name=name, kind=JobKind.FFT, base_model=self.model, overrides=overrides)
        event = JobSubmitted(tenant="default", job=name, submission=submission or f"s-{name}", spec=spec)
        await self.bus.publish(event)
        self.events.append(event)

    def delivery(self, index: int) -> Delivery:
        event = self.events[index]
        body = msgspec.json.encode(event)
        pending = BEHIND_MIN + len(self.events) - index
        return Delivery(event.subject, body, {}, index + 1, 1, 1_000.0, cast(Any, None), pending)

    async def read_ahead(self) -> None:
        """Until nothing happens any more; the consumer has the first one in hand all the while."""
        placement: Placement = self.placement
        await placement._models.read(self.model)
        reading = asyncio.create_task(placement.look_ahead.run())
        with placement.look_ahead.in_hand(self.delivery(0)):
            for _ in range(200):
                await asyncio.sleep(0)
        self.bus.stopping.set()
        await reading

    def said(self, kind: type[JobFailed] | type[JobAdmitted]) -> list[tuple[str, str]]:
        stored = self.bus.server.streams["OPENRL_EVENTS"].messages
        events = [EVENT_DECODER.decode(each.data) for each in stored if each.subject.startswith("openrl.ev.placement.")]
        return [(event.job, event.submission) for event in events if isinstance(event, kind)]


@pytest.fixture
def backlog(tmp_path: Path) -> Backlog:
    return Backlog(tmp_path)


async def test_W4_what_can_never_run_is_told_before_those_that_stand_before_it(backlog: Backlog) -> None:
    await backlog.submit("first", 10)
    await backlog.submit("second", 10)
    await backlog.submit("huge", HUGE_GIB)
    await backlog.read_ahead()
    assert backlog.said(JobFailed) == [("huge", "s-huge")]
    assert backlog.placement.state.jobs["default.huge"].phase is JobPhase.FAILED
    assert backlog.said(JobAdmitted) == [], "all others wait for their turn"


async def test_E6_when_its_turn_comes_nothing_changes(backlog: Backlog) -> None:
    await backlog.submit("first", 10)
    await backlog.submit("huge", HUGE_GIB)
    await backlog.read_ahead()
    record = backlog.placement.state.jobs["default.huge"]
    for index in range(2):
        await backlog.placement.handle(backlog.delivery(index))
    assert backlog.placement.state.jobs["default.huge"] == record
    assert record.incarnation == 2
    assert backlog.said(JobAdmitted) == [("first", "s-first")]
    assert set(backlog.said(JobFailed)) == {("huge", "s-huge")}


async def test_a_name_is_given_in_the_streams_order_although_a_later_submission_of_it_can_never_run(
    backlog: Backlog,
) -> None:
    """Told first, the later one would have the name, and the earlier would be refused for it."""
    await backlog.submit("first", 10)
    await backlog.submit("a", 10, "s1")
    await backlog.submit("a", HUGE_GIB, "s2")
    await backlog.read_ahead()
    assert backlog.said(JobFailed) == []
    for index in range(3):
        await backlog.placement.handle(backlog.delivery(index))
    assert ("a", "s1") in backlog.said(JobAdmitted)
    assert backlog.placement.state.jobs["default.a"].submission == "s1"


async def test_garbage_in_the_backlog_is_left_to_its_turn(backlog: Backlog) -> None:
    await backlog.submit("first", 10)
    await backlog.bus.publish_raw("openrl.ev.client.default.job.odd.submitted", b"{", message_id="odd")
    await backlog.submit("huge", HUGE_GIB)
    await backlog.read_ahead()
    assert backlog.said(JobFailed) == [("huge", "s-huge")]
