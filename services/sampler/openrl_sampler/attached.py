"""Which jobs this sampler serves, from the job records it has seen. Pure.

FFT: the one job of the workload record. LoRA: every job whose record names this workload as its sampler and has not
ended. Job keys are ``<tenant>.<job>.<incarnation>``, so a job submitted again under its old name is another job and can
never be served the old one's weights.
"""

from __future__ import annotations

from openrl_common.records import JobKind, JobRecord, WorkloadRecord
from openrl_sampler.updates import job_key


class AttachedJobs:
    """Feed it records with their revisions, in any order; read ``keys``."""

    def __init__(self, workload: WorkloadRecord) -> None:
        self._workload = workload
        self._records: dict[str, tuple[int, JobRecord]] = {}
        self.keys: frozenset[str] = frozenset()
        self._derive()

    def saw(self, key: str, record: JobRecord, revision: int) -> None:
        """Key ``<tenant>.<job>`` has this record at ``revision``. An older revision than the known one is ignored."""
        known = self._records.get(key)
        if known is None or revision >= known[0]:
            self._records[key] = (revision, record)
            self._derive()

    def gone(self, key: str) -> None:
        if self._records.pop(key, None):
            self._derive()

    def _derive(self) -> None:
        workload = self._workload
        if workload.kind is JobKind.FFT:
            self.keys = frozenset(f"{job}.{workload.incarnation}" for job in workload.jobs)
            return
        self.keys = frozenset(
            job_key(record.tenant, record.job, record.incarnation)
            for _, record in self._records.values()
            if record.sampler == workload.workload and not record.phase.ended
        )
