"""A control plane for the session, a fresh OpenRL for each test (``KUBEBUILDER_ASSETS``; a clear skip without)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kube.kube_helpers import DRIVER, NAMESPACE, SETTINGS, Cluster, PlayedWorkers, volume, write_model
from openrl_client.bench.control_plane import ControlPlane, device_class, missing_assets
from openrl_client.local_system import LocalSystem
from openrl_common.bus import Bus
from openrl_launcher.kubernetes.api import KubeApi

BASE = Path(__file__).parents[2] / "deploy" / "base"


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A real API server with OpenRL's own CRDs, service account and roles; a dead node is noticed after 6 s."""
    if why := missing_assets():
        pytest.skip(why)
    arguments = {
        "kube-controller-manager": ["--node-monitor-grace-period=6s", "--node-monitor-period=1s"],
        "kwok": ["--node-lease-duration-seconds=4"],
        "kube-scheduler": ["--pod-max-in-unschedulable-pods-duration=5s"],
    }
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), arguments=arguments) as plane:
        for name in ("namespace", "crds", "rbac"):
            plane.kubectl("apply", "--server-side", "-f", str(BASE / f"{name}.yaml"))
        plane.apply(device_class(DRIVER), *volume())
        yield plane


@pytest.fixture
def make_cluster(
    control_plane: ControlPlane, tmp_path: Path
) -> Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]:
    """``async with make_cluster(MAX_SEATS_PER_CLAIM=2) as cluster``: settings of placement and ledger by name."""

    @contextlib.asynccontextmanager
    async def make(**settings: object) -> AsyncIterator[Cluster]:
        environment = SETTINGS | {f"OPEN_RL_{name}": str(value) for name, value in settings.items()}
        kubeconfig = await asyncio.to_thread(control_plane.kubeconfig_of, NAMESPACE, "openrl-launcher")
        home = tmp_path / "home"
        async with LocalSystem(home, environment=environment, services=("ledger", "placement")) as system:
            bus = await Bus.connect(system.nats_url, name="test")
            api = await KubeApi.connect(kubeconfig=control_plane.admin_kubeconfig, namespace=NAMESPACE)
            workers = PlayedWorkers(bus, api)
            playing = asyncio.create_task(workers.run())
            cluster = Cluster(control_plane, bus, system, write_model(tmp_path / "model"), workers, kubeconfig)
            try:
                yield cluster
            finally:
                for task in (playing, *cluster.tasks):
                    task.cancel()
                await asyncio.gather(playing, *cluster.tasks, return_exceptions=True)
                await api.close()
                await bus.close()
                await asyncio.to_thread(_clean, control_plane, cluster.names)

    return make


@pytest.fixture
async def cluster(
    make_cluster: Callable[..., contextlib.AbstractAsyncContextManager[Cluster]],
) -> AsyncIterator[Cluster]:
    """No seat limit, binpack."""
    async with make_cluster() as made:
        yield made


def _clean(plane: ControlPlane, nodes: list[str]) -> None:
    """Nothing of one test is there for the next."""
    quick: list[Any] = ["-n", NAMESPACE, "--all", "--grace-period=0", "--force", "--wait=false"]
    plane.kubectl("delete", "pods", *quick)
    plane.kubectl("delete", "resourceclaims,workloads,claimledgers", "-n", NAMESPACE, "--all", "--wait=true")
    if nodes:
        plane.kubectl("delete", "nodes", "--ignore-not-found", *nodes)
        plane.kubectl("delete", "resourceslices", "--ignore-not-found", *(f"{name}-gpu" for name in nodes))
