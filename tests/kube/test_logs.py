"""K3: ``openrl logs`` of a worker on a cluster goes to its pod, or says how to."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from kube.kube_helpers import H100, Cluster

OPENRL = Path(sys.executable).parent / "openrl"


async def logs(cluster: Cluster, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": path, "KUBECONFIG": str(cluster.plane.admin_kubeconfig)}
    home = cluster.system.home.parent / "laptop"
    command = [str(OPENRL), "logs", *arguments, "--nats-url", cluster.system.nats_url, "--home", str(home)]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )


async def test_K3_openrl_logs_of_a_pod_runs_kubectl_or_says_the_command(cluster: Cluster) -> None:
    await cluster.add_nodes(("a", 2, H100, ()))
    async with cluster.launcher():
        await cluster.submit("one")
        await cluster.ready("one")
        pod = await cluster.pod_of("one")
        assert pod is not None
        name = pod["metadata"]["name"]

        without = await logs(cluster, "one/trainer", path="/nowhere")
        assert without.returncode == 1
        assert f"`kubectl -n openrl logs {name} -c worker --tail=200`" in without.stderr
        assert len(without.stderr.splitlines()) == 1

        # A fake kubelet has no log: the API server's answer shows which pod's it was asked for, and that kubectl ran.
        ran = await logs(cluster, "one/trainer", "-n", "5", path=os.environ["KUBEBUILDER_ASSETS"])
        assert ran.returncode != 0
        assert re.search(rf"containerLogs/openrl/{name}/worker|{name}", ran.stderr), ran.stderr

        unknown = await logs(cluster, "two/trainer", path="/nowhere")
        assert unknown.returncode == 1
        assert "no log of 'two/trainer'" in unknown.stderr
