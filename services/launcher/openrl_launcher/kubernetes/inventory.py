"""What the cluster offers (K2): ResourceSlices of one driver, joined with enabled nodes and what others' pods request.

Fed with objects one by one; ``record(node)`` is what the bus is told. Device memory comes from the driver's ``memory``
capacity. A pool whose newest generation is not complete makes the node incomplete (P1): half an inventory would send
workloads elsewhere or call them impossible. Slices that no single node owns are not counted.

It also knows which devices are free, so that a founder's pod may be pinned to the node it would win (K11): a guess that
kube-scheduler, the only mutex of devices (K4), confirms or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from openrl_common.records import Device, NodeRecord, Role, Tier
from openrl_launcher.kubernetes.manifests import DEVICE_GIB, ENABLED, MANAGED
from openrl_launcher.kubernetes.objects import Node, Pod, ResourceClaim, ResourceSlice

DeviceKey = tuple[str, str]
"""Pool and device name, of the configured driver."""
_SUFFIXES = {
    "": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000), "M": Decimal(1000**2), "G": Decimal(1000**3),
    "T": Decimal(1000**4), "P": Decimal(1000**5), "E": Decimal(1000**6), "Ki": Decimal(1024), "Mi": Decimal(1024**2),
    "Gi": Decimal(1024**3), "Ti": Decimal(1024**4), "Pi": Decimal(1024**5), "Ei": Decimal(1024**6),
}  # fmt: skip
_REPELS = ("NoSchedule", "NoExecute")


@lru_cache(maxsize=4096)
def quantity_bytes(text: str) -> int:
    """A Kubernetes quantity in whole bytes, rounded down; 0 when it is none."""
    digits = text.rstrip("KMGTPEkmi")
    suffix = text[len(digits) :]
    try:
        return int(Decimal(digits) * _SUFFIXES[suffix])
    except (InvalidOperation, KeyError, ValueError, OverflowError):
        return 0


def node_token(name: str) -> str:
    """The node's id on the bus (E1: no dots). Reversible: Kubernetes allows no underscore in a node's name."""
    return name.replace(".", "_")


def node_name(token: str) -> str:
    return token.replace("_", ".")


class Inventory:
    """Nodes by their Kubernetes name. ``changed`` collects those whose record may differ; the caller empties it."""

    def __init__(self, *, driver: str, namespace: str) -> None:
        self._driver = driver
        self._namespace = namespace
        self._nodes: dict[str, Node] = {}
        self._slices: dict[str, ResourceSlice] = {}
        self._slices_of: defaultdict[str, set[str]] = defaultdict(set)
        self._reserved: dict[str, tuple[str, int, bool]] = {}
        self._others: defaultdict[str, int] = defaultdict(int)
        self._ours: defaultdict[str, int] = defaultdict(int)
        self._sizes: dict[DeviceKey, tuple[str, int]] = {}
        self._keys_of: dict[str, dict[DeviceKey, int]] = {}
        self._holders: dict[DeviceKey, str] = {}
        self._held: dict[str, tuple[DeviceKey, ...]] = {}
        self._pins: dict[str, tuple[str, int, int, int]] = {}
        self._pins_on: defaultdict[str, set[str]] = defaultdict(set)
        self._free: dict[int, dict[str, int]] = defaultdict(dict)
        self.changed: set[str] = set()

    # --- feeding ------------------------------------------------------------------------------------------------------

    def set_node(self, name: str, node: Node | None) -> None:
        if node is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = node
        self._refresh(name)

    def set_slice(self, name: str, found: ResourceSlice | None) -> None:
        before = self._slices.pop(name, None)
        if found is not None and found.spec.driver == self._driver and found.spec.node_name:
            self._slices[name] = found
            self._slices_of[found.spec.node_name].add(name)
            self._refresh(found.spec.node_name)
        if before is not None and (found is None or found.spec.node_name != before.spec.node_name):
            self._slices_of[before.spec.node_name].discard(name)
            self._refresh(before.spec.node_name)

    def set_pod(self, key: str, pod: Pod | None) -> None:
        """What pods request of a node's memory: others' count against it (P6), ours only where a pin is chosen."""
        before = self._reserved.pop(key, None)
        now = None
        if pod is not None and pod.spec.node_name and not pod.ended:
            now = (pod.spec.node_name, requested_bytes(pod), self._is_ours(pod))
            self._reserved[key] = now
        if before == now:
            return
        for entry, sign in ((before, -1), (now, +1)):
            if entry is not None:
                node, size, ours = entry
                (self._ours if ours else self._others)[node] += sign * size
                if not ours:
                    self.changed.add(node)

    def set_claim(self, key: str, claim: ResourceClaim | None) -> None:
        """Whose devices are taken; anybody's claims count."""
        for device in self._held.pop(key, ()):
            if self._holders.get(device) == key:
                del self._holders[device]
                self._count_free(self._sizes.get(device, ("", 0))[0])
        results = [] if claim is None else [each for each in claim.results if each.driver == self._driver]
        if results:
            self._held[key] = tuple((each.pool, each.device) for each in results)
            for device in self._held[key]:
                self._holders[device] = key
            for node in {self._sizes.get(device, ("", 0))[0] for device in self._held[key]}:
                self._count_free(node)

    def _is_ours(self, pod: Pod) -> bool:
        return pod.metadata.namespace == self._namespace and all(
            pod.metadata.labels.get(key) == value for key, value in MANAGED.items()
        )

    def _refresh(self, node: str) -> None:
        for key in self._keys_of.pop(node, {}):
            self._sizes.pop(key, None)
        devices, _ = self._devices(node)
        self._keys_of[node] = devices
        for key, size in devices.items():
            self._sizes[key] = (node, size)
        self._count_free(node)
        self.changed.add(node)

    def _devices(self, node: str) -> tuple[dict[DeviceKey, int], bool]:
        """Devices of the newest complete generation of each pool, and whether every pool has one that is its newest."""
        pools: defaultdict[str, list[ResourceSlice]] = defaultdict(list)
        for name in self._slices_of.get(node, ()):
            pools[self._slices[name].spec.pool.name].append(self._slices[name])
        found: dict[DeviceKey, int] = {}
        complete = bool(pools)
        for pool, slices in pools.items():
            newest = max(each.spec.pool.generation for each in slices)
            chosen = [each for each in slices if each.spec.pool.generation == newest]
            if len(chosen) != chosen[0].spec.pool.resource_slice_count:
                complete = False
                continue
            for each in chosen:
                for device in each.spec.devices:
                    memory = device.capacity.get("memory")
                    size = 0 if memory is None else quantity_bytes(memory.value)
                    if size > 0 and not any(taint.effect in _REPELS for taint in device.taints):
                        found[pool, device.name] = size
        return found, complete

    # --- asking -------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Iterable[str]:
        return self._nodes.keys()

    def ready(self, name: str) -> bool:
        node = self._nodes.get(name)
        return node is not None and node.ready

    def node_of(self, pool: str, device: str) -> str:
        return self._sizes.get((pool, device), ("", 0))[0]

    def device_bytes(self, pool: str, device: str) -> int:
        return self._sizes.get((pool, device), ("", 0))[1]

    def record(self, name: str) -> NodeRecord:
        """What the bus is told of a node; one that is not there any more is not enabled, and lost."""
        node = self._nodes.get(name)
        if node is None:
            return NodeRecord(node=node_token(name), devices=(), enabled=False, suspect=True, lost=True)
        devices, complete = self._devices(name)
        labels = node.metadata.labels
        return NodeRecord(
            node=node_token(name),
            devices=tuple(
                Device(device=device, memory_bytes=size, model=labels.get(DEVICE_GIB, ""))
                for (_, device), size in sorted(devices.items(), key=lambda item: (len(item[0][1]), item[0]))
            ),
            host_allocatable_bytes=quantity_bytes(node.status.allocatable.get("memory", "")),
            host_reserved_bytes=self._others.get(name, 0),
            roles=_roles(labels),
            enabled=_enabled(node),
            complete=complete,
            suspect=not node.ready,
            lost=not node.ready,
        )

    # --- pins (K11) ---------------------------------------------------------------------------------------------------

    def pin(
        self, claim: str, tiers: tuple[Tier, ...], *, role: Role, host_bytes: int, avoid: tuple[str, ...] = ()
    ) -> str:
        """The node that would win: tightest tier, smallest device, room for all of it; "" when none has room now.

        The choice counts as taken until ``unpin``, so that two founders are not sent to one last device.
        """
        for tier in tiers:
            for size in sorted(self._free):
                if size < tier.floor_bytes or (tier.ceiling_gib and size > tier.ceiling_gib << 30):
                    continue
                for node, free in self._free[size].items():
                    if free >= tier.count and node not in avoid and self._takes(node, role, host_bytes):
                        self._pins[claim] = (node, size, tier.count, host_bytes)
                        self._pins_on[node].add(claim)
                        self._ours[node] += host_bytes
                        self._count_free(node)
                        return node
        return ""

    def unpin(self, claim: str) -> None:
        pinned = self._pins.pop(claim, None)
        if pinned is not None:
            node, _, _, host_bytes = pinned
            self._pins_on[node].discard(claim)
            self._ours[node] -= host_bytes
            self._count_free(node)

    def _takes(self, name: str, role: Role, host_bytes: int) -> bool:
        node = self._nodes.get(name)
        if node is None or not node.ready or not _enabled(node):
            return False
        roles = _roles(node.metadata.labels)
        if roles and role not in roles:
            return False
        allocatable = quantity_bytes(node.status.allocatable.get("memory", ""))
        used = self._others.get(name, 0) + self._ours.get(name, 0)
        return not allocatable or used + host_bytes <= allocatable

    def _count_free(self, node: str) -> None:
        free: defaultdict[int, int] = defaultdict(int)
        for key, size in self._keys_of.get(node, {}).items():
            if key not in self._holders:
                free[size] += 1
        for claim in self._pins_on.get(node, ()):
            _, size, count, _ = self._pins[claim]
            free[size] -= count
        for size, counts in self._free.items():
            if size not in free:
                counts.pop(node, None)
        for size, count in free.items():
            if count > 0:
                self._free[size][node] = count
            else:
                self._free[size].pop(node, None)


def requested_bytes(pod: Pod) -> int:
    """Memory that a pod holds of its node: its containers together, or its largest init container, and its overhead."""
    regular = sum(quantity_bytes(each.resources.requests.get("memory", "0")) for each in pod.spec.containers)
    sidecars, largest = 0, 0
    for each in pod.spec.init_containers:
        size = quantity_bytes(each.resources.requests.get("memory", "0"))
        if each.restart_policy == "Always":
            sidecars += size
        else:
            largest = max(largest, size + sidecars)
    return max(regular + sidecars, largest) + quantity_bytes(pod.spec.overhead.get("memory", "0"))


def _enabled(node: Node) -> bool:
    """P1: the operator's word, and no cordon; role labels that are all false take nobody."""
    labels = node.metadata.labels
    no_role = not _roles(labels) and any(f"openrl.io/{role}" in labels for role in Role)
    return labels.get(ENABLED) == "true" and not node.spec.unschedulable and not no_role


def _roles(labels: Mapping[str, str]) -> tuple[Role, ...]:
    """P1: no role label = both roles; any present = only those set to true."""
    present = {role: labels[f"openrl.io/{role}"] for role in Role if f"openrl.io/{role}" in labels}
    return tuple(sorted(role for role, value in present.items() if value == "true"))
