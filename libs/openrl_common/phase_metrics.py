"""A worker's start on its ``/metrics``, phase by phase (O4). Read when it is scraped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from openrl_common.records import Phase


class PhaseMetrics(Collector):
    """``phases`` grows while the worker starts; those of one name are added up."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._phases = phases

    def collect(self) -> Iterator[GaugeMetricFamily]:
        seconds: defaultdict[str, float] = defaultdict(float)
        for phase in tuple(self._phases):
            seconds[phase.name] += phase.seconds
        family = GaugeMetricFamily("openrl_worker_phase_seconds", "Of this process's start.", labels=["phase"])
        for name, value in seconds.items():
            family.add_metric([name], value)
        yield family
