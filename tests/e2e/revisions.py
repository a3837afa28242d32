"""What a run left behind, held against the invariants: every stored revision of every bucket, in order.

Buckets keep one value per key. ``keep_all`` makes them keep every revision for the length of a test, so that afterwards
the run is read back from the server itself: message by message in the order of the server's time stamps, which agrees
with cause and effect because a write is acknowledged before anything can follow from it. What worker processes wrote
down about themselves (``storm_workers``) is merged in by the same clock. The checkers are the simulation's.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil

from openrl_common.bus import Bus
from openrl_common.memory_server import MemoryServer, Network, Stored, Stream
from openrl_common.streams import BUCKETS
from simulation.invariants import Invariants
from simulation.settled import Settled
from simulation.virtual_time import EPOCH

BUCKET_STREAMS = tuple(f"KV_{bucket.name}" for bucket in BUCKETS)
MAX_TURN_S = 120.0
"""The ledger's ``--max-turn``."""
STREAMS = (*BUCKET_STREAMS, "OPENRL_EVENTS", "OPENRL_DLQ")


async def keep_all(bus: Bus) -> None:
    """From here on no revision is replaced."""
    for stream in BUCKET_STREAMS:
        config = (await bus.jetstream.stream_info(stream)).config
        config.max_msgs_per_subject = -1
        await bus.jetstream.update_stream(config)


class Revisions:
    """Everything stored, read from the first message on; ``read_on`` reads what came since."""

    def __init__(self) -> None:
        self.of: dict[str, list[Stored]] = {stream: [] for stream in STREAMS}

    async def read_on(self, bus: Bus) -> None:
        for stream, messages in self.of.items():
            state = (await bus.jetstream.stream_info(stream)).state
            if state.messages <= len(messages):
                continue
            start = messages[-1].seq + 1 if messages else 1
            async with (
                asyncio.timeout(60.0),
                contextlib.aclosing(bus.tail(stream=stream, subject=">", start_sequence=start)) as tail,
            ):
                async for each in tail:
                    messages.append(Stored(each.subject, each.body, each.headers, each.sequence, each.published_at))
                    if len(messages) >= state.messages:
                        break

    def lost(self) -> list[str]:
        """Revisions that another was written over, and that are not stored (E18).

        A sequence may be missing: its write met a full disk and was never acknowledged. Who writes by compare-and-swap
        names what stands there, so nothing that was acknowledged and built upon can be missing unseen.
        """
        found = []
        for stream in BUCKET_STREAMS:
            last: dict[str, int] = {}
            for each in self.of[stream]:
                over = each.headers.get("Nats-Expected-Last-Subject-Sequence")
                if over is not None and int(over) != last.get(each.subject, 0):
                    found.append(f"{each.subject}: {each.seq} was written over {over}, which is not stored")
                last[each.subject] = each.seq
        return found

    @property
    def num_stored(self) -> int:
        return sum(map(len, self.of.values()))


@dataclass
class Life:
    """One worker process by its own notes; what the checkers of the simulation ask of a worker."""

    launch: Any
    node: str
    pid: int
    notes: list[tuple[float, str]]
    runs_on: bool
    alive: bool = False
    touching: bool = False

    @property
    def started_at(self) -> float:
        return self.notes[0][0] - EPOCH

    def could_touch(self) -> bool:
        return self.alive


def read_lives(directory: Path) -> list[Life]:
    """The notes of every worker process. ``runs_on``: it runs now, so that it has no last moment yet."""
    lives = []
    for path in sorted(directory.iterdir()):
        assignment, pid, _ = path.name.split(".")
        lines = path.read_text().splitlines(keepends=True)
        if not lines or not lines[0].endswith("\n"):
            continue  # killed while it wrote its first line
        workload, node = lines[0].split()
        notes = [(float(line.split()[1]), line.split()[0]) for line in lines[1:] if line.endswith("\n")]
        launch = SimpleNamespace(assignment=assignment, workload=workload, devices=())
        lives.append(Life(launch, node, int(pid), sorted(notes), _runs(int(pid), assignment)))
    return [life for life in lives if life.notes]


