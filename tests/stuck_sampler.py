"""``stuck_sampler.py FILE [--break | --in-write | --in-verify] …``: a sampler that hangs or breaks once FILE exists.

At its first request; with ``--in-write`` in the middle of the next weight update; with ``--in-verify`` where it
verifies one, until FILE is gone. The latter two say by FILE.reached that they hang. It is the real process otherwise,
with either engine; what follows are ``openrl_sampler``'s own arguments.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from openrl_sampler import __main__ as sampler
from openrl_sampler import service

READS_BEFORE = 10
"""Slices of the update that are written before it hangs."""


def _hang_or_break(engine: Any, flag: Path, breaks: bool) -> None:
    step = engine.step

    def faulty_step() -> Any:
        if flag.exists() and "warm-up" not in engine._calls:
            if breaks:
                raise RuntimeError("the device fell off the bus")
            threading.Event().wait()
        return step()

    engine.step = faulty_step


def _hang_in_write(flag: Path) -> None:
    from openrl_sampler import streamed

    read, left = streamed._read, [READS_BEFORE]

    def faulty_read(*arguments: Any) -> None:
        if flag.exists():
            left[0] -= 1
            if left[0] < 0:
                flag.with_suffix(".reached").touch()
                threading.Event().wait()
        read(*arguments)

    streamed._read = faulty_read


def _hang_in_verify(flag: Path) -> None:
    from openrl_common import weights

    hash_file = weights.hash_file

    def slow_hash(path: Path) -> str:
        while flag.exists():
            flag.with_suffix(".reached").touch()
            time.sleep(0.02)
        return hash_file(path)

    weights.hash_file = slow_hash


if __name__ == "__main__":
    path, *rest = sys.argv[1:]
    fault = rest.pop(0) if rest and rest[0] in ("--break", "--in-write", "--in-verify") else ""
    make = service.make_engine

    def make_engine(*arguments: Any) -> Any:
        engine = make(*arguments)
        if fault == "--in-write":
            _hang_in_write(Path(path))
        elif fault == "--in-verify":
            _hang_in_verify(Path(path))
        else:
            _hang_or_break(engine, Path(path), breaks=fault == "--break")
        return engine

    service.make_engine = make_engine
    sampler.main(rest)
