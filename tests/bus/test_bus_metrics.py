"""O1, O4: ``/metrics`` count what becomes of deliveries, how old they are when handled, and how many wait."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from openrl_common import attributes, settlement
from openrl_common.bus import Bus, Delivery
from openrl_common.bus_metrics import export_bus
from openrl_common.errors import Poison, Rejected, Transient
from openrl_common.events import JobFinished
from support import until


async def test_O1_every_delivery_is_counted_once_by_what_became_of_it(bus: Bus) -> None:
    registry = CollectorRegistry()
    export_bus(bus, registry)
    errors = {"refused": Rejected("no"), "poison": Poison("never"), "later": Transient("not yet")}

    async def handle(delivery: Delivery) -> None:
        error = errors.pop(delivery.subject.split(".")[5], None)
        if error is not None:
            raise error

    def count(outcome: str) -> float:
        return registry.get_sample_value("openrl_bus_deliveries_total", {"consumer": "c", "outcome": outcome}) or 0

    for job in ("good", *errors):
        await bus.publish(JobFinished(tenant="t", job=job, submission="s"))
    consuming = asyncio.create_task(
        bus.consume(stream="OPENRL_EVENTS", durable="c", subjects=["openrl.ev.client.>"], handler=handle)
    )
    await until(lambda: count("handled") == 2)  # the good one, and the one that was to come again
    consuming.cancel()
    await asyncio.gather(consuming, return_exceptions=True)
    assert [count(outcome) for outcome in ("rejected", "dead", "again")] == [1, 1, 1]
    assert registry.get_sample_value("openrl_bus_age_seconds_count", {"consumer": "c"}) == 5
    assert registry.get_sample_value("openrl_bus_pending", {"consumer": "c"}) == 0
    assert registry.get_sample_value("openrl_bus_connected") == 1


async def test_O2_a_span_says_which_message_it_handled_and_whom_that_is_about(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(settlement, "_TRACER", provider.get_tracer("test"))

    async def handle(_: Delivery) -> None:
        return

    event = JobFinished(tenant="t", job="j", submission="s")
    await bus.publish(event)
    consuming = asyncio.create_task(
        bus.consume(stream="OPENRL_EVENTS", durable="c", subjects=["openrl.ev.client.>"], handler=handle)
    )
    await until(lambda: bool(kept.get_finished_spans()))
    consuming.cancel()
    await asyncio.gather(consuming, return_exceptions=True)
    (span,) = kept.get_finished_spans()
    said = dict(span.attributes or {})
    assert span.name == "process finished"
    assert (said[attributes.TENANT], said[attributes.JOB]) == ("t", "j")
    assert said[attributes.MESSAGING_DESTINATION_NAME] == event.subject
    assert (said[attributes.MESSAGING_CONSUMER_GROUP_NAME], said[attributes.DELIVERIES]) == ("c", 1)
    provider.shutdown()
