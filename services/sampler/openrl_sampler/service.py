"""The sampler's shell: it starts the engine, then serves until stopped.

    start   prefetch and imports ─▶ load ─▶ engine ─▶ newest weights ─▶ ready record      each phase stamped
    serve   OPENRL_SAMPLE ─▶ requests ─▶ engine_loop ─▶ answers        openrl_weights, openrl_jobs ─▶ weights_keeper
    stop    SIGTERM: running calls finish, waiting ones are nak'ed, the process exits 0 (E17); an engine that is stuck
            or broke ends the process, whose successor gets what it had in hand (V11)

Not here: requests and answers (requests), what happens on the device and when (engine_loop), tokens (engine).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from openrl_common.names import sample_subject
from openrl_common.prefetch import Prefetch, PrefetchMode
from openrl_common.prefetch_phase import prefetching
from openrl_common.records import Phase
from openrl_common.service import until_stopped
from openrl_common.turns import Moved
from openrl_common.weights import WEIGHTS_FORMATS
from openrl_common.wire import SamplingParams
from openrl_common.worker import WorkerContext, WorkerSettings
from openrl_sampler.admission import Limits
from openrl_sampler.agreement import AgreementKeeper
from openrl_sampler.engine import Engine, GenerateCall
from openrl_sampler.engine_loop import EngineLoop
from openrl_sampler.engines import EngineSettings, check_workload, import_engine, make_engine
from openrl_sampler.metrics import Metrics
from openrl_sampler.requests import Requests
from openrl_sampler.waiting import WaitingLine
from openrl_sampler.watchdog import StepWatch
from openrl_sampler.weights_keeper import WeightsKeeper

T = TypeVar("T")

FORGOTTEN_AFTER_S = 86_400.0
ACK_WAIT_S = 5.0
"""A sampler that died is noticed after this long (V11)."""


@dataclass(frozen=True)
class SamplerSettings(WorkerSettings):
    """The worker's settings and the sampler's own; see ``__main__`` for what they mean."""

    max_num_seqs: int
    max_waiting_requests: int
    max_sequences_per_request: int
    prefill_tokens: int
    max_adapters: int
    adapter_slots: int
    update_headroom_gib: float
    running_at_update: str
    vllm_memory_share: float
    vllm_capture_sizes: str
    vllm_compile: str
    vllm_cache_directory: Path | None
    vllm_cache_hostpath: Path | None
    engine_stuck_after_s: float
    agreement_limit: float
    prefetch: str


async def serve(context: WorkerContext, config: SamplerSettings) -> None:
    """The main of a sampler worker: start the engine, then serve until stopped."""
    check_workload(context.workload)
    ready = context.service.require("engine", "the engine is starting")
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
    sampler = Sampler(context, config, thread)
    starting = asyncio.ensure_future(sampler.start())
    stopping = asyncio.ensure_future(context.stopping.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        starting.result()
        ready.set()
        await sampler.run()
    finally:
        stopping.cancel()
        # An import, a load or a stuck step in the thread cannot be interrupted, and nothing of it is worth waiting for.
        thread.shutdown(wait=False, cancel_futures=True)


class Sampler:
    """One sampler process. ``start`` once, then ``run`` until the context is stopping."""

    def __init__(self, context: WorkerContext, config: SamplerSettings, thread: ThreadPoolExecutor) -> None:
        self._context = context
        self._config = config
        self._thread = thread
        self._wake = asyncio.Event()
        self._metrics = Metrics(context.service.registry)
        self._engine: Engine
        self._weights: WeightsKeeper

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Engine up, newest weights applied, ready record written. Phases: imports, load, engine, weights."""
        context = self._context
        async with prefetching(context, PrefetchMode(self._config.prefetch)) as prefetch:
            with context.stamp("imports"):
                await self._in_thread(lambda: import_engine(context.workload, self._engine_settings()))
            if not context.workload.shape.exclusive:
                await prefetch.whole()  # others may want the device while the network is waited for
            async with context.turn():
                await self._load(prefetch)
        if self._engine.can_park:
            context.movers(self._park, self._resume)
        with context.stamp("weights"):
            await self._weights.follow()
            await self._weights.looked_ahead()
            async with context.turn():
                await self._weights.apply_due()
        await context.ready(
            {
                "engine": self._engine.name,
                "can_park": str(self._engine.can_park).lower(),
                "max_model_len": str(self._engine.max_model_len),
                WEIGHTS_FORMATS: self._engine.weights_formats,
            }
        )

    async def _load(self, prefetch: Prefetch) -> None:
        context = self._context
        with context.stamp("load", context.workload.base_model):
            self._engine = await self._in_thread(lambda: make_engine(context.workload, self._engine_settings()))
            await self._in_thread(lambda: self._engine.load(prefetch))
        for part, seconds in self._engine.load_parts.items():
            context.phases.append(Phase(name=part, started_at=time.time() - seconds, seconds=seconds))
        self._weights = WeightsKeeper(context, self._engine, self._in_thread, self._wake, self._metrics)
        with context.stamp("engine", self._engine.name):
            await self._in_thread(lambda: _warm_up(self._engine))

    async def _park(self) -> Moved:
        path = self._context.home / "parked" / self._context.assignment
        left = await self._in_thread(lambda: self._engine.park(path))
        return Moved(left.bytes, left.seconds, left.held_bytes)

    async def _resume(self) -> Moved:
        """V5: weights, then the update that came meanwhile, then keys and values of the calls that go on."""
        weights = await self._in_thread(self._engine.resume_weights)
        await self._weights.apply_due()
        cache = await self._in_thread(self._engine.resume_cache)
        return Moved(weights.bytes + cache.bytes, weights.seconds + cache.seconds, cache.held_bytes)

    def _engine_settings(self) -> EngineSettings:
        return EngineSettings(
            device_bytes=self._context.device_bytes,
            max_num_seqs=self._config.max_num_seqs,
            prefill_tokens=self._config.prefill_tokens,
            max_adapters=self._config.max_adapters,
            adapter_slots=self._config.adapter_slots,
            update_method=self._context.workload.update_method,
            update_chunk_bytes=self._context.workload.update_chunk_bytes,
            update_headroom_gib=self._config.update_headroom_gib,
            running_at_update=self._config.running_at_update,
            vllm_memory_share=self._config.vllm_memory_share,
            vllm_capture_sizes=self._config.vllm_capture_sizes,
            vllm_compile=self._config.vllm_compile,
            vllm_cache_directory=self._config.vllm_cache_directory,
            vllm_cache_hostpath=self._config.vllm_cache_hostpath,
            home=self._context.home,
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- run -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        context, engine, config = self._context, self._engine, self._config
        limits = Limits(
            max_model_len=engine.max_model_len,
            vocabulary_size=engine.vocabulary_size,
            sequences_max=config.max_sequences_per_request,
        )
        line = WaitingLine(config.max_waiting_requests)
        requests = Requests(context, engine, self._weights, line, limits, self._metrics, self._wake)
        watch = StepWatch(config.engine_stuck_after_s or math.inf)
        context.service.checks["engine step"] = watch.check
        loop = EngineLoop(context, engine, requests, self._weights, self._in_thread, watch, self._wake)
        await requests.hear_cancellations()
        await AgreementKeeper(context, config.agreement_limit, self._weights, self._metrics).serve()
        consume = context.bus.consume(
            stream="OPENRL_SAMPLE",
            durable=context.workload.workload,  # <tenant>--<runtime>--sampler: no two runtimes share one
            subjects=[sample_subject(context.workload.tenant, context.workload.owner_name, "*")],
            handler=requests.handle,
            concurrency=2 * config.max_waiting_requests,
            ack_wait_s=ACK_WAIT_S,
            forgotten_after_s=FORGOTTEN_AFTER_S,
        )
        try:
            await until_stopped(context.stopping, consume, loop.run(), loop.watch(), self._weights.announce())
        finally:
            await self._weights.close()


def _warm_up(engine: Engine) -> None:
    """One short generation, so that the first request does not pay for lazy initialisation."""
    prompt = [0] * min(8, engine.max_model_len - 2)
    engine.add(
        GenerateCall(request="warm-up", job="", prompts=[prompt], params=SamplingParams(n=2, max_tokens=2), seed=0)
    )
    while engine.num_sequences:
        engine.step()
