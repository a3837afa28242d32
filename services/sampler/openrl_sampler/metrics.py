"""What a sampler counts, for /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from openrl_common.wire import SampleResult


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "openrl_sampler_requests",
            "Requests by outcome (ok, late, or the error's code).",
            ["outcome"],
            registry=registry,
        )
        self.tokens = Counter("openrl_sampler_tokens", "Tokens generated and answered.", registry=registry)
        self.request_seconds = Histogram(
            "openrl_sampler_request_seconds", "From acceptance to the answer.", registry=registry
        )
        self.updates = Counter(
            "openrl_sampler_weight_updates", "Weight updates by outcome.", ["outcome"], registry=registry
        )
        self.update_seconds = Histogram(
            "openrl_sampler_weight_update_seconds", "Verifying and applying one version.", registry=registry
        )

    def count(self, result: SampleResult) -> None:
        self.requests.labels(result.error.code if result.error else "ok").inc()
        if result.error is None:
            self.tokens.inc(sum(len(sequence.tokens) for group in result.sequences for sequence in group))
            self.request_seconds.observe(result.seconds)
