"""What is read of Kubernetes objects: only the fields that a decision needs, decoded by msgspec (K6).

The official client validates every answer with pydantic; at thousands of objects that is the larger part of a
launcher's time and memory. Unknown fields are ignored, absent ones get the API's own defaults. Nothing here is written.
"""

from __future__ import annotations

import msgspec


class _Object(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class Meta(_Object, frozen=True, kw_only=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class Condition(_Object, frozen=True, kw_only=True):
    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


# --- nodes and slices ---------------------------------------------------------------------------------------------


class NodeSpec(_Object, frozen=True, kw_only=True):
    unschedulable: bool = False


class NodeStatus(_Object, frozen=True, kw_only=True):
    allocatable: dict[str, str] = {}
    conditions: list[Condition] = []


class Node(_Object, frozen=True, kw_only=True):
    metadata: Meta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def ready(self) -> bool:
        return any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)


class Pool(_Object, frozen=True, kw_only=True):
    name: str
    generation: int = 0
    resource_slice_count: int = 0


class Capacity(_Object, frozen=True, kw_only=True):
    value: str


class DeviceTaint(_Object, frozen=True, kw_only=True):
    key: str = ""
    effect: str = ""


class SliceDevice(_Object, frozen=True, kw_only=True):
    name: str
    capacity: dict[str, Capacity] = {}
    taints: list[DeviceTaint] = []


class SliceSpec(_Object, frozen=True, kw_only=True):
    driver: str
    pool: Pool
    node_name: str = ""
    devices: list[SliceDevice] = []


class ResourceSlice(_Object, frozen=True, kw_only=True):
    metadata: Meta
    spec: SliceSpec


# --- claims -------------------------------------------------------------------------------------------------------


class AllocationResult(_Object, frozen=True, kw_only=True):
    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""


class AllocatedDevices(_Object, frozen=True, kw_only=True):
    results: list[AllocationResult] = []


class Allocation(_Object, frozen=True, kw_only=True):
    devices: AllocatedDevices = AllocatedDevices()


class ClaimStatus(_Object, frozen=True, kw_only=True):
    allocation: Allocation | None = None


class ResourceClaim(_Object, frozen=True, kw_only=True):
    metadata: Meta
    status: ClaimStatus = ClaimStatus()

    @property
    def results(self) -> list[AllocationResult]:
        """What the scheduler gave it; empty while it is not allocated."""
        return [] if self.status.allocation is None else self.status.allocation.devices.results


# --- pods ---------------------------------------------------------------------------------------------------------


class Resources(_Object, frozen=True, kw_only=True):
    requests: dict[str, str] = {}


class Container(_Object, frozen=True, kw_only=True):
    resources: Resources = Resources()
    restart_policy: str = ""


class PodSpec(_Object, frozen=True, kw_only=True):
    node_name: str = ""
    containers: list[Container] = []
    init_containers: list[Container] = []
    overhead: dict[str, str] = {}


class Terminated(_Object, frozen=True, kw_only=True):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class Waiting(_Object, frozen=True, kw_only=True):
    reason: str = ""
    message: str = ""


class Running(_Object, frozen=True, kw_only=True):
    started_at: str | None = None


class ContainerState(_Object, frozen=True, kw_only=True):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Object, frozen=True, kw_only=True):
    name: str = ""
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatus(_Object, frozen=True, kw_only=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: list[Condition] = []
    container_statuses: list[ContainerStatus] = []


_PULLING = ("ContainerCreating", "ErrImagePull", "ImagePullBackOff")


class Pod(_Object, frozen=True, kw_only=True):
    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def ended(self) -> bool:
        """For good: its containers are not started again."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def deleting(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def pulling(self) -> bool:
        """Sandbox, network and volumes are there and the worker's container waits: its image is being pulled."""
        prepared = any(
            each.type == "PodReadyToStartContainers" and each.status == "True" for each in self.status.conditions
        )
        return prepared and any(
            each.name == "worker" and each.state.waiting is not None and each.state.waiting.reason in _PULLING
            for each in self.status.container_statuses
        )

    @property
    def unschedulable(self) -> str:
        """The scheduler's verdict in its own words (K4), "" when it has none or has placed it."""
        for each in self.status.conditions:
            if each.type == "PodScheduled" and each.status == "False" and each.reason == "Unschedulable":
                return each.message or "kube-scheduler finds no node"
        return ""


Watched = Node | ResourceSlice | ResourceClaim | Pod
