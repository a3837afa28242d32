"""The load of ``openrl bench kube``: nodes, pods as they come to run, and the played processes of OpenRL's workers.

No container starts on fake kubelets, so a worker's process is played: when its pod runs, its lease goes from starting
to live and its ready record is written, as ``openrl_common.worker`` does. Renewals are left out: two thousand workers
on two thousand machines write them, not the machine that is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from kubernetes.aio import client, config

from openrl_client.bench.control_plane import fake_node
from openrl_client.errors import TimedOut
from openrl_common.bus import Bus
from openrl_common.errors import Conflict
from openrl_common.records import LeaseRecord, LeaseState, ReadyRecord
from openrl_common.store import Entry

_STALLED_S = 120.0
_AT_ONCE = 32


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
    configuration.client_session_kwargs = {"trust_env": False}
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    api = client.ApiClient(configuration)
    try:
        yield api
    finally:
        await api.close()


class PlayedProcesses:
    """Answers every pod that runs; ``ready`` are the workloads whose workers are.

    All look at the leases through one live copy: two thousand that ask for theirs would be load that the measured
    machine has to answer and to send.
    """

    def __init__(self, bus: Bus, pods: Pods) -> None:
        self._store = bus.store
        self._pods = pods
        self._leases: dict[str, Entry[LeaseRecord]] = {}
        self._waiting: dict[str, asyncio.Event] = {}
        self.ready: set[str] = set()

    async def play(self) -> None:
        mirror = await self._store.leases.mirror(on_change=self._on_lease)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    tasks.create_task(self._start(await self._pods.started.get()))
        finally:
            await mirror.close()

    async def until_ready(self, count: int) -> None:
        await _until(lambda: len(self.ready) >= count, lambda: len(self.ready))

    def _on_lease(self, assignment: str, entry: Entry[LeaseRecord] | None) -> None:
        if entry is None:
            self._leases.pop(assignment, None)
            return
        self._leases[assignment] = entry
        if entry.value.state is not LeaseState.LIVE and assignment in self._waiting:
            self._waiting.pop(assignment).set()

    async def _start(self, pod: _Pod) -> None:
        assignment = pod.metadata.labels["openrl.io/assignment"]
        workload = pod.metadata.annotations["openrl.io/workload"]
        while True:
            lease = self._leases.get(assignment)
            if lease is not None and lease.value.state is LeaseState.TOMBSTONE:
                return
            if lease is not None and lease.value.state is LeaseState.STARTING:
                with contextlib.suppress(Conflict):
                    record = LeaseRecord(state=LeaseState.LIVE, holder=pod.metadata.name)
                    await self._store.leases.write(assignment, record, last=lease.revision)
                    break
            if self._leases.get(assignment) is lease:  # else it has changed while it was looked at
                await self._waiting.setdefault(assignment, asyncio.Event()).wait()
        record_ready = ReadyRecord(assignment=assignment, workload=workload, ready=True, ready_at=time.time())
        await self._store.ready.put(assignment, record_ready)
        self.ready.add(workload)


async def make_nodes(
    api: client.ApiClient, num_nodes: int, *, driver: str, devices: int, device_bytes: int, host_bytes: int
) -> None:
    """Fake nodes and the slices of their devices; returns once all are ready. Raises TimedOut when one is refused."""
    gate = asyncio.Semaphore(_AT_ONCE)
    paths = {"Node": "/api/v1/nodes", "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices"}

    async def make(index: int) -> None:
        made = fake_node(f"n{index:04d}", devices_bytes=[device_bytes] * devices, driver=driver, host_bytes=host_bytes)
        for each in made:
            if each["kind"] == "Node":
                each["status"] |= {"conditions": [{"type": "Ready", "status": "True"}]}  # a write less each
            async with gate:
                await post(api, paths[str(each["kind"])], each)

    async with asyncio.TaskGroup() as tasks:
        for index in range(num_nodes):
            tasks.create_task(make(index))


async def post(api: client.ApiClient, path: str, body: object) -> None:
    """Create one object. Raises TimedOut when it is refused."""
    headers = {"Content-Type": "application/json"}
    await api.update_params_for_auth(headers, [], ["BearerToken"], path, "POST", body)
    answer = await api.rest_client.request("POST", api.configuration.host + path, headers=headers, body=body)
    data = await answer.read()
    if answer.status >= 300:
        raise TimedOut(f"POST {path} was refused: {data[:300].decode(errors='replace')}")
