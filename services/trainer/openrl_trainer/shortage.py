"""What a trainer leaves for its next life when memory was short where it could not go on (R2, R6, R14).

One rank of a sharded model that is short in the middle of a pass cannot tell the others, who wait for it in a
collective: the group ends. On any number of devices an optimizer step or a load_state that ran short has changed a part
of the state: only the log brings it back. So that no life ends there again and again, it writes down what comes next:
go on with half the budget, or refuse the entry.

    <checkpoints of the job>/short-<rank>.note
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from openrl_common.records import Record
from openrl_common.wire import LoadState, OptimStep
from openrl_trainer.files import replace_file

CHANGES_IN_PLACE = (OptimStep, LoadState)
"""Broken off, they leave a part of the state changed; of any other request the state is as before."""


class Shortage(Record, frozen=True, kw_only=True):
    """``halved_to``: the budget from now on, 0 = as it was; ``refused_seq``: the entry that is refused, 0 = none."""

    halved_to: int = 0
    refused_seq: int = 0


def leave(directory: Path, rank: int, shortage: Shortage) -> None:
    """A disk that takes no note costs another life, nothing else."""
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / f"short-{rank}.note", msgspec.json.encode(shortage))


def found(directory: Path) -> Shortage:
    """What all ranks of earlier lives left."""
    notes = []
    for path in directory.glob("short-*.note"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            notes.append(msgspec.json.decode(path.read_bytes(), type=Shortage))
    return Shortage(
        halved_to=min((note.halved_to for note in notes if note.halved_to), default=0),
        refused_seq=max((note.refused_seq for note in notes), default=0),
    )
