"""``python -m simulation.run``: many schedules (``--seeds FIRST:END``), or one again with its trace (``--seed N``)."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from simulation.plan import draw_plan
from simulation.world import Outcome, World

_THRESHOLDS = (20_000, 5, 1_000)
_RUNS_A_COLLECTION = 16
_RUNS = itertools.count(1)


def simulate(seed: int, *, tracing: bool = False) -> Outcome:
    """One schedule, from its seed."""
    with _collected_apart():
        return World(draw_plan(seed), tracing=tracing).run()


@contextlib.contextmanager
def _collected_apart() -> Iterator[None]:
    """Garbage is looked for seldom, and only in what runs have made: collections took a fifth of the time before.

    Not never: then a run goes through ever new memory, which costs as much.
    """
    _set_apart_what_is_there()
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if next(_RUNS) % _RUNS_A_COLLECTION == 0:
            gc.collect()


@functools.cache
def _set_apart_what_is_there() -> None:
    gc.collect()
    gc.freeze()


def simulate_many(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Outcomes as they come, in ``jobs`` processes."""
    if jobs == 1:
        yield from map(simulate, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(simulate, seeds, chunksize=8)


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end)) if end else range(int(first))


def main() -> int:
    parser = argparse.ArgumentParser(description="Deterministic simulation of the scheduler.")
    parser.add_argument("--seeds", type=_seeds, default=range(200), help="how many, or FIRST:END (default 200)")
    parser.add_argument("--seed", type=int, help="replay this one and print its trace")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = simulate(arguments.seed, tracing=True)
        print("\n".join(outcome.trace))
        print(_summary(outcome))
        return 1 if outcome.violation else 0
    started, failed, done = time.monotonic(), 0, 0
    try:
        for outcome in simulate_many(arguments.seeds, arguments.jobs):
            done += 1
            if outcome.violation:
                failed += 1
                print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
            if done % 500 == 0:
                print(f"{done} schedules, {failed} failed", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        pass
    seconds = time.monotonic() - started
    print(f"{done} schedules, {failed} failed, {seconds:.1f} s ({done / max(seconds, 1e-9):.1f} a second)")
    return 1 if failed else 0


def _summary(outcome: Outcome) -> str:
    verdict = outcome.violation or "clean"
    return (
        f"seed {outcome.seed}: {verdict}\n  {outcome.num_workloads} workloads, {outcome.num_delivered} messages, "
        f"{outcome.num_writes} writes, {outcome.num_crashes} crashes, {outcome.virtual_s:.1f} virtual seconds, "
        f"digest {outcome.digest}"
    )


if __name__ == "__main__":
    sys.exit(main())
