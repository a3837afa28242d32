"""A checkpoint is read into the page cache before and while it is loaded (R1), where that helps.

The problem: loaders map safetensors files and touch them page by page. Every miss waits for one read of the kernel's
read-ahead (128 KiB by default), a few at a time: on a file system with 10 ms of latency that is 25 MiB/s, whatever its
bandwidth. More threads that read() in large blocks do not help as much as they seem to, because the kernel turns every
read into the same small requests, one or two under way a thread. And fadvise(WILLNEED) on a large range reads its first
request only: the kernel trims it without a word (``force_page_cache_ra``). How it is done here: prefetch_reading.py.

    decide ─▶ not to read: everybody goes on at once
       └────▶ read, in the loader's order (prefetch_blocks.py) ─▶ end
                  └─ a loader beside it waits for each tensor (arriving.py)

Bytes are read and forgotten; what stays is the page cache, for all processes of the machine.

Invariants: ``decide`` is pure, and its reason names the numbers it rests on; an error names file and offset; nobody
waits for a reading that has ended or will not begin.

Not here: loading. Not done: direct reads, which would leave nothing for the next process on this machine.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import click

from openrl_common.errors import Rejected
from openrl_common.host_memory import room
from openrl_common.page_cache import NETWORK_FILE_SYSTEMS, file_system_of, is_fuse, is_resident
from openrl_common.prefetch_blocks import Blocks, blocks_of
from openrl_common.prefetch_reading import Reading, Report, unreadable
from openrl_common.quantities import format_bytes, format_seconds
from openrl_common.settings import setting
from openrl_common.tensors import checkpoint_files

_MEMORY_SHARE = 0.9
"""Share of the available memory that a checkpoint may take."""


class PrefetchMode(StrEnum):
    AUTO = "auto"
    ALWAYS = "always"
    OFF = "off"


PREFETCH = setting(
    "--prefetch",
    type=click.Choice([mode.value for mode in PrefetchMode]),
    default=PrefetchMode.AUTO.value,
    help="Read the checkpoint into the page cache before loading it. auto: on a network or FUSE file system, when "
    "it is not there already and fits in memory; always: wherever it is.",
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a decision rests on. ``missing_bytes`` None: the kernel does not tell what is in memory."""

    file_system: str
    total_bytes: int
    missing_bytes: int | None
    available_bytes: int
    memory_bound: str = "available on this machine"


@dataclass(frozen=True)
class Decision:
    read: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Prefetched:
    """What was decided and done; ``seconds`` of reading. ``cancelled``: told to stop before the end."""

    decision: Decision
    read_bytes: int = 0
    seconds: float = 0.0
    cancelled: bool = False

    def __str__(self) -> str:
        """One line for people."""
        if not self.decision.read:
            return f"not prefetched: {self.decision.reason}"
        rate = f", {format_bytes(int(self.read_bytes / self.seconds))}/s" if self.seconds > 0 else ""
        told = ", then told to stop" if self.cancelled else ""
        done = f"{format_bytes(self.read_bytes)} in {format_seconds(self.seconds)}{rate}{told}"
        return f"prefetched {done}: {self.decision.reason}"


def decide(mode: PrefetchMode, facts: Facts) -> Decision:
    """Whether to read, and why, in words that name the numbers. ``mode`` is not off."""
    missing = facts.total_bytes if facts.missing_bytes is None else facts.missing_bytes
    where = f"{format_bytes(missing)} of {format_bytes(facts.total_bytes)} to read from {facts.file_system}"
    slow = facts.file_system in NETWORK_FILE_SYSTEMS or is_fuse(facts.file_system)
    if missing == 0:
        return Decision(False, f"all of its {format_bytes(facts.total_bytes)} are in the page cache already")
    if mode is PrefetchMode.AUTO and not slow:
        return Decision(False, f"{facts.file_system} is no network or FUSE file system")
    memory = f"{format_bytes(facts.available_bytes)} of memory {facts.memory_bound}"
    if missing > facts.available_bytes * _MEMORY_SHARE:
        if mode is PrefetchMode.AUTO:
            return Decision(False, f"{where}, which does not fit in {memory}")
        return Decision(True, f"{where}, as --prefetch always says, though it does not fit in {memory}")
    return Decision(True, f"{where}, {memory}")


