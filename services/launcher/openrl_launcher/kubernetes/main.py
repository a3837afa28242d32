"""The body of a cluster's launcher as a service: connect, run until stopped, leave the workers running (E17)."""

from __future__ import annotations

import asyncio

from prometheus_client import Gauge

from openrl_common.errors import Bug
from openrl_common.service import ServiceContext
from openrl_launcher.kubernetes.api import KubeApi
from openrl_launcher.kubernetes.cluster import ClusterLauncher
from openrl_launcher.kubernetes.settings import KubernetesSettings


async def body(context: ServiceContext, settings: KubernetesSettings) -> None:
    api = await KubeApi.connect(kubeconfig=settings.kubeconfig, namespace=settings.namespace)
    launcher = ClusterLauncher(context.bus, api, settings)
    context.checks.update(launcher.readiness())
    gauges = {
        "openrl_launcher_workers": ("Worker pods", lambda: launcher.workers.running),
        "openrl_launcher_active": ("Whether this replica has the duty", lambda: float(launcher.duty.held)),
        "openrl_launcher_api_requests": ("Requests to the Kubernetes API", lambda: float(sum(api.requests.values()))),
    }
    for name, (what, read) in gauges.items():
        Gauge(name, what, registry=context.registry).set_function(read)
    api.count = Gauge(
        "openrl_launcher_api_requests_by", "The same by verb and resource", ["request"], registry=context.registry
    )
    running = asyncio.create_task(launcher.run(), name="cluster launcher")
    stopping = asyncio.create_task(context.stopping.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            if not context.stopping.is_set():
                raise Bug("the launcher's loop has ended")
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        await api.close()
