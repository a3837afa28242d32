"""What becomes of a delivered message: ack, nak or dead letter, decided by the class of its handler's error.

Invariants: that decision is made here and nowhere else; a cancelled handler gives its message back; a Bug is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import openrl_common.without_websockets  # noqa: F401

import msgspec
import nats.errors
from opentelemetry.trace import Span

from openrl_common import attributes
from openrl_common.errors import Bug, OpenRLError, Poison, Rejected, Transient
from openrl_common.events import EVENT_DECODER, AnyEvent
from openrl_common.pull import NETWORK_ERRORS
from openrl_common.telemetry import extract_context, tracer

if TYPE_CHECKING:
    from openrl_common.bus import Bus
    from openrl_common.connection import Received

log = logging.getLogger(__name__)
_TRACER = tracer(__name__)

_NAK_DELAYS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
_TRANSIENT_DELIVERIES_MAX = 1_000
_ENTITIES = {
    "job": attributes.JOB,
    "workload": attributes.WORKLOAD,
    "seat": attributes.WORKLOAD,
    "claim": attributes.CLAIM,
    "node": attributes.NODE,
}
_EVENT_TOKENS = 7


class Outcome(StrEnum):
    """What became of one delivery. AGAIN: it was given back, or the server was not told and delivers it again."""

    HANDLED = "handled"
    REJECTED = "rejected"
    AGAIN = "again"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as a handler sees it. ``sequence`` is its place in the stream; ``deliveries`` counts from 1.

    ``pending``: how many the consumer had behind it when it was delivered.
    """

    subject: str
    body: bytes
    headers: dict[str, str]
    sequence: int
    deliveries: int
    published_at: float
    message: Received
    pending: int = 0

    def event(self) -> AnyEvent:
        """Decode the body. Raises Poison when it is not an event of a known type."""
        try:
            return EVENT_DECODER.decode(self.body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Poison(f"message {self.sequence} on {self.subject} is not an event: {error}") from error

    async def in_progress(self) -> None:
        """Tell the server that the handler still works, so that the message is not delivered again."""
        with contextlib.suppress(*NETWORK_ERRORS):
            await self.message.in_progress()


Handler = Callable[[Delivery], Awaitable[None]]


def delivery_of(message: Received) -> Delivery:
    delivered = message.delivered
    return Delivery(
        subject=message.subject,
        body=message.data,
        headers=message.headers,
        sequence=delivered.sequence,
        deliveries=delivered.deliveries,
        published_at=delivered.stored_at,
        message=message,
        pending=delivered.pending,
    )


async def handle(bus: Bus, message: Received, handler: Handler, *, stream: str, durable: str, max_deliver: int) -> None:
    """Run ``handler`` on ``message`` of consumer ``durable``, and settle it. Raises Bug."""
    delivery = delivery_of(message)
    error: BaseException | None = None
    started = time.monotonic()
    if delivery.deliveries <= _TRANSIENT_DELIVERIES_MAX:
        try:
            with _TRACER.start_as_current_span(
                f"process {delivery.subject.rsplit('.', 1)[-1]}", context=extract_context(delivery.headers)
            ) as span:
                if span.is_recording():
                    _describe(span, delivery, stream, durable)
                await handler(delivery)
        except asyncio.CancelledError:
            with contextlib.suppress(*NETWORK_ERRORS, nats.errors.Error):
                await message.nak()
            raise
        except Bug:
            raise
        except Exception as caught:
            error = caught
    else:
        error = Poison("too many deliveries: the handler never finished")
    outcome = await _settle(bus, delivery, error, stream, durable, max_deliver)
    bus.on_settled(durable, outcome, time.time() - delivery.published_at, delivery.pending)
    log.debug(
        "handled subject=%s sequence=%d deliveries=%d seconds=%.4f error=%r",
        delivery.subject, delivery.sequence, delivery.deliveries, time.monotonic() - started, error,
    )  # fmt: skip


async def _settle(
    bus: Bus, delivery: Delivery, error: BaseException | None, stream: str, durable: str, max_deliver: int
) -> Outcome:
    message = delivery.message
    with contextlib.suppress(*NETWORK_ERRORS, nats.errors.Error):
        if error is None:
            await message.ack()
            return Outcome.HANDLED
        if isinstance(error, Rejected):
            log.info("rejected subject=%s: %s", delivery.subject, error)
            await message.ack()
            return Outcome.REJECTED
        limit = _TRANSIENT_DELIVERIES_MAX if isinstance(error, Transient) else max_deliver
        if isinstance(error, Poison) or delivery.deliveries >= limit:
            log.error("dead letter subject=%s sequence=%d: %s", delivery.subject, delivery.sequence, error)
            await _bury(bus, delivery, error, stream, durable)
            await message.term()
            return Outcome.DEAD
        if not isinstance(error, OpenRLError):
            log.error("handler failed subject=%s sequence=%d", delivery.subject, delivery.sequence, exc_info=error)
        await message.nak(delay=_NAK_DELAYS_S[min(delivery.deliveries, len(_NAK_DELAYS_S)) - 1])
    return Outcome.AGAIN


def _describe(span: Span, delivery: Delivery, stream: str, durable: str) -> None:
    """Of what the span is: attributes by which a trace is found (O2). An event's subject says whom it is about."""
    span.set_attributes(
        {
            attributes.MESSAGING_SYSTEM: attributes.MESSAGING_SYSTEM_NATS,
            attributes.MESSAGING_OPERATION_TYPE: "process",
            attributes.MESSAGING_DESTINATION_NAME: delivery.subject,
            attributes.MESSAGING_CONSUMER_GROUP_NAME: durable,
            attributes.MESSAGING_NATS_STREAM: stream,
            attributes.MESSAGING_NATS_SEQUENCE: delivery.sequence,
            attributes.DELIVERIES: delivery.deliveries,
        }
    )
    tokens = delivery.subject.split(".")
    if len(tokens) == _EVENT_TOKENS and tokens[1] == "ev":
        _, _, _, tenant, entity, entity_id, _ = tokens
        span.set_attribute(attributes.TENANT, tenant)
        if entity in _ENTITIES:
            span.set_attribute(_ENTITIES[entity], entity_id)


async def _bury(bus: Bus, delivery: Delivery, error: BaseException, stream: str, durable: str) -> None:
    headers = {key: value for key, value in delivery.headers.items() if not key.startswith("Nats-")}
    headers |= {
        "openrl-dlq-subject": delivery.subject,
        "openrl-dlq-stream": stream,
        "openrl-dlq-sequence": str(delivery.sequence),
        "openrl-dlq-consumer": durable,
        "openrl-dlq-deliveries": str(delivery.deliveries),
        "openrl-dlq-error": f"{type(error).__name__}: {error}".replace("\n", " ").replace("\r", " ")[:500],
    }
    await bus.publish_raw(
        f"openrl.dlq.{stream}.{durable}",
        delivery.body,
        message_id=f"dlq:{stream}:{durable}:{delivery.sequence}",
        headers=headers,
    )
