"""The slow mount as a context: started as a process of its own, unmounted and gone at the end, whatever happens."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from openrl_common.errors import Rejected

_MOUNTED_S = 30.0
_ENDED_S = 10.0


def why_no_fuse() -> str:
    """Why a mount is not possible here; empty when it may be."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not there or not ours to open"
    if ctypes.util.find_library("fuse3") is None:
        return "libfuse 3 is not installed"
    return "" if find_spec("mfusepy") else "mfusepy is not installed (extra benchmark)"


@contextmanager
def slow_mount(source: Path, point: Path, *options: str) -> Iterator[Path]:
    """Mount ``source`` at ``point``; ``options`` are those of ``python -m openrl_client.bench.slow_mount``.

    Raises:
        Rejected: ``no-fuse``, with what the mount said.
    """
    command = [sys.executable, "-m", "openrl_client.bench.slow_mount", str(source), str(point), *options]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + _MOUNTED_S
            while not os.path.ismount(point):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    raise Rejected(f"FUSE cannot be mounted here: {said.read().strip()[-300:]}", code="no-fuse")
                time.sleep(0.05)
            yield point
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(point)], check=False, capture_output=True)
            process.terminate()
            try:
                process.wait(_ENDED_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
