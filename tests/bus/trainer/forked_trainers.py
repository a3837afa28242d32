"""Starts trainers by forking, imports being paid once: a line of JSON (their environment) in, the child's pid out.

Tests that end trainers dozens of times run this as a process of its own; the launcher has its zygote for that.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys


def main() -> bool:
    """False in the parent, at the end of its input; True in a child."""
    import openrl_trainer.warm  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: no zombies
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            environment = json.loads(line)
            os.environ.update(environment)
            log = os.open(environment["LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["openrl_trainer"]
            return True
        print(pid, flush=True)
    return False


if __name__ == "__main__" and main():
    runpy.run_module("openrl_trainer", run_name="__main__", alter_sys=True)
