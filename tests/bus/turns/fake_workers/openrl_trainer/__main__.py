"""A worker whose work on the device is a wait; its lease, its turns and its end are the real ones.

It behaves as its workload's name says. ``<home>/touches`` gets a line for everything it does on the device, and
``<home>/device/<assignment>`` exists while it is on it: a worker that finds more there than fits saw a double hold.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import click

from openrl_common import settings, worker
from openrl_common.turns import Moved

BEHAVIOUR = os.environ["OPEN_RL_WORKLOAD"].split("--")[1].split("-")[0]
ASSIGNMENT = os.environ["OPEN_RL_ASSIGNMENT"]
HOME = Path(os.environ["OPEN_RL_HOME"])
CAPACITY_BYTES = int((HOME / "capacity").read_text())
MARK = HOME / "device" / ASSIGNMENT
MARK.unlink(missing_ok=True)  # of a former process, which is gone


def say(what: str) -> None:
    with (HOME / "touches").open("a") as touches:
        touches.write(f"{time.time():.4f} {os.environ['OPEN_RL_WORKLOAD']} {ASSIGNMENT} {os.getpid()} {what}\n")


def enter() -> None:
    if not MARK.exists():
        MARK.parent.mkdir(exist_ok=True)
        MARK.write_text(os.environ["OPEN_RL_DEVICE_BYTES"])
        held = [int(path.read_text() or 0) for path in MARK.parent.iterdir()]
        if len(held) > 1 and sum(held) > CAPACITY_BYTES:
            say("double")
    say("touch")


async def park() -> Moved:
    if BEHAVIOUR == "unparkable":
        raise OSError("no room to park in")
    await asyncio.sleep(0.02)
    MARK.unlink()
    say("park")
    return Moved(1000, 0.02)


async def resume() -> Moved:
    say("resume")
    return Moved(1000, 0.01)


async def work(context: worker.WorkerContext) -> None:
    async with context.turn():  # as the real workers: inside its first turn, with nothing to park yet
        enter()
        await asyncio.sleep(6 if BEHAVIOUR == "loading" else 0)
        say("loaded")
    context.movers(park, resume)
    await context.ready({"can_park": "true"})
    while not context.stopping.is_set():
        async with context.turn():
            enter()
            if BEHAVIOUR == "hung":
                await asyncio.sleep(600)
            if BEHAVIOUR == "frozen":
                os.kill(os.getpid(), 19)
            for _ in range(10 if BEHAVIOUR == "long" else 1):
                await asyncio.sleep(0.02)
                await context.boundary()
                enter()
        await asyncio.sleep(0.6 if BEHAVIOUR == "idle" else 0.005)


@click.command()
@settings.settings(*worker.WORKER_SETTINGS)
def command(**parameters: object) -> None:
    worker.run_worker("trainer", settings.from_parameters(worker.WorkerSettings, parameters), work)


if __name__ == "__main__":
    sys.exit(command())
