"""A worker process that behaves as its workload's name says; the lease and its end are the real ones.

Put before the real package on PYTHONPATH, so that the launcher's own command line starts it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

BEHAVIOUR = os.environ["OPEN_RL_WORKLOAD"].split("--")[1]
MARK = Path(os.environ["OPEN_RL_HOME"]) / f"starts-{os.environ['OPEN_RL_ASSIGNMENT']}"


def main() -> int:
    with MARK.open("a") as mark:
        mark.write(f"{os.getpid()}\n")
    starts = len(MARK.read_text().splitlines())
    if BEHAVIOUR == "crash" or (BEHAVIOUR == "crash-once" and starts == 1):
        print("loading")
        print("ValueError: the model is cursed", file=sys.stderr)
        return 3
    if BEHAVIOUR == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("will not go", flush=True)
        time.sleep(600)
    if BEHAVIOUR == "parent":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if BEHAVIOUR.startswith("lease"):
        return real()
    print("running", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(600)
    return 0


def real() -> int:
    """The life of a worker as trainer and sampler have it: lease live, renewed, ready record, drain."""
    import click

    from openrl_common import settings, worker

    async def work(context: worker.WorkerContext) -> None:
        await context.ready({"devices": os.environ["CUDA_VISIBLE_DEVICES"]})
        await context.stopping.wait()

    @click.command()
    @settings.settings(*worker.WORKER_SETTINGS)
    def command(**parameters: object) -> None:
        config = settings.from_parameters(worker.WorkerSettings, parameters)
        sys.exit(worker.run_worker("trainer", config, work))

    command()
    return 0


if __name__ == "__main__":
    sys.exit(main())
