"""A read-only FUSE mount of a directory whose every read waits: a network file system with known latency and bandwidth.

    python -m openrl_client.bench.slow_mount SOURCE MOUNTPOINT --latency-ms 10

A read request (at most ``--max-read`` bytes, as the kernel splits them) is answered ``--latency-ms`` after it came, or
later when the requests before it keep the one link of ``--bytes-per-s`` busy. How many requests the kernel keeps under
way for page cache reads is ``--max-background``, the kernel's own default being 12; read-ahead is left as the kernel
has it. Sizes and names are answered at once. The source should lie in memory, so that no disk is measured.

For tests: ``--fail-at`` makes reads at and after that offset fail with EIO; ``--forgetful`` drops what is cached of a
file whenever it is opened, as FUSE file systems do that do not ask the kernel to keep it.

Runs in the foreground until it is unmounted (``fusermount3 -u``). Needs /dev/fuse, libfuse 3 and the right to mount.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from openrl_common.settings import BYTES, Directory, WholeNumber

MAX_READ_BYTES = 256 * 1024
BYTES_PER_S = 1 << 30
MAX_BACKGROUND = 12
_SERVERS = 512
"""Threads that answer; more than requests ever under way, so that nothing but latency and link bound them."""


class Link:
    """When the answer to a read may leave: a fixed latency, and one line that carries so many bytes a second."""

    def __init__(self, latency_s: float, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = 0.0
        self._lock = threading.Lock()

    def leaves_at(self, num_bytes: int) -> float:
        """On the clock; takes the line for ``num_bytes``."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
            return max(now + self._latency_s, self._free_at)


def _operations(source: Path, link: Link, *, max_read_bytes: int, max_background: int, fail_at: int) -> tuple[Any, Any]:
    """The directory, and the mount that serves it."""
    import mfusepy  # loads libfuse: only the process that mounts needs it

    class SlowDirectory(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def init_with_config(self, conn_info: Any, config_3: Any) -> None:
            conn_info.max_read = max_read_bytes
            conn_info.max_background = max_background
            conn_info.congestion_threshold = max(1, max_background * 3 // 4)

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            try:
                found = os.stat(fh) if fh else os.stat(self._real(path))
            except FileNotFoundError:
                raise mfusepy.FuseOSError(errno.ENOENT) from None
            kind = stat.S_IFDIR | 0o555 if stat.S_ISDIR(found.st_mode) else stat.S_IFREG | 0o444
            return {
                "st_mode": kind,
                "st_size": found.st_size,
                "st_nlink": 1,
                "st_mtime": found.st_mtime_ns,
                "st_uid": os.getuid(),
                "st_gid": os.getgid(),
            }

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *sorted(os.listdir(self._real(path)))]

        def opendir(self, path: str) -> int:
            return 0

        def open(self, path: str, flags: int) -> int:
            return os.open(self._real(path), os.O_RDONLY)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            raise NotImplementedError("SlowMount.read answers")

        @staticmethod
        def _real(path: str) -> Path:
            return source / path.lstrip("/")

    class SlowMount(mfusepy.FUSE):  # type: ignore[misc]
        def read(self, path: bytes | None, buf: Any, size: int, offset: int, fip: Any) -> int:
            """Straight into the kernel's answer: a copy more would cost a tenth of a core at the link's full speed."""
            leaves_at = link.leaves_at(size)
            if fail_at and offset + size > fail_at:
                return -errno.EIO
            room = (ctypes.c_char * size).from_address(ctypes.addressof(buf.contents))
            count = os.preadv(fip.contents.fh, [room], offset)
            time.sleep(max(0.0, leaves_at - time.monotonic()))
            return count

    return SlowDirectory(), SlowMount


@click.command(help=__doc__)
@click.argument("source", type=Directory())
@click.argument("mountpoint", type=Directory())
@click.option("--latency-ms", type=click.FloatRange(min=0), default=10.0, show_default=True)
@click.option("--bytes-per-s", type=BYTES, default="1GiB", show_default=True)
@click.option("--max-read", "max_read_bytes", type=BYTES, default="256KiB", show_default=True)
@click.option("--max-background", type=WholeNumber(1), default=str(MAX_BACKGROUND), show_default=True)
@click.option("--fail-at", type=BYTES, default="0", help="Reads from this offset fail; 0 = none.")
@click.option("--forgetful", is_flag=True, help="What is cached of a file is dropped when it is opened.")
def main(
    source: Path,
    mountpoint: Path,
    latency_ms: float,
    bytes_per_s: int,
    max_read_bytes: int,
    max_background: int,
    fail_at: int,
    forgetful: bool,
) -> None:
    link = Link(latency_ms / 1000, bytes_per_s)
    operations, mount = _operations(
        source, link, max_read_bytes=max_read_bytes, max_background=max_background, fail_at=fail_at
    )
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.mallopt(_M_MMAP_THRESHOLD, 64 << 20)  # a buffer per read from the heap, not a mapping each
    libc.mallopt(_M_TRIM_THRESHOLD, 512 << 20)
    mount(
        operations,
        str(mountpoint),
        foreground=True,
        ro=True,
        fsname="openrl-slow",
        subtype="openrl-slow",
        max_read=max_read_bytes,
        max_threads=_SERVERS,
        kernel_cache=not forgetful,
    )


_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

if __name__ == "__main__":
    main()
