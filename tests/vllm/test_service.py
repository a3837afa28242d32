"""A sampler process with the vLLM engine on a real nats-server: it serves, is updated, is killed, and followed.

What is imported are the torch engine's tests: the same requests, the same answers (V8-V11).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sampler_support import save_delta_version
from sampler_world import STUCK, World, gone, versions

from bus.sampler.test_sampler_service import (  # noqa: F401
    test_v9_lora_jobs_come_and_go_each_with_its_own_adapter,
    test_v10_a_cancelled_request_leaves_the_line_or_the_engine_and_harms_nobody,
    test_v10_every_bad_request_gets_its_own_code_and_harms_nobody,
)
from bus.sampler.test_sampler_under_load import (  # noqa: F401
    test_v8_a_sampler_killed_in_the_middle_of_a_write_is_followed_by_one_that_serves_the_whole_version,
    test_v10_a_request_that_runs_past_its_deadline_leaves_the_engine_unanswered,
    test_v10_a_storm_of_requests_cancellations_and_updates_ends_with_every_request_settled_once,
)
from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.events import WeightsApplied
from openrl_common.nats_server import NatsServer
from openrl_common.records import JobKind

HEAD_DIM = 32
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
async def world(tmp_path: Path, model_path: Path) -> AsyncIterator[World]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    bus = await Bus.connect(server.url, name="test")
    await streams.ensure(bus)
    # Importing vLLM takes long on a busy machine.
    world = World(bus, server.url, tmp_path, model_path, engine="vllm-cpu", head_dim=HEAD_DIM, deadline_s=400.0)
    await world.listen()
    yield world
    for process in world.processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    await bus.close()
    server.stop()


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
