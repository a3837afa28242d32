"""``stuck_sampler.py FILE [--break] …``: a sampler whose engine hangs or breaks at its first request once FILE exists.

The real process otherwise, with either engine; what follows are ``openrl_sampler``'s own arguments.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrl_sampler import __main__ as sampler
from openrl_sampler import service


def _with_fault(flag: Path, breaks: bool) -> Callable[..., Any]:
    make = service.make_engine

    def make_engine(*arguments: Any) -> Any:
        engine = make(*arguments)
        step = engine.step

        def faulty_step() -> Any:
            if flag.exists() and "warm-up" not in engine._calls:
                if breaks:
                    raise RuntimeError("the device fell off the bus")
                threading.Event().wait()
            return step()

        engine.step = faulty_step
        return engine

    return make_engine


if __name__ == "__main__":
    flag, *arguments = sys.argv[1:]
    breaks = arguments[:1] == ["--break"]
    service.make_engine = _with_fault(Path(flag), breaks)
    sampler.main(arguments[breaks:])
