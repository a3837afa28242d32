"""Whether a job's sampler and trainer agree (V12): the same tokens, the same weights, both sides' log-probabilities.

A policy gradient divides the one by the other; where they differ for any other reason than training, it learns that
difference. The client measures, because it alone sees both; the job's sampler is told, which warns above its limit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from openrl_client.errors import OpenRLError, Rejected
from openrl_common.names import agreement_subject
from openrl_common.wire import Agreement, AgreementVerdict, Datum, SamplingParams

if TYPE_CHECKING:
    from openrl_client.job import Job

log = logging.getLogger(__name__)


def differences(sampled: Iterable[float], trained: Iterable[float]) -> tuple[int, float, float, float]:
    """Number of tokens, mean and maximum of the absolute difference, and the k3 estimate of the KL; see ``Agreement``.

    Raises:
        Rejected: ``bad-request``: there are none, or not equally many.
    """
    try:
        gaps = [theirs - ours for ours, theirs in zip(sampled, trained, strict=True)]
    except ValueError as error:
        raise Rejected(
            "sampler and trainer gave numbers of log-probabilities that differ", code="bad-request"
        ) from error
    if not gaps:
        raise Rejected("no token was sampled to compare", code="bad-request")
    sizes = [abs(gap) for gap in gaps]
    kl = sum(math.exp(min(gap, 700.0)) - 1.0 - gap for gap in gaps) / len(gaps)
    return len(gaps), sum(sizes) / len(gaps), max(sizes), kl


async def measure(
    job: Job, prompts: list[list[int]], *, version: int, n: int = 2, max_tokens: int = 64, stop_token_ids: list[int]
) -> Agreement:
    """Sample with exactly ``version``, let the trainer score the tokens, compare, and tell the sampler.

    Args:
        version: what the trainer published last; nothing may have been trained since.

    Raises:
        What ``Job.sample`` and ``Job.forward`` raise. That the sampler could not be told is only logged.
    """
    params = SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0, stop_token_ids=stop_token_ids)
    result = await job.sample(prompts, params, exact=version)
    pairs = [(prompt, one) for prompt, group in zip(prompts, result.sequences, strict=True) for one in group]
    scored = (await job.forward([Datum(tokens=prompt + one.tokens) for prompt, one in pairs])).logprobs or []
    num_tokens, mean, largest, kl = differences(
        (logprob for _, one in pairs for logprob in one.logprobs),
        (logprob for (prompt, _), row in zip(pairs, scored, strict=True) for logprob in row[len(prompt) :]),
    )
    record = job.record
    agreement = Agreement(
        tenant=record.tenant, job=record.job, incarnation=record.incarnation, version=version,
        num_tokens=num_tokens, mean=mean, max=largest, kl=kl,
    )  # fmt: skip
    subject = agreement_subject(record.runtime_tenant, record.runtime)
    try:
        verdict = await job.client.bus.request(subject, agreement, AgreementVerdict)
    except OpenRLError as error:
        log.info("the sampler was not told how far it is from the trainer: %s", error)
        return agreement
    if verdict.above:
        log.warning(
            "job %s, weights version %d: log-probabilities of sampler and trainer differ by %.4f nats a token,"
            " the limit is %g", record.job, version, mean, verdict.limit,
        )  # fmt: skip
    return agreement