class Prefetch:
    """One checkpoint's way into the page cache. ``run`` once; ``wait_for`` and ``end`` from any thread."""

    def __init__(self, directory: Path, *, mode: PrefetchMode, report: Report | None = None) -> None:
        self._directory = directory
        self._mode = mode
        self._report = report
        self._decided = threading.Event()
        self._ended = False
        self._reading: Reading | None = None

    def run(self) -> Prefetched:
        """Decide, and read the safetensors files of the checkpoint if so decided. Blocking.

        Raises:
            Rejected: ``checkpoint-unreadable``: a read failed or ended early; file and offset are in the message.
        """
        with ExitStack() as opened:
            try:
                decision, self._reading = self._decide(opened)
            finally:
                self._decided.set()
            if self._reading is None:
                return Prefetched(decision=decision)
            if self._ended:
                self._reading.end()
            seconds = self._reading.run()
            return Prefetched(
                decision=decision,
                read_bytes=self._reading.read_bytes,
                seconds=seconds,
                cancelled=not self._reading.is_whole,
            )

    def wait_for(self, tensor: str) -> None:
        """Return when it is in the page cache as far as it will be. Raises as ``run``, if that is why it is not."""
        self._decided.wait()
        if self._reading is not None:
            self._reading.wait_for(tensor)

    def wait_for_all(self) -> None:
        """Return when nothing will be read any more. Raises as ``run``."""
        self._decided.wait()
        if self._reading is not None:
            self._reading.wait_for_all()

    def check(self) -> None:
        """Raise what the reading has met, if it has."""
        if self._reading is not None:
            self._reading.check()

    def end(self) -> None:
        """Read nothing more, and let everybody go who waits."""
        self._ended = True
        self._decided.set()
        if self._reading is not None:
            self._reading.end()

    def _decide(self, opened: ExitStack) -> tuple[Decision, Reading | None]:
        if self._mode is PrefetchMode.OFF:
            return Decision(False, "--prefetch is off"), None
        try:
            files = checkpoint_files(self._directory)
            blocks = blocks_of(files)
        except Rejected as error:  # not what is read here: the loader will say whether it can do with what is there
            return Decision(False, str(error)), None
        descriptors = {path: _open(path, opened) for path in files}
        there = [is_resident(descriptors[each.path], each.offset, each.num_bytes) for each in blocks.blocks]
        missing = [index for index, resident in enumerate(there) if not resident]
        facts = _facts(files, blocks, missing, known=None not in there)
        decision = decide(self._mode, facts)
        if decision.read and is_fuse(facts.file_system) and is_resident(descriptors[files[0]], 0, 1) is False:
            # Its header has just been read, and the file opened again.
            why = f"{facts.file_system} forgets what was read of a file when it is opened again"
            decision = Decision(False, why)
        return decision, Reading(blocks, missing, descriptors, self._report) if decision.read else None


def _facts(files: tuple[Path, ...], blocks: Blocks, missing: list[int], *, known: bool) -> Facts:
    memory = room()
    return Facts(
        file_system=_slowest(files),
        total_bytes=blocks.num_bytes,
        missing_bytes=sum(blocks.blocks[index].num_bytes for index in missing) if known else None,
        available_bytes=memory.num_bytes,
        memory_bound=memory.bound,
    )


def _slowest(files: tuple[Path, ...]) -> str:
    """The file system of the files; where they lie on several (a hub's cache has links), a network one if there is."""
    kinds = list(dict.fromkeys(file_system_of(path) for path in files))
    slow = [kind for kind in kinds if kind in NETWORK_FILE_SYSTEMS or is_fuse(kind)]
    return (slow or kinds)[0]


def _open(path: Path, opened: ExitStack) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, 0, os.strerror(error.errno or 0)) from error
    opened.callback(os.close, fd)
    return fd
