"""Whether sampler and trainer agree (V12), as clients measure it: they alone see both sides' log-probabilities.

    openrl.q.sampler.<tenant>.<runtime>.agreement ─▶ metrics; above the limit also a warning, SamplerDisagreed, and the
                                                     ready record's ``agreement`` (openrl status)

A measurement says nothing about who is wrong, so nothing is stopped: the alert is for a person. Recipes measure every
few steps (``openrl_client.agreement``).
"""

from __future__ import annotations

import logging

from openrl_common.errors import Rejected
from openrl_common.events import SamplerDisagreed
from openrl_common.names import agreement_subject
from openrl_common.wire import Agreement, AgreementVerdict
from openrl_common.worker import WorkerContext
from openrl_sampler.metrics import Metrics
from openrl_sampler.updates import job_key
from openrl_sampler.weights_keeper import WeightsKeeper

log = logging.getLogger(__name__)


class AgreementKeeper:
    """``limit``: of the mean difference, nats a token; 0 = none."""

    def __init__(self, context: WorkerContext, limit: float, weights: WeightsKeeper, metrics: Metrics) -> None:
        self._context = context
        self._limit = limit
        self._weights = weights
        self._metrics = metrics
        metrics.logprob_limit.set(limit)

    async def serve(self) -> None:
        """One replica hears each measurement."""
        workload = self._context.workload
        subject = agreement_subject(workload.tenant, workload.owner_name)
        await self._context.bus.serve(subject, Agreement, self._on_measured)

    async def _on_measured(self, measured: Agreement) -> AgreementVerdict:
        key = job_key(measured.tenant, measured.job, measured.incarnation)
        if key not in self._weights.jobs:
            raise Rejected(f"job {key} is not served here", code="unknown-job")
        self._metrics.logprob_difference.labels("mean").set(measured.mean)
        self._metrics.logprob_difference.labels("max").set(measured.max)
        above = 0 < self._limit < measured.mean
        what = (
            f"{key} version {measured.version}: mean {measured.mean:.5f}, max {measured.max:.5f}"
            f" over {measured.num_tokens} tokens"
        )
        if above:
            self._metrics.disagreements.inc()
            log.warning("sampler and trainer disagree: %s, the limit of the mean is %g", what, self._limit)
            self._weights.announce_later(
                SamplerDisagreed(
                    tenant=measured.tenant, job=measured.job, incarnation=measured.incarnation,
                    version=measured.version, assignment=self._context.assignment, mean=measured.mean,
                    max=measured.max, limit=self._limit,
                )
            )  # fmt: skip
            what += f", above the limit of {self._limit:g}"
        await self._context.note({"agreement": what})
        return AgreementVerdict(limit=self._limit, above=above)
