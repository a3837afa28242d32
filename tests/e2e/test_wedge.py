"""A worker that is started and never says a word gives its seat up; its place is avoided and that is explained (F2)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from openrl_client import connect
from openrl_client.bench.seats import MODEL_CONFIG
from openrl_client.local_system import LocalSystem
from openrl_common.queries import ExplainAnswer, ExplainQuery
from openrl_common.records import JobKind, JobSpec, Overrides, Reason, WorkloadPhase

from .conftest import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(180)]
WORKERS = Path(__file__).parent.parent / "bus" / "launcher" / "fake_workers"


async def test_f2_p13_a_mute_worker_is_moved_off_and_explain_says_where_it_will_not_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F2, P13: on one node there is no other place, so it waits, and says why; its device is free for others."""
    monkeypatch.setenv("PYTHONPATH", str(WORKERS))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes(msgspec.json.encode(MODEL_CONFIG))
    environment = {
        **SETTINGS, "OPEN_RL_WARM_START": "off", "OPEN_RL_WEDGE_GRACE": "15s", "OPEN_RL_PASS_EVERY": "1s",
        "OPEN_RL_STOP_GRACE": "1s",
    }  # fmt: skip
    sizes = Overrides(trainer_device_gib=4, sampler_device_gib=4, trainer_host_gib=0.1, sampler_host_gib=0.1)
    async with LocalSystem(tmp_path / "home", environment=environment) as system, connect(system.nats_url) as client:
        job = await client.submit(
            JobSpec(name="mute", kind=JobKind.FFT, base_model=str(model), overrides=sizes), timeout_s=60.0
        )

        async def explained() -> ExplainAnswer:
            query = ExplainQuery(workload="mute/trainer", tenant="default")
            return await client.query("explain", query, ExplainAnswer, timeout_s=30.0)

        answer = await explained()
        async with asyncio.timeout(120):
            while not (answer.record.avoid and answer.record.reason is Reason.UNSCHEDULABLE):
                await asyncio.sleep(0.3)
                answer = await explained()
        assert answer.record.phase is WorkloadPhase.PENDING
        assert {avoid.node for avoid in answer.record.avoid} == {"", "local"}
        assert "avoided by it" in answer.record.message
        assert any("avoids local" in note and "--wedge-grace" in note for note in answer.notes)
        async with asyncio.timeout(60):
            while any(hold.value.claim for hold in (await client.bus.store.devices.list()).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        await job.cancel()
