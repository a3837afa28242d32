"""Checkpoints on disk (R5): where a job's training stands, so that a restart replays only the tail of its log.

    <home>/checkpoints/<tenant>/<job>/<incarnation>/
        <seq>-<sha256>.safetensors     a state file (state_file.py): every entry up to ``seq`` is in it
        <seq>-<sha256>.json            its Mark: where the log goes on, which weights version is the newest
        load-<seq>.safetensors         the very file that entry ``seq``, a load_state, read (a hard link; a copy where
                                       none can be): the named state may be replaced or deleted since, and the replay
                                       needs it
        delete-<seq>.note              entry ``seq`` has found the state that it removes: when it is broken off and
                                       comes again, that is gone by its own hand

Invariants: the state file is written and fsynced under a temporary name and renamed; the mark, which comes last and the
same way, makes it a checkpoint; the name has its SHA-256, so that a damaged one is known and the one before it is used;
the newest ``KEPT`` stay. The log before the position of the older one is needed by nobody.

Not here: when (cadence.py), trimming the log (checkpointer.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch import Tensor

from openrl_common.errors import Rejected
from openrl_common.records import Record, StateInfo
from openrl_common.weights import hash_file
from openrl_trainer.files import copy_file, disk_errors, fsync_path, replace_file
from openrl_trainer.state_file import State, read_state, write_state

log = logging.getLogger(__name__)

KEPT = 2


class Mark(Record, frozen=True, kw_only=True):
    """What a checkpoint is of.

    Attributes:
        seq: the last log entry applied.
        position: stream sequence from which the log is to be read on.
        version: the newest weights version then.
        halved_to: the token budget since memory was short (TrainEngine), 0 = it never was.
        payloads: object name → stream sequence of entries that travelled by reference (R7) and whose payload may
            still be stored.
    """

    seq: int
    position: int
    version: int
    halved_to: int = 0
    payloads: dict[str, int] = {}  # noqa: RUF012 (msgspec copies defaults)


def checkpoint_directory(home: Path, tenant: str, job: str, incarnation: int) -> Path:
    return home / "checkpoints" / tenant / job / str(incarnation)


def write_checkpoint(directory: Path, mark: Mark, state: State, info: StateInfo) -> int:
    """Write a checkpoint and drop all but the newest ``KEPT``; returns its bytes.

    Raises:
        Rejected: ``disk-full`` or ``write-failed``; the checkpoints before it are untouched.
    """
    temporary = directory / f"writing-{mark.seq}.safetensors"
    with disk_errors(directory):
        try:
            size_bytes = write_state(temporary, state, info)
            stem = f"{mark.seq:012d}-{hash_file(temporary)}"
            temporary.rename(directory / f"{stem}.safetensors")
            replace_file(directory / f"{stem}.json", msgspec.json.encode(mark))
        finally:
            temporary.unlink(missing_ok=True)
    clean(directory)
    return size_bytes


def marks(directory: Path) -> list[Mark]:
    """The marks of the checkpoints that stand, newest first; whether their files are sound is not looked at."""
    return [mark for _, mark in _marked(directory)]


def read_newest(directory: Path, parameters: dict[str, Tensor]) -> tuple[Mark, State] | None:
    """The newest sound checkpoint; None when there is none at all.

    Raises:
        Rejected: ``bad-state``: there are some, and none can be used; why, of the oldest.
    """
    failure: Rejected | None = None
    for path, mark in _marked(directory):
        try:
            if hash_file(path) != path.stem.partition("-")[2]:
                raise Rejected(f"{path} has other bytes than were written", code="bad-state")
            return mark, read_state(path, parameters)[0]
        except OSError as error:
            failure = Rejected(f"{path} cannot be read: {error.strerror}", code="bad-state")
        except Rejected as error:
            failure = error
        log.error("checkpoint not usable: %s", failure)
    if failure is not None:
        raise failure
    return None


def pinned_load(directory: Path, seq: int) -> Path:
    return directory / f"load-{seq:012d}.safetensors"


def pin_load(directory: Path, seq: int, source: Path) -> Path:
    """The file that entry ``seq`` loads: ``source`` as it is now, or as it was when the entry was applied first."""
    pinned = pinned_load(directory, seq)
    with disk_errors(pinned):
        directory.mkdir(parents=True, exist_ok=True)
        if not pinned.exists() and source.is_file():
            try:
                os.link(source, pinned)
            except OSError as error:  # another file system, one without hard links, somebody else's file
                log.info("%s cannot be linked (%s), it is copied", source, error.strerror)
                copy_file(source, pinned)
            fsync_path(directory)
    return pinned if pinned.exists() else source


def finds_for_removal(directory: Path, seq: int, source: Path) -> bool:
    """Whether entry ``seq`` has a ``source`` to remove: it stands, or stood when the entry was applied first (E6).

    Called before the removal. A disk that takes no note is no reason to keep what would make room on it.
    """
    note = directory / f"delete-{seq:012d}.note"
    if note.exists():
        return True
    found = source.exists()
    if found:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            replace_file(note, b"")
    return found


def clean(directory: Path) -> None:
    """Drop checkpoints but the newest ``KEPT``, what only the log before them needed, and what killed writers left."""
    standing = _marked(directory)
    kept = {path.stem for path, _ in standing[:KEPT]}
    oldest = min((mark.seq for _, mark in standing[:KEPT]), default=0)
    for path in directory.glob("*"):
        kind, _, seq = path.stem.rpartition("-")
        if kind in ("load", "delete"):
            stale = seq.isdigit() and int(seq) <= oldest
        else:
            stale = path.suffix in (".safetensors", ".json") and path.stem not in kept
        if stale or path.suffix == ".writing":
            path.unlink(missing_ok=True)


def remove_ended(home: Path, is_over: Callable[[str, str, int], bool]) -> list[Path]:
    """Drop the checkpoints of jobs that are over (``is_over``: tenant, job, incarnation). Returns what was there."""
    gone = []
    for directory in sorted((home / "checkpoints").glob("*/*/*")):
        tenant, job, incarnation = directory.parts[-3:]
        if incarnation.isdigit() and is_over(tenant, job, int(incarnation)):
            shutil.rmtree(directory, ignore_errors=True)
            gone.append(directory)
    return gone


def _marked(directory: Path) -> list[tuple[Path, Mark]]:
    found = []
    for path in sorted(directory.glob("[0-9]*.json"), reverse=True):
        try:
            mark = msgspec.json.decode(path.read_bytes(), type=Mark)
        except (OSError, msgspec.MsgspecError) as error:
            log.error("checkpoint mark %s is not usable: %s", path, error)
            continue
        found.append((path.with_suffix(".safetensors"), mark))
    return found
