"""One job's checkpoints over its life (R5): the newest at the start, the next when due, what is behind them trimmed.

    take     copy to the host (the device's thread) ─▶ write, fsync, rename (behind the training)
             ─▶ openrl_checkpoints ─▶ trim: the log before the older checkpoint, its payloads, old results

Invariants: nothing is trimmed before the newest checkpoint stands on disk and its record is written; what the older of
two needs stays; a disk that takes no checkpoint delays trimming and nothing else.

Not here: the files (checkpoints.py), the log (job_runner.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrl_common.bus import Bus
from openrl_common.errors import Rejected, Transient
from openrl_common.names import train_subject
from openrl_common.records import CheckpointRecord, JobRecord
from openrl_common.streams import TRAIN
from openrl_trainer.cadence import Cadence
from openrl_trainer.metrics import Metrics

if TYPE_CHECKING:  # torch is imported in the engine's thread, not here
    from openrl_trainer.checkpoints import Mark
    from openrl_trainer.engine import TrainEngine
    from openrl_trainer.state_file import State

log = logging.getLogger(__name__)

RESULTS_KEPT = 1024
"""Results behind the older checkpoint that may still be asked for; a client has at most 256 requests in flight."""

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class Checkpointer:
    """``payloads``: object name → stream sequence of entries that travelled by reference; the runner adds to it."""

    def __init__(self, bus: Bus, record: JobRecord, home: Path, cadence: Cadence, metrics: Metrics) -> None:
        self._bus = bus
        self._record = record
        self._home = home
        self._cadence = cadence
        self._metrics = metrics
        self.payloads: dict[str, int] = {}
        self.steps = 0
        """Optimizer steps since the last copy."""
        self.applied_seq = 0
        """The last entry whose result was stored."""
        self.lost_after = 0
        """With ``state-lost``: the entry after which nothing can be answered."""
        self.trimmed_seq = 0
        """Results up to this entry may be gone."""
        self._seq = 0
        self._last_at = time.monotonic()
        self._cost_s = 0.0
        self._writing = False

    @property
    def _key(self) -> str:
        return f"{self._record.tenant}.{self._record.job}"

    @property
    def directory(self) -> Path:
        from openrl_trainer.checkpoints import checkpoint_directory

        return checkpoint_directory(self._home, self._record.tenant, self._record.job, self._record.incarnation)

    # --- start ----------------------------------------------------------------------------------------------------

    async def restore(self, engine: TrainEngine, on_disk: InThread, on_device: InThread) -> Mark | None:
        """Put the engine where the newest checkpoint stood. None: there is none, the log is read from its start.

        Raises:
            Rejected: ``state-lost``: what is on disk cannot be used, or the log it needs is trimmed.
        """
        from openrl_trainer.checkpoints import read_newest

        known = await self._bus.store.checkpoints.get(self._key)
        trimmed = 0
        if known is not None and known.value.incarnation == self._record.incarnation:
            trimmed, self.lost_after = known.value.trimmed_before, known.value.seq
        newest: tuple[Mark, State] | None = None
        why = "there is none"
        try:
            newest = await on_disk(lambda: read_newest(self.directory, engine.parameters()))
        except Rejected as error:
            why = str(error)
            log.error("job %s: %s", self._key, why)
        if newest is None and not trimmed:
            return None  # the whole log is there
        if newest is None or newest[0].position < trimmed:
            raise Rejected(
                f"the log of job {self._key} begins at {trimmed}, and no checkpoint from there can be used ({why}):"
                " submit the job again, load_state takes a named state",
                code="state-lost",
            )
        mark, state = newest
        await on_device(lambda: engine.restore(state, mark.version, mark.halved_to))
        self._seq = mark.seq
        self.payloads = dict(mark.payloads)
        log.info("job %s goes on from the checkpoint of entry %d", self._key, mark.seq)
        return mark

    # --- take -----------------------------------------------------------------------------------------------------

    def due(self, seq: int) -> bool:
        """Whether entry ``seq`` is to be the last one of a new checkpoint. One at a time."""
        since = time.monotonic() - self._last_at
        return (
            not self._writing
            and seq > self._seq
            and self._cadence.due(since_s=since, steps=self.steps, cost_s=self._cost_s)
        )

    def copied(self, seq: int, seconds: float) -> None:
        """A copy was made: counting starts anew."""
        self._seq, self.steps, self._last_at = seq, 0, time.monotonic()
        self._cost_s = seconds
        self._writing = True

    async def write(self, mark: Mark, state: State, engine: TrainEngine, on_disk: InThread) -> None:
        """Write a copy, then trim what it makes superfluous."""
        from openrl_trainer.checkpoints import write_checkpoint

        started = time.monotonic()
        info = engine.state_info(mark.seq)
        try:
            size_bytes: int = await on_disk(lambda: write_checkpoint(self.directory, mark, state, info))
        except Rejected as error:
            self._metrics.checkpoint(error.code, 0, self._cost_s, 0.0)
            log.warning("job %s: checkpoint of entry %d not written: %s", self._key, mark.seq, error)
            return
        finally:
            self._cost_s += time.monotonic() - started
            self._writing = False
        write_s = time.monotonic() - started
        self._metrics.checkpoint("ok", size_bytes, self._cost_s - write_s, write_s)
        try:
            await self._trim(mark, size_bytes, write_s)
        except Transient as error:
            log.warning("job %s: not trimmed: %s; the next checkpoint will", self._key, error)

    async def _trim(self, newest: Mark, size_bytes: int, write_s: float) -> None:
        from openrl_trainer.checkpoints import KEPT, marks

        standing = marks(self.directory)
        older = standing[1] if len(standing) >= KEPT else None
        record = CheckpointRecord(
            tenant=self._record.tenant,
            job=self._record.job,
            incarnation=self._record.incarnation,
            seq=newest.seq,
            trimmed_before=older.position if older else 0,
            directory=str(self.directory),
            bytes=size_bytes,
            taken_at=time.time(),
            copy_seconds=self._cost_s - write_s,
            write_seconds=write_s,
        )
        await self._bus.store.checkpoints.put(self._key, record)
        if older is None:
            return
        self.trimmed_seq = max(self.trimmed_seq, older.seq - RESULTS_KEPT)
        await self._bus.purge(TRAIN.name, train_subject(self._record.tenant, self._record.job), before=older.position)
        for name in [name for name, sequence in self.payloads.items() if sequence < older.position]:
            await self._bus.delete_payload(name)
            del self.payloads[name]
        prefix = f"{self._key}.{self._record.incarnation}."
        await self._bus.store.results.keep_newest(prefix, max(0, self.applied_seq - older.seq) + RESULTS_KEPT)
