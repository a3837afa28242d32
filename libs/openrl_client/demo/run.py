"""Runs the demo: a model, a system, four jobs at once, a report.

Interrupted at any moment it leaves nothing running: the jobs' tasks end, then the system's block ends every process.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrl_client.cli import first_cause
from openrl_client.connection import Client, connect
from openrl_client.demo import plan
from openrl_client.demo.report import JobReport, Report, share_of_time, summary, write
from openrl_client.demo.screen import Screen
from openrl_client.demo.watch import Watcher
from openrl_client.errors import OpenRLError
from openrl_client.metrics import Metrics
from openrl_client.recipes import run_recipe
from openrl_client.supervisor import LocalSystem, down
from openrl_client.tasks import load_task
from openrl_client.tiny import make_tiny_model
from openrl_client.tokenizer import Tokenizer
from openrl_common.names import DEFAULT_TENANT
from openrl_common.records import JobPhase


@dataclass(frozen=True)
class DemoSettings:
    """``home``: everything the demo writes. Steps and samples are per job."""

    home: Path
    base_steps: int
    sft_steps: int
    grpo_steps: int
    evaluation_samples: int
    seed: int
    engine: str = "auto"


@dataclass
class JobState:
    """A job of the mix while it runs; the screen reads it."""

    job: plan.DemoJob
    report: JobReport
    phase: str = "submitting"
    step: str = ""
    reward: str = ""
    seats: str = ""
    reason: str = ""
    since: float = 0.0
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def kind(self) -> str:
        return self.job.kind.value

    def begin(self, phase: str, at: float) -> None:
        """Close the phase that stands, open the next. ``at``: seconds since the jobs were published."""
        if at > self.since:
            self.report.timeline.append((self.phase, round(self.since, 3), round(at, 3)))
            self.report.phases[self.phase] = round(self.report.phases.get(self.phase, 0.0) + at - self.since, 3)
        self.phase, self.since = phase, at


class Demo:
    """One run."""

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        self.states = [JobState(job, JobReport(name=job.name, kind=job.kind.value, phase="")) for job in self._jobs]
        self.published_at = time.time()
        self.watcher: Watcher | None = None

    @property
    def _on_vllm(self) -> bool:
        return self.settings.engine.startswith("vllm")

    @property
    def _jobs(self) -> tuple[plan.DemoJob, ...]:
        return plan.JOBS_OF_VLLM if self._on_vllm else plan.JOBS

    @property
    def _now(self) -> float:
        return time.time() - self.published_at

    async def run(self) -> tuple[Report, Path]:
        """Make what is missing, run everything, write the report."""
        home = self.settings.home
        began = time.monotonic()
        seconds: dict[str, float] = {}
        async with Screen(self._rows) as screen:
            model = await self._model(screen)
            seconds["model"] = round(time.monotonic() - began, 2)
            system_home = home / "system"
            await asyncio.to_thread(clear, system_home)
            starting = time.monotonic()
            async with LocalSystem(system_home, progress=screen.line, environment=self._environment()) as system:
                seconds["system_up"] = round(time.monotonic() - starting, 2)
                async with connect(system.nats_url) as client:
                    await self._run_jobs(client, model, screen)
                    seconds["jobs"] = round(self._now, 2)
                ending = time.monotonic()
            seconds["system_down"] = round(time.monotonic() - ending, 2)
            screen.line("writing the report")
        seconds["all"] = round(time.monotonic() - began, 2)
        report = self._report(seconds)
        return report, write(report, home / "report")

    def _environment(self) -> dict[str, str]:
        """Settings of the services."""
        devices = plan.DEVICES_OF_VLLM if self._on_vllm else plan.DEVICES
        return {
            "OPEN_RL_DEVICES": ",".join(f"1x{size}" for size in devices),
            "OPEN_RL_MAX_SEATS_PER_CLAIM": str(plan.MAX_SEATS_PER_CLAIM),
            "OPEN_RL_LORA_IDLE": str(plan.LORA_IDLE_S),
            "OPEN_RL_TRAINER_HOST_BASE": str(plan.HOST_BASE_BYTES),
            "OPEN_RL_SAMPLER_HOST_BASE": str(plan.HOST_BASE_BYTES),
        }

    async def _model(self, screen: Screen) -> Path:
        """The tiny model, made once and kept."""
        model = self.settings.home / "models" / f"tiny-{self.settings.base_steps}"
        if not (model / "config.json").is_file():
            screen.line(f"making a tiny Qwen3 model and tokenizer in {model}")
            for state in self.states:
                state.phase = "model"
            await make_tiny_model(
                model, steps=self.settings.base_steps, on_line=self._model_line(screen), environment=dict(os.environ)
            )
        return model

    @staticmethod
    def _model_line(screen: Screen) -> Any:
        def on_line(line: str) -> None:
            if line.startswith("step"):
                screen.line(f"  {line}")

        return on_line

    def _rows(self) -> list[JobState]:
        for state in self.states:
            if self.watcher is not None and state.phase in ("submitting", "admitted", "starting", "waiting"):
                key = f"{DEFAULT_TENANT}.{state.name}"
                state.reason = self.watcher.standing_reason(key)
                state.seats = self.watcher.seats_of(key)
            else:
                state.reason = ""
        return self.states

    async def _run_jobs(self, client: Client, model: Path, screen: Screen) -> None:
        tokenizer = Tokenizer(model)
        self.published_at = time.time()
        for state in self.states:
            state.phase, state.since = "submitting", 0.0
        self.watcher = Watcher(self.published_at)
        await self.watcher.start(client)
        try:
            # A failed job does not end the others: the report says how each one ended.
            await asyncio.gather(*(self._run_job(client, state, model, tokenizer, screen) for state in self.states))
        finally:
            await self.watcher.close()

    async def _run_job(
        self, client: Client, state: JobState, model: Path, tokenizer: Tokenizer, screen: Screen
    ) -> None:
        report = state.report
        settings = plan.recipe_settings(
            state.job.kind,
            seed=self.settings.seed,
            sft_steps=self.settings.sft_steps,
            grpo_steps=self.settings.grpo_steps,
            evaluation_samples=self.settings.evaluation_samples,
        )
        path = self.settings.home / "report" / f"{state.name}.metrics.jsonl"
        path.unlink(missing_ok=True)
        try:
            with Metrics(path) as metrics:
                job = await client.submit(
                    state.job.spec(model, self.settings.seed, self.settings.engine), timeout_s=30.0
                )
                state.begin("waiting", self._now)
                await job.ready(on_progress=lambda progress: self._on_progress(state, progress))
                report.ready_s = round(self._now, 3)
                outcome = await run_recipe(
                    job,
                    "sft+grpo",
                    load_task(state.job.task),
                    tokenizer,
                    settings,
                    metrics,
                    on_step=lambda line: self._on_step(state, line),
                    on_phase=lambda phase, reward: self._on_phase(state, phase, reward),
                )
            report.reward_before = outcome.reward_before
            report.reward_after_sft = outcome.reward_after_sft
            report.reward_after = outcome.reward_after
            if outcome.first_step_at is not None:
                report.first_step_s = round(outcome.first_step_at - self.published_at, 3)
            state.begin("finishing", self._now)
            report.phase = (await job.finish()).phase.value
        except (OpenRLError, ExceptionGroup) as error:
            report.error = str(first_cause(error))
            report.phase = JobPhase.FAILED.value
            screen.line(f"{state.name}: {report.error}")
        state.begin(report.phase.lower(), self._now)
        state.seats = state.step = ""

    def _on_progress(self, state: JobState, progress: Any) -> None:
        workloads = [one for one in (progress.trainer, progress.sampler) if one is not None]
        placed = workloads and all(one.phase.value in ("Placed", "Starting", "Ready") for one in workloads)
        phase = "starting" if placed else "waiting"
        if phase != state.phase:
            state.begin(phase, self._now)

    def _on_phase(self, state: JobState, phase: str, reward: float | None) -> None:
        if phase != "done":
            state.begin(phase, self._now)
        state.step = ""
        if reward is not None and phase != "evaluate":
            state.reward = f"{state.reward} → {reward:.2f}".removeprefix(" → ")

    def _on_step(self, state: JobState, line: dict[str, Any]) -> None:
        steps = self.settings.sft_steps if line["recipe"] == "sft" else self.settings.grpo_steps
        state.step = f"{line['step'] + 1}/{steps}"
        if line["recipe"] == "grpo":
            state.report.rewards.append(round(line["reward"], 4))
            spent = state.report.grpo_step_seconds
            for name, seconds in line["seconds"].items():
                spent[name] = round(spent.get(name, 0.0) + seconds / self.settings.grpo_steps, 5)

    def _report(self, seconds: dict[str, float]) -> Report:
        jobs = [state.report for state in self.states]
        watcher = self.watcher
        assert watcher is not None
        for job in jobs:
            job.waits = watcher.waits_of(f"{DEFAULT_TENANT}.{job.name}", time.time())
        passed = all(
            job.phase == JobPhase.FINISHED.value and job.gain is not None and job.gain > plan.GAIN_MIN for job in jobs
        )
        return Report(
            jobs=jobs,
            claims=list(watcher.claims.values()),
            seats=watcher.seats,
            seconds=seconds,
            share_of_time=share_of_time(jobs),
            machine={"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
            passed=passed,
        )


def clear(system_home: Path) -> None:
    """End what a killed run left there, then start from nothing: every run shows the same thing."""
    if system_home.exists():
        down(system_home, progress=lambda line: None)
        shutil.rmtree(system_home)


def closing_lines(report: Report, path: Path) -> list[str]:
    """What is printed at the end; the last line names report.json."""
    lines = ["", summary(report), ""]
    for job in report.jobs:
        if job.error:
            lines.append(f"{job.name} failed: {job.error}")
        elif job.gain is None or job.gain <= plan.GAIN_MIN:
            gain = "nothing" if job.gain is None else f"{job.gain:.3f}"
            lines.append(f"{job.name}: GRPO gained {gain}, expected more than {plan.GAIN_MIN}")
    lines += [f"chart: {report.chart}" if report.chart else "chart: needs matplotlib (pip install matplotlib)"]
    return [*lines, f"page: {report.page}", f"report: {path}"]
