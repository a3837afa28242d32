"""``openrl logs`` of a worker on a cluster: its pod's, by kubectl, which reads with the caller's own rights.

The launcher needs no right to read logs then, and following one goes past NATS.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterable
from fnmatch import fnmatchcase

from openrl_client.errors import Rejected
from openrl_common.records import WorkerRecord


def kubectl_logs(workers: Iterable[WorkerRecord], workload: str, *, follow: bool, num_lines: int) -> list[str] | None:
    """The command for the newest pod of a workload (a pattern); None when none of its workers is a pod.

    A cluster's launcher writes ``<namespace>/<pod>`` into ``log_path``, others the path of a file.
    """
    pods = [
        each
        for each in workers
        if fnmatchcase(each.workload, workload) and each.log_path and not each.log_path.startswith("/")
    ]
    if not pods:
        return None
    namespace, _, pod = max(pods, key=lambda each: each.launched_at).log_path.partition("/")
    command = ["kubectl", "-n", namespace, "logs", pod, "-c", "worker", f"--tail={num_lines}"]
    return [*command, "--follow"] if follow else command


def show(command: list[str]) -> int:
    """Run it on this terminal; its exit code. Raises Rejected, with the command, where there is no kubectl."""
    if shutil.which(command[0]) is None:
        raise Rejected(
            f"this worker runs in a pod, and there is no kubectl here: where there is one, `{shlex.join(command)}`",
            code="no-kubectl",
        )
    return subprocess.run(command, check=False).returncode
