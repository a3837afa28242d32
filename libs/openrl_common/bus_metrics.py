"""What a service's ``/metrics`` say of its bus: deliveries by outcome, how late, what waits (O1, O4)."""

from __future__ import annotations

import functools

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from openrl_common.bus import Bus
from openrl_common.settlement import Outcome

_AGES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


def export_bus(bus: Bus, registry: CollectorRegistry) -> None:
    """Register the metrics of ``bus`` and keep them."""
    settled = Counter(
        "openrl_bus_deliveries",
        "Deliveries by what became of them: handled, rejected, again (given back), dead (a dead letter).",
        ["consumer", "outcome"],
        registry=registry,
    )
    age = Histogram(
        "openrl_bus_age_seconds",
        "From a message's storing to the end of its handling; a redelivery counts from the first.",
        ["consumer"],
        buckets=_AGES_S,
        registry=registry,
    )
    behind = Gauge("openrl_bus_pending", "Messages behind the one last settled.", ["consumer"], registry=registry)
    Gauge("openrl_bus_connected", "Whether it is connected to NATS.", registry=registry).set_function(
        lambda: float(bus.connected)
    )
    Gauge("openrl_bus_reconnects", "Connections lost and back.", registry=registry).set_function(
        lambda: float(bus.reconnects)
    )

    @functools.cache
    def of(consumer: str) -> tuple[dict[Outcome, Counter], Histogram, Gauge]:
        """Every outcome from the first delivery on: what first appears with 1 is no increase to Prometheus."""
        outcomes = {outcome: settled.labels(consumer, str(outcome)) for outcome in Outcome}
        return outcomes, age.labels(consumer), behind.labels(consumer)

    def count(consumer: str, outcome: Outcome, age_s: float, pending: int) -> None:
        outcomes, ages, waiting = of(consumer)
        outcomes[outcome].inc()
        ages.observe(max(0.0, age_s))
        waiting.set(pending)

    bus.on_settled = count
