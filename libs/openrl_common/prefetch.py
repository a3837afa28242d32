"""A checkpoint is read into the page cache before it is loaded (R1), where that helps.

The problem: loaders map safetensors files and touch them page by page. Every miss waits for one read of the kernel's
read-ahead (128 KiB by default), a few at a time: on a file system with 10 ms of latency that is 25 MiB/s, whatever its
bandwidth. More threads that read() in large blocks do not help as much as they seem to, because the kernel turns every
read into the same small requests, one or two under way a thread. And fadvise(WILLNEED) on a large range reads its first
request only: the kernel trims it without a word (``force_page_cache_ra``).

The way here: every thread first asks for its whole block by WILLNEED in steps of what the kernel takes at once (after
fadvise(SEQUENTIAL), twice the read-ahead), which returns at once with all of them under way, and then reads the block,
which waits for them and tells about errors. Bytes are read and forgotten; what stays is the page cache.

Invariants: ``decide`` is pure, and its reason names the numbers it rests on; no more than ``THREADS`` blocks are under
way; an error names file and offset; on a cancellation no thread reads another piece.

Not here: loading. Not done: direct reads, which would leave nothing for the next process on this machine.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import click

from openrl_common.errors import Rejected
from openrl_common.host_memory import room
from openrl_common.page_cache import (
    NETWORK_FILE_SYSTEMS,
    file_system_of,
    is_fuse,
    is_resident,
    missing_ranges,
    read_ahead_bytes,
)
from openrl_common.quantities import format_bytes, format_seconds
from openrl_common.settings import setting
from openrl_common.tensors import checkpoint_files

THREADS = 32
BLOCK_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20
"""A thread's buffer: small enough to stay in a core's cache, and how often a cancellation is looked for."""
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


Report = Callable[[int, int], None]
"""Called with the bytes read and the bytes to read, from the reading threads, at most once a block."""


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


def prefetch(
    directory: Path, *, mode: PrefetchMode, report: Report | None = None, cancel: threading.Event | None = None
) -> Prefetched:
    """Decide, and read the safetensors files of a checkpoint directory if so decided. Blocking.

    Raises:
        Rejected: ``checkpoint-unreadable``: a read failed or ended early; file and offset are in the message.
    """
    if mode is PrefetchMode.OFF:
        return Prefetched(decision=Decision(False, "--prefetch is off"))
    try:
        files = checkpoint_files(directory)
    except Rejected as error:  # no safetensors: the loader will say whether it can do with what is there
        return Prefetched(decision=Decision(False, str(error)))
    with ExitStack() as opened:
        blocks, facts = _look(files, opened)
        decision = decide(mode, facts)
        if not decision.read:
            return Prefetched(decision=decision)
        if is_fuse(facts.file_system) and _forgets(blocks[0]):
            why = f"{facts.file_system} forgets what was read of a file when it is opened again"
            return Prefetched(decision=Decision(False, why))
        return _Reading(blocks, report, cancel or threading.Event()).run(decision)


@dataclass(frozen=True)
class _Block:
    path: Path
    fd: int
    offset: int
    num_bytes: int


def _look(files: tuple[Path, ...], opened: ExitStack) -> tuple[list[_Block], Facts]:
    """The blocks that are not in memory, or all where the kernel does not tell, and what to decide from."""
    blocks: list[_Block] = []
    total_bytes, known = 0, True
    for path in files:
        fd = _open(path)
        opened.callback(os.close, fd)
        size = os.fstat(fd).st_size
        total_bytes += size
        missing = missing_ranges(fd, size, BLOCK_BYTES)
        known = known and missing is not None
        blocks += [_Block(path, fd, *each) for each in (_all_blocks(size) if missing is None else missing)]
    memory = room()
    facts = Facts(
        file_system=_slowest(files),
        total_bytes=total_bytes,
        missing_bytes=sum(block.num_bytes for block in blocks) if known else None,
        available_bytes=memory.num_bytes,
        memory_bound=memory.bound,
    )
    return blocks, facts


class _Reading:
    """One run of the threads over the blocks, in the order of the files."""

    def __init__(self, blocks: list[_Block], report: Report | None, cancel: threading.Event) -> None:
        self._report = report
        self._cancel = cancel
        self._lock = threading.Lock()
        self._blocks: Iterator[_Block] = iter(blocks)
        self._total_bytes = sum(block.num_bytes for block in blocks)
        self._read_bytes = 0
        self._error: Exception | None = None
        self._num_threads = min(THREADS, len(blocks))

    def run(self, decision: Decision) -> Prefetched:
        started = time.monotonic()
        threads = [
            threading.Thread(target=self._work, name=f"prefetch {n}", daemon=True) for n in range(self._num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return Prefetched(
            decision=decision,
            read_bytes=self._read_bytes,
            seconds=time.monotonic() - started,
            cancelled=self._cancel.is_set() and self._read_bytes < self._total_bytes,
        )

    def _work(self) -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        try:
            while not self._stopped():
                with self._lock:
                    block = next(self._blocks, None)
                if block is None:
                    return
                self._read(block, buffer)
                with self._lock:
                    if self._report is not None:
                        self._report(self._read_bytes, self._total_bytes)
        except Exception as error:  # raised by run, in the thread that asked
            with self._lock:
                self._error = self._error or error

    def _stopped(self) -> bool:
        return self._cancel.is_set() or self._error is not None

    def _read(self, block: _Block, buffer: memoryview) -> None:
        end = block.offset + block.num_bytes
        step = _announce_reading(block.fd)
        if step:
            for offset in range(block.offset, end, step):
                os.posix_fadvise(block.fd, offset, min(step, end - offset), os.POSIX_FADV_WILLNEED)
        offset = block.offset
        while offset < end and not self._stopped():
            wanted = min(len(buffer), end - offset)
            try:
                count = os.preadv(block.fd, [buffer[:wanted]], offset)
            except OSError as error:
                raise _unreadable(block.path, offset, os.strerror(error.errno or errno.EIO)) from error
            if count == 0:
                raise _unreadable(block.path, offset, f"it ends there, and had {end} bytes or more when it was opened")
            offset += count
            with self._lock:
                self._read_bytes += count


def _announce_reading(fd: int) -> int:
    """Tell the kernel that the file is read in order; how many bytes it then takes at once, 0 where nobody can tell."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return 2 * read_ahead_bytes(fd)


def _all_blocks(size: int) -> list[tuple[int, int]]:
    return [(offset, min(BLOCK_BYTES, size - offset)) for offset in range(0, size, BLOCK_BYTES)]


def _slowest(files: tuple[Path, ...]) -> str:
    """The file system of the files; where they lie on several (a hub's cache has links), a network one if there is."""
    kinds = list(dict.fromkeys(file_system_of(path) for path in files))
    slow = [kind for kind in kinds if kind in NETWORK_FILE_SYSTEMS or is_fuse(kind)]
    return (slow or kinds)[0]


def _forgets(block: _Block) -> bool:
    """Whether the page cache of a file is gone when it is opened again, as FUSE has it unless told otherwise."""
    try:
        os.preadv(block.fd, [bytearray(1)], block.offset)
    except OSError:
        return False  # the reading proper will say so, with file and offset
    again = _open(block.path)
    try:
        return is_resident(again, block.offset) is False
    finally:
        os.close(again)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, 0, os.strerror(error.errno or errno.EIO)) from error


def _unreadable(path: Path, offset: int, why: str) -> Rejected:
    return Rejected(
        f"checkpoint file {str(path)!r} cannot be read at byte {offset:,}: {why}", code="checkpoint-unreadable"
    )
