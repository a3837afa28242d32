"""Simulated trainers and samplers: a start in phases, then pieces of work on their device.

A trainer does one thing at a time, in the order asked (R4, R10); a sampler serves all its jobs at once (V10), as far as
the device's share allows (``devices``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from openrl_common.records import ClaimEntry, JobKind, ReadyRecord, Role
from openrl_rehearsal.agenda import Agenda
from openrl_rehearsal.devices import Piece, SharedDevice, Tenant
from openrl_rehearsal.profile import ModelTimes, Phase, Times, Work

_TRAINER_STATE_BYTES = {JobKind.FFT: 8, JobKind.LORA: 2}
_SAMPLER_STATE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Span:
    """Something a worker or a job did, or waited for."""

    name: str
    began_s: float
    ended_s: float


class FileCache:
    """Which models' files each node has in its page cache, and from when on (R1)."""

    def __init__(self, *, cached: bool) -> None:
        self._all = cached
        self._since: dict[tuple[str, str], float] = {}

    def seconds(self, node: str, model: str, phase: Phase, now: float) -> float:
        """How long this phase takes here: the first reader fills the cache, who comes meanwhile ends no earlier."""
        if phase.cold is None or self._all:
            return phase.time.seconds
        since = self._since.get((node, model))
        if since is None:
            self._since[node, model] = now + phase.cold.seconds
            return phase.cold.seconds
        return max(phase.time.seconds, since - now)


@dataclass(eq=False)
class Worker:
    """One assignment's process. ``on_ready`` is told once, when it serves."""

    agenda: Agenda
    assignment: str
    entry: ClaimEntry
    node: str
    model_name: str
    kind: JobKind
    model: ModelTimes
    times: Times
    device: SharedDevice
    files: FileCache
    on_ready: Callable[[ReadyRecord], None]
    spans: list[Span] = field(default_factory=list)
    is_ready: bool = False
    stopped: bool = False

    def __post_init__(self) -> None:
        trainer = self.entry.role is Role.TRAINER
        per_parameter = _TRAINER_STATE_BYTES[self.kind] if trainer else _SAMPLER_STATE_BYTES
        state_bytes = min(self.entry.device_bytes, int(per_parameter * self.model.parameters))
        self.tenant = Tenant(self.assignment, self.entry.owner, self.entry.device_bytes, state_bytes)
        self._queue: deque[tuple[Work, Callable[[float, float], None]]] = deque()
        self._serving = False
        self._did: set[int] = set()

    # --- start ---------------------------------------------------------------------------------------------------

    def start(self, pull_s: float) -> None:
        groups = [
            (on_device, list(phases))
            for on_device, phases in groupby(self.times.start(self.entry.role), key=lambda phase: phase.on_device)
        ]
        if pull_s > 0:
            self._span("image pull", self.agenda.now, self.agenda.now + pull_s)
        self.agenda.after(pull_s, self._next_phases, groups)

    def _next_phases(self, groups: list[tuple[bool, list[Phase]]]) -> None:
        if self.stopped:
            return
        if not groups:
            self.is_ready = True
            self.on_ready(ReadyRecord(assignment=self.assignment, workload=self.entry.workload, ready=True))
            return
        (on_device, phases), *rest = groups
        seconds = [self.files.seconds(self.node, self.model_name, phase, self.agenda.now) for phase in phases]
        if not on_device:
            self._stamp(phases, seconds, self.agenda.now, self.agenda.now + sum(seconds))
            self.agenda.after(sum(seconds), self._next_phases, rest)
            return
        total_s = sum(seconds)
        busy = sum(phase.busy * each for phase, each in zip(phases, seconds, strict=True)) / total_s if total_s else 1.0

        def done() -> None:
            self._waited(piece)
            self._stamp(phases, seconds, piece.began_at or 0.0, self.agenda.now)
            self._next_phases(rest)

        piece = Piece(self.tenant, total_s, busy, done, breakable=False)
        self.device.submit(piece)

    def _stamp(self, phases: list[Phase], seconds: list[float], began_s: float, ended_s: float) -> None:
        """Spans of phases that ran back to back: what slowed them down is spread evenly."""
        total_s = sum(seconds)
        at = began_s
        for phase, each in zip(phases, seconds, strict=True):
            until = at + ((ended_s - began_s) * each / total_s if total_s else 0.0)
            self._span(phase.name, at, until)
            at = until

    def _waited(self, piece: Piece) -> None:
        began_at = piece.began_at if piece.began_at is not None else self.agenda.now
        if began_at > piece.queued_at:
            self._span("turn", piece.queued_at, began_at)

    def _span(self, name: str, began_s: float, ended_s: float) -> None:
        self.spans.append(Span(name, began_s, ended_s))

    # --- work ----------------------------------------------------------------------------------------------------

    def ask(self, work: Work, done: Callable[[float, float], None]) -> None:
        """Do a piece of work; ``done(began, ended)`` when it is: its first moment on the device, and its last."""
        if self.stopped:
            return
        if self.entry.role is Role.SAMPLER:
            self._do(work, done)
            return
        self._queue.append((work, done))
        self._serve()

    def _serve(self) -> None:
        if self._queue and not self._serving:
            self._serving = True
            work, done = self._queue.popleft()

            def and_on(began_s: float, ended_s: float) -> None:
                self._serving = False
                self._serve()
                done(began_s, ended_s)

            self._do(work, and_on)

    def _do(self, work: Work, done: Callable[[float, float], None]) -> None:
        seconds = work.time.seconds
        if work.first is not None and id(work) not in self._did:
            self._did.add(id(work))
            seconds += work.first.seconds

        def finished() -> None:
            if not self.stopped:
                done(piece.began_at if piece.began_at is not None else self.agenda.now, self.agenda.now)

        piece = Piece(self.tenant, seconds, work.busy, finished)
        self.device.submit(piece)

    def stop(self) -> None:
        self.stopped = True
        self.device.leave(self.tenant)
