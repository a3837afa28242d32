"""Group commit: writes that wait for the same stream go out together, and are synced to the disk once.

JetStream syncs every stored message of a stream, one after the other (E18): some 2,000 a second on a disk, whatever
the number in flight. An atomic batch is synced once. It costs about as much as fifteen single messages (the server
stages it in a file store of its own), so a batch is a loss for a few writes and several times faster for many.
Hence: while few writes are under way each goes alone, as if this module were not there; those that find
``ALONE_MAX`` under way wait. Once ``GROUP_MIN`` wait, no more go alone, and when ``ALONE_LAST`` are left under way
all that have gathered leave as one batch.

Invariants: a write keeps its own conditions, its own answer and its own deadline, and nobody may count on what shares
its batch (E10: no rule rests on several keys changing together). Writes to one subject keep their order. A batch that
the server refuses, because of one conflict in it or because it knows no batches, stores nothing: its members then go
alone, and each meets its own error. A batch without an answer is an unknown outcome for each member (E7).

A conflict would spoil a whole batch, and most conflicts are with the process itself. So conditional writes to one
subject go one after the other, and one whose condition the landing of the one before has broken is not sent.

The server's side is ADR-50; nothing here knows NATS, ``connection`` sends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

ALONE_MAX = 16
ALONE_LAST = 4
GROUP_MIN = 16
GROUP_MAX = 128
GROUP_BYTES_MAX = 256 * 1024


@dataclass(frozen=True, slots=True)
class Write:
    """A message for a stream. ``timeout`` in seconds, of one try."""

    subject: str
    body: bytes
    headers: dict[str, str]
    timeout: float
    expected: int | None = None
    """The stream sequence that the last message of the subject must have; ``headers`` say so to the server."""


class Stale(Exception):
    """``expected`` stood no more: a write of this connection landed on the subject meanwhile. It was not sent."""


@dataclass(slots=True, eq=False)
class _Waiting:
    write: Write
    answer: asyncio.Future[int | None]
    """The stream sequence, or None: go alone."""
    goes_alone: bool = False


@dataclass(slots=True)
class _Line:
    """What one connection writes to one stream."""

    alone: int = 0
    group: asyncio.Task[None] | None = None
    waiting: deque[_Waiting] = field(default_factory=deque)
    behind: dict[str, deque[tuple[int, asyncio.Future[None]]]] = field(default_factory=dict)
    """Subjects with a conditional write under way, and the ones held back until it is over."""


class GroupCommit:
    """The lines of one connection, a stream each.

    Args:
        send_alone: stores one write and returns its stream sequence.
        send_group: stores all or nothing; returns the stream sequence of the last one (they stand one after another),
            or None when the server refused.
    """

    def __init__(
        self,
        send_alone: Callable[[Write], Awaitable[int]],
        send_group: Callable[[Sequence[Write]], Awaitable[int | None]],
    ) -> None:
        self._send_alone = send_alone
        self._send_group = send_group
        self._lines: dict[str, _Line] = {}
        self.grouped = 0
        self.refused = 0

    async def publish(self, write: Write) -> int:
        """Store ``write``, alone or with others; return its stream sequence.

        Raises:
            TimeoutError: no answer within ``write.timeout``; it may be stored.
            Stale: see there.
            Whatever ``send_alone`` and ``send_group`` raise.
        """
        line = self._lines.setdefault(_stream_of(write.subject), _Line())
        if write.expected is None:
            return await self._publish(line, write)
        await _take_turn(line, write, write.expected)
        sequence = None
        try:
            sequence = await self._publish(line, write)
        finally:
            _pass_turn(line, write.subject, sequence)
        return sequence

    async def _publish(self, line: _Line, write: Write) -> int:
        if line.alone < ALONE_MAX and not line.waiting and line.group is None:
            line.alone += 1
        else:
            sequence = await self._wait(line, write)
            if sequence is not None:
                return sequence
        try:
            return await self._send_alone(write)
        finally:
            line.alone -= 1
            self._advance(line)

    async def _wait(self, line: _Line, write: Write) -> int | None:
        waiting = _Waiting(write, asyncio.get_running_loop().create_future())
        line.waiting.append(waiting)
        self._advance(line)
        try:
            return await _within(waiting.answer, write.timeout)
        except BaseException:
            if waiting.goes_alone:  # told to go, and cancelled before it went
                line.alone -= 1
                self._advance(line)
            raise

    def _advance(self, line: _Line) -> None:
        """Let go whoever may go now."""
        while line.waiting and line.group is None:
            if len(line.waiting) >= GROUP_MIN:
                if line.alone > ALONE_LAST:
                    return  # the stream is busy with these: meanwhile more gather
                members = _take_group(line.waiting)
                if len(members) > 1:
                    line.group = asyncio.create_task(self._run_group(line, members), name="group commit")
                else:
                    _go_alone(line, members)
            elif line.alone < ALONE_MAX:
                _go_alone(line, [line.waiting.popleft()])
            else:
                return

    async def _run_group(self, line: _Line, members: Sequence[_Waiting]) -> None:
        try:
            last = await self._send_group([waiting.write for waiting in members])
            if last is None:
                self.refused += 1
                _go_alone(line, members)
                return
            self.grouped += len(members)
            for sequence, waiting in enumerate(members, start=last - len(members) + 1):
                if not waiting.answer.done():
                    waiting.answer.set_result(sequence)
        except Exception as error:
            for waiting in members:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
        finally:
            for waiting in members:
                if not waiting.answer.done():  # the connection is closing
                    waiting.answer.cancel()
            line.group = None
            self._advance(line)


def _take_group(waiting: deque[_Waiting]) -> list[_Waiting]:
    """Those in front, up to the limits. The first is always taken."""
    members: list[_Waiting] = []
    num_bytes = 0
    while waiting and len(members) < GROUP_MAX:
        num_bytes += len(waiting[0].write.body)
        if members and num_bytes > GROUP_BYTES_MAX:
            break
        first = waiting.popleft()
        if not first.answer.done():
            members.append(first)
    return members


def _go_alone(line: _Line, members: Sequence[_Waiting]) -> None:
    for waiting in members:
        if not waiting.answer.done():
            line.alone += 1
            waiting.goes_alone = True
            waiting.answer.set_result(None)


async def _take_turn(line: _Line, write: Write, expected: int) -> None:
    """Wait until no other conditional write to the subject is under way. Raises Stale, TimeoutError."""
    behind = line.behind.get(write.subject)
    if behind is None:
        line.behind[write.subject] = deque()
        return
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    behind.append((expected, turn))
    try:
        await _within(turn, write.timeout)
    except asyncio.CancelledError:
        if not turn.cancelled() and turn.exception() is None:  # it had the turn, and was cancelled before it went
            _pass_turn(line, write.subject, None)
        raise


def _pass_turn(line: _Line, subject: str, landed: int | None) -> None:
    """To the next one that still has a chance; ``landed`` is the sequence of the write that is over, if it is known."""
    behind = line.behind[subject]
    while behind:
        expected, turn = behind.popleft()
        if turn.done():
            continue
        if landed is None or expected >= landed:
            turn.set_result(None)
            return
        turn.set_exception(Stale())
    del line.behind[subject]


async def _within(answer: asyncio.Future[T], timeout: float) -> T:
    """Its result. Raises TimeoutError after ``timeout`` seconds; ``answer`` is done in any case."""
    timer = asyncio.get_running_loop().call_later(timeout, _expire, answer)
    try:
        return await answer
    finally:
        timer.cancel()


def _expire(answer: asyncio.Future[T]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


def _stream_of(subject: str) -> str:
    """Every stream and bucket has the first two tokens of its subjects to itself (``$KV.openrl_ledger``)."""
    first, _, rest = subject.partition(".")
    return f"{first}.{rest.partition('.')[0]}"
