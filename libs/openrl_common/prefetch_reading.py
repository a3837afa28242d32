"""The threads that bring a checkpoint's blocks into the page cache (R1), and what waits for single tensors of it.

Every thread first asks for its whole block by WILLNEED in steps of what the kernel takes at once, which returns at once
with all of them under way; then it reads one byte of each piece, which waits for it. Nothing is copied: the kernel says
afterwards whether all of the block is there. Where it is not, or the kernel does not tell, the block is read through;
that also finds the byte at which a file cannot be read.

Invariants: no more than ``THREADS`` blocks are under way; the first error ends the reading, and is raised to everybody
who waits; nobody waits any more once the reading has ended, whatever ended it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from openrl_common.errors import Rejected
from openrl_common.page_cache import is_resident, read_ahead_bytes
from openrl_common.prefetch_blocks import Block, Blocks

THREADS = 32
_PIECE_BYTES = 1 << 20
"""A thread's buffer: small enough to stay in a core's cache, and how often a cancellation is looked for."""
_TOUCH_BYTES = 256 << 10
"""No kernel asks for less at once by default where it matters; where one does, the block is looked at in the end."""

Report = Callable[[int, int], None]
"""Called with the bytes that arrived and the bytes to read, from the reading threads, once a block."""


class Reading:
    """Blocks on their way. ``run`` in one thread, ``wait_for`` in any, ``end`` in any.

    Attributes:
        read_bytes: what has arrived.
    """

    def __init__(
        self, blocks: Blocks, missing: Iterable[int], opened: Mapping[Path, int], report: Report | None
    ) -> None:
        """``missing``: the indices of the blocks to read. ``opened``: the descriptors of the files."""
        self._blocks = blocks
        self._opened = opened
        self._steps = {path: announce_reading(fd) for path, fd in opened.items()}
        self._report = report
        self._changed = threading.Condition(threading.RLock())  # a report may end the reading
        self._to_come = sorted(missing)
        self._next = iter(self._to_come)
        self._to_wait_for = set(self._to_come)
        self._total_bytes = sum(blocks.blocks[index].num_bytes for index in self._to_come)
        self.read_bytes = 0
        self._error: Exception | None = None
        self._ended = False

    @property
    def is_whole(self) -> bool:
        return not self._to_wait_for

    def run(self) -> float:
        """Read until all is there or ``end`` is called; the seconds it took. Raises what a thread met first."""
        started = time.monotonic()
        threads = [
            threading.Thread(target=self._work, name=f"prefetch {number}", daemon=True)
            for number in range(min(THREADS, len(self._to_come)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.end()
        self.check()
        return time.monotonic() - started

    def end(self) -> None:
        """No thread reads another piece, and nobody waits any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, tensor: str) -> None:
        """Return when the tensor is in the page cache, or nothing will be read any more. Raises as ``run``."""
        self._wait(self._blocks.of_tensor.get(tensor, range(0)))

    def wait_for_all(self) -> None:
        """Return when nothing will be read any more. Raises as ``run``."""
        self._wait(range(len(self._blocks.blocks)))

    def check(self) -> None:
        """Raise what a thread has met, if one has."""
        if self._error is not None:
            raise self._error

    def _wait(self, needed: range) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped() or self._to_wait_for.isdisjoint(needed))
        self.check()

    def _work(self) -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        try:
            while not self._stopped():
                with self._changed:
                    index = next(self._next, None)
                if index is None:
                    return
                block = self._blocks.blocks[index]
                if self._bring(block, buffer):
                    self._arrived(index, block)
        except Exception as error:  # raised by run, in the thread that asked
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _arrived(self, index: int, block: Block) -> None:
        with self._changed:
            self._to_wait_for.discard(index)
            self.read_bytes += block.num_bytes
            if self._report is not None:
                self._report(self.read_bytes, self._total_bytes)
            self._changed.notify_all()

    def _stopped(self) -> bool:
        return self._ended or self._error is not None

    def _bring(self, block: Block, buffer: memoryview) -> bool:
        """Whether the block is there; False when told to stop before."""
        fd, step = self._opened[block.path], self._steps[block.path]
        if step:
            for offset in range(block.offset, block.end, step):
                os.posix_fadvise(fd, offset, min(step, block.end - offset), os.POSIX_FADV_WILLNEED)
            if self._touch(fd, block) and is_resident(fd, block.offset, block.num_bytes):
                return True
        return self._read_through(fd, block, buffer)

    def _touch(self, fd: int, block: Block) -> bool:
        try:
            for offset in range(block.offset, block.end, _TOUCH_BYTES):
                if self._stopped() or not os.pread(fd, 1, min(offset + _TOUCH_BYTES, block.end) - 1):
                    return False
        except OSError:
            return False  # reading it through will say so, and where
        return True

    def _read_through(self, fd: int, block: Block, buffer: memoryview) -> bool:
        offset = block.offset
        while offset < block.end:
            if self._stopped():
                return False
            try:
                count = os.preadv(fd, [buffer[: block.end - offset]], offset)
            except OSError as error:
                raise unreadable(block.path, offset, os.strerror(error.errno or errno.EIO)) from error
            if count == 0:
                why = f"it ends there, and had {block.end} bytes or more when it was opened"
                raise unreadable(block.path, offset, why)
            offset += count
        return True


def announce_reading(fd: int) -> int:
    """Tell the kernel that the file is read in order; how many bytes it then takes at once, 0 where nobody can tell."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return 2 * read_ahead_bytes(fd)


def unreadable(path: Path, offset: int, why: str) -> Rejected:
    return Rejected(
        f"checkpoint file {str(path)!r} cannot be read at byte {offset:,}: {why}", code="checkpoint-unreadable"
    )
