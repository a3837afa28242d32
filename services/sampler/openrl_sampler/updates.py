"""Which weight updates are due (V5, V8), level-triggered: from what openrl_weights holds and what is applied. Pure.

Only the newest version of a job counts: versions published while one was applied are skipped. A version that failed is
tried again with growing delays, because its cause may pass (a full page cache, a shared file system that lags); it is
never given up and never blocks another job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from openrl_common.records import WeightsRecord

RETRY_FIRST_S = 1.0
RETRY_MOST_S = 30.0


def job_key(tenant: str, job: str, incarnation: int) -> str:
    """``<tenant>.<job>.<incarnation>``: a job submitted again under its old name is another job."""
    return f"{tenant}.{job}.{incarnation}"


@dataclass(frozen=True, slots=True)
class Failure:
    version: int
    attempts: int
    retry_at: float
    why: str


def due(
    records: Iterable[WeightsRecord],
    attached: Set[str],
    applied: Mapping[str, int],
    failures: Mapping[str, Failure],
    now: float,
) -> list[WeightsRecord]:
    """The records to apply now.

    Args:
        records: the newest of each job.
        attached: keys of the jobs served here; other jobs' records are ignored.
        applied: job key → version served (absent = 0).
    """
    chosen: list[WeightsRecord] = []
    for record in records:
        key = job_key(record.tenant, record.job, record.incarnation)
        failure = failures.get(key)
        waits = failure is not None and failure.version == record.version and now < failure.retry_at
        if key in attached and record.version > applied.get(key, 0) and not waits:
            chosen.append(record)
    return chosen


def failed(previous: Failure | None, version: int, why: str, now: float) -> Failure:
    attempts = previous.attempts + 1 if previous is not None and previous.version == version else 1
    delay = min(RETRY_MOST_S, RETRY_FIRST_S * 2.0 ** (attempts - 1))
    return Failure(version=version, attempts=attempts, retry_at=now + delay, why=why)


def next_retry_at(failures: Mapping[str, Failure]) -> float | None:
    return min((failure.retry_at for failure in failures.values()), default=None)
