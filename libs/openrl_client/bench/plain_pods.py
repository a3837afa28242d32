"""What a user would do without OpenRL, for ``openrl bench kube``: pods with a claim template each, in ``default``.

``bare``: one container and its device, the least that kube-scheduler takes. ``full``: what a worker's pod has besides
(environment, probes, volumes, memory, security context): each write of such a pod costs the API server about 1.7 times
as much. What a full pod has is kept like ``openrl_launcher.kubernetes.manifests`` by hand.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from openrl_client.bench.kube_load import Pods, post

Body = Literal["bare", "full"]
_TEMPLATE = "one-device"
_ENVIRONMENT = {
    "OPEN_RL_WORKLOAD": "bench--j1--trainer", "OPEN_RL_ASSIGNMENT": "0123456789ab", "OPEN_RL_HOME": "/var/lib/openrl",
    "OPEN_RL_HEALTH_HOST": "0.0.0.0", "OPEN_RL_CLAIM": "c-0123456789ab", "OPEN_RL_OWNER": "bench.j1",
    "OPEN_RL_NATS_URL": "nats://127.0.0.1:4222", "OPEN_RL_DEVICE_BYTES": "32212254720",
    "OPEN_RL_HEALTH_PORT": "8080", "OPEN_RL_START_GATE_WAIT": "15m", "HOME": "/tmp", "PYTHONUNBUFFERED": "1",
}  # fmt: skip


async def plain_pods(
    api: Any,
    pods: Pods,
    *,
    count: int,
    at_once: int,
    waiting_max: int,
    device_class: str,
    shared_volume: str,
    body: Body,
) -> float:
    """Make ``count`` pods; seconds until all run.

    Args:
        at_once: requests under way.
        waiting_max: pods that are made and do not run yet; 0 = no bound.
        shared_volume: a volume claim that full pods mount.
    """
    memory = f"device.capacity['{device_class}'].memory"
    device = {
        "deviceClassName": device_class,
        "selectors": [{"cel": {"expression": f"{memory}.compareTo(quantity('25Gi')) >= 0"}}],
    }
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": _TEMPLATE},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": device}]}}},
    }
    await post(api, "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates", template)
    spec = _bare() if body == "bare" else _full(shared_volume)
    gate = asyncio.Semaphore(at_once)

    async def make(index: int) -> None:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"plain-{index}"}, "spec": spec}
        async with gate:
            await post(api, "/api/v1/namespaces/default/pods", pod)

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for index in range(count):
            if waiting_max:
                await pods.until_running(index + 1 - waiting_max)
            tasks.create_task(make(index))
        await pods.until_running(count)
    return time.monotonic() - began


def _bare() -> dict[str, Any]:
    return {
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "worker", "image": "x", "resources": {"claims": [{"name": "gpu"}]}}],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": _TEMPLATE}],
    }


def _full(shared_volume: str) -> dict[str, Any]:
    spec = _bare()
    memory = {"memory": str(1 << 30)}
    ready = {"httpGet": {"path": "/readyz", "port": "health"}}
    node = {"name": "OPEN_RL_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    spec["containers"][0] |= {
        "command": ["python", "-m", "trainer"],
        "env": [*({"name": name, "value": value} for name, value in _ENVIRONMENT.items()), node],
        "envFrom": [{"configMapRef": {"name": "openrl-workers", "optional": True}}],
        "ports": [{"name": "health", "containerPort": 8080}],
        "resources": {"claims": [{"name": "gpu"}], "requests": memory, "limits": memory},
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
        },
        "startupProbe": {**ready, "periodSeconds": 5, "failureThreshold": 720},
        "livenessProbe": {"httpGet": {"path": "/livez", "port": "health"}, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {**ready, "periodSeconds": 5},
        "volumeMounts": [{"name": "home", "mountPath": "/var/lib/openrl"}, {"name": "tmp", "mountPath": "/tmp"}],
    }  # fmt: skip
    return spec | {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "home", "persistentVolumeClaim": {"claimName": shared_volume}}, {"name": "tmp", "emptyDir": {}}
        ],
    }  # fmt: skip
