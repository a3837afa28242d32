"""The demo's report: report.json, a chart (PNG) and a page (HTML) around it.

report.json: ``jobs[]`` (``name``, ``kind``, ``phase``, held-out ``reward_before``, ``reward_after_sft`` and
``reward_after``, ``first_step_s`` from publish to the end of the first step, ``waits[]`` of ``reason`` and ``seconds``,
``phases``), ``claims[]`` (``claim``, ``limit``, ``max_seats``), ``seats[]`` over time. Times are seconds.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

import msgspec

from openrl_client.demo.watch import ClaimPeak, SeatCount


class JobReport(msgspec.Struct, kw_only=True):
    """One job. ``timeline``: (phase, start, end) in seconds since the demo's jobs were published."""

    name: str
    kind: str
    phase: str
    reward_before: float | None = None
    reward_after_sft: float | None = None
    reward_after: float | None = None
    first_step_s: float | None = None
    ready_s: float | None = None
    waits: list[dict[str, Any]] = []
    phases: dict[str, float] = {}
    grpo_step_seconds: dict[str, float] = {}
    timeline: list[tuple[str, float, float]] = []
    rewards: list[float] = []
    error: str = ""

    @property
    def gain(self) -> float | None:
        """What GRPO alone added to the held-out reward."""
        if self.reward_after is None or self.reward_after_sft is None:
            return None
        return self.reward_after - self.reward_after_sft


class Report(msgspec.Struct, kw_only=True):
    """Everything, as report.json has it."""

    jobs: list[JobReport]
    claims: list[ClaimPeak]
    seats: list[SeatCount]
    seconds: dict[str, float]
    share_of_time: dict[str, float]
    machine: dict[str, Any]
    passed: bool
    chart: str = ""
    page: str = ""


def share_of_time(jobs: list[JobReport]) -> dict[str, float]:
    """Share of all the jobs' time that each phase took (1 in all)."""
    total = sum(sum(job.phases.values()) for job in jobs)
    names = dict.fromkeys(name for job in jobs for name in job.phases)
    return {name: round(sum(job.phases.get(name, 0.0) for job in jobs) / total, 4) for name in names} if total else {}


def write(report: Report, directory: Path) -> Path:
    """Write chart, page and report.json; return the path of the last."""
    directory.mkdir(parents=True, exist_ok=True)
    chart = directory / "report.png"
    try:
        draw(report, chart)
        report.chart = str(chart)
    except ImportError:
        report.chart = ""  # without matplotlib (extra `report`) the page has the tables only
    page = directory / "report.html"
    page.write_text(render(report))
    report.page = str(page)
    path = directory / "report.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return path


