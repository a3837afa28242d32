"""One job of a trainer: follows its training log and answers every entry (R4, R5).

    tail of openrl.train.<tenant>.<job> ─▶ envelope, incarnation ─▶ LogOrder ─▶ engine (one thread, turn by turn)
                                          └▶ openrl_weights, WeightsReady ─▶ openrl_results ─▶ answer to reply_to

Invariants:
- an entry's result is stored after everything it caused was published, and sent after it was stored: whoever has an
  answer can rely on it, and a crash in between repeats the publishing with the same ids (E6);
- after a restart the log is read from its beginning; entries whose result is stored are applied again but neither
  published nor answered again, save the last one, whose answer may never have left;
- jobs take the device in turn: an ``asyncio.Lock`` serves waiters in order and each job waits with one entry (R10);
- without a renewed lease, or outside its turn on a shared device, the device is not touched (B7, T4); a turn may pass
  on at the end of a micro-batch, in the middle of an entry (T3).

Not here: what an entry does (engine.py), which jobs there are (service.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from openrl_common.bus import Delivery
from openrl_common.errors import Rejected, Transient
from openrl_common.events import WeightsReady
from openrl_common.names import train_subject
from openrl_common.nats_server import MAX_PAYLOAD_BYTES
from openrl_common.records import JobRecord
from openrl_common.streams import TRAIN
from openrl_common.turns import TurnStopped
from openrl_common.wire import TRAIN_DECODER, AnyTrainRequest, ErrorInfo, OptimStep, PayloadRef, TrainResult
from openrl_common.worker import WorkerContext
from openrl_trainer.log import Apply, LogOrder, Refuse, Repeat
from openrl_trainer.metrics import Metrics

if TYPE_CHECKING:  # torch is imported in the engine's thread, not here
    from openrl_trainer.engine import Outcome, TrainEngine

log = logging.getLogger(__name__)
T = TypeVar("T")

_RESULT_BYTES_MAX = MAX_PAYLOAD_BYTES - 64 * 1024
_RETRY_S = (0.1, 2.0)
_LEASE_LOOK_S = 0.2


class Envelope(msgspec.Struct, frozen=True):
    """What every entry has, read leniently: enough to answer one whose body is not usable."""

    seq: int
    incarnation: int
    reply_to: str = ""


_ENVELOPE_DECODER = msgspec.json.Decoder(Envelope)
_ENCODER = msgspec.json.Encoder()


class Device:
    """The one thread that runs torch, and the turn to use it. Waiters are served in the order they came."""

    def __init__(self, context: WorkerContext, thread: ThreadPoolExecutor) -> None:
        self._context = context
        self._thread = thread
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread, on the device. Raises TurnStopped."""

        def steps() -> Generator[None, None, T]:
            yield from ()
            return work()

        return await self.run_steps(steps())

    async def run_steps(self, steps: Generator[None, None, T]) -> T:
        """Run a piece of work that pauses at its safe boundaries; there the device may be left for a while (T3)."""
        async with self._turn:
            while not self._context.lease_held:  # noqa: ASYNC110 (time passing changes it, nobody sets it)
                await asyncio.sleep(_LEASE_LOOK_S)
            async with self._context.turn():
                # Once begun, a piece of work ends before the turn passes on, also when its job is cancelled meanwhile.
                running = asyncio.ensure_future(self._to_the_end(steps))
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    await asyncio.wait({running})
                    raise

    async def run_anywhere(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread, whoever has the device: imports, moving tensors, dropping them."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _to_the_end(self, steps: Generator[None, None, T]) -> T:
        while True:
            paused, value = await self.run_anywhere(lambda: _next(steps))
            if not paused:
                return cast(T, value)
            try:
                await self._context.boundary()
            except TurnStopped:
                await self.run_anywhere(steps.close)  # torch's modes belong to that thread
                raise


def _next(steps: Generator[None, None, T]) -> tuple[bool, T | None]:
    """One piece, in the thread: whether it paused, else what it returned (StopIteration cannot cross a future)."""
    try:
        next(steps)
    except StopIteration as ended:
        return False, ended.value
    return True, None


class JobRunner:
    """``prepare``, ``run`` until ``stop`` (the entry in hand is finished and answered), ``close``.

    ``make_engine`` runs in the device's thread.
    """

    def __init__(
        self,
        context: WorkerContext,
        device: Device,
        record: JobRecord,
        make_engine: Callable[[], TrainEngine],
        metrics: Metrics,
        on_first_step: Callable[[float], Awaitable[None]],
    ) -> None:
        self._context = context
        self._bus = context.bus
        self._device = device
        self._record = record
        self._make_engine = make_engine
        self._metrics = metrics
        self._on_first_step = on_first_step
        self._order: LogOrder[Delivery] = LogOrder()
        self._engine: TrainEngine | None = None
        self._broken: ErrorInfo | None = None
        self._stopping = asyncio.Event()
        self._replaying = True
        self._begun_at = 0.0

    @property
    def name(self) -> str:
        return f"{self._record.tenant}.{self._record.job}"

    async def prepare(self) -> None:
        """Make the engine. A job whose settings cannot be used stays, and answers every request with the reason."""
        try:
            self._engine = await self._device.run(self._make_engine)
        except Rejected as error:
            log.warning("job cannot be trained job=%s: %s", self.name, error)
            self._broken = ErrorInfo(code=error.code, message=str(error))

    def stop(self) -> None:
        self._stopping.set()

    @property
    def engine(self) -> TrainEngine | None:
        """None before ``prepare``, after ``close`` and for a job that cannot be trained."""
        return self._engine

    async def run(self) -> None:
        subject = train_subject(self._record.tenant, self._record.job)
        async with contextlib.aclosing(self._bus.tail(stream=TRAIN.name, subject=subject)) as entries:
            while (delivery := await self._next(entries)) is not None:
                try:
                    await self._take(delivery)
                except TurnStopped as stopped:
                    log.info("job %s: %s", self.name, stopped)
                    return  # the log still has the entry

    async def close(self) -> None:
        """Give the engine's memory back, so that the next job finds it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await self._device.run_anywhere(engine.close)

    async def _next(self, entries: AsyncGenerator[Delivery, None]) -> Delivery | None:
        """The next entry; None when stopped, or when the bus has ended the tail."""
        if self._stopping.is_set():
            return None
        coming = asyncio.ensure_future(anext(entries, None))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else None
        finally:
            for task in (coming, stopping):
                task.cancel()
            await asyncio.gather(coming, stopping, return_exceptions=True)

    # --- order ----------------------------------------------------------------------------------------------------

    async def _take(self, delivery: Delivery) -> None:
        try:
            envelope = _ENVELOPE_DECODER.decode(delivery.body)
        except msgspec.DecodeError as error:
            log.warning("entry %d of job %s is not a request: %s", delivery.sequence, self.name, error)
            return
        if envelope.incarnation != self._record.incarnation:
            await self._refuse_incarnation(envelope, delivery)
            return
        match self._order.decide(envelope.seq, delivery):
            case Apply(entries):
                for entry in entries:
                    if self._stopping.is_set():
                        return  # the log still has them
                    await self._apply(entry)
            case Repeat(seq):
                stored = await self._retried(lambda: self._bus.store.results.get(self._key(seq)))
                if stored is not None:
                    await self._answer(envelope.reply_to, stored.value)
            case Refuse(code, message):
                await self._answer(
                    envelope.reply_to, TrainResult(seq=envelope.seq, error=ErrorInfo(code=code, message=message))
                )
            case _:  # held: the missing entry brings it back
                log.info("entry %d of job %s waits for entry %d", envelope.seq, self.name, self._order.expected)

    async def _refuse_incarnation(self, envelope: Envelope, delivery: Delivery) -> None:
        """Answer only requests sent since this job began: the old job's whole log is on the same subject."""
        if envelope.incarnation < self._record.incarnation and delivery.published_at > self._record.submitted_at:
            message = (
                f"incarnation {envelope.incarnation} of job {self.name} has ended, it is {self._record.incarnation} now"
            )
            error = ErrorInfo(code="stale-incarnation", message=message)
            await self._answer(envelope.reply_to, TrainResult(seq=envelope.seq, error=error))

    # --- one entry ------------------------------------------------------------------------------------------------

    async def _apply(self, delivery: Delivery) -> None:
        envelope = _ENVELOPE_DECODER.decode(delivery.body)
        stored = await self._stored(envelope.seq)
        started = time.time()
        try:
            request = await self._request_of(delivery, envelope)
            outcome = await self._run_engine(request, stored)
        except Rejected as error:
            if error.code == "state-lost":
                self._broken = ErrorInfo(code=error.code, message=str(error))
            request, outcome = None, _failed(envelope.seq, error.code, str(error))
        if stored is not None:
            if await self._stored(envelope.seq + 1) is None:
                await self._answer(envelope.reply_to, stored)
            return
        result, body = _encoded(outcome.result)
        if outcome.weights is not None:
            await self._announce(outcome)
        await self._retried(lambda: self._bus.store.results.put(self._key(envelope.seq), result))
        if envelope.reply_to:
            await self._bus.send(envelope.reply_to, body)
        await self._note(request, result, started)

    async def _stored(self, seq: int) -> TrainResult | None:
        """The result an earlier life stored. Results are stored in order, so the first miss ends the replay."""
        if not self._replaying:
            return None
        entry = await self._retried(lambda: self._bus.store.results.get(self._key(seq)))
        if entry is None:
            self._replaying = False
            if seq > 1:
                log.info("job %s is where it was: %d entries replayed", self.name, seq - 1)
            return None
        return entry.value

    async def _request_of(self, delivery: Delivery, envelope: Envelope) -> AnyTrainRequest:
        """The whole request, fetched when it travels by reference (R7). Raises Rejected."""
        request = _decoded(delivery.body)
        if not isinstance(request, PayloadRef):
            return request
        body = await self._retried(lambda: self._bus.get_payload(request))
        carried = _decoded(body)
        if isinstance(carried, PayloadRef) or (carried.seq, carried.incarnation) != (request.seq, request.incarnation):
            raise Rejected(
                f"the payload of entry {envelope.seq} is {type(carried).__name__} {carried.seq} of incarnation"
                f" {carried.incarnation}: send the request it stands for",
                code="bad-request",
            )
        return carried

    async def _run_engine(self, request: AnyTrainRequest, stored: TrainResult | None) -> Outcome:
        if self._broken is not None:
            return _failed(request.seq, self._broken.code, self._broken.message)
        engine = self._engine
        assert engine is not None

        def steps() -> Generator[None, None, Outcome]:
            try:
                return (yield from engine.steps(request, stored))
            except RuntimeError as error:  # what torch refuses for this request alone; gradients are as before (R6)
                log.exception("entry %d of job %s failed in the engine", request.seq, self.name)
                return _failed(request.seq, "engine-error", f"{type(request).__name__}: {str(error).splitlines()[0]}")

        return await self._device.run_steps(steps())

    async def _announce(self, outcome: Outcome) -> None:
        weights = outcome.weights
        assert weights is not None
        key = f"{weights.tenant}.{weights.job}"
        await self._retried(lambda: self._bus.store.weights.put(key, weights))
        event = WeightsReady(
            tenant=weights.tenant,
            job=weights.job,
            incarnation=weights.incarnation,
            version=weights.version,
            weights=weights,
        )
        await self._retried(lambda: self._bus.publish(event))

    async def _note(self, request: AnyTrainRequest | None, result: TrainResult, started: float) -> None:
        operation = type(request).__struct_config__.tag if request is not None else "unusable"
        self._metrics.entry(str(operation), result.error.code if result.error else "ok", time.time() - started)
        if result.error is not None:
            log.warning("entry %d of job %s refused: %s", result.seq, self.name, result.error.message)
        self._begun_at = self._begun_at or started
        if isinstance(request, OptimStep) and result.error is None:
            await self._on_first_step(self._begun_at)

    # --- bus ------------------------------------------------------------------------------------------------------

    def _key(self, seq: int) -> str:
        return f"{self.name}.{self._record.incarnation}.{seq}"

    async def _answer(self, reply_to: str, result: TrainResult) -> None:
        if reply_to:
            await self._bus.send(reply_to, _ENCODER.encode(result))

    async def _retried(self, action: Callable[[], Awaitable[T]]) -> T:
        """The entry is applied and cannot be applied twice: what is to be told the bus is told until it hears (E7)."""
        delay = _RETRY_S[0]
        while True:
            try:
                return await action()
            except Transient as error:
                log.warning("job %s: %s; trying again", self.name, error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _RETRY_S[1])


def _decoded(body: bytes) -> AnyTrainRequest:
    try:
        return TRAIN_DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise Rejected(f"the request is not usable: {error}", code="bad-request") from error


def _failed(seq: int, code: str, message: str) -> Outcome:
    from openrl_trainer.engine import Outcome

    return Outcome(TrainResult(seq=seq, error=ErrorInfo(code=code, message=message)))


def _encoded(result: TrainResult) -> tuple[TrainResult, bytes]:
    """The result and its bytes; one too large for a message becomes an error that says so."""
    body = _ENCODER.encode(result)
    if len(body) <= _RESULT_BYTES_MAX:
        return result, body
    message = f"the answer has {len(body)} bytes, a message takes {_RESULT_BYTES_MAX}: send fewer sequences at once"
    result = TrainResult(seq=result.seq, error=ErrorInfo(code="result-too-large", message=message))
    return result, _ENCODER.encode(result)
