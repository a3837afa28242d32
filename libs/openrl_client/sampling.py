"""Sampling requests (V10): publish to the runtime's work queue, wait for the answer, try again when it is busy or lost.

Invariants: one call ends at its deadline; an attempt's message lives no longer than the attempt (its TTL), so that a
sampler never works on what nobody waits for; an attempt that was never answered is repeated under a new request id
with twice the window (generation has no side effects). A cancelled call tells the samplers, which stop working on it;
where that is lost, the attempt's end stops them.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from openrl_client.encoding import encode
from openrl_client.errors import Rejected, TimedOut, Transient
from openrl_client.write_watch import WriteWatch
from openrl_common.names import cancel_subject, sample_subject
from openrl_common.wire import SAMPLE_RESULT_DECODER, CancelSample, SampleRequest, SampleResult, SamplingParams

if TYPE_CHECKING:
    from openrl_common.bus import Bus
    from openrl_common.records import JobRecord

FIRST_ATTEMPT_S = 60.0
BUSY_BACKOFF_MAX_S = 5.0
IN_FLIGHT_MAX = 1024


class SampleClient:
    """Sends the sampling requests of one connection and matches answers by request id."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = ""
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        self._waiting: dict[str, asyncio.Future[SampleResult]] = {}
        self._watch = WriteWatch("sampling requests", bus.why_unwritten)

    async def start(self) -> None:
        self._inbox = self._bus.new_inbox()
        self._unsubscribe = await self._bus.subscribe(self._inbox, self._on_reply)

    async def close(self) -> None:
        if self._unsubscribe is not None:
            await self._unsubscribe()
        for future in self._waiting.values():
            future.cancel()

    async def _on_reply(self, body: bytes, headers: dict[str, str]) -> None:
        try:
            result = SAMPLE_RESULT_DECODER.decode(body)
        except msgspec.MsgspecError:
            return
        future = self._waiting.get(result.request)
        if future is not None and not future.done():
            future.set_result(result)

    async def sample(
        self,
        record: JobRecord,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        timeout_s: float,
        at_least: int | None = None,
        exact: int | None = None,
        ended: Callable[[], Awaitable[Exception | None]],
    ) -> SampleResult:
        """Return the completions of every prompt, in order. Cancel the task to take the request back.

        Raises:
            Rejected: the sampler's typed no (``bad-params``, ``too-long``, ``unknown-job``, ``version-not-served`` …);
                ``bad-request``: it cannot be sent.
            TimedOut: no answer within ``timeout_s``.
        """
        if len(self._waiting) >= IN_FLIGHT_MAX:
            raise Rejected(f"{IN_FLIGHT_MAX} sampling requests are in flight: await some", code="too-many-in-flight")
        deadline = time.monotonic() + timeout_s
        window_s = FIRST_ATTEMPT_S
        backoff_s = 0.05
        with self._watch.waiting():
            while (left_s := deadline - time.monotonic()) > 0:
                attempt_s = min(left_s, window_s)
                result = await self._attempt(record, prompts, params, attempt_s, at_least, exact)
                if result is None:
                    window_s *= 2
                    if (error := await ended()) is not None:
                        raise error
                elif result.error is None:
                    return result
                elif result.error.code == "busy":
                    await asyncio.sleep(min(left_s, backoff_s * random.uniform(0.5, 1.5)))
                    backoff_s = min(BUSY_BACKOFF_MAX_S, backoff_s * 2)
                elif result.error.code == "version-not-served" and at_least is not None and attempt_s < left_s:
                    window_s *= 2  # this attempt ended before the version came; the call has time left
                elif result.error.code != "deadline":
                    raise Rejected(result.error.message, code=result.error.code)
        raise TimedOut(
            f"job {record.job}: no completions within {timeout_s:.0f} s: see `openrl status` for its sampler, "
            "or raise timeout_s"
        )

    async def _attempt(
        self,
        record: JobRecord,
        prompts: list[list[int]],
        params: SamplingParams,
        attempt_s: float,
        at_least: int | None,
        exact: int | None,
    ) -> SampleResult | None:
        request = SampleRequest(
            request=uuid.uuid4().hex,
            tenant=record.tenant,
            job=record.job,
            incarnation=record.incarnation,
            prompts=prompts,
            params=params,
            deadline=time.time() + attempt_s,
            reply_to=self._inbox,
            at_least=at_least,
            exact=exact,
        )
        body = encode(request)
        future: asyncio.Future[SampleResult] = asyncio.get_running_loop().create_future()
        self._waiting[request.request] = future
        self._watch.tries()
        try:
            async with asyncio.timeout(attempt_s):
                await self._bus.publish_raw(
                    sample_subject(record.runtime_tenant, record.runtime, record.tenant),
                    body,
                    message_id=request.request,
                    ttl_s=attempt_s + 1,
                )
                self._watch.answered()
                return await future
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            if not future.done() or future.cancelled():  # not answered
                cancelled = msgspec.json.encode(CancelSample(request=request.request))
                await self._bus.send(cancel_subject(record.runtime_tenant, record.runtime), cancelled)
            raise
        except Rejected:
            self._watch.answered()
            raise
        except Transient as error:
            self._watch.failed(error)
            await asyncio.sleep(min(attempt_s, 0.5))
            return None
        finally:
            del self._waiting[request.request]
