"""``openrl drill rehearse`` and ``openrl drill reference``. The client's ``drill`` group loads them by name, on use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from openrl_client.cli.common import machine_readable, table
from openrl_client.drills import parse_jobs
from openrl_common import settings
from openrl_common.errors import Rejected
from openrl_rehearsal import profile as profiles
from openrl_rehearsal.plan import Plan
from openrl_rehearsal.rehearse import rehearse as run_rehearsal
from openrl_rehearsal.report import figures_table, header, summary, table_rows

PROFILE = click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    default=profiles.REFERENCE,
    help="Times of phases and steps, JSON or TOML. Default: the reference cluster's.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")

_RULES = settings.settings(
    replace(settings.DEVICES, help="Devices of the fleet, for example 6x79.65GiB."),
    replace(settings.HOST_MEMORY_BYTES, help="Host memory of each node. 0: not checked."),
    settings.MAX_SEATS_PER_CLAIM,
    settings.PLACEMENT_STRATEGY,
    settings.OWNER_AFFINITY,
    settings.PLACEMENT_TIMEOUT_S,
    settings.LORA_JOBS_PER_RUNTIME,
)


@click.command()
@click.option("--simulate", is_flag=True, help="On a virtual clock, with the times of a profile. Required for now.")
@click.option(
    "--jobs", required=True, help="KIND:MODEL:COUNT, several with commas: fft:qwen3-0.6b:6,lora:gemma-4-e2b:6"
)
@_RULES
@click.option(
    "--devices-per-node", type=settings.WholeNumber(1), default="8", show_default=True, help="Devices of one node."
)
@click.option("--co-residency", type=settings.SWITCH, default="on", show_default=True, help="Residents share a device.")
@click.option(
    "--device-reserve",
    "device_reserve_bytes",
    type=settings.BYTES,
    default="1GiB",
    show_default=True,
    help="Device memory that co-residents leave free.",
)
@click.option(
    "--max-turn", "max_turn_s", type=settings.SECONDS, default="120s", show_default=True, help="Longest turn."
)
@click.option("--warm", default="", help="Models whose LoRA runtimes are up before kickoff, with commas.")
@click.option(
    "--steps", "goal_steps", type=settings.WholeNumber(1), default="3", show_default=True, help="Steps of every job."
)
@click.option(
    "--within",
    "goal_within_s",
    type=settings.SECONDS,
    default="180s",
    show_default=True,
    help="The goal: all steps done so long after kickoff.",
)
@click.option("--shuffled", is_flag=True, help="Draw the order of submissions, and ids, from --seed.")
@click.option("--seed", type=settings.WholeNumber(), default="0", show_default=True, help="For --shuffled.")
@click.option(
    "--client-spacing",
    "client_spacing_s",
    type=settings.SECONDS,
    default=None,
    help="From one client's submission to the next. Default: the profile's.",
)
@click.option(
    "--sampler-asks-after",
    "sampler_asks_after_s",
    type=settings.SECONDS,
    default="0s",
    help="What if a sampler asked for its seat so long after its trainer?",
)
@PROFILE
@JSON
@click.option("--figures", is_flag=True, help="Also list every time of the profile with its basis.")
@click.option("--chart", "chart_path", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture (PNG).")
def rehearse(
    *,
    simulate: bool,
    jobs: str,
    devices: tuple[int, ...],
    warm: str,
    profile_path: Path,
    as_json: bool,
    figures: bool,
    chart_path: Path | None,
    **parameters: Any,
) -> None:
    """Rehearse a drill: would the jobs reach their goal on these devices, under these rules?"""
    if not simulate:
        raise click.UsageError("a drill on a running system is not built yet: add --simulate")
    if not devices:
        raise click.UsageError("which devices? write for example --devices 6x79.65GiB")
    profile = profiles.load(profile_path)
    plan = Plan(
        devices=devices,
        jobs=parse_jobs(jobs),
        warm=tuple(part.strip() for part in warm.split(",") if part.strip()),
        **parameters,
    )
    report = run_rehearsal(plan, profile)
    if chart_path is not None:
        from openrl_rehearsal.chart import draw

        draw(report, chart_path)
    if as_json:
        click.echo(machine_readable(report, "json"))
        return
    click.echo(table(header(), table_rows(report)))
    click.echo()
    click.echo("\n".join(summary(report)))
    if chart_path is not None:
        click.echo(f"chart: {chart_path}")
    if figures:
        click.echo()
        click.echo(table(["FIGURE", "VALUE", "BASIS", "WHY"], figures_table(list(profile.figures()))))


@click.command()
@PROFILE
@JSON
@click.option("--scan", "draws", type=settings.WholeNumber(), default="0", help="Draw the unmeasured figures so often.")
@click.option("--factor", type=click.FloatRange(1, 10), default=1.5, show_default=True, help="How far they may be off.")
@click.option("--seed", type=settings.WholeNumber(), default="1", show_default=True, help="Of the draws.")
def reference(*, profile_path: Path, as_json: bool, draws: int, factor: float, seed: int) -> None:
    """Rehearse the reference drills: what was measured, what the profile says, what other rules would change."""
    from openrl_rehearsal.reference import drills, scan

    profile = profiles.load(profile_path)
    try:
        rows = drills(profile)
    except Rejected as error:
        raise Rejected(f"the reference drills need the reference's models: {error}", code="bad-profile") from error
    scans = [
        scan(profile, draws=draws, seed=seed, factor=factor, shuffled=shuffled) for shuffled in (False, True) if draws
    ]
    if as_json:
        click.echo(machine_readable({"drills": rows, "scans": scans}, "json"))
        return
    cells = [
        [
            row.what,
            "" if row.measured is None else str(row.measured),
            str(row.rehearsed),
            " ".join(f"{count}×{kind}" for kind, count in row.by_kind.items()),
            f"{row.mean_s:.0f}",
            f"{row.last_ended_s:.0f}",
            str(row.switches),
        ]
        for row in rows
    ]
    click.echo(table(["DRILL", "MEASURED", "REHEARSED", "WHICH", "MEAN S", "LAST S", "SWITCHES"], cells))
    for each in scans:
        order = "any order of submissions" if each.shuffled else "submissions as listed"
        click.echo(
            f"\n{each.draws} draws, unmeasured figures off by up to ×{each.factor:g}, {order}:\n"
            f"  drill 3 {each.drill_3}, drill 4 {each.drill_4}\n"
            f"  {each.kept} agree with drills 3 and 4, of these drill 7 {each.drill_7}"
        )
