"""The engine loop: one thread that owns the engine, one piece of work on it at a time.

    until stopped:  apply what is due ─▶ start who may start ─▶ a burst of steps in the thread ─▶ answers
    beside it:      a watch over the step in hand; an engine that is stuck or raised is left, with its process (V11)

Invariants:
- only the engine's thread touches the engine's tensors, and every update is applied at a step boundary (V5);
- on a shared device (T1 to T6) the engine is touched inside its turn only; between two bursts it may be parked, with
  its running calls, and what waits for a version does not ask for the device (T3-T5, V5);
- on SIGTERM running calls finish, waiting ones are nak'ed (E17).

Not here: how tokens are made (engine), who may start (waiting), which update is due (updates), answers (requests).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import secrets
import time

from openrl_common.errors import Bug, Rejected
from openrl_common.turns import TurnStopped
from openrl_common.wire import ErrorInfo, SampleResult
from openrl_common.worker import WorkerContext
from openrl_sampler.engine import Engine, GenerateCall, Generated
from openrl_sampler.requests import Requests, call_of, info_of
from openrl_sampler.waiting import Versions, Waiter
from openrl_sampler.watchdog import StepWatch
from openrl_sampler.weights_keeper import InThread, WeightsKeeper

log = logging.getLogger(__name__)

BURST_S = 0.02
"""Steps run back to back at most this long before the loop looks at the line and the weights again."""
LOOK_S = 1.0
"""How often a wait for a version reads openrl_weights itself, whatever the mirror says (E5, E15)."""


class EngineLoop:
    """``run`` and ``watch`` side by side, until the context is stopping and nothing is in hand."""

    def __init__(
        self,
        context: WorkerContext,
        engine: Engine,
        requests: Requests,
        weights: WeightsKeeper,
        in_thread: InThread,
        watch: StepWatch,
        wake: asyncio.Event,
    ) -> None:
        self._context = context
        self._engine = engine
        self._requests = requests
        self._weights = weights
        self._in_thread = in_thread
        self._watch = watch
        self._wake = wake

    @property
    def _over(self) -> bool:
        return self._context.stopping.is_set() and not self._requests.in_hand

    async def run(self) -> None:
        waking = asyncio.create_task(self._wake_on_stop())
        try:
            while not self._over:
                self._wake.clear()
                if self._context.stopping.is_set():  # who has not started goes elsewhere
                    self._requests.give_back("the sampler is stopping", only=self._requests.line.drain())
                if not (self._context.lease_held and await self._work()):
                    await self._rest()
        finally:
            waking.cancel()
            self._weights.stop_announcing()

    async def watch(self) -> None:
        """Raises Bug when a step hangs or the engine died: the process ends, what it had in hand goes elsewhere."""
        pause_s = min(LOOK_S, self._watch.limit_s / 4)
        while not self._over:
            await asyncio.sleep(pause_s)
            if why := self._watch.check():
                faulthandler.dump_traceback(all_threads=True)  # where it hangs: into the worker's log
                why += " (--engine-stuck-after)"
            if why := why or self._engine.failure:
                await self._requests.engine_failed(why)
                raise Bug(f"{why}: it is replaced")

    async def _wake_on_stop(self) -> None:
        await self._context.stopping.wait()
        self._wake.set()

    async def _work(self) -> bool:
        """What there is to do on the device now, within one turn; False when there was nothing.

        A request that waits for a version does not ask for the device: the trainer may need it to make that version.
        """
        stopping = self._context.stopping.is_set()
        if not stopping:
            self._refuse_waiting()
        due = not stopping and self._weights.look_ahead()
        starts = not stopping and self._engine.room > 0 and self._requests.line.has_startable(**self._versions())
        if not (due or starts or self._engine.num_sequences):
            return False
        try:
            async with self._context.turn():
                await self._touch(stopping)
        except TurnStopped as stopped:
            self._requests.give_back(str(stopped))
        return True

    async def _touch(self, stopping: bool) -> None:
        """Updates, starts, steps: all that touches the engine."""
        try:
            if not stopping:
                await self._weights.apply_due()
                await self._start_waiting()
            if self._engine.num_sequences:
                await self._generate()
        except Exception as error:  # whatever an engine raises: what it had in hand is lost with it
            await self._requests.engine_failed(f"the engine broke: {type(error).__name__}: {error}")
            raise

    async def _generate(self) -> None:
        for key in self._requests.take_unwanted():
            await self._in_thread(lambda key=key: self._engine.abort(key))  # type: ignore[misc]
        for generated in await self._in_thread(self._burst):
            self._finish(generated)

    def _burst(self) -> list[Generated]:
        """In the thread: steps until a call ends, something waits at the door, or the time is up."""
        end = time.monotonic() + BURST_S
        while True:
            with self._watch.step():
                ended = self._engine.step()
            if ended or not self._engine.num_sequences or self._wake.is_set() or time.monotonic() > end:
                return ended

    async def _rest(self) -> None:
        """Nothing to generate: sleep until something changes, a deadline or a retry is due, or it is time to look."""
        line = self._requests.line
        times = [at for at in (line.wake_at(), self._weights.retry_at) if at is not None]
        timeout = max(0.02, min([*(at - time.time() for at in times), LOOK_S]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._wake.wait()
                return
        await self._weights.look({f"{w.request.tenant}.{w.request.job}" for w in line if w.wants_version})

    # --- the line ------------------------------------------------------------------------------------------------

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
        line = self._requests.line
        if not len(line):
            return []
        taken = line.take(time.time(), room=room, why_behind=self._weights.why_behind, **self._versions())
        for waiter, error in taken.refused:
            self._requests.resolve_error(waiter.key, error)
        return taken.start

    async def _start_waiting(self) -> None:
        engine = self._engine
        start = self._take(engine.room)
        for waiter in start:
            self._requests.in_hand[waiter.key].running = True
        calls = [call_of(waiter, secrets.randbits(63)) for waiter in start]
        if calls:
            for key, error in await self._in_thread(lambda: _add(engine, calls)):
                self._requests.resolve_error(key, error)

    def _finish(self, generated: Generated) -> None:
        in_hand = self._requests.in_hand.get(generated.request)
        if in_hand is None:
            return
        self._requests.resolve(
            generated.request,
            SampleResult(
                request=in_hand.waiter.request.request,
                sequences=generated.sequences,
                prompt_logprobs=generated.prompt_logprobs,
                prompt_top_logprobs=generated.prompt_top_logprobs,
                error=generated.error,
                seconds=time.monotonic() - in_hand.started,
            ),
        )


def _add(engine: Engine, calls: list[GenerateCall]) -> list[tuple[str, ErrorInfo]]:
    """Hand calls to the engine; returns those it could not take."""
    refused = []
    for call in calls:
        try:
            engine.add(call)
        except Rejected as error:
            refused.append((call.request, info_of(error)))
    return refused
