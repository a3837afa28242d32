"""``openrl bench seats`` as a picture: latency over the offered rate, and where a grant's CPU goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from openrl_client.pictures import new_figure, save
from openrl_common.errors import Rejected

if TYPE_CHECKING:
    from openrl_client.bench.seats import SeatsReport


def check(path: Path) -> None:
    """Raises Rejected, before anything is measured: matplotlib is not installed, or the directory is not there."""
    new_figure()
    if not path.absolute().parent.is_dir():
        raise Rejected(f"--chart {path} cannot be written: {path.parent} is not a directory", code="usage")


def draw(report: SeatsReport, path: Path) -> None:
    """Write a picture (PNG, SVG, PDF by the suffix). Raises Rejected when the file cannot be written."""
    figure = new_figure(figsize=(11, 4))
    latency, cpu = figure.subplots(1, 2, width_ratios=[3, 2])
    points = sorted(
        [(point.rate_per_s, point.p50_ms, point.p99_ms) for point in report.curve]
        + [(report.rate_per_s, report.p50_ms, report.p99_ms)]
    )
    rates, p50s, p99s = zip(*points, strict=True)
    latency.plot(rates, p50s, marker="o", label="median")
    latency.plot(rates, p99s, marker="o", label="99th percentile")
    latency.axvline(report.grants_per_s, color="#636363", linestyle="--", linewidth=1)
    latency.annotate(
        f"saturated: {report.grants_per_s:.0f}/s", (report.grants_per_s, min(p50s)), rotation=90, ha="right", fontsize=8
    )
    latency.set(
        xlabel="grants a second offered", ylabel="ms from JobSubmitted to SeatBooked", yscale="log", xlim=(0, None)
    )
    latency.legend()
    names = list(report.cpu_ms_per_grant)
    bars = cpu.barh(names, [report.cpu_ms_per_grant[name] for name in names])
    cpu.bar_label(bars, fmt="%.1f", padding=2)
    cpu.margins(x=0.12)
    cpu.invert_yaxis()
    cpu.set(xlabel="CPU, ms a grant")
    figure.suptitle(
        f"{report.nodes} nodes, {report.seated_claims} claims seated; {report.machine.cores} cores "
        f"({report.machine.cpu}), {report.store.file_system}, every write synced; other processes took "
        f"{report.other_cores:g} cores",
        fontsize=9,
    )
    save(figure, path)
