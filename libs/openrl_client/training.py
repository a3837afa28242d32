"""The client's end of a job's training log (R4, C2): number the requests, publish them in order, collect the answers.

Invariants:
- a sequence number is assigned at the call, so that the order of the calls is the order of the log, however many are
  in flight and whoever awaits what first;
- one task publishes, in order, each request only right after the one before it (compare-and-swap on the log's last
  entry): the log has neither a gap nor a second copy, and of two clients one is told, instead of taking the other's
  answers for its own;
- every request ends: by its answer (through the inbox, or read from ``openrl_results`` when the reply was lost), by
  the end of the job, or by the bus being gone for ``unreachable_after_s``.

It does not retry a request that the trainer refused: the log has it, refused, under its number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any

import msgspec

from openrl_client.encoding import encode
from openrl_client.errors import Conflict, JobEndedError, Rejected, Transient, Unreachable
from openrl_client.write_watch import WriteWatch
from openrl_common.names import train_subject
from openrl_common.streams import PAYLOAD_INLINE_BYTES_MAX
from openrl_common.wire import RESULT_DECODER, PayloadRef, TrainRequest, TrainResult

if TYPE_CHECKING:
    from openrl_common.bus import Bus

IN_FLIGHT_MAX = 256
"""Requests without an answer that one job may have."""
RECOVER_INTERVAL_S = 2.0
UNREACHABLE_AFTER_S = 120.0
TRAIN_STREAM = "OPENRL_TRAIN"


class EntryNumber(msgspec.Struct, frozen=True):
    """What every entry of a log has, read leniently."""

    seq: int
    incarnation: int


def number_of(entry: bytes) -> EntryNumber | None:
    """The number of a log entry, None for what is no entry."""
    try:
        return msgspec.json.decode(entry, type=EntryNumber)
    except (msgspec.MsgspecError, RecursionError):
        return None


class Pending(Awaitable[TrainResult]):
    """One request in flight. Await it for the TrainResult; a refused one raises Rejected with the trainer's code."""

    def __init__(self, seq: int, future: asyncio.Future[TrainResult]) -> None:
        self.seq = seq
        self.sent_at = time.monotonic()
        self._future = future

    def __await__(self) -> Generator[Any, None, TrainResult]:
        # Shielded: a caller that gives up (wait_for) must not make a later reader of the same request fail.
        return asyncio.shield(self._future).__await__()

    def done(self) -> bool:
        return self._future.done()

    def settle(self, result: TrainResult) -> None:
        """Deliver the answer; a second one (reply and stored result) changes nothing."""
        if self._future.done():
            return
        if result.error is not None:
            self._future.set_exception(Rejected(result.error.message, code=result.error.code))
        else:
            self._future.set_result(result)

    def fail(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # the log of the job says it already: no "never retrieved" on top


class TrainingLog:
    """Publishes the requests of one incarnation of one job.

    Args:
        after: stream sequence of the last entry on the log's subject, 0 when there is none.
        ended: returns None while the job runs, else the error that every outstanding request ends with.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        tenant: str,
        job: str,
        incarnation: int,
        next_seq: int,
        after: int,
        ended: Callable[[], Awaitable[Exception | None]],
        recover_interval_s: float = RECOVER_INTERVAL_S,
    ) -> None:
        self._bus = bus
        self._tenant = tenant
        self._job = job
        self._incarnation = incarnation
        self._next_seq = next_seq
        self._after = after
        self._ended = ended
        self._recover_interval_s = recover_interval_s
        self._outstanding: dict[int, Pending] = {}
        self._queue: asyncio.Queue[tuple[TrainRequest, bytes]] = asyncio.Queue()
        self._inbox = ""
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        self._watch = WriteWatch(f"requests of job {job}", bus.why_unwritten)

    async def start(self) -> None:
        self._inbox = self._bus.new_inbox()
        self._unsubscribe = await self._bus.subscribe(self._inbox, self._on_reply)
        self._tasks = [asyncio.create_task(self._publish_loop()), asyncio.create_task(self._recover_loop())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._unsubscribe is not None:
            await self._unsubscribe()
        self._fail_all(Unreachable(f"job {self._job}: the client was closed before the answer came"))

    def send(self, kind: type[TrainRequest], **fields: Any) -> Pending:
        """Number a request and queue it. Returns at once.

        Raises:
            Rejected: ``too-many-in-flight``; await some answers first. ``bad-request``: it cannot be written down.
            Exception: what ended this log (the job, or the bus), if something did.
        """
        if self._failure is not None:
            raise self._failure
        if len(self._outstanding) >= IN_FLIGHT_MAX:
            raise Rejected(
                f"job {self._job}: {IN_FLIGHT_MAX} requests are in flight: await some of them first",
                code="too-many-in-flight",
            )
        seq = self._next_seq
        request = kind(seq=seq, incarnation=self._incarnation, reply_to=self._inbox, **fields)
        body = encode(request)
        pending = Pending(seq, asyncio.get_running_loop().create_future())
        self._next_seq = seq + 1
        self._outstanding[seq] = pending
        self._queue.put_nowait((request, body))  # bounded by IN_FLIGHT_MAX
        return pending

    async def _on_reply(self, body: bytes, headers: dict[str, str]) -> None:
        try:
            result = RESULT_DECODER.decode(body)
        except msgspec.MsgspecError:
            return  # garbage on an inbox harms nobody: the stored result is read instead
        self._settle(result)

    def _settle(self, result: TrainResult) -> None:
        pending = self._outstanding.pop(result.seq, None)
        if pending is not None:
            pending.settle(result)

    async def _publish_loop(self) -> None:
        while True:
            request, body = await self._queue.get()
            deadline = time.monotonic() + UNREACHABLE_AFTER_S
            with self._watch.waiting():
                self._watch.tries()
                while not await self._try_publish(request, body):
                    if time.monotonic() > deadline:
                        error = Unreachable(
                            f"job {self._job}: no server took request {request.seq} for {UNREACHABLE_AFTER_S:.0f} s: "
                            "check that the system is up (openrl up), then attach to the job again"
                        )
                        self._fail_all(error)
                        return
                    await asyncio.sleep(0.5)
                self._watch.answered()

    async def _try_publish(self, request: TrainRequest, body: bytes) -> bool:
        # The inbox is this log's alone: two clients' requests of one number never pass for the same message.
        message_id = f"{self._tenant}.{self._job}.{self._incarnation}.{request.seq}.{self._inbox.rsplit('.', 1)[-1]}"
        subject = train_subject(self._tenant, self._job)
        try:
            if len(body) > PAYLOAD_INLINE_BYTES_MAX:
                name, digest = await self._bus.put_payload(body)
                reference = PayloadRef(
                    seq=request.seq,
                    incarnation=request.incarnation,
                    reply_to=request.reply_to,
                    object_name=name,
                    digest=digest,
                    size_bytes=len(body),
                )
                body = msgspec.json.encode(reference)
            while True:
                try:
                    self._after = await self._bus.publish_raw(subject, body, message_id=message_id, after=self._after)
                    return True
                except Conflict:
                    if await self._resolve(request, body):
                        return True
        except Transient as error:
            self._watch.failed(error)
            return False
        except Rejected as error:  # its number is taken: nothing after it could ever be applied
            self._give_up(request.seq, error)
            return True

    async def _resolve(self, request: TrainRequest, body: bytes) -> bool:
        """The log's last entry is not the one before ``request``: this very request, another client's, or garbage.

        True when nothing is left to do for the request, False when it is to go behind that entry. Raises Unreachable.
        """
        last = await self._bus.last(stream=TRAIN_STREAM, subject=train_subject(self._tenant, self._job))
        self._after = 0 if last is None else last.sequence
        if last is None or last.body == body:
            return last is not None
        number = number_of(last.body)
        if number is None or number.incarnation != self._incarnation or number.seq < request.seq:
            return False  # nothing of this job's, or nothing that takes this number: goes behind it
        self._give_up(
            request.seq,
            Rejected(
                f"job {self._job}: another client has sent request {request.seq}: one drives a job at a time; attach "
                "again to go on after it",
                code="another-client",
            ),
        )
        return True

    def _give_up(self, seq: int, error: Exception) -> None:
        """Nothing from ``seq`` on was or will be sent; what was sent before is still answered."""
        self._failure = error
        for late in [late for late in self._outstanding if late >= seq]:
            self._outstanding.pop(late).fail(error)
        while not self._queue.empty():
            self._queue.get_nowait()

    async def _recover_loop(self) -> None:
        """Read stored results of requests whose reply did not come, and notice the end of the job."""
        while True:
            await asyncio.sleep(self._recover_interval_s)
            try:
                await self._recover_once()
            except Transient:
                continue

    async def _recover_once(self) -> None:
        now = time.monotonic()
        late = [p.seq for p in self._outstanding.values() if now - p.sent_at >= self._recover_interval_s]
        if not late:
            return
        for seq in late:
            entry = await self._bus.store.results.get(f"{self._tenant}.{self._job}.{self._incarnation}.{seq}")
            if entry is not None:
                self._settle(_as_result(entry.value))
        if self._outstanding and (error := await self._ended()) is not None:
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error if isinstance(error, JobEndedError | Unreachable) else None
        outstanding, self._outstanding = self._outstanding, {}
        for pending in outstanding.values():
            pending.fail(error)


def _as_result(stored: Any) -> TrainResult:
    return stored if isinstance(stored, TrainResult) else RESULT_DECODER.decode(bytes(stored))
