"""A worker whose work is to say that it lives; its lease, its turns and its end are the real ones.

It writes down, with the clock that the server stamps messages with, every 50 ms that it lives and every time that it
touches the device. Its file is on another disk than the system's: it goes on when that one is full. A process was alive
at least from its first line to its last, so what is found against it is never a false alarm.

The first word of its job's name says how it ends: ``run`` and ``steady`` when it is told to, ``die`` again and again by
itself, ``flaky`` once by itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import click

from openrl_common import settings, worker
from openrl_common.turns import Moved

BEHAVIOUR = os.environ["OPEN_RL_WORKLOAD"].split("--")[1].split("-")[0]
ASSIGNMENT = os.environ["OPEN_RL_ASSIGNMENT"]
WITNESS = Path(os.environ["STORM_WITNESS"])
ALIVE_S = 0.05
DIES_AFTER_S = 0.7


class Notes:
    """This process' file: ``<assignment>.<pid>.<start>``, one word and one time in each line."""

    def __init__(self) -> None:
        self.first = not list(WITNESS.glob(f"{ASSIGNMENT}.*"))
        path = WITNESS / f"{ASSIGNMENT}.{os.getpid()}.{time.time_ns()}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._file, f"{os.environ['OPEN_RL_WORKLOAD']} {os.environ['OPEN_RL_NODE']}\n".encode())
        self.say("alive")

    def say(self, what: str) -> None:
        os.write(self._file, f"{what} {time.time():.6f}\n".encode())

    def say_alive(self) -> None:
        while True:
            self.say("alive")
            time.sleep(ALIVE_S)


async def _moved() -> Moved:
    return Moved(1000, 0.0)


async def work(context: worker.WorkerContext, notes: Notes) -> None:
    context.movers(_moved, _moved)
    began = time.monotonic()
    async with context.turn():
        notes.say("touch")
    await context.ready({"can_park": "true"})
    while not context.stopping.is_set():
        async with context.turn():
            notes.say("touch")
            await asyncio.sleep(0.02)
            notes.say("touch")
        dies = BEHAVIOUR == "die" or (BEHAVIOUR == "flaky" and notes.first)
        if dies and time.monotonic() - began > DIES_AFTER_S:
            print("RuntimeError: it dies", file=sys.stderr, flush=True)
            os._exit(3)
        await asyncio.sleep(0.1)


@click.command()
@settings.settings(*worker.WORKER_SETTINGS)
def command(**parameters: object) -> None:
    notes = Notes()
    threading.Thread(target=notes.say_alive, daemon=True).start()
    config = settings.from_parameters(worker.WorkerSettings, parameters)
    worker.run_worker("trainer", config, lambda context: work(context, notes))


if __name__ == "__main__":
    command()
