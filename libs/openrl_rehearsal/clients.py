"""Simulated clients: each submits one job, drives its steps when both workers are ready, and finishes it (C1).

submit ─▶ JobReady ─▶ (sample → reward → train → publish → apply) × steps ─▶ JobFinished ─▶ JobEnded
"""

from __future__ import annotations

from collections.abc import Callable

from openrl_common.events import Event, JobEnded, JobFailed, JobFinished, JobReady, JobSubmitted
from openrl_common.names import DEFAULT_TENANT
from openrl_common.records import JobKind, JobSpec, Role
from openrl_rehearsal.control import Control
from openrl_rehearsal.profile import ModelTimes, Times
from openrl_rehearsal.workers import Span, Worker


class Client:
    """One job. Times are seconds of the agenda; None = not yet, or never."""

    def __init__(
        self,
        control: Control,
        find_worker: Callable[[str], Worker | None],
        *,
        job: str,
        kind: JobKind,
        model_name: str,
        model: ModelTimes,
        times: Times,
        steps: int,
    ) -> None:
        self._control = control
        self._agenda = control.agenda
        self._find_worker = find_worker
        self.job = job
        self.kind = kind
        self.model_name = model_name
        self._model = model
        self._times = times
        self._steps = steps
        self.submitted_s: float | None = None
        self.ready_s: float | None = None
        self.step_ended_s: list[float] = []
        self.ended_s: float | None = None
        self.failure = ""
        self.spans: list[Span] = []

    @property
    def over(self) -> bool:
        return self.ended_s is not None

    def submit(self) -> None:
        self.submitted_s = self._agenda.now
        spec = JobSpec(name=self.job, kind=self.kind, base_model=self.model_name)
        event = JobSubmitted(tenant=DEFAULT_TENANT, job=self.job, submission=f"s-{self.job}", spec=spec)
        self._control.submit(event, self._model.model)

    def on_event(self, event: Event) -> None:
        if isinstance(event, JobReady) and self.ready_s is None:
            self.ready_s = self._agenda.now
            self._sample()
        elif isinstance(event, JobFailed):
            self.failure = f"{event.code}: {event.message}"
            self.ended_s = self._agenda.now
        elif isinstance(event, JobEnded) and self.ended_s is None:
            self.ended_s = self._agenda.now

    def finish(self) -> None:
        self._control.publish(JobFinished(tenant=DEFAULT_TENANT, job=self.job, submission=f"s-{self.job}"))

    def worker(self, role: Role) -> Worker | None:
        record = self._control.state.jobs.get(f"{DEFAULT_TENANT}.{self.job}")
        if record is None:
            return None
        return self._find_worker(record.trainer if role is Role.TRAINER else record.sampler)

    # --- one step ------------------------------------------------------------------------------------------------

    def _ask(self, role: Role, name: str, next_part: Callable[[], None]) -> None:
        asked_s = self._agenda.now
        worker = self.worker(role)
        assert worker is not None, f"job {self.job} is ready, but its {role} is not there"

        def done(began_s: float, ended_s: float) -> None:
            if began_s > asked_s:
                self.spans.append(Span("turn", asked_s, began_s))
            self.spans.append(Span(name, began_s, ended_s))
            next_part()

        worker.ask(getattr(self._times.step, name), done)

    def _pass_time(self, name: str, seconds: float, next_part: Callable[[], None]) -> None:
        self.spans.append(Span(name, self._agenda.now, self._agenda.now + seconds))
        self._agenda.after(seconds, next_part)

    def _sample(self) -> None:
        if len(self.step_ended_s) == self._steps:
            self.finish()
            return
        self._ask(Role.SAMPLER, "sample", self._reward)

    def _reward(self) -> None:
        self._pass_time("reward", self._times.step.reward.seconds, self._train)

    def _train(self) -> None:
        self._ask(Role.TRAINER, "train", self._publish)

    def _publish(self) -> None:
        self._pass_time("publish", self._times.step.publish.seconds, self._apply)

    def _apply(self) -> None:
        self._ask(Role.SAMPLER, "apply", self._step_done)

    def _step_done(self) -> None:
        self.step_ended_s.append(self._agenda.now)
        self._sample()
