"""One job as its client drives it (C1, C2).

Train operations are plain functions: they take their number in the job's log at the call and return an awaitable, so
that several may be in flight and asynchronous loops read naturally. Sampling is independent of the log: it goes on
while weights change, and every token says which version made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from openrl_client.errors import JobEndedError, Rejected, TimedOut
from openrl_client.training import TRAIN_STREAM, Pending, TrainingLog, number_of
from openrl_common.events import EVENT_DECODER, AnyEvent, JobFinished
from openrl_common.names import short_workload, train_subject
from openrl_common.quantities import format_seconds
from openrl_common.records import JobPhase, JobRecord, SavedState, WorkloadRecord
from openrl_common.wire import (
    LOSSES,
    AdamParams,
    Datum,
    DeleteState,
    Forward,
    ForwardBackward,
    ListStates,
    LoadState,
    OptimStep,
    SampleResult,
    SamplingParams,
    SaveState,
    SaveWeights,
)

if TYPE_CHECKING:
    from openrl_client.connection import Client

POLL_INTERVAL_S = 0.5
SAMPLE_TIMEOUT_S = 600.0
END_TIMEOUT_S = 60.0


class Progress(msgspec.Struct, frozen=True):
    """What a job is doing on its way to ready: its record and those of its two workloads (None: not written yet)."""

    job: JobRecord
    trainer: WorkloadRecord | None
    sampler: WorkloadRecord | None

    def lines(self) -> list[str]:
        """One line per workload: phase, and why it waits."""
        lines = []
        for workload in (self.trainer, self.sampler):
            if workload is None:
                continue
            line = f"{short_workload(workload.workload)}: {workload.phase.value}"
            if workload.reason is not None:
                line += f" ({workload.reason.value}: {workload.message})"
            elif workload.claim:
                line += f" on {workload.claim}"
            lines.append(line)
        return lines

    def __str__(self) -> str:
        """So that ``job.ready(on_progress=print)`` prints what a person wants to read."""
        return "\n".join(self.lines()) or f"{self.job.job}: {self.job.phase.value}"


class PendingVersion(Awaitable[int]):
    """A weights publication in flight; await it for the version number."""

    def __init__(self, pending: Pending) -> None:
        self.seq = pending.seq
        self._pending = pending

    async def _version(self) -> int:
        result = await self._pending
        if result.version is None:
            raise Rejected(f"request {self.seq}: the trainer answered without a version", code="bad-answer")
        return result.version

    def __await__(self) -> Any:
        return self._version().__await__()


class Job:
    """Made by ``Client.submit`` or ``Client.attach``. ``record`` is the last one seen."""

    def __init__(self, client: Client, record: JobRecord) -> None:
        self.client = client
        self.record = record
        self._log: TrainingLog | None = None
        self._changed = asyncio.Event()
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None

    @property
    def name(self) -> str:
        return self.record.job

    @property
    def key(self) -> str:
        return f"{self.record.tenant}.{self.record.job}"

    async def open(self) -> None:
        """Find the end of the training log and start following the job."""
        bus = self.client.bus
        record = self.record
        seq, after = await self._log_end()
        self._log = TrainingLog(
            bus,
            tenant=record.tenant,
            job=record.job,
            incarnation=record.incarnation,
            next_seq=seq + 1,
            after=after,
            ended=self.ended_error,
        )
        await self._log.start()
        subject = f"openrl.ev.placement.{record.tenant}.job.{record.job}.>"
        self._unsubscribe = await bus.subscribe(subject, self._on_event)

    async def _log_end(self) -> tuple[int, int]:
        """This incarnation's last number in the training log, and the stream sequence of the log's last entry."""
        bus, subject = self.client.bus, train_subject(self.record.tenant, self.record.job)
        last = await bus.last(stream=TRAIN_STREAM, subject=subject)
        if last is None:
            return 0, 0
        if (number := number_of(last.body)) is not None:
            return (number.seq if number.incarnation == self.record.incarnation else 0), last.sequence
        seq = 0  # somebody published garbage there; the trainer passes over it, and so does this
        async with contextlib.aclosing(bus.tail(stream=TRAIN_STREAM, subject=subject)) as entries:
            async for entry in entries:
                number = number_of(entry.body)
                if number is not None and number.incarnation == self.record.incarnation:
                    seq = max(seq, number.seq)
                if entry.sequence >= last.sequence:
                    break
        return seq, last.sequence

    async def close(self) -> None:
        """Stop following; the job itself goes on."""
        if self._unsubscribe is not None:
            await self._unsubscribe()
            self._unsubscribe = None
        if self._log is not None:
            await self._log.close()
            self._log = None

    async def _on_event(self, body: bytes, headers: dict[str, str]) -> None:
        self._changed.set()

    # --- where it stands ------------------------------------------------------------------------------------------

    async def refresh(self) -> JobRecord:
        """Read the job's record again.

        Raises:
            JobEndedError: ``replaced``: another job runs under this name.
        """
        entry = await self.client.bus.store.jobs.get(self.key)
        if entry is None or entry.value.submission != self.record.submission:
            raise JobEndedError(f"job {self.name} was replaced by a later one of that name", code="replaced")
        self.record = entry.value
        return self.record

    async def progress(self) -> Progress:
        record = await self.refresh()
        return Progress(
            job=record,
            trainer=await self._workload(record, record.trainer),
            sampler=await self._workload(record, record.sampler),
        )

    async def _workload(self, record: JobRecord, workload: str) -> WorkloadRecord | None:
        """As it was admitted, or newer under its own key, where an earlier job's of this name may still stand."""
        if not workload:
            return None  # the job was refused
        entry = await self.client.bus.store.workloads.get(workload)
        admitted = next((each for each in record.workloads if each.workload == workload), None)
        if entry is None or (admitted is not None and entry.value.incarnation < admitted.incarnation):
            return admitted
        return entry.value

    async def ended_error(self) -> Exception | None:
        """None while the job runs, else the error that says how it ended."""
        try:
            record = await self.refresh()
        except JobEndedError as error:
            return error
        if not record.phase.ended and record.phase is not JobPhase.FINISHING:
            return None
        outcome = record.phase if record.phase.ended else (record.outcome or record.phase)
        why = record.message or record.reason or f"see `openrl events --job {self.name}`"
        return JobEndedError(f"job {self.name} is {outcome.value}: {why}", code=record.reason or outcome.value.lower())

    async def ready(
        self, timeout_s: float | None = None, on_progress: Callable[[Progress], None] | None = None
    ) -> JobRecord:
        """Wait until trainer and sampler both answer; ``on_progress`` hears every change, waiting reasons included.

        Raises:
            JobEndedError: the job ended first (``impossible``, ``placement-timeout``, ``worker-failed`` …).
            TimedOut: ``timeout_s`` passed; the job goes on waiting.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        told: list[str] = []
        while True:
            progress = await self.progress()
            ready = progress.job.phase is JobPhase.READY
            if not ready and (error := await self.ended_error()) is not None:
                raise error  # before anything is told: the workers may serve another job by now
            if on_progress is not None and progress.lines() != told:
                told = progress.lines()
                on_progress(progress)
            if ready:
                return progress.job
            if deadline is not None and time.monotonic() >= deadline:
                waited = format_seconds(timeout_s or 0.0)
                raise TimedOut(f"job {self.name} is not ready after {waited}: {'; '.join(progress.lines())}")
            await self._wait_change(deadline)

    async def _wait_change(self, deadline: float | None) -> None:
        wait_s = POLL_INTERVAL_S if deadline is None else max(0.01, min(POLL_INTERVAL_S, deadline - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        self._changed.clear()

    async def wait_ended(self, timeout_s: float | None = END_TIMEOUT_S) -> JobRecord:
        """Wait until the job has ended and its seats are free. Raises TimedOut."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                record = await self.refresh()
            except JobEndedError:
                return self.record
            if record.phase.ended:
                return record
            if deadline is not None and time.monotonic() >= deadline:
                waited = format_seconds(timeout_s or 0.0)
                raise TimedOut(f"job {self.name} is still {record.phase.value} after {waited}")
            await self._wait_change(deadline)

    async def events(self, *, follow: bool = True) -> AsyncIterator[AnyEvent]:
        """The job's own events from its submission on; endless with ``follow``, else up to now."""
        subject = f"openrl.ev.*.{self.record.tenant}.*.{self.record.job}.>"
        last = None if follow else await self.client.bus.last(stream="OPENRL_EVENTS", subject=subject)
        if last is None and not follow:
            return
        start = self.record.incarnation
        tail = self.client.bus.tail(stream="OPENRL_EVENTS", subject=subject, start_sequence=start)
        async with contextlib.aclosing(tail) as deliveries:
            async for delivery in deliveries:
                with contextlib.suppress(msgspec.MsgspecError):
                    yield EVENT_DECODER.decode(delivery.body)
                if last is not None and delivery.sequence >= last.sequence:
                    return

    # --- training (each takes its number at the call) ---------------------------------------------------------------

    def _send(self, kind: Any, **fields: Any) -> Pending:
        if self._log is None:
            raise Rejected(f"job {self.name}: this client is closed", code="closed")
        return self._log.send(kind, **fields)

    def forward(self, data: list[Datum]) -> Pending:
        """Log-probabilities of ``data`` under the current weights: ``(await …).logprobs[datum][token]``."""
        return self._send(Forward, data=data)

    def forward_backward(
        self, data: list[Datum], *, loss: str, loss_config: dict[str, float] | None = None, normalizer: float = 1.0
    ) -> Pending:
        """Accumulate the gradients of ``loss`` (summed over tokens ÷ ``normalizer``, R8) over ``data``.

        Raises:
            Rejected: ``unknown-loss``, before anything is sent.
        """
        if loss not in LOSSES:
            raise Rejected(f"loss {loss!r} is not known: use one of {', '.join(LOSSES)}", code="unknown-loss")
        return self._send(ForwardBackward, data=data, loss=loss, loss_config=loss_config or {}, normalizer=normalizer)

    async def forward_backward_custom(
        self, data: list[Datum], derivatives: Callable[[list[list[float]]], list[list[float]]]
    ) -> Pending:
        """Accumulate the gradients of any loss of token log-probabilities, computed here (loss ``custom``, R8).

        Args:
            derivatives: from the log-probabilities under the current weights (``[datum][token]``, entry 0 unused) the
                derivative of your loss by each of them, in the same shape. Nothing may be trained in between.
        """
        result = await self.forward(data)
        rows = derivatives(result.logprobs or [])
        if [len(row) for row in rows] != [len(datum.tokens) for datum in data]:
            raise Rejected("derivatives: give one per token of every datum", code="bad-request")
        weighted = [msgspec.structs.replace(datum, weights=row) for datum, row in zip(data, rows, strict=True)]
        return self.forward_backward(weighted, loss="custom")

    def optim_step(self, adam: AdamParams) -> Pending:
        """Apply the accumulated gradients with AdamW, then clear them."""
        return self._send(OptimStep, adam=adam)

    def publish_weights(self) -> PendingVersion:
        """Write a weights version and announce it to the samplers; await it for the version number."""
        return PendingVersion(self._send(SaveWeights))

    def save_state(self, name: str) -> Pending:
        """Keep weights and optimizer under ``name``."""
        return self._send(SaveState, name=name)

    def load_state(self, name: str) -> Pending:
        """Go back to what ``save_state`` kept."""
        return self._send(LoadState, name=name)

    async def list_states(self) -> list[SavedState]:
        """What ``save_state`` kept for this job, in its earlier incarnations too; sorted by name."""
        return (await self._send(ListStates)).states or []

    def delete_state(self, name: str) -> Pending:
        """Drop what ``save_state`` kept. Awaiting it raises Rejected (``state-missing``) when there is none."""
        return self._send(DeleteState, name=name)

    # --- sampling ---------------------------------------------------------------------------------------------------

    PARAMETERS: ClassVar[frozenset[str]] = frozenset(SamplingParams.__struct_fields__)

    async def sample(
        self,
        prompts: list[list[int]],
        params: SamplingParams | None = None,
        *,
        at_least: int | None = None,
        exact: int | None = None,
        timeout_s: float = SAMPLE_TIMEOUT_S,
        **settings: Any,
    ) -> SampleResult:
        """Completions of token prompts. ``settings`` are the fields of SamplingParams (``n``, ``max_tokens`` …).

        Cancelling the task that awaits it takes the request back: the sampler stops working on it.

        Args:
            at_least: do not start before this weights version serves; ``exact``: only with this one.

        Raises:
            Rejected: the sampler's typed no. TimedOut: no answer in time. JobEndedError: the job is over.
        """
        if unknown := settings.keys() - self.PARAMETERS:
            raise Rejected(f"unknown sampling parameter {sorted(unknown)[0]!r}", code="bad-params")
        if at_least is not None and exact is not None:
            raise Rejected("at_least and exact exclude each other: give one of them", code="bad-params")
        chosen = msgspec.structs.replace(params or SamplingParams(), **settings)
        samples = await self.client.samples()
        return await samples.sample(
            self.record, prompts, chosen, timeout_s=timeout_s, at_least=at_least, exact=exact, ended=self.ended_error
        )

    # --- ends -------------------------------------------------------------------------------------------------------

    async def finish(self, *, timeout_s: float | None = END_TIMEOUT_S) -> JobRecord:
        """Say that the job is done; waits until its seats are free (``timeout_s`` 0: do not wait)."""
        record = self.record
        await self.client.bus.publish(JobFinished(tenant=record.tenant, job=record.job, submission=record.submission))
        return record if timeout_s == 0 else await self.wait_ended(timeout_s)

    async def cancel(self, *, why: str = "", timeout_s: float | None = END_TIMEOUT_S) -> JobRecord:
        """End the job now; waits until its seats are free (``timeout_s`` 0: do not wait)."""
        await self.client.cancel_submission(self.name, self.record.submission, why=why)
        return self.record if timeout_s == 0 else await self.wait_ended(timeout_s)


__all__ = ["Job", "PendingVersion", "Progress"]
