"""The load of ``openrl bench kube``: plain pods as a user makes them, and the played processes of OpenRL's workers.

No container starts on fake kubelets, so a worker's process is played: when its pod runs, its lease goes from starting
to live and its ready record is written, as ``openrl_common.worker`` does. Renewals are left out: two thousand workers
on two thousand machines write them, not the machine that is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from kubernetes.aio import client, config

from openrl_client.errors import TimedOut
from openrl_common.bus import Bus
from openrl_common.errors import Conflict
from openrl_common.records import LeaseRecord, LeaseState, ReadyRecord

_STALLED_S = 120.0
_GATE_LOOK_S = 0.05


class _Meta(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Status(msgspec.Struct, frozen=True):
    phase: str = ""


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Meta
    status: _Status = _Status()


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[_Pod]


class Pods:
    """The pods of one namespace as they run. ``running`` counts those that ran once, by name."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._events = msgspec.json.Decoder(_Event)
        self._lists = msgspec.json.Decoder(_List)
        self.running: dict[str, float] = {}
        self.there: set[str] = set()
        self.started: asyncio.Queue[_Pod] = asyncio.Queue()

    async def follow(self) -> None:
        """For ever; an API server under load ends watches, so each begins with a list."""
        core = client.CoreV1Api(self._api)
        while True:
            answer = await core.list_namespaced_pod_without_preload_content(self._namespace)
            listed = self._lists.decode(await answer.read())
            self.there = {pod.metadata.name for pod in listed.items}
            for pod in listed.items:
                self._see(pod)
            answer = await core.list_namespaced_pod_without_preload_content(
                self._namespace, watch=True, resource_version=listed.metadata.resource_version, _request_timeout=3600
            )
            while line := await answer.content.readline():
                event = self._events.decode(line)
                if event.type == "ERROR":
                    break
                pod = msgspec.json.decode(event.object, type=_Pod)
                if event.type == "DELETED":
                    self.there.discard(pod.metadata.name)
                else:
                    self.there.add(pod.metadata.name)
                    self._see(pod)

    def _see(self, pod: _Pod) -> None:
        if pod.status.phase == "Running" and pod.metadata.name not in self.running:
            self.running[pod.metadata.name] = time.monotonic()
            self.started.put_nowait(pod)

    async def until_running(self, count: int) -> None:
        await _until(lambda: len(self.running) >= count, lambda: len(self.running))

    async def until_gone(self) -> None:
        await _until(lambda: not self.there, lambda: -len(self.there))


async def _until(condition: Any, progress: Any) -> None:
    """Raises TimedOut when ``progress`` stands still."""
    best, since = progress(), time.monotonic()
    while not condition():
        await asyncio.sleep(0.02)
        now = progress()
        if now > best:
            best, since = now, time.monotonic()
        elif time.monotonic() - since > _STALLED_S:
            raise TimedOut(f"nothing moved for {_STALLED_S:g} s at {best}")


@asynccontextmanager
async def connected(kubeconfig: Path) -> AsyncIterator[client.ApiClient]:
    configuration = client.Configuration()
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    api = client.ApiClient(configuration)
    try:
        yield api
    finally:
        await api.close()


async def plain_pods(api: client.ApiClient, pods: Pods, *, count: int, at_once: int, device_class: str) -> float:
    """``count`` pods, each with a claim made from one template; seconds until all run. They are deleted afterwards."""
    core = client.CoreV1Api(api)
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "one-device"},
        "spec": {
            "spec": {
                "devices": {
                    "requests": [
                        {
                            "name": "gpu",
                            "exactly": {
                                "deviceClassName": device_class,
                                "selectors": [
                                    {
                                        "cel": {
                                            "expression": f"device.capacity['{device_class}'].memory"
                                            ".compareTo(quantity('25Gi')) >= 0"
                                        }
                                    }
                                ],
                            },
                        }
                    ]
                }
            }
        },
    }
    custom = client.CustomObjectsApi(api)
    await custom.create_namespaced_custom_object("resource.k8s.io", "v1", "default", "resourceclaimtemplates", template)
    gate = asyncio.Semaphore(at_once)

    async def make(index: int) -> None:
        pod: Any = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"plain-{index}"},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "worker", "image": "x", "resources": {"claims": [{"name": "gpu"}]}}],
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-device"}],
            },
        }
        async with gate:
            answer = await core.create_namespaced_pod_without_preload_content("default", pod)
            if answer.status >= 300:
                raise TimedOut(f"pod {index} was refused: {await answer.text()}")
            await answer.read()

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for index in range(count):
            tasks.create_task(make(index))
        await pods.until_running(count)
    return time.monotonic() - began


class PlayedProcesses:
    """Answers every pod that runs; ``ready`` are the workloads whose workers are."""

    def __init__(self, bus: Bus, pods: Pods) -> None:
        self._store = bus.store
        self._pods = pods
        self.ready: set[str] = set()

    async def play(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._start(await self._pods.started.get()))

    async def _start(self, pod: _Pod) -> None:
        assignment = pod.metadata.labels["openrl.io/assignment"]
        workload = pod.metadata.annotations["openrl.io/workload"]
        while True:
            lease = await self._store.leases.get(assignment)
            if lease is not None and lease.value.state is LeaseState.TOMBSTONE:
                return
            if lease is not None and lease.value.state is LeaseState.STARTING:
                try:
                    record = LeaseRecord(state=LeaseState.LIVE, holder=pod.metadata.name)
                    await self._store.leases.write(assignment, record, last=lease.revision)
                    break
                except Conflict:
                    continue
            await asyncio.sleep(_GATE_LOOK_S)
        record_ready = ReadyRecord(assignment=assignment, workload=workload, ready=True, ready_at=time.time())
        await self._store.ready.put(assignment, record_ready)
        self.ready.add(workload)


def node_objects(num_nodes: int, *, driver: str, devices: int, device_bytes: int, host_bytes: int) -> str:
    """A List of fake nodes and their slices, as JSON for kubectl."""
    from openrl_client.bench.control_plane import fake_node

    items = [
        each
        for index in range(num_nodes)
        for each in fake_node(
            f"n{index:04d}", devices_bytes=[device_bytes] * devices, driver=driver, host_bytes=host_bytes
        )
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
