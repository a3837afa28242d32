"""A sampler process with the vLLM engine on a real nats-server: it serves, is updated, is killed, and followed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sampler_support import save_delta_version, save_full_version

import bus.sampler.test_sampler_service as helpers
from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.events import WeightsApplied
from openrl_common.nats_server import NatsServer
from openrl_common.records import JobKind

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
async def world(tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[helpers.World]:
    monkeypatch.setattr(helpers, "DEADLINE_S", 180.0)  # importing vLLM takes long on a busy machine
    server = NatsServer(tmp_path / "nats")
    server.start()
    bus = await Bus.connect(server.url, name="test")
    await streams.ensure(bus)
    world = helpers.World(bus, server.url, tmp_path, model_path)
    await world.listen()
    yield world
    for process in world.processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    await bus.close()
    server.stop()


async def test_v11_a_killed_sampler_leaves_its_requests_and_its_weights_to_the_next(
    world: helpers.World, save_full: Callable[..., Any]
) -> None:
    """V3, V5, V8, V11, R1: also when it is killed while an update is on its way, or hangs; the next one begins at the
    baseline."""
    workload = await world.workload(JobKind.FFT, ("t.j",), engine="vllm-cpu")
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
    assert helpers.versions(cold) == {0}
    assert (await world.sample(timeout_s=120.0)).sequences == cold.sequences, "the same seed gives the same tokens"
    full = save_full_version(world.home, 1, head_dim=32)
    await world.weights(full)
    applied = await world.next_event(WeightsApplied)
    assert applied.version == 1
    assert helpers.versions(await world.sample(at_least=1, timeout_s=120.0)) == {1}
    delta = save_delta_version(world.home, full, 2)
    name = await world.send(at_least=2, timeout_s=300.0)
    await world.weights(delta)
    first.kill()
    await helpers._gone(first)
    program = (str(helpers.STUCK), str(world.home / "hang"))
    second = await world.start(workload, "a2", "--engine-stuck-after", "10s", program=program)
    assert helpers.versions(await world.answer(name)) == {2}

    (world.home / "hang").touch()
    name = await world.send(at_least=2, timeout_s=300.0)
    assert await helpers._gone(second, 60.0) == 1
    assert "the engine has been at one step for" in (world.home / "a2.log").read_text().splitlines()[-1]
    await world.start(workload, "a3")
    assert helpers.versions(await world.answer(name)) == {2}, "from the baseline and its delta again"
