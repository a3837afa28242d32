"""What Linux says about a file before it is read: its file system, how far the kernel reads ahead, what is in memory.

Nothing here reads a file's data. Elsewhere than on Linux the answers are ``unknown``, a default, and None.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any

import psutil

READ_AHEAD_BYTES = 128 * 1024
"""The kernel's default read-ahead, taken where the real one cannot be read."""

NETWORK_FILE_SYSTEMS = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs")
    + ("pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs")
)


def file_system_of(path: Path) -> str:
    """The type of the file system that holds ``path`` (which need not exist yet), ``unknown`` when nobody says."""
    real = os.path.realpath(path)
    best, found = "", "unknown"
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, found = mount, partition.fstype
    return found


def is_fuse(file_system: str) -> bool:
    """FUSE with something other than a block device behind it."""
    return file_system == "fuse" or file_system.startswith("fuse.")


def read_ahead_bytes(fd: int) -> int:
    """How many bytes the kernel reads ahead on the device of an open file."""
    device = os.fstat(fd).st_dev
    try:
        text = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text()
        return max(READ_AHEAD_BYTES, int(text) * 1024)
    except (OSError, ValueError):
        return READ_AHEAD_BYTES


def is_resident(fd: int, offset: int, num_bytes: int) -> bool | None:
    """Whether all of a range of a file is in the page cache, and up to date; None when nobody may know.

    mincore(2) tells the truth only to the owner of a file and to who may write it; to others it says that everything is
    in memory, so others are not asked (Linux 5.2 and later).
    """
    libc = _libc()
    if libc is None or num_bytes < 1 or not _may_ask(fd):
        return None
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset + num_bytes - start
    pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
    try:
        # Private and writable: only so ctypes gives the address; nothing is ever written.
        mapping = mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
    except (OSError, ValueError):  # shorter than it was
        return None
    with mapping:
        anchor = ctypes.c_char.from_buffer(mapping)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), pages)
        del anchor
    return None if failed else pages.raw.count(1) == len(pages)


def _may_ask(fd: int) -> bool:
    if os.fstat(fd).st_uid == os.geteuid():
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mincore") and os.name == "posix" and os.path.isdir("/proc/self/fd") else None
