"""The sampler's shell: requests from the bus, weights from KV, one thread that owns the engine.

    OPENRL_SAMPLE ─▶ handle: decode, check, join the waiting line ─▶ … ─▶ answer, then ack
    openrl_weights, openrl_jobs ─▶ weights_keeper: which updates are due
    engine loop, until stopped:  apply what is due ─▶ start who may start ─▶ a burst of steps in the thread ─▶ answers

Invariants:
- only the engine thread touches the engine's tensors, and the loop starts one piece of work on it at a time, so every
  update is applied at a step boundary (V5);
- a request is acked after its answer was sent (or its deadline passed); a process that dies leaves it to another (V11);
- on a shared device (03, turns) the engine is touched inside its turn only; between two bursts it may be parked, with
  its running calls, and what waits for a version does not ask for the device (T3-T5, V5);
- on SIGTERM running calls finish, waiting ones are nak'ed, the process exits 0 (E17).

Not here: how tokens are made (engine), who may start (waiting), which update is due (updates).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from openrl_common.bus import Delivery
from openrl_common.errors import Poison, Rejected, Transient
from openrl_common.names import sample_subject
from openrl_common.nats_server import MAX_PAYLOAD_BYTES
from openrl_common.records import JobKind, Phase
from openrl_common.service import until_stopped
from openrl_common.turns import Moved, TurnStopped
from openrl_common.weights import WEIGHTS_FORMATS
from openrl_common.wire import SAMPLE_DECODER, ErrorInfo, SampleRequest, SampleResult, SamplingParams
from openrl_common.worker import WorkerContext, WorkerSettings
from openrl_sampler.admission import Limits, check_request
from openrl_sampler.engine import Engine, GenerateCall, Generated
from openrl_sampler.engines import EngineSettings, check_workload, import_engine, make_engine
from openrl_sampler.metrics import Metrics
from openrl_sampler.updates import job_key
from openrl_sampler.waiting import Versions, Waiter, WaitingLine
from openrl_sampler.weights_keeper import WeightsKeeper

log = logging.getLogger(__name__)
T = TypeVar("T")

FORGOTTEN_AFTER_S = 86_400.0
ACK_WAIT_S = 5.0
"""A sampler that died is noticed after this long (V11)."""
BEAT_S = 1.5
BURST_S = 0.02
"""Steps run back to back at most this long before the loop looks at the line and the weights again."""
LOOK_S = 1.0
"""How often a wait for a version reads openrl_weights itself, whatever the mirror says (E5, E15)."""
DELIVERIES_MAX = 4
"""A request delivered more often than this without an answer is what kills the engine: it gets an error instead."""


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
    vllm_memory_share: float
    vllm_capture_sizes: str
    vllm_compile: str
    vllm_cache_directory: Path | None
    vllm_cache_hostpath: Path | None


class _Envelope(msgspec.Struct, frozen=True):
    """What it takes to answer a request, read leniently."""

    request: str
    reply_to: str


_ENVELOPE_DECODER = msgspec.json.Decoder(_Envelope)


@dataclass(slots=True)
class _InHand:
    """A request between its acceptance and its answer."""

    waiter: Waiter
    future: asyncio.Future[SampleResult]
    started: float
    running: bool = False


async def serve(context: WorkerContext, config: SamplerSettings) -> None:
    """The main of a sampler worker: start the engine, then serve until stopped."""
    check_workload(context.workload)
    ready = context.service.require("engine", "the engine is starting")
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") as thread:
        sampler = Sampler(context, config, thread)
        starting = asyncio.ensure_future(sampler.start())
        stopping = asyncio.ensure_future(context.stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            return
        starting.result()
        ready.set()
        await sampler.run()


class Sampler:
    """One sampler process. ``start`` once, then ``run`` until the context is stopping."""

    def __init__(self, context: WorkerContext, config: SamplerSettings, thread: ThreadPoolExecutor) -> None:
        self._context = context
        self._config = config
        self._thread = thread
        self._bus = context.bus
        self._engine: Engine
        self._limits: Limits
        self._line = WaitingLine(config.max_waiting_requests)
        self._in_hand: dict[str, _InHand] = {}
        self._wake = asyncio.Event()
        self._metrics = Metrics(context.service.registry)
        self._weights: WeightsKeeper
        self._first_request = True

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Engine up, newest weights applied, ready record written. Phases: imports, load, engine, weights."""
        context = self._context
        with context.stamp("imports"):
            await self._in_thread(lambda: import_engine(context.workload, self._engine_settings()))
        async with context.turn():
            await self._load()
        if self._engine.can_park:
            context.movers(self._park, self._resume)
        self._limits = Limits(
            max_model_len=self._engine.max_model_len,
            vocabulary_size=self._engine.vocabulary_size,
            sequences_max=self._config.max_sequences_per_request,
        )
        with context.stamp("weights"):
            await self._weights.follow()
            async with context.turn():
                await self._weights.apply_due()
        await context.ready(
            {
                "engine": self._engine.name,
                "can_park": str(self._engine.can_park).lower(),
                "max_model_len": str(self._engine.max_model_len),
                WEIGHTS_FORMATS: "full,delta" if context.workload.kind is JobKind.FFT else "lora",
            }
        )

    async def _load(self) -> None:
        context = self._context
        with context.stamp("load", context.workload.base_model):
            self._engine = await self._in_thread(lambda: make_engine(context.workload, self._engine_settings()))
            await self._in_thread(self._engine.load)
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
        workload = self._context.workload
        consume = self._bus.consume(
            stream="OPENRL_SAMPLE",
            durable=workload.workload,  # <tenant>--<runtime>--sampler: no two runtimes share one
            subjects=[sample_subject(workload.tenant, workload.owner_name)],
            handler=self.handle,
            concurrency=2 * self._config.max_waiting_requests,
            ack_wait_s=ACK_WAIT_S,
            forgotten_after_s=FORGOTTEN_AFTER_S,
        )
        try:
            await until_stopped(self._context.stopping, consume, self._run_engine(), self._weights.announce())
        finally:
            await self._weights.close()

    async def _run_engine(self) -> None:
        waking = asyncio.create_task(self._wake_on_stop())
        try:
            while not (self._context.stopping.is_set() and not self._in_hand):
                self._wake.clear()
                if self._context.stopping.is_set():
                    self._turn_away()
                if not (self._context.lease_held and await self._work()):
                    await self._rest()
        finally:
            waking.cancel()
            self._weights.stop_announcing()

    async def _work(self) -> bool:
        """What there is to do on the device now, within one turn; False when there was nothing.

        A request that waits for a version does not ask for the device: the trainer may need it to make that version.
        """
        stopping = self._context.stopping.is_set()
        if not stopping:
            self._refuse_waiting()
        due = not stopping and self._weights.has_due
        starts = not stopping and self._engine.room > 0 and self._line.has_startable(**self._versions())
        if not (due or starts or self._engine.num_sequences):
            return False
        try:
            async with self._context.turn():
                if not stopping:
                    await self._weights.apply_due()
                    await self._start_waiting()
                if self._engine.num_sequences:
                    await self._abort_expired()
                    for generated in await self._in_thread(self._burst):
                        self._finish(generated)
        except TurnStopped as stopped:
            for in_hand in self._in_hand.values():
                if not in_hand.future.done():
                    in_hand.future.set_exception(Transient(str(stopped)))
        return True

    async def _wake_on_stop(self) -> None:
        await self._context.stopping.wait()
        self._wake.set()

    def _turn_away(self) -> None:
        """Stopping: who has not started goes to another replica, or to this workload's next process."""
        for waiter in self._line.drain():
            self._in_hand[waiter.key].future.set_exception(Transient("the sampler is stopping"))

    async def _rest(self) -> None:
        """Nothing to generate: sleep until something changes, a deadline or a retry is due, or it is time to look."""
        times = [at for at in (self._line.wake_at(), self._weights.retry_at) if at is not None]
        timeout = max(0.02, min([*(at - time.time() for at in times), LOOK_S]))
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            await self._weights.look({f"{w.request.tenant}.{w.request.job}" for w in self._line if w.wants_version})

    def _burst(self) -> list[Generated]:
        """In the thread: steps until a call ends, something waits at the door, or the time is up."""
        end = time.monotonic() + BURST_S
        while True:
            ended = self._engine.step()
            if ended or not self._engine.num_sequences or self._wake.is_set() or time.monotonic() > end:
                return ended

    # --- requests ------------------------------------------------------------------------------------------------

    async def handle(self, delivery: Delivery) -> None:
        """One delivery of OPENRL_SAMPLE; returning acks it."""
        try:
            request = SAMPLE_DECODER.decode(delivery.body)
        except msgspec.DecodeError as error:
            await self._refuse_unreadable(delivery, error)
            return
        key = str(delivery.sequence)
        if key in self._in_hand:  # redelivered while it runs here: the first delivery's handler answers
            await _beat_until(self._in_hand[key].future, delivery)
            return
        if time.time() >= request.deadline:
            self._metrics.requests.labels("late").inc()
            return
        if self._context.stopping.is_set():
            raise Transient("the sampler is stopping")
        try:
            if delivery.deliveries > DELIVERIES_MAX:
                raise Rejected(f"given up after {DELIVERIES_MAX} deliveries without an answer", code="engine-failed")
            in_hand = await self._accept(key, request)
        except Rejected as error:
            await self._answer(request, SampleResult(request=request.request, error=_info(error)))
            return
        try:
            result = await _beat_until(in_hand.future, delivery)
        finally:
            self._in_hand.pop(key, None)
            self._wake.set()
        await self._answer(request, result)

    async def _refuse_unreadable(self, delivery: Delivery, error: msgspec.DecodeError) -> None:
        """Answer a request with a wrong field; what cannot even be answered is Poison."""
        try:
            envelope = _ENVELOPE_DECODER.decode(delivery.body)
        except msgspec.DecodeError:
            raise Poison(
                f"message {delivery.sequence} on {delivery.subject} is not a sample request: {error}"
            ) from error
        info = ErrorInfo(code="bad-request", message=f"the request is not usable: {error}")
        self._metrics.requests.labels(info.code).inc()
        log.warning("request %s refused: %s", envelope.request, info.message)
        await self._bus.send(envelope.reply_to, msgspec.json.encode(SampleResult(request=envelope.request, error=info)))

    async def _accept(self, key: str, request: SampleRequest) -> _InHand:
        """Check the request and put it in line. Raises Rejected."""
        job = job_key(request.tenant, request.job, request.incarnation)
        if job not in self._weights.jobs:
            await self._weights.look_for_job(f"{request.tenant}.{request.job}")
        if job not in self._weights.jobs:
            raise Rejected(
                f"job {request.tenant}/{request.job} (incarnation {request.incarnation}) is not served by runtime"
                f" {self._context.workload.owner_name}",
                code="unknown-job",
            )
        check_request(request, self._limits)
        waiter = Waiter(key, job, request)
        if request.params.stop:  # reads the tokenizer, the first time
            await asyncio.to_thread(self._engine.check, _call(waiter, 0))
        else:
            self._engine.check(_call(waiter, 0))
        self._line.offer(waiter)
        in_hand = _InHand(waiter, asyncio.get_running_loop().create_future(), time.monotonic())
        self._in_hand[key] = in_hand
        self._wake.set()
        return in_hand

    def _versions(self) -> Versions:
        return {
            "newest": self._engine.version,
            "serves": self._engine.serves,
            "held_back": lambda waiter: waiter.request.exact is not None and waiter.job in self._weights.blocked,
        }

    def _refuse_waiting(self) -> None:
        """Answer those whose version or deadline has passed; nothing starts."""
        self._take(room=0)

    def _take(self, room: int) -> list[Waiter]:
        if not len(self._line):
            return []
        taken = self._line.take(time.time(), room=room, why_behind=self._weights.why_behind, **self._versions())
        for waiter, error in taken.refused:
            self._resolve(waiter.key, SampleResult(request=waiter.request.request, error=error))
        return taken.start

    async def _start_waiting(self) -> None:
        engine = self._engine
        start = self._take(engine.room)
        for waiter in start:
            self._in_hand[waiter.key].running = True
        calls = [_call(waiter, secrets.randbits(63)) for waiter in start]
        if calls:
            for key, error in await self._in_thread(lambda: _add(engine, calls)):
                self._resolve(key, SampleResult(request=self._in_hand[key].waiter.request.request, error=error))

    async def _abort_expired(self) -> None:
        now = time.time()
        late = [key for key, one in self._in_hand.items() if one.running and one.waiter.request.deadline <= now]
        for key in late:
            await self._in_thread(lambda key=key: self._engine.abort(key))  # type: ignore[misc]
            error = ErrorInfo(code="deadline", message="the deadline passed while it was generated")
            self._resolve(key, SampleResult(request=self._in_hand[key].waiter.request.request, error=error))

    def _finish(self, generated: Generated) -> None:
        in_hand = self._in_hand.get(generated.request)
        if in_hand is None:
            return
        self._resolve(
            generated.request,
            SampleResult(
                request=in_hand.waiter.request.request,
                sequences=generated.sequences,
                prompt_logprobs=generated.prompt_logprobs,
                error=generated.error,
                seconds=time.monotonic() - in_hand.started,
            ),
        )

    def _resolve(self, key: str, result: SampleResult) -> None:
        in_hand = self._in_hand.get(key)
        if in_hand is not None:
            in_hand.running = False
            if not in_hand.future.done():
                in_hand.future.set_result(result)

    async def _answer(self, request: SampleRequest, result: SampleResult) -> None:
        """Send the answer unless it is too late; record the first one as the last phase of the start."""
        self._metrics.count(result)
        if not request.reply_to or time.time() >= request.deadline:
            return
        body = msgspec.json.encode(result)
        if len(body) > MAX_PAYLOAD_BYTES:
            error = ErrorInfo(
                code="too-large",
                message=f"the answer has {len(body)} bytes, the bus takes {MAX_PAYLOAD_BYTES}: ask for fewer tokens",
            )
            body = msgspec.json.encode(SampleResult(request=request.request, error=error))
        await self._bus.send(request.reply_to, body)
        if self._first_request and result.error is None:
            self._first_request = False
            now = time.time()
            phase = Phase(name="first request", started_at=now - result.seconds, seconds=result.seconds)
            self._context.phases.append(phase)
            await self._context.publish_phases()


