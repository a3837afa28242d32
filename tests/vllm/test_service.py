"""A sampler process with the vLLM engine on a real nats-server: it serves, is updated, is killed, and followed.

What is imported are the torch engine's tests: the same requests, the same answers (V8-V11); more of them in
test_service_long.py.
"""

from __future__ import annotations

import pytest
from sampler_support import save_delta_version
from sampler_world import STUCK, World, gone, versions

from bus.sampler.test_sampler_service import (  # noqa: F401
    test_v9_lora_jobs_come_and_go_each_with_its_own_adapter,
)
from bus.sampler.test_sampler_under_load import (  # noqa: F401
    test_v10_a_request_that_runs_past_its_deadline_leaves_the_engine_unanswered,
)
from openrl_common.events import WeightsApplied
from openrl_common.records import JobKind

pytestmark = pytest.mark.timeout(1200)


async def test_v11_a_killed_sampler_leaves_its_requests_and_its_weights_to_the_next(world: World) -> None:
    """V3, V5, V8, V11, R1: also when it is killed while an update is on its way, or hangs; the next one begins at the
    baseline."""
    workload = await world.workload(JobKind.FFT, ("t.j",))
    first = await world.start(workload, "a1")
    record = await world.ready("a1")
    assert record.detail["engine"] == "vllm"
    assert record.detail["can_park"] == "false"
    assert record.detail["weights_formats"] == "full,delta"
    assert record.detail["prefetch"].startswith("not prefetched: ")  # R1
    names = [phase.name for phase in record.phases]
    assert (names[0], set(names[1:3])) == ("start", {"prefetch", "imports"})
    assert names[3:] == ["load", "configure", "engine", "weights"]
    cold = await world.sample(timeout_s=120.0)
    assert versions(cold) == {0}
    assert (await world.sample(timeout_s=120.0)).sequences == cold.sequences, "the same seed gives the same tokens"
    full = world.full(1)
    await world.weights(full)
    applied = await world.next_event(WeightsApplied)
    assert applied.version == 1
    assert versions(await world.sample(at_least=1, timeout_s=120.0)) == {1}
    delta = save_delta_version(world.home, full, 2)
    name = await world.send(at_least=2, timeout_s=300.0)
    await world.weights(delta)
    first.kill()
    await gone(first)
    program = (str(STUCK), str(world.home / "hang"))
    second = await world.start(workload, "a2", "--engine-stuck-after", "10s", program=program)
    assert versions(await world.answer(name)) == {2}

    (world.home / "hang").touch()
    name = await world.send(at_least=2, timeout_s=300.0)
    assert await gone(second, 60.0) == 1
    assert "the engine has been at one step for" in (world.home / "a2.log").read_text().splitlines()[-1]
    await world.start(workload, "a3")
    assert versions(await world.answer(name)) == {2}, "from the baseline and its delta again"
