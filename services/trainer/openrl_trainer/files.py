"""Files that appear whole or not at all (R5, R11): written under a temporary name, fsynced, renamed.

A disk that is full (or a quota, or a file-size limit) is one typed error, after which nothing of the attempt is left
and whatever stood there before still stands.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrl_common.errors import Rejected

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the ways a write can fail into Rejected: ``disk-full`` or ``write-failed``, naming the path."""
    import safetensors  # here: the shell of a trainer, which starts in no time, takes other things of this module

    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        # safetensors reports an operating-system error by text only: "... (os error 28)".
        found = re.search(r"os error (\d+)", str(error))
        code = int(found.group(1)) if found else getattr(error, "errno", None)
        if code in _FULL:
            free = shutil.disk_usage(_existing(path)).free
            raise Rejected(
                f"{path} cannot be written: {os.strerror(code or 0)}, {free} bytes are free;"
                " the newest version before it still stands, free some space and ask again",
                code="disk-full",
            ) from error
        raise Rejected(f"{path} cannot be written: {error}", code="write-failed") from error


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def temporary_directory(final: Path) -> Iterator[Path]:
    """A hidden sibling of ``final``, empty at first and removed at the end if it still exists.

    Leftovers of a process that was killed here are removed first: a directory of versions has one writer.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for leftover in final.parent.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = final.parent / f".writing-{final.name}"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_directory(temporary: Path, final: Path) -> None:
    """Fsync every file of ``temporary``, then give it its final name (which must be free)."""
    for path in temporary.iterdir():
        fsync_path(path)
    fsync_path(temporary)
    temporary.rename(final)
    fsync_path(final.parent)


def replace_file(path: Path, body: bytes) -> None:
    """Give ``path`` this content, whole or not at all."""
    temporary = path.with_name(f"{path.name}.writing")
    with temporary.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_path(path.parent)


def copy_file(source: Path, path: Path) -> None:
    """Make ``path`` a copy of ``source``, whole or not at all. The caller makes the entry of its directory last."""
    temporary = path.with_name(f"{path.name}.writing")
    try:
        shutil.copyfile(source, temporary)
        fsync_path(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
