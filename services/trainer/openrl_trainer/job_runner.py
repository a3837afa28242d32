"""One job of a trainer: follows its training log and answers every entry (R4, R5).

    tail of openrl.train.<tenant>.<job> ─▶ envelope, incarnation ─▶ LogOrder ─▶ engine (one thread, turn by turn)
                                     background: write ─▶ openrl_weights, WeightsReady ─┤
                                                                                        └▶ openrl_results ─▶ reply_to

Invariants:
- an entry's result is stored after everything it caused was published, and sent after it was stored: whoever has an
  answer can rely on it, and a crash in between repeats the publishing with the same ids (E6);
- after a restart the log is read from the newest checkpoint on (from its beginning when there is none); entries whose
  result is stored are applied again but neither published nor answered again, save the last one, whose answer may
  never have left;
- results are stored in the order of the log, save those of what is written beside the training (R12): these are in
  order among themselves, and a checkpoint waits for those before it;
- a checkpoint is taken only where no entry is held back (log.py), so that its place in the log is one number.

Not here: what an entry does (engine.py), whose turn it is (device.py), which jobs there are (service.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import TYPE_CHECKING, TypeVar

import msgspec

from openrl_common.bus import Delivery
from openrl_common.errors import Rejected, Transient
from openrl_common.events import WeightsApplied, WeightsReady
from openrl_common.names import train_subject
from openrl_common.nats_server import MAX_PAYLOAD_BYTES
from openrl_common.records import JobKind, JobRecord, WeightsRecord
from openrl_common.streams import EVENTS, TRAIN
from openrl_common.turns import TurnStopped
from openrl_common.weights import DELTA, WEIGHTS_FORMATS
from openrl_common.wire import (
    TRAIN_DECODER,
    AnyTrainRequest,
    DeleteState,
    ErrorInfo,
    ListStates,
    LoadState,
    OptimStep,
    PayloadRef,
    SaveState,
    SaveWeights,
    TrainResult,
)
from openrl_common.worker import WorkerContext
from openrl_trainer.background import Background
from openrl_trainer.checkpointer import Checkpointer, InThread
from openrl_trainer.device import Device
from openrl_trainer.log import Apply, LogOrder, Refuse, Repeat
from openrl_trainer.metrics import Metrics
from openrl_trainer.shortage import CHANGES_IN_PLACE

if TYPE_CHECKING:  # torch is imported in the engine's thread, not here
    from openrl_trainer.engine import Outcome, TrainEngine

log = logging.getLogger(__name__)
T = TypeVar("T")

_RESULT_BYTES_MAX = MAX_PAYLOAD_BYTES - 64 * 1024
_RETRY_S = (0.1, 2.0)


class Envelope(msgspec.Struct, frozen=True):
    """What every entry has, read leniently: enough to answer one whose body is not usable."""

    seq: int
    incarnation: int
    reply_to: str = ""


_ENVELOPE_DECODER = msgspec.json.Decoder(Envelope)
_ENCODER = msgspec.json.Encoder()


class JobRunner:
    """``prepare``, ``run`` until ``stop`` (the entry in hand is finished and answered), ``close``.

    ``make_engine`` runs in the device's thread, ``on_disk`` runs what reads and writes files.
    """

    def __init__(
        self,
        context: WorkerContext,
        device: Device,
        record: JobRecord,
        make_engine: Callable[[], TrainEngine],
        on_disk: InThread,
        checkpointer: Checkpointer,
        metrics: Metrics,
        on_first_step: Callable[[float], Awaitable[None]],
        *,
        weights_delta: str,
    ) -> None:
        self._context = context
        self._bus = context.bus
        self._device = device
        self._record = record
        self._make_engine = make_engine
        self._on_disk = on_disk
        self._checkpointer = checkpointer
        self._background: Background
        self._metrics = metrics
        self._on_first_step = on_first_step
        self._weights_delta = weights_delta
        self._order: LogOrder[Delivery] = LogOrder()
        self._engine: TrainEngine | None = None
        self._broken: ErrorInfo | None = None
        self._stopping = asyncio.Event()
        self._replay_until = 0
        """Stream sequence of the last entry that an earlier life may have applied."""
        self._start_at = 1
        self._begun_at = 0.0

    @property
    def name(self) -> str:
        return f"{self._record.tenant}.{self._record.job}"

    async def prepare(self) -> None:
        """Make the engine, where its newest checkpoint stood.

        A job whose settings cannot be used, or whose state is lost, stays, and answers every request with the reason.
        """
        last = await self._retried(lambda: self._bus.last(stream=TRAIN.name, subject=self._subject))
        self._replay_until = last.sequence if last is not None else 0
        try:
            engine = self._engine = await self._device.run(self._make_engine)
            mark = await self._retried(lambda: self._checkpointer.restore(engine, self._on_disk, self._device.run))
        except Rejected as error:
            log.warning("job cannot be trained job=%s: %s", self.name, error)
            self._broken = ErrorInfo(code=error.code, message=str(error))
            if error.code == "state-lost":
                self._order.expected = self._checkpointer.lost_after + 1
            return
        if mark is not None:
            self._order.expected, self._start_at = mark.seq + 1, mark.position
        await self._drop_old_versions(engine)  # a killed process may have answered a version and not come to it

    def stop(self) -> None:
        self._stopping.set()

    @property
    def engine(self) -> TrainEngine | None:
        """None before ``prepare``, after ``close`` and for a job that cannot be trained."""
        return self._engine

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._background = Background(tasks.create_task)
                await self._follow()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _follow(self) -> None:
        tail = self._bus.tail(stream=TRAIN.name, subject=self._subject, start_sequence=self._start_at)
        async with contextlib.aclosing(tail) as entries:
            while (delivery := await self._next(entries)) is not None:
                try:
                    await self._take(delivery)
                except TurnStopped as stopped:
                    log.info("job %s: %s", self.name, stopped)
                    return  # the log still has the entry

    @property
    def _subject(self) -> str:
        return train_subject(self._record.tenant, self._record.job)

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
        except (msgspec.DecodeError, RecursionError) as error:  # lists a thousand deep, in a field that is none
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
                if not self._order.held and self._checkpointer.due(self._order.expected - 1):
                    await self._checkpoint(delivery.sequence + 1)
            case Repeat(seq):
                await self._repeat(seq, envelope.reply_to)
            case Refuse(code, message):
                await self._answer(
                    envelope.reply_to, TrainResult(seq=envelope.seq, error=ErrorInfo(code=code, message=message))
                )
            case _:  # held: the missing entry brings it back
                log.info("entry %d of job %s waits for entry %d", envelope.seq, self.name, self._order.expected)
                if delivery.sequence >= self._replay_until and await self._is_torn():
                    await self._lose(self._order.expected)

    async def _is_torn(self) -> bool:
        """Whether what is missing was applied by an earlier life: then the log has lost it, and nobody sends it again.

        Asked once all that an earlier life saw was read: entries may lie in the log in any order.
        """
        first = min(self._order.held)
        return any([await self._stored(seq) is not None for seq in {self._order.expected, first - 1, first}])

    async def _lose(self, missing: int) -> None:
        message = (
            f"entry {missing} of job {self.name} was applied before and is not in the log any more (its age, or its"
            " size): the job's state cannot be rebuilt, submit it again, load_state takes a named state"
        )
        log.error("%s", message)
        self._broken = ErrorInfo(code="state-lost", message=message)
        for entry in self._order.give_up():
            await self._apply(entry)

    async def _repeat(self, seq: int, reply_to: str) -> None:
        """The stored result again. One that is being written still is answered when it stands."""
        stored = await self._stored(seq)
        if stored is None and seq <= self._checkpointer.trimmed_seq:
            message = f"the result of entry {seq} is not kept any more: it was answered long ago"
            stored = TrainResult(seq=seq, error=ErrorInfo(code="result-trimmed", message=message))
        if stored is not None:
            await self._answer(reply_to, stored)

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
        stored = await self._stored(envelope.seq) if delivery.sequence <= self._replay_until else None
        started = time.time()
        request: AnyTrainRequest | None = None
        try:
            request = await self._request_of(delivery, envelope)
            await self._wait_for_writes(request)
            outcome = await self._run_engine(request, stored)
        except Rejected as error:
            code, message = error.code, str(error)
            if request is None and stored is not None and stored.error is None and stored.logprobs is None:
                code = "state-lost"  # going on without it would be another training
                message = (
                    f"entry {envelope.seq} was applied before and cannot be read now ({error}): submit the job again"
                )
            if code == "state-lost":
                self._broken = ErrorInfo(code=code, message=message)
            request, outcome = None, _failed(envelope.seq, code, message)
        if isinstance(request, OptimStep):
            self._checkpointer.steps += 1
        if stored is not None:
            if await self._stored(envelope.seq + 1) is None:
                await self._answer(envelope.reply_to, stored)
        elif outcome.write is not None:
            write = outcome.write
            await self._background.give(lambda: self._write(write, envelope, request, started))
        else:
            await self._settle(outcome, envelope, request, started)

    async def _wait_for_writes(self, request: AnyTrainRequest) -> None:
        if isinstance(request, LoadState | ListStates | DeleteState):
            await self._background.idle()  # the state they mean may be being written
        elif isinstance(request, SaveWeights | SaveState):
            await self._background.room()

    async def _write(
        self, write: Callable[[], Outcome], envelope: Envelope, request: AnyTrainRequest | None, started: float
    ) -> None:
        engine = self._engine
        assert engine is not None
        if isinstance(request, SaveWeights):
            engine.deltas = await self._may_send_deltas()
        outcome: Outcome = await self._on_disk(write)
        await self._settle(outcome, envelope, request, started)
        if outcome.weights is not None:
            await self._drop_old_versions(engine)

    async def _drop_old_versions(self, engine: TrainEngine) -> None:
        served = await self._served_versions()
        await self._on_disk(lambda: engine.retain(served))

    async def _settle(
        self, outcome: Outcome, envelope: Envelope, request: AnyTrainRequest | None, started: float
    ) -> None:
        """Publish what an entry caused, store its result, answer it."""
        result, body = _encoded(outcome.result)
        if outcome.weights is not None:
            await self._announce(outcome.weights)
        await self._retried(lambda: self._bus.store.results.put(self._key(envelope.seq), result))
        self._checkpointer.applied_seq = max(self._checkpointer.applied_seq, envelope.seq)
        if envelope.reply_to:
            await self._bus.send(envelope.reply_to, body)
        await self._note(request, result, started)

    async def _may_send_deltas(self) -> bool:
        """Whether the job's sampler says in its ready record that it takes deltas (or a setting says so)."""
        if self._weights_delta != "auto" or self._record.spec.kind is not JobKind.FFT or not self._record.sampler:
            return self._weights_delta == "on"
        store = self._bus.store
        sampler = await self._retried(lambda: store.workloads.get(self._record.sampler))
        if sampler is None or not sampler.value.assignment:
            return False
        ready = await self._retried(lambda: store.ready.get(sampler.value.assignment))
        return ready is not None and DELTA in ready.value.detail.get(WEIGHTS_FORMATS, "").split(",")

    async def _served_versions(self) -> tuple[int, ...]:
        """The version that a sampler of this job said it applied last: it may read the files again (R11)."""
        subject = WeightsApplied(
            tenant=self._record.tenant, job=self._record.job, incarnation=self._record.incarnation, version=0,
            assignment="", seconds=0.0, peak_extra_bytes=0,
        ).subject  # fmt: skip
        last = await self._retried(lambda: self._bus.last(stream=EVENTS.name, subject=subject))
        if last is None:
            return ()
        applied = msgspec.json.decode(last.body, type=WeightsApplied)
        return (applied.version,) if applied.incarnation == self._record.incarnation else ()

    async def _checkpoint(self, position: int) -> None:
        """Copy the job's state and have it written: every entry before ``position`` is in it, no later one."""
        engine = self._engine
        if engine is None or self._broken is not None:
            return
        from openrl_trainer.checkpoints import Mark

        await self._background.room()
        seq, payloads, halved_to = self._order.expected - 1, dict(self._checkpointer.payloads), engine.halved_to
        started = time.monotonic()
        state = await self._device.run(engine.copy_state)
        self._checkpointer.copied(seq, time.monotonic() - started)

        async def write() -> None:
            # Versions before it are written by now, those behind it are not.
            mark = Mark(seq=seq, position=position, version=engine.version, halved_to=halved_to, payloads=payloads)
            await self._checkpointer.write(mark, state, engine, self._on_disk)

        await self._background.give(write)

    async def _stored(self, seq: int) -> TrainResult | None:
        entry = await self._retried(lambda: self._bus.store.results.get(self._key(seq)))
        return None if entry is None else entry.value

    async def _request_of(self, delivery: Delivery, envelope: Envelope) -> AnyTrainRequest:
        """The whole request, fetched when it travels by reference (R7). Raises Rejected."""
        request = _decoded(delivery.body)
        if not isinstance(request, PayloadRef):
            return request
        self._checkpointer.payloads[request.object_name] = delivery.sequence
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
                if isinstance(request, CHANGES_IN_PLACE):
                    raise  # only the log brings the state back
                log.exception("entry %d of job %s failed in the engine", request.seq, self.name)
                return _failed(request.seq, "engine-error", f"{type(request).__name__}: {str(error).splitlines()[0]}")

        return await self._device.run_steps(steps())

    async def _announce(self, weights: WeightsRecord) -> None:
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
