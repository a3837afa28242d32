"""NATS stands still, and everything is told to end: it ends, says what was not written, and nothing is lost (E17)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from openrl_client import connect
from openrl_client.supervisor import LocalSystem
from openrl_client.training import TRAIN_STREAM, number_of
from openrl_common import service
from openrl_common.bus import Bus
from openrl_common.names import train_subject
from openrl_common.records import JobKind, JobSpec
from openrl_common.wire import AdamParams, Datum
from support import until

from .conftest import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]
GRACE_S = service._DRAIN_S + service._CANCEL_S + service._CLOSE_S
DATA = [Datum(tokens=[7, 8, 9, 10])]
STEPS = 12


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def last_number(bus: Bus) -> int:
    """Of the job's training log, as it is stored."""
    last = await bus.last(stream=TRAIN_STREAM, subject=train_subject("default", "calm"))
    number = number_of(last.body) if last is not None else None
    return number.seq if number is not None else 0


async def test_E17_all_five_services_end_within_their_grace_and_the_job_goes_on_with_what_it_was_sent(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The connections stay open and nothing is answered: harder than a server that is gone."""
    environment = {**SETTINGS, "OPEN_RL_WARM_START": "off"}
    async with LocalSystem(tmp_path / "home", environment=environment) as system, connect(system.nats_url) as client:
        job = await client.submit(JobSpec(name="calm", kind=JobKind.FFT, base_model=str(tiny_model)))
        await job.ready(120)
        asked = []
        for _ in range(STEPS):
            asked.append(job.forward_backward(DATA, loss="cross_entropy"))
            asked.append(job.optim_step(AdamParams(learning_rate=1e-3)))
        async with asyncio.timeout(20):
            while await last_number(client.bus) < asked[-1].seq:  # noqa: ASYNC110 (another process does it)
                await asyncio.sleep(0.01)
        workers = {e.value.workload: e.value.pid for e in (await client.bus.store.workers.list()).values()}
        pids = {name: pid for name, pid in system.pids.items() if name != "nats"} | workers
        ending = {name: psutil.Process(pid) for name, pid in pids.items()}
        assert len(ending) == 5
        nats = psutil.Process(system.pids["nats"])
        nats.suspend()
        try:
            for process in ending.values():
                process.terminate()
            await until(lambda: all(map(has_ended, ending.values())), within_s=GRACE_S + 2.0)
        finally:
            nats.resume()
        for name in ("ledger", "placement", "launcher"):
            assert "service stopped" in (system.home / "logs" / f"{name}.log").read_text(), name
        said = (system.home / "logs" / "placement.log").read_text()
        assert "writes not confirmed by NATS: openrl_ledger.duty.placement" in said
        results = await asyncio.gather(*asked)
        assert [result.seq for result in results] == list(range(1, 2 * STEPS + 1))
        assert await job.publish_weights() == 1
        await job.finish()
