"""The trainer's shell: starts the base model, then serves the jobs whose records name this workload.

    start   prefetch beside imports and load ─▶ (FFT: the job's engine) ─▶ ready record  each phase stamped
    serve   mirror of openrl_jobs ─▶ a JobRunner per job; LoRA jobs come and go, an FFT trainer has one
    stop    SIGTERM or a tombstone: logs are not read further, the entry in hand ends, exit 0 (E17)

Invariants: torch runs in one thread, so the loop keeps answering health checks and renewing the lease; a job's fault
stays the job's; a Bug ends the process.

Not here: one job's log (job_runner.py), the mathematics (engine.py and below, imported in the thread).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrl_common.parking import Parking
from openrl_common.prefetch import Prefetch, PrefetchMode
from openrl_common.prefetch_phase import prefetching
from openrl_common.records import JobKind, JobRecord, LoraSpec, Phase
from openrl_common.store import Entry, Mirror
from openrl_common.turns import Moved
from openrl_common.worker import WorkerContext, WorkerSettings
from openrl_trainer.cadence import Cadence
from openrl_trainer.checkpointer import Checkpointer
from openrl_trainer.device import Device
from openrl_trainer.group import Group
from openrl_trainer.job_runner import JobRunner
from openrl_trainer.metrics import Metrics
from openrl_trainer.model_path import check_model_path

if TYPE_CHECKING:  # torch is imported in the engine's thread, not here
    from torch import Tensor

    from openrl_trainer.engine import TrainEngine
    from openrl_trainer.model import BaseModel

log = logging.getLogger(__name__)

JobId = tuple[str, str, int]
_LOOK_S = 5.0
"""How often the jobs are looked at whatever the mirror says (E5)."""


@dataclass(frozen=True)
class TrainerSettings(WorkerSettings):
    """The worker's settings and the trainer's own; see ``__main__`` for what they mean."""

    train_token_budget: int
    keep_weights: int
    torch_threads: int
    prefetch: str
    checkpoint_every: Cadence
    weights_delta: str
    baseline_every: int


async def serve(context: WorkerContext, config: TrainerSettings) -> None:
    """The main of a trainer worker: start, then serve until stopped."""
    loaded = context.service.require("model", "the model is loading")
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
    trainer = Trainer(context, config, thread)
    starting = asyncio.ensure_future(trainer.start())
    stopping = asyncio.ensure_future(context.stopping.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        starting.result()
        loaded.set()
        await trainer.run()
    finally:
        stopping.cancel()
        await trainer.close()
        # An import or a load in the thread cannot be interrupted, and nothing of it is worth waiting for.
        thread.shutdown(wait=False, cancel_futures=True)


class Trainer:
    """One trainer process. ``start`` once, ``run`` until the context is stopping, ``close`` in any case."""

    def __init__(self, context: WorkerContext, config: TrainerSettings, thread: ThreadPoolExecutor) -> None:
        self._context = context
        self._config = config
        self._device = Device(context, thread)
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="disk")
        self._metrics = Metrics(context.service.registry)
        self._base: BaseModel
        self._parking: Parking
        self._group: Group | None = None
        self._jobs: Mirror[JobRecord] | None = None
        self._changed = asyncio.Event()
        self._runners: dict[JobId, JobRunner] = {}
        self._tasks: dict[JobId, asyncio.Task[None]] = {}
        self._first_step_seen = False

    # --- start ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises Rejected when the base model cannot be used: the process ends with that one line."""
        context = self._context
        check_model_path(context.workload.base_model)
        num_devices = context.workload.shape.device_count
        if num_devices > 1:
            self._group = Group(num_devices)
        async with prefetching(context, PrefetchMode(self._config.prefetch)) as prefetch:
            with context.stamp("imports"):
                await self._device.run_anywhere(_import_engine)
            await context.publish_phases()
            if self._group is not None or not context.workload.shape.exclusive:
                # Other processes load beside this one; others may want the device, and the network is waited for.
                await prefetch.whole()
            with context.stamp("load", context.workload.base_model):
                self._base = await self._device.run(lambda: self._load(prefetch))
        if self._group is None:
            context.movers(self._park, self._resume)  # several devices are exclusive, so nobody asks for them (P10)
        self._jobs = await context.store.jobs.mirror(on_change=self._on_change)
        await self._remove_ended()
        with context.stamp("jobs"):
            await self._reconcile()
        await context.ready(
            {
                "device": str(self._base.device),
                "dtype": str(self._base.model.dtype).removeprefix("torch."),
                "length_max": str(self._base.length_max),
                "torch_threads": str(self._threads()),
                "can_park": str(self._group is None).lower(),
                "devices": str(num_devices),
            }
        )

    def _threads(self) -> int:
        given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        return self._config.torch_threads or (int(given) if given.isdigit() and int(given) > 0 else 1)

    def _load(self, prefetch: Prefetch) -> BaseModel:
        import torch

        from openrl_trainer.model import BaseModel, prepare_torch

        workload = self._context.workload
        if self._group is not None:
            from openrl_trainer.commands import Begin

            begin = Begin(
                base_model=workload.base_model,
                dtype=workload.dtype,
                sharded=workload.kind is JobKind.FFT,
                length_max=workload.max_model_len,
                num_threads=self._threads(),
                device_bytes=self._context.device_bytes,
            )
            return self._group.begin(begin)
        device = prepare_torch(self._threads(), self._context.device_bytes)
        path = self._context.home / "parked" / self._context.assignment
        self._parking = Parking(torch, device, path)
        return BaseModel(
            workload.base_model,
            dtype=workload.dtype,
            device=device,
            frozen=workload.kind is JobKind.LORA,
            length_max=workload.max_model_len,
            prefetch=prefetch,
        )

    # --- turns on a shared device (T5) ---------------------------------------------------------------------------

    async def _park(self) -> Moved:
        left = await self._device.run_anywhere(lambda: self._parking.park(list(self._tensors())))
        return Moved(left.bytes, left.seconds, left.held_bytes)

    async def _resume(self) -> Moved:
        left = await self._device.run_anywhere(self._parking.restore)
        return Moved(left.bytes, left.seconds, left.held_bytes)

    def _tensors(self) -> Iterator[Tensor]:
        """Parameters, buffers, and of every job gradients and optimizer state."""
        yield from self._base.tensors()
        for runner in self._runners.values():
            if runner.engine is not None:
                yield from runner.engine.tensors()

    # --- jobs -----------------------------------------------------------------------------------------------------

    def _on_change(self, _key: str, _entry: Entry[JobRecord] | None) -> None:
        self._changed.set()

    def _wanted(self) -> dict[JobId, JobRecord]:
        """The jobs this workload serves. An FFT trainer's parameters are one incarnation's and nobody else's."""
        assert self._jobs is not None
        workload = self._context.workload
        return {
            (record.tenant, record.job, record.incarnation): record
            for record in (entry.value for entry in self._jobs.entries.values())
            if record.trainer == workload.workload
            and not record.phase.ended
            and (workload.kind is JobKind.LORA or record.incarnation == workload.incarnation)
        }

    async def _reconcile(self) -> None:
        wanted = self._wanted()
        for job in [job for job in self._tasks if job not in wanted]:
            await self._drop(job)
        for job, record in wanted.items():
            if job not in self._tasks:
                runner = JobRunner(
                    self._context,
                    self._device,
                    record,
                    lambda record=record: self._make_engine(record),  # type: ignore[misc]
                    self._on_disk,
                    Checkpointer(
                        self._context.bus, record, self._context.home, self._config.checkpoint_every, self._metrics
                    ),
                    self._metrics,
                    self._on_step,
                    weights_delta=self._config.weights_delta,
                )
                await runner.prepare()
                self._runners[job] = runner
                self._tasks[job] = asyncio.create_task(runner.run(), name=f"job {record.tenant}.{record.job}")
                log.info("serving job %s.%s incarnation %d", record.tenant, record.job, record.incarnation)
        self._metrics.jobs.set(len(self._tasks))

    async def _drop(self, job: JobId) -> None:
        task, runner = self._tasks.pop(job), self._runners.pop(job)
        runner.stop()
        await task
        await runner.close()
        log.info("job %s.%s incarnation %d is no longer served", *job)

    async def _on_disk(self, work: Callable[[], Any]) -> Any:
        """Run what reads and writes files beside the training (R12): one at a time, nothing of torch's but copies."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def _remove_ended(self) -> None:
        """Checkpoints of jobs that are over are nobody's: remove them (R5, bounded space)."""
        from openrl_trainer.checkpoints import remove_ended

        assert self._jobs is not None
        records = {(entry.value.tenant, entry.value.job): entry.value for entry in self._jobs.entries.values()}

        def is_over(tenant: str, job: str, incarnation: int) -> bool:
            record = records.get((tenant, job))
            if record is None:
                return False  # a mirror that lags is no reason
            return record.incarnation > incarnation or (record.incarnation == incarnation and record.phase.ended)

        for directory in await self._on_disk(lambda: remove_ended(self._context.home, is_over)):
            log.info("removed the checkpoints of a job that is over: %s", directory)

    def _make_engine(self, record: JobRecord) -> TrainEngine:
        from openrl_trainer.checkpoints import checkpoint_directory
        from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
        from openrl_trainer.shortage import found

        lora = record.spec.lora or LoraSpec() if record.spec.kind is JobKind.LORA else None
        job = JobSettings(
            tenant=record.tenant,
            job=record.job,
            incarnation=record.incarnation,
            seed=record.spec.seed,
            lora=lora,
            rank_max=self._context.workload.max_rank,
            float32_masters=record.spec.float32_masters,
        )
        settings = EngineSettings(
            home=self._context.home,
            token_budget=self._config.train_token_budget,
            keep_weights=self._config.keep_weights,
            baseline_every=self._config.baseline_every,
            device_bytes=self._context.device_bytes,
        )
        if self._group is not None:
            from openrl_trainer.group_engine import GroupEngine

            return GroupEngine(self._base, job, settings, self._group)
        engine = TrainEngine(self._base, job, settings)
        engine.recall(found(checkpoint_directory(settings.home, job.tenant, job.job, job.incarnation)))
        return engine

    async def _on_step(self, begun_at: float) -> None:
        if not self._first_step_seen:
            self._first_step_seen = True
            phase = Phase(name="first step", started_at=begun_at, seconds=time.time() - begun_at)
            self._context.phases.append(phase)
            await self._context.publish_phases()

    # --- serve ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until stopping. A runner that fails is a fault of the process: it ends with that error."""
        stopping = asyncio.ensure_future(self._context.stopping.wait())
        try:
            while not stopping.done():
                changed = asyncio.ensure_future(self._changed.wait())
                waiting = {stopping, changed, *self._tasks.values()}
                done, _ = await asyncio.wait(waiting, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for task in done & set(self._tasks.values()):
                    task.result()
                    if not self._context.bus.stopping.is_set():
                        raise RuntimeError(f"{task.get_name()} ended by itself")
                if stopping.done() or self._context.bus.stopping.is_set():
                    break
                self._changed.clear()
                await self._reconcile()
        finally:
            stopping.cancel()
        for runner in self._runners.values():
            runner.stop()
        for result in await asyncio.gather(*self._tasks.values(), return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def close(self) -> None:
        if self._jobs is not None:
            await self._jobs.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._group is not None:
            self._group.close()


def _import_engine() -> None:
    """The slow imports, in the thread that will use them; the variables must stand before torch reads them."""
    from openrl_trainer import preload

    preload.set_variables()  # a forked worker's module was imported before its environment was its own
