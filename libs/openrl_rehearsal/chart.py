"""A rehearsal as a picture: a few jobs as timelines, many as a curve of how many had reached the goal when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openrl_client.pictures import new_figure, save
from openrl_rehearsal.report import Report

TIMELINES_MAX = 60
_LANES = ("trainer", "sampler", "client")
_COLOURS = {
    "waiting": "#d9d9d9",
    "turn": "#b0b0b0",
    "image pull": "#8c6d31",
    "imports": "#9ecae1",
    "load": "#6baed6",
    "to device": "#4292c6",
    "engine": "#3182bd",
    "compile": "#2171b5",
    "capture": "#08519c",
    "sample": "#fdae6b",
    "reward": "#fee6ce",
    "train": "#31a354",
    "publish": "#c7e9c0",
    "apply": "#756bb1",
}
_OTHER = "#636363"


def draw(report: Report, path: Path) -> None:
    """Write a picture (PNG, SVG, PDF by the suffix).

    Raises:
        Rejected: matplotlib is not installed, or the file cannot be written.
    """
    shown = [job for job in report.jobs if job.timeline]
    few = 0 < len(shown) <= TIMELINES_MAX
    figure = new_figure(figsize=(11, 1.6 + 0.42 * len(shown) if few else 5))
    axes = figure.add_subplot()
    if few:
        _timelines(axes, report)
    else:
        _curve(axes, report)
    axes.axvline(report.plan.goal_within_s, color="#cb181d", linewidth=1.2)
    axes.set_xlabel("seconds since kickoff")
    axes.set_title(
        f"{report.reached} of {report.num_jobs} jobs finished {report.plan.goal_steps} steps within "
        f"{report.plan.goal_within_s:g} s (profile {report.profile}, simulated)",
        fontsize=10,
    )
    save(figure, path)


def _timelines(axes: Any, report: Report) -> None:
    from matplotlib.patches import Patch

    height = 0.8 / len(_LANES)
    seen: dict[str, str] = {}
    for index, job in enumerate(report.jobs):
        for row in job.timeline:
            if row.ended_s <= 0:
                continue
            colour = _COLOURS.get(row.name, _OTHER)
            seen[row.name] = colour
            began_s = max(0.0, row.began_s)
            top = index - 0.4 + _LANES.index(row.who) * height
            axes.broken_barh([(began_s, row.ended_s - began_s)], (top, height * 0.92), facecolors=colour)
        if job.reached:
            moment = job.steps_ended_s[report.plan.goal_steps - 1]
            axes.plot([moment], [index], marker="*", color="#cb181d", markersize=9, zorder=3)
    axes.set_yticks(range(len(report.jobs)), [job.job for job in report.jobs], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    names = [name for name in _COLOURS if name in seen] + [name for name in seen if name not in _COLOURS]
    axes.legend(
        handles=[Patch(facecolor=seen[name], label=name) for name in names],
        fontsize=7,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )


def _curve(axes: Any, report: Report) -> None:
    goal = report.plan.goal_steps
    moments = sorted(job.steps_ended_s[goal - 1] for job in report.jobs if len(job.steps_ended_s) >= goal)
    axes.step([0.0, *moments], range(len(moments) + 1), where="post")
    axes.set_ylabel(f"jobs with {goal} steps")
    axes.set_ylim(0, max(1, report.num_jobs))
    axes.set_xlim(left=0)
