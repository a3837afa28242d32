"""The reference drills (D5): 12 jobs at once on six H100, and how far the profile can be trusted about them.

Drills 3 and 4 fitted the profile; drill 7 is predicted. The reference had neither co-residency nor owner affinity, so
its drills are rehearsed without. ``scan`` asks how much the prediction owes to the figures that nobody measured: it
draws all of them anew, keeps the draws that still give drills 3 and 4, and counts what these say of drill 7.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import msgspec

from openrl_client.drills import parse_jobs
from openrl_common.quantities import GIB
from openrl_rehearsal.plan import Plan
from openrl_rehearsal.profile import Basis, Figure, Part, Profile, Rate
from openrl_rehearsal.rehearse import rehearse

H100_BYTES = int(79.65 * GIB)
WARM = ("qwen3-0.6b", "gemma-4-e2b")
JOBS = "lora:qwen3-0.6b:3,fft:qwen3-0.6b:6,lora:gemma-4-e2b:3"
"""The order is fitted: drill 4 ends with seven only when the slower runtime finds no device left."""

DRILL_3 = Plan(
    devices=(H100_BYTES,) * 6, jobs=parse_jobs(JOBS), max_seats_per_claim=0, owner_affinity=False, co_residency=False
)
DRILL_4 = msgspec.structs.replace(DRILL_3, max_seats_per_claim=2)
DRILL_7 = msgspec.structs.replace(DRILL_4, warm=WARM)
MEASURED = {3: 3, 4: 7, 7: 8}
DRILLS = {3: DRILL_3, 4: DRILL_4, 7: DRILL_7}
_UNSURE = (Basis.ASSUMED, Basis.FITTED)


class DrillRow(msgspec.Struct, frozen=True, kw_only=True):
    """``measured`` None = nobody ran it. ``mean_s``: from submission to the end, over all jobs."""

    what: str
    measured: int | None
    rehearsed: int
    by_kind: dict[str, int]
    last_ended_s: float
    mean_s: float
    switches: int


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are keyed by how many of 12 jobs reached the goal."""

    draws: int
    factor: float
    shuffled: bool
    drill_3: dict[int, int]
    drill_4: dict[int, int]
    kept: int
    drill_7: dict[int, int]
    """Of the kept draws only: those in which drills 3 and 4 come out as measured."""


def row(what: str, plan: Plan, profile: Profile, measured: int | None = None) -> DrillRow:
    report = rehearse(plan, profile)
    took = [job.ended_s - job.submitted_s for job in report.jobs if job.ended_s and job.submitted_s is not None]
    return DrillRow(
        what=what,
        measured=measured,
        rehearsed=report.reached,
        by_kind=report.reached_by_kind,
        last_ended_s=report.last_ended_s,
        mean_s=round(sum(took) / len(took), 1) if took else 0.0,
        switches=report.switches,
    )


def drills(profile: Profile) -> list[DrillRow]:
    """The three drills as the reference ran them, then what this project's own rules change."""
    labels = {3: "drill 3: no limit", 4: "drill 4: limit 2", 7: "drill 7: limit 2, LoRA runtimes warm"}
    rows = [row(labels[number], plan, profile, MEASURED[number]) for number, plan in DRILLS.items()]
    for limit in (2, 3, 4):
        for co_residency in (False, True):
            for affinity, late_s in ((False, 0.0), (True, 0.0), (True, 0.1)):
                plan = msgspec.structs.replace(
                    DRILL_7,
                    max_seats_per_claim=limit,
                    co_residency=co_residency,
                    owner_affinity=affinity,
                    sampler_asks_after_s=late_s,
                )
                what = f"warm, limit {limit}, co-residency {_switch(co_residency)}, affinity {_switch(affinity)}"
                rows.append(row(what + (", sampler asks once its trainer sits" if late_s else ""), plan, profile))
    return rows


def scan(
    profile: Profile,
    *,
    draws: int,
    seed: int,
    factor: float = 1.5,
    shuffled: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Scan:
    """Multiply every assumed or fitted figure by its own number between 1/factor and factor, ``draws`` times.

    Args:
        shuffled: also draw the order in which the clients submit, and the ids of claims.
    """
    source = random.Random(seed)
    counts: dict[int, Counter[int]] = {number: Counter() for number in DRILLS}
    kept = 0
    for index in range(draws):
        drawn = _drawn(profile, source, factor)
        plan_seed = source.getrandbits(32)
        outcome = {number: _reached(DRILLS[number], drawn, shuffled, plan_seed) for number in (3, 4)}
        for number, reached in outcome.items():
            counts[number][reached] += 1
        if all(reached == MEASURED[number] for number, reached in outcome.items()):
            kept += 1
            counts[7][_reached(DRILL_7, drawn, shuffled, plan_seed)] += 1
        progress(index + 1)
    return Scan(
        draws=draws,
        factor=factor,
        shuffled=shuffled,
        drill_3=dict(sorted(counts[3].items())),
        drill_4=dict(sorted(counts[4].items())),
        kept=kept,
        drill_7=dict(sorted(counts[7].items())),
    )


def _reached(plan: Plan, profile: Profile, shuffled: bool, seed: int) -> int:
    return rehearse(msgspec.structs.replace(plan, shuffled=shuffled, seed=seed), profile).reached


def _drawn(profile: Profile, source: random.Random, factor: float) -> Profile:
    def draw(value: float, basis: Basis) -> float:
        return value * math.exp(source.uniform(-math.log(factor), math.log(factor))) if basis in _UNSURE else value

    def walk(part: Any) -> Any:
        if isinstance(part, Figure):
            return msgspec.structs.replace(part, seconds=draw(part.seconds, part.basis))
        if isinstance(part, Rate):
            return msgspec.structs.replace(part, gib_per_s=draw(part.gib_per_s, part.basis))
        if isinstance(part, Part):
            return msgspec.structs.replace(part, **{name: walk(getattr(part, name)) for name in part.__struct_fields__})
        if isinstance(part, tuple):
            return tuple(walk(each) for each in part)
        if isinstance(part, dict):
            return {name: walk(each) for name, each in part.items()}
        return part

    return cast(Profile, walk(profile))


def _switch(on: bool) -> str:
    return "on" if on else "off"
