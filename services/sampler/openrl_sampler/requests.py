"""Requests of the bus, from their acceptance to their answer.

    OPENRL_SAMPLE ─▶ handle: decode, check, join the line ─▶ (engine_loop) ─▶ resolve ─▶ answer, then ack
    openrl.q.sampler.<tenant>.<runtime>.cancel ─▶ out of the line at once, out of the engine at its next step boundary

Invariants:
- a request is acked after its answer was sent (or its deadline passed); a process that dies leaves it to another (V11);
- every accepted request is resolved once: by the engine loop, by its cancellation, or given back;
- of an engine that failed, what ran on it is given back the first time and answered ``engine-failed`` the second: a
  request that kills engines kills two.

Not here: who may start and when (``waiting``, ``engine_loop``), how tokens are made (engine).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from openrl_common.bus import Delivery
from openrl_common.errors import Poison, Rejected, Transient
from openrl_common.names import cancel_subject
from openrl_common.nats_server import MAX_PAYLOAD_BYTES
from openrl_common.records import Phase
from openrl_common.wire import CANCEL_DECODER, SAMPLE_DECODER, ErrorInfo, SampleRequest, SampleResult
from openrl_common.worker import WorkerContext
from openrl_sampler.admission import Limits, check_request
from openrl_sampler.engine import Engine, GenerateCall
from openrl_sampler.metrics import Metrics
from openrl_sampler.updates import job_key
from openrl_sampler.waiting import Waiter, WaitingLine
from openrl_sampler.weights_keeper import WeightsKeeper

log = logging.getLogger(__name__)

BEAT_S = 1.5
DELIVERIES_MAX = 4
"""A request delivered more often than this without an answer is what kills the process: it gets an error instead."""
CANCELLED_MAX = 1024
"""Cancellations remembered that came before their request."""
_GIVE_BACK_S = 2.0


class _Envelope(msgspec.Struct, frozen=True):
    """What it takes to answer a request, read leniently."""

    request: str
    reply_to: str


_ENVELOPE_DECODER = msgspec.json.Decoder(_Envelope)


@dataclass(slots=True)
class InHand:
    """A request between its acceptance and its answer. ``running``: in the engine; ``cancelled``: to be taken out."""

    waiter: Waiter
    future: asyncio.Future[SampleResult]
    deliveries: int
    started: float
    running: bool = False
    cancelled: bool = False

    @property
    def late(self) -> bool:
        return self.waiter.request.deadline <= time.time()


class Requests:
    """``wake`` is set whenever the engine loop should look."""

    def __init__(
        self,
        context: WorkerContext,
        engine: Engine,
        weights: WeightsKeeper,
        line: WaitingLine,
        limits: Limits,
        metrics: Metrics,
        wake: asyncio.Event,
    ) -> None:
        self._context = context
        self._engine = engine
        self._weights = weights
        self._limits = limits
        self._metrics = metrics
        self._wake = wake
        self._bus = context.bus
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._closed = ""
        self._empty = asyncio.Event()
        self._first_request = True
        self.line = line
        self.in_hand: dict[str, InHand] = {}
        """By stream sequence, which is also the engine's name of the call."""

    # --- in ------------------------------------------------------------------------------------------------------

    async def handle(self, delivery: Delivery) -> None:
        """One delivery of OPENRL_SAMPLE; returning acks it."""
        try:
            request = SAMPLE_DECODER.decode(delivery.body)
        except msgspec.DecodeError as error:
            await self._refuse_unreadable(delivery, error)
            return
        if delivery.subject.rpartition(".")[2] != request.tenant:  # what a credential is limited by (E1)
            raise Poison(f"message {delivery.sequence} on {delivery.subject} speaks for tenant {request.tenant!r}")
        key = str(delivery.sequence)
        if key in self.in_hand:  # redelivered while it runs here: the first delivery's handler answers
            await _beat_until(self.in_hand[key].future, delivery)
            return
        if time.time() >= request.deadline:
            self._metrics.requests.labels("late").inc()
            return
        if closed := self._closed or ("the sampler is stopping" if self._context.stopping.is_set() else ""):
            raise Transient(closed)
        waiter = Waiter(key, job_key(request.tenant, request.job, request.incarnation), request)
        future: asyncio.Future[SampleResult] = asyncio.get_running_loop().create_future()
        # Before anything is waited for: a redelivery that comes meanwhile must find it.
        in_hand = self.in_hand[key] = InHand(waiter, future, delivery.deliveries, time.monotonic())
        try:
            await self._accept(in_hand)
            await self._answer(request, await _beat_until(future, delivery))
        finally:
            self.in_hand.pop(key, None)
            if not self.in_hand:
                self._empty.set()
            self._wake.set()

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

    async def _accept(self, in_hand: InHand) -> None:
        """Check the request and put it in line, or settle it: its future says which answer, or that it goes back."""
        try:
            await self._check(in_hand)
            if not in_hand.future.done():  # else given back meanwhile
                self.line.offer(in_hand.waiter)
                self._wake.set()
        except Rejected as error:
            self.resolve_error(in_hand.waiter.key, info_of(error))
        except Exception as error:
            if not in_hand.future.done():
                in_hand.future.set_exception(error)

    async def _check(self, in_hand: InHand) -> None:
        """Raises Rejected."""
        waiter = in_hand.waiter
        request, job = waiter.request, waiter.job
        if in_hand.deliveries > DELIVERIES_MAX:
            raise Rejected(f"given up after {DELIVERIES_MAX} deliveries without an answer", code="engine-failed")
        if job not in self._weights.jobs:
            await self._weights.look_for_job(f"{request.tenant}.{request.job}")
        if job not in self._weights.jobs:
            raise Rejected(
                f"job {request.tenant}/{request.job} (incarnation {request.incarnation}) is not served by runtime"
                f" {self._context.workload.owner_name}",
                code="unknown-job",
            )
        check_request(request, self._limits)
        if request.params.stop:  # reads the tokenizer, the first time
            await asyncio.to_thread(self._engine.check, call_of(waiter, 0))
        else:
            self._engine.check(call_of(waiter, 0))
        if in_hand.cancelled or request.request in self._cancelled:
            self._cancelled.pop(request.request, None)
            raise _cancelled()

    # --- cancellation --------------------------------------------------------------------------------------------

    async def hear_cancellations(self) -> Callable[[], Awaitable[None]]:
        """Every replica hears every cancellation. Returns what ends the hearing."""
        workload = self._context.workload
        return await self._bus.subscribe(cancel_subject(workload.tenant, workload.owner_name), self._on_cancel)

    async def _on_cancel(self, body: bytes, _headers: dict[str, str]) -> None:
        try:
            name = CANCEL_DECODER.decode(body).request
        except msgspec.DecodeError as error:
            log.warning("a cancellation is not usable: %s", error)
            return
        in_hand = next((one for one in self.in_hand.values() if one.waiter.request.request == name), None)
        if in_hand is None:
            self._cancelled[name] = None
            while len(self._cancelled) > CANCELLED_MAX:
                self._cancelled.popitem(last=False)
            return
        in_hand.cancelled = True
        if self.line.remove(in_hand.waiter.key):
            self.resolve_error(in_hand.waiter.key, info_of(_cancelled()))
        self._wake.set()

    # --- out -----------------------------------------------------------------------------------------------------

    def resolve(self, key: str, result: SampleResult) -> None:
        in_hand = self.in_hand.get(key)
        if in_hand is not None:
            in_hand.running = False
            if not in_hand.future.done():
                in_hand.future.set_result(result)

    def resolve_error(self, key: str, error: ErrorInfo) -> None:
        if (in_hand := self.in_hand.get(key)) is not None:
            self.resolve(key, SampleResult(request=in_hand.waiter.request.request, error=error))

    def take_unwanted(self) -> list[str]:
        """Keys of what runs for nobody: its deadline passed, or its client took it back. Answered; the engine must
        still forget them."""
        unwanted = {key: one for key, one in self.in_hand.items() if one.running and (one.late or one.cancelled)}
        late = ErrorInfo(code="deadline", message="the deadline passed while it was generated")
        for key, one in unwanted.items():
            self.resolve_error(key, info_of(_cancelled()) if one.cancelled else late)
        return list(unwanted)

    def give_back(self, why: str, *, only: list[Waiter] | None = None) -> None:
        """Nak what is not resolved yet, or only these: they go to another replica, or to this workload's next
        process."""
        keys = list(self.in_hand) if only is None else [waiter.key for waiter in only]
        for key in keys:
            future = self.in_hand[key].future
            if not future.done():
                future.set_exception(Transient(why))

    async def engine_failed(self, why: str) -> None:
        """The engine is lost: take nothing more, answer what failed a second time, give the rest back (V11)."""
        self._closed = why
        for key, one in self.in_hand.items():
            if one.running and one.deliveries > 1:
                self.resolve_error(key, ErrorInfo(code="engine-failed", message=f"given up the second time: {why}"))
        self.give_back(why)
        if self.in_hand:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GIVE_BACK_S):
                    await self._empty.wait()

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


def call_of(waiter: Waiter, seed: int) -> GenerateCall:
    """``seed``: for a request that brings none."""
    request = waiter.request
    return GenerateCall(
        request=waiter.key,
        job=waiter.job,
        prompts=request.prompts,
        params=request.params,
        seed=seed if request.params.seed is None else request.params.seed,
        exact=request.exact,
    )


def info_of(error: Rejected) -> ErrorInfo:
    return ErrorInfo(code=error.code, message=str(error))


def _cancelled() -> Rejected:
    return Rejected("cancelled by its client", code="cancelled")


async def _beat_until(future: asyncio.Future[SampleResult], delivery: Delivery) -> SampleResult:
    """Wait, telling the server that the request is being worked on."""
    while not (await asyncio.wait({future}, timeout=BEAT_S))[0]:
        await delivery.in_progress()
    return future.result()
