"""A job that can never run is told so at any backlog (W4): submissions are looked at while others stand before them.

While the consumer is behind, a second reader goes through the submissions in stream order and hands those that would be
refused for what they need to the same handler, before their turn. To the handler that is a message that comes twice:
the first time decides, the second changes nothing (E6).

Invariant: of one name, none is handed over while an earlier one in the backlog is undecided: names are given in the
stream's order.

Not here: the decision (``jobs``) and what a refusal says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator

from openrl_common.bus import Bus, Delivery
from openrl_common.errors import OpenRLError, Poison, Rejected
from openrl_common.events import JobSubmitted
from openrl_placement import jobs
from openrl_placement.estimator import Constants
from openrl_placement.models import Models
from openrl_placement.state import State

log = logging.getLogger(__name__)

_SUBJECT = "openrl.ev.client.*.job.*.submitted"
BEHIND_MIN = 64
"""Messages behind one that is handled from which on the backlog is read ahead: fewer have been pulled already."""
_AT_ONCE = 8
"""Models that are read, and refusals that are carried out, at the same time."""


class LookAhead:
    """``run`` reads; the consumer's handler says by ``in_hand`` where the backlog begins."""

    def __init__(
        self,
        bus: Bus,
        state: State,
        models: Models,
        constants: Constants,
        handle: Callable[[jobs.Submission], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._state = state
        self._models = models
        self._constants = constants
        self._handle = handle
        self._in_hand: set[int] = set()
        self._behind = asyncio.Event()
        self._start = 1
        self._before: defaultdict[str, list[str]] = defaultdict(list)
        """Of each name, in stream order, the submissions in the backlog that were undecided when last looked at."""
        self._slots = asyncio.Semaphore(_AT_ONCE)

    @contextlib.contextmanager
    def in_hand(self, delivery: Delivery) -> Iterator[None]:
        """The consumer's handler has this submission until the block ends."""
        self._in_hand.add(delivery.sequence)
        if delivery.pending < BEHIND_MIN:
            self._behind.clear()
        elif not self._behind.is_set():
            self._start = min(self._in_hand)
            self._behind.set()
        try:
            yield
        finally:
            self._in_hand.discard(delivery.sequence)

    async def run(self) -> None:
        """Until the bus is stopping."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._run(tasks))
            await self._bus.stopping.wait()
            reading.cancel()

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        while not self._bus.stopping.is_set():
            await self._behind.wait()
            self._before.clear()
            async with contextlib.aclosing(
                self._bus.tail(stream="OPENRL_EVENTS", subject=_SUBJECT, start_sequence=self._start)
            ) as backlog:
                async for delivery in backlog:
                    await self._look_at(delivery, tasks)
                    if delivery.pending == 0 and not self._behind.is_set():
                        break

    async def _look_at(self, delivery: Delivery, tasks: asyncio.TaskGroup) -> None:
        try:
            event = delivery.event()
        except Poison:
            return
        if not isinstance(event, JobSubmitted) or event.subject != delivery.subject:
            return
        name = f"{event.tenant}.{event.job}"
        before = [earlier for earlier in self._before[name] if not jobs.is_decided(self._state, name, earlier)]
        is_first = not before
        self._before[name] = [*before, event.submission]
        submission = jobs.Submission(event, delivery.sequence, delivery.published_at)
        if not is_first or delivery.sequence in self._in_hand or not jobs.wants_model(self._state, submission):
            return
        model = self._models.known(event.spec.base_model)
        if model is None or jobs.can_never_run(self._state, event, model, self._constants):
            await self._slots.acquire()
            tasks.create_task(self._hand_over(submission))

    async def _hand_over(self, submission: jobs.Submission) -> None:
        event = submission.event
        try:
            model = await self._models.read(event.spec.base_model)
            if isinstance(model, Rejected) or jobs.can_never_run(self._state, event, model, self._constants):
                await self._handle(submission)
        except OpenRLError as error:
            log.debug("left for its turn: %s", error)
        finally:
            self._slots.release()
