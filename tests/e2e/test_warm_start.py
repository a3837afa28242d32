"""Warm start with the real trainer and sampler (B6): the same numbers, the same life, nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from e2e.conftest import SETTINGS
from openrl_client import JobSpec, connect, processes
from openrl_client.supervisor import LocalSystem, down
from openrl_common import zygote
from openrl_common.records import JobKind
from openrl_launcher.__main__ import WARM_MODULES
from openrl_launcher.warm import WarmStart
from support import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

PROBE = """
import hashlib, os
from openrl_trainer.preload import set_variables
set_variables()
import torch
from openrl_common.records import LoraSpec
from openrl_trainer.model import BaseModel, prepare_torch

def digest(threads):
    base = BaseModel(os.environ["OPEN_RL_PROBE_MODEL"], dtype="float32", device=prepare_torch(threads, 0), frozen=True)
    base.add_adapter("a", LoraSpec(rank=4), seed=3)
    parameters = base.trainable("a")
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    ids = torch.arange(512).reshape(8, 64) % 200
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(base.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    whole = hashlib.sha256()
    for name in sorted(parameters):
        whole.update(parameters[name].detach().numpy().tobytes())
    return whole.hexdigest()

print(*[(digest(threads), torch.get_num_threads()) for threads in (1, 2)], flush=True)
os._exit(0)
"""


@pytest.mark.long
async def test_B6_a_forked_worker_computes_the_same_numbers_with_one_and_two_threads(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    common = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    own = {"OPEN_RL_PROBE_MODEL": str(tiny_model)}
    warm = WarmStart(environment=common, modules=WARM_MODULES, cwd=tmp_path, log_path=tmp_path / "warm.log")
    keeping = asyncio.create_task(warm.keep())
    try:
        with (tmp_path / "forked").open("wb") as log:
            worker = await warm.launch(zygote.Order(module="probe", environment=own), log.fileno())
        assert worker is not None, (tmp_path / "warm.log").read_text()
        assert await asyncio.to_thread(worker.wait) == 0
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    with (tmp_path / "plain").open("wb") as log:
        command = [sys.executable, "-m", "probe"]
        plain = await asyncio.create_subprocess_exec(*command, env=common | own, stdout=log, stderr=log)
        assert await plain.wait() == 0
    numbers = (tmp_path / "forked").read_text()
    assert numbers == (tmp_path / "plain").read_text()
    assert "', 1) ('" in numbers


@pytest.mark.long
async def test_B6_a_job_on_forked_workers_outlives_the_parent_and_leaves_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    async with LocalSystem(tmp_path / "home", environment=SETTINGS, warm_start="on") as system:
        await until(lambda: bool(processes.warm_parents_of(system.home)))
        async with connect(system.nats_url) as client:
            spec = JobSpec(name="warm", kind=JobKind.FFT, base_model=str(tiny_model), dtype="float32")
            job = await client.submit(spec)
            await job.ready(120)
            workers = [entry.value for entry in (await client.bus.store.workers.list()).values()]
            assert len(workers) == 2
            (launcher,) = {psutil.Process(worker.pid).ppid() for worker in workers}
            assert launcher == system.pids["launcher"], "forked for the launcher, which is their parent"
            ready = [entry.value for entry in (await client.bus.store.ready.list()).values()]
            imports = [phase.seconds for one in ready for phase in one.phases if phase.name == "imports"]
            assert len(imports) == 2
            assert max(imports) < 1.0, "they were imported before the fork"
            (parent,) = processes.warm_parents_of(system.home)
            parent.kill()
            os.kill(workers[0].pid, signal.SIGKILL)
            await until(lambda: not psutil.pid_exists(workers[0].pid))
            assert psutil.pid_exists(workers[1].pid)
            await job.finish()
    assert processes.services_of(system.home) + processes.workers_of(system.home) == []


@pytest.mark.parametrize("after_s", [0.5, 3.0])
def test_B6_ctrl_c_while_the_parent_imports_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    home = tmp_path / "home"
    command = [str(Path(sys.executable).parent / "openrl"), "up", "--foreground", "--home", str(home)]
    process = subprocess.Popen(
        [*command, "--devices", "2x8GiB"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OPEN_RL_WARM_START": "on"},
    )
    deadline = time.monotonic() + 30.0
    while not processes.warm_parents_of(home) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    process.wait(40.0)
    left = processes.services_of(home) + processes.workers_of(home)
    down(home, progress=lambda line: None)
    assert left == []
