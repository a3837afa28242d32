"""What a sampler counts, for /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from openrl_common.wire import SampleResult
from openrl_sampler.engine import Applied


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
            "openrl_sampler_weight_update_seconds", "Applying one version; generation stands still.", registry=registry
        )

        self.touched_share = Gauge(
            "openrl_sampler_weight_touched_share",
            "Share of the parameters' elements that the last update wrote: 1 for a whole version, a few percent for a"
            " delta; near 0 where the trainer changed several percent means that names were skipped.",
            registry=registry,
        )
        self.peak_extra_bytes = Gauge(
            "openrl_sampler_weight_peak_extra_bytes",
            "Memory that the last update took beside the weights.",
            registry=registry,
        )

        self.logprob_difference = Gauge(
            "openrl_sampler_logprob_difference",
            "Sampler against trainer on one version and the same tokens, nats a token, as last measured: mean, max.",
            ["statistic"],
            registry=registry,
        )
        self.logprob_limit = Gauge(
            "openrl_sampler_logprob_difference_limit", "The limit of the mean difference; 0: none.", registry=registry
        )
        self.disagreements = Counter(
            "openrl_sampler_disagreements", "Measurements whose mean difference was above the limit.", registry=registry
        )

    def count_update(self, applied: Applied) -> None:
        self.updates.labels("applied").inc()
        self.update_seconds.observe(applied.seconds)
        self.touched_share.set(applied.touched_share)
        self.peak_extra_bytes.set(applied.peak_extra_bytes)

    def count(self, result: SampleResult) -> None:
        self.requests.labels(result.error.code if result.error else "ok").inc()
        if result.error is None:
            self.tokens.inc(sum(len(sequence.tokens) for group in result.sequences for sequence in group))
            self.request_seconds.observe(result.seconds)