def _runs(pid: int, assignment: str) -> bool:
    try:
        process = psutil.Process(pid)
        environment = process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
        return environment.get("OPEN_RL_ASSIGNMENT", "").rstrip() == assignment
    except psutil.Error:
        return False


@dataclass
class _Machine:
    node: str
    workers: dict[int, Life] = field(default_factory=dict)

    def alive(self) -> list[Life]:
        return [life for life in self.workers.values() if life.alive]


class Replay(Network):
    """Stands where the simulation's world stands for its checkers: the truth, the machines, the clock, the settings."""

    def __init__(self, limit: int) -> None:
        self.plan = SimpleNamespace(limit=limit, coresidency=True, max_turn_s=MAX_TURN_S)
        self.loop = SimpleNamespace(now_s=time.time() - EPOCH)
        self.server = MemoryServer(self)
        self.machines: dict[str, _Machine] = {}
        self.violations: list[str] = []
        self.invariants = Invariants(cast(Any, self))
        self.truth = self.invariants.truth
        self.settled = Settled(cast(Any, self))

    def violation(self, what: str) -> None:
        self.violations.append(f"{EPOCH + self.loop.now_s:.6f}: {what}")

    def limit_in_force(self) -> int:
        return int(self.plan.limit)

    def landed(self, stream: Stream, message: Stored, before: Stored | None) -> None:
        if stream.kv:
            self.invariants.written(stream, message, before)
        elif message.subject.endswith(".gone"):
            self.invariants.said_gone(message)

    def check(self, revisions: Revisions, lives: list[Life]) -> list[str]:
        """Invariants 1 to 6 at every revision and at every note of a worker: what does not hold."""
        sources = [_stored(stream, messages) for stream, messages in revisions.of.items()]
        sources += [_moments(life) for life in lives]
        for at, _, who, what in heapq.merge(*sources, key=lambda moment: moment[:2]):
            self.loop.now_s = at - EPOCH
            if isinstance(who, Life):
                self._noted(who, what)
            else:
                self.server.streams[who].store(what.subject, what.data, {}, self)
        return self.violations

    def _noted(self, life: Life, what: str) -> None:
        if what == "first":
            claim = self.truth.claim(self.invariants.claim_of(cast(Any, life)))
            life.launch.devices = claim.devices if claim is not None else ()
            self.invariants.worker_starts(cast(Any, life))
            machine = self.machines.setdefault(life.node, _Machine(life.node))
            machine.workers[id(life)] = life
            life.alive = True
        elif what == "touch":
            life.touching = True
            self.invariants.worker_touches(cast(Any, life))
        elif what == "last":
            life.alive = life.touching = life.runs_on

    def at_rest(self, revisions: Revisions, lives: list[Life]) -> Settled:
        """The checks of a system that has come to rest, on the last values alone."""
        for stream, messages in revisions.of.items():
            kept = self.server.streams[stream]
            for message in messages:
                kept.last[message.subject] = message
            if not kept.kv:
                kept.messages = messages
        for life in lives:
            machine = self.machines.setdefault(life.node, _Machine(life.node))
            life.alive = life.runs_on
            life.touching = life.alive and any(what == "touch" for _, what in life.notes)
            machine.workers[id(life)] = life
        return self.settled


def _stored(stream: str, messages: list[Stored]) -> Iterator[tuple[float, int, Any, Any]]:
    for each in messages:
        yield each.stored_at, 0, stream, each


def _moments(life: Life) -> Iterator[tuple[float, int, Any, Any]]:
    yield life.notes[0][0], 1, life, "first"
    for at, what in life.notes:
        if what == "touch":
            yield at, 1, life, what
    yield life.notes[-1][0], 2, life, "last"


async def consumers_behind(bus: Bus) -> list[str]:
    """Durable consumers of events with something undelivered or unacknowledged."""
    found = []
    for info in await bus.jetstream.consumers_info("OPENRL_EVENTS"):
        left = (info.num_pending or 0) + (info.num_ack_pending or 0)
        if info.config.durable_name and left:
            found.append(f"consumer {info.name} is behind by {left}")
    return found