def _call(waiter: Waiter, seed: int) -> GenerateCall:
    request = waiter.request
    return GenerateCall(
        request=waiter.key,
        job=waiter.job,
        prompts=request.prompts,
        params=request.params,
        seed=seed if request.params.seed is None else request.params.seed,
        exact=request.exact,
    )


def _add(engine: Engine, calls: list[GenerateCall]) -> list[tuple[str, ErrorInfo]]:
    """Hand calls to the engine; returns those it could not take."""
    refused = []
    for call in calls:
        try:
            engine.add(call)
        except Rejected as error:
            refused.append((call.request, _info(error)))
    return refused


def _info(error: Rejected) -> ErrorInfo:
    return ErrorInfo(code=error.code, message=str(error))


async def _beat_until(future: asyncio.Future[SampleResult], delivery: Delivery) -> SampleResult:
    """Wait, telling the server that the request is being worked on."""
    while not (await asyncio.wait({future}, timeout=BEAT_S))[0]:
        await delivery.in_progress()
    return future.result()


def _warm_up(engine: Engine) -> None:
    """One short generation, so that the first request does not pay for lazy initialisation."""
    prompt = [0] * min(8, engine.max_model_len - 2)
    engine.add(
        GenerateCall(request="warm-up", job="", prompts=[prompt], params=SamplingParams(n=2, max_tokens=2), seed=0)
    )
    while engine.num_sequences:
        engine.step()