def summary(report: Report) -> str:
    """The closing table as text."""
    from openrl_client.cli.common import table

    rows = []
    for job in report.jobs:
        waited: dict[str, float] = {}
        for wait in job.waits:
            waited[wait["reason"]] = max(waited.get(wait["reason"], 0.0), wait["seconds"])
        rows.append(
            [
                job.name,
                job.kind,
                job.phase,
                *(_number(value) for value in (job.reward_before, job.reward_after_sft, job.reward_after)),
                "" if job.gain is None else f"{job.gain:+.3f}",
                "" if job.first_step_s is None else f"{job.first_step_s:.1f} s",
                ", ".join(f"{reason} {seconds:.1f} s" for reason, seconds in waited.items() if seconds >= 0.05),
            ]
        )
    header = ["JOB", "KIND", "PHASE", "BEFORE", "AFTER SFT", "AFTER GRPO", "GRPO GAIN", "FIRST STEP", "LONGEST WAITS"]
    claims = [
        [peak.claim, f"{peak.max_seats}/{peak.limit or '∞'}", ",".join(peak.devices) or "none came free in time"]
        for peak in report.claims
    ]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in report.share_of_time.items())
    return "\n".join(
        [
            table(header, rows),
            "",
            table(["CLAIM", "MOST SEATS/LIMIT", "DEVICES"], claims),
            "",
            f"time of the jobs: {shares}",
            "seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in report.seconds.items()),
        ]
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def render(report: Report) -> str:
    """The page: chart, tables, waits."""
    picture = ""
    if report.chart:
        encoded = base64.b64encode(Path(report.chart).read_bytes()).decode()
        picture = f'<img alt="rewards, seats and phases over time" src="data:image/png;base64,{encoded}">'
    waits = "".join(
        f"<tr><td>{html.escape(wait['workload'])}<td>{html.escape(wait['reason'])}<td>{wait['since_s']:.1f}"
        f"<td>{wait['seconds']:.1f}<td>{html.escape(wait['message'])}"
        for job in report.jobs
        for wait in job.waits
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>OpenRL demo</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
pre {{ overflow-x: auto; background: #f6f6f4; padding: 1rem; }}
img {{ max-width: 100%; }}
td, th {{ text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }}
</style>
<h1>OpenRL demo: {"passed" if report.passed else "failed"}</h1>
{picture}
<pre>{html.escape(summary(report))}</pre>
<h2>Waits</h2>
<table><tr><th>workload<th>reason<th>from s<th>for s<th>why{waits}</table>
</html>
"""


def draw(report: Report, path: Path) -> None:
    """The chart: reward by step, held-out rewards, seats per claim, phases of each job. Raises ImportError."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 8), layout="constrained")
    colors = {job.name: plt.get_cmap("tab10")(index) for index, job in enumerate(report.jobs)}
    for job in report.jobs:
        axes[0][0].plot(_smooth(job.rewards), label=job.name, color=colors[job.name])
    axes[0][0].set(title="training reward (mean of 10 steps)", xlabel="GRPO step", ylim=(0, 1))
    axes[0][0].legend()
    _draw_bars(axes[0][1], report)
    _draw_seats(axes[1][0], report)
    _draw_timeline(axes[1][1], report, plt.get_cmap("Set2"))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _smooth(values: list[float], window: int = 10) -> list[float]:
    return [
        sum(values[max(0, index - window + 1) : index + 1]) / min(window, index + 1) for index in range(len(values))
    ]


def _draw_bars(axes: Any, report: Report) -> None:
    for offset, (field, label) in enumerate(
        (("reward_before", "before"), ("reward_after_sft", "after SFT"), ("reward_after", "after GRPO"))
    ):
        heights = [getattr(job, field) or 0.0 for job in report.jobs]
        places = [index + (offset - 1) * 0.27 for index in range(len(heights))]
        axes.bar_label(axes.bar(places, heights, width=0.25, label=label), fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(report.jobs)), [job.name for job in report.jobs])
    axes.set(title="held-out reward", ylim=(0, 1.05))
    axes.legend(loc="upper left", ncols=3, fontsize=8)


def _draw_seats(axes: Any, report: Report) -> None:
    """One row per claim that got a device: darker with every seat, grey while it waits; the holders written in."""
    end = report.seconds.get("jobs", 0.0)
    cut = [peak for peak in report.claims if peak.devices]
    for row, peak in enumerate(cut):
        changes = [change for change in report.seats if change.claim == peak.claim]
        ends = [change.at for change in changes[1:]] + [max(end, changes[-1].at if changes else end)]
        for change, until in zip(changes, ends, strict=True):
            width = until - change.at
            if change.seats and width > 0:
                alpha = min(1.0, 0.3 * change.seats) if change.allocated else 0.15
                color = "tab:blue" if change.allocated else "tab:gray"
                axes.barh(row, width, left=change.at, height=0.6, color=color, alpha=alpha)
            if change.seats and width > 0.15 * end:
                text = f"{change.seats}: {', '.join(change.holders)}{'' if change.allocated else ' (waits)'}"
                axes.text(change.at + 0.01 * end, row, text, va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(cut)), [f"{','.join(peak.devices)}\n{peak.claim[-6:]}" for peak in cut], fontsize=8)
    axes.invert_yaxis()
    limit = max((peak.limit for peak in cut), default=0)
    axes.set(title=f"seats per claim (limit {limit or 'none'})", xlabel="seconds since publish", xlim=(0, end or 1))


def _draw_timeline(axes: Any, report: Report, colors: Any) -> None:
    names = list(dict.fromkeys(name for job in report.jobs for name, _, _ in job.timeline))
    for row, job in enumerate(report.jobs):
        for name, start, end in job.timeline:
            axes.barh(row, end - start, left=start, color=colors(names.index(name)), height=0.6)
    for index, name in enumerate(names):
        axes.barh(0, 0, color=colors(index), label=name)
    axes.set_yticks(range(len(report.jobs)), [job.name for job in report.jobs])
    axes.invert_yaxis()
    axes.set(title="what each job did", xlabel="seconds since publish")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
