"""What a trainer measures (``/metrics``)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.jobs = Gauge("openrl_trainer_jobs", "Jobs this trainer serves.", registry=registry)
        self._entries = Counter(
            "openrl_trainer_entries_total",
            "Log entries applied, by outcome.",
            ["operation", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "openrl_trainer_entry_seconds",
            "From an entry's turn to its stored answer.",
            ["operation"],
            buckets=_SECONDS,
            registry=registry,
        )

        self._checkpoints = Counter(
            "openrl_trainer_checkpoints_total", "Checkpoints written, by outcome.", ["outcome"], registry=registry
        )
        self._checkpoint_bytes = Gauge(
            "openrl_trainer_checkpoint_bytes", "Size of the newest checkpoint.", registry=registry
        )
        self._checkpoint_seconds = Histogram(
            "openrl_trainer_checkpoint_seconds",
            "Of a checkpoint: copy (training stands still) and write (beside training).",
            ["part"],
            buckets=_SECONDS,
            registry=registry,
        )

    def checkpoint(self, outcome: str, size_bytes: int, copy_s: float, write_s: float) -> None:
        self._checkpoints.labels(outcome).inc()
        if outcome == "ok":
            self._checkpoint_bytes.set(size_bytes)
            self._checkpoint_seconds.labels("copy").observe(copy_s)
            self._checkpoint_seconds.labels("write").observe(write_s)

    def entry(self, operation: str, outcome: str, seconds: float) -> None:
        self._entries.labels(operation, outcome).inc()
        self._seconds.labels(operation).observe(seconds)
