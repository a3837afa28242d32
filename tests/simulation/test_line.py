"""One small system in calm times, many seeds: what comes free goes to the first in line, whoever gives it away (W1)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from openrl_common.quantities import GIB
from openrl_common.records import WorkloadPhase
from openrl_launcher import core
from simulation.machines import Weather
from simulation.mutation import mutated
from simulation.plan import JobPlan, NodePlan, draw_plan
from simulation.world import World

SLOW = Weather(
    slow=0.1, very_slow=0.01, request_lost=0.0, answer_lost=0.0, late=0.0, delivery_lost=0.0, delivered_twice=0.1,
    ack_lost=0.0, changes_late=0.05, crash_at_effect=0.0,
)  # fmt: skip


def job(name: str, device_gib: float, host_gib: float) -> JobPlan:
    return JobPlan(
        name=name, submission=f"s-{name}", at_s=0.0, kind="fft", device_gib=(device_gib, device_gib),
        host_gib=host_gib, exclusive=None, priority=0,
    )  # fmt: skip


class Memory(World):
    """``x`` and ``y`` share the large device and all host memory. ``first`` would fit beside them,
    ``later`` the free device.

    Then ``x`` ends, and its memory is what ``first`` needs.
    """

    async def _run(self) -> None:
        for name in self._names():
            self.start(name)
        await asyncio.sleep(0.2)
        for each in (job("x", 30, 4), job("y", 30, 1), job("first", 30, 4), job("later", 10, 4)):
            self._submit(each)
            await self._until(self.settled.waits_are_true, "not settled")
        self.network.weather = self.plan.weather
        self.end_job("x", "s-x", "finish")
        await self._sleep(6.0)
        await self._until(self.settled.waits_are_true, "not settled after the release")
        phases = {key: record.phase for key, record in self.truth.workloads().items()}
        for role in ("trainer", "sampler"):
            first, later = phases[f"t--first--{role}"], phases[f"t--later--{role}"]
            if (first, later) != (WorkloadPhase.READY, WorkloadPhase.PENDING):
                self.violation(f"the {role} of the first in line is {first}, that of the later one {later} (W1)")
        self._stop_if_violated()


def violations(seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        plan = replace(
            draw_plan(seed), nodes=(NodePlan(devices=(24 * GIB, 80 * GIB), host_bytes=10 * GIB),), jobs=(), faults=(),
            weather=SLOW, limit=0, old_limit=0, strategy="binpack", placement_timeout_s=0.0, worker_failure=0.0,
            leak=0.0, hangs=0.0, works=False, skews_s={},
        )  # fmt: skip
        found.append(Memory(plan).run().violation)
    return [each for each in found if each]


def test_W1_P6_host_memory_goes_to_the_first_in_line_whether_with_a_seat_or_with_a_device() -> None:
    assert violations(range(30)) == []
    with mutated(core._allocate, "set_aside_bytes += entry.host_bytes", "pass"):
        assert any("(W1)" in each for each in violations(range(10)))
