"""K2, K11, P1: nodes as the bus is told of them, and the node that a founder would win."""

from __future__ import annotations

import pytest

from openrl_common.quantities import GIB
from openrl_common.records import Role, Tier
from openrl_launcher.kubernetes.inventory import Inventory, node_name, node_token, quantity_bytes, requested_bytes
from openrl_launcher.kubernetes.manifests import MANAGED
from openrl_launcher.kubernetes.objects import (
    AllocatedDevices,
    Allocation,
    AllocationResult,
    Capacity,
    ClaimStatus,
    Condition,
    Container,
    DeviceTaint,
    Meta,
    Node,
    NodeSpec,
    NodeStatus,
    Pod,
    PodSpec,
    PodStatus,
    Pool,
    ResourceClaim,
    Resources,
    ResourceSlice,
    SliceDevice,
    SliceSpec,
)

DRIVER = "gpu.example.com"
TIERS = (Tier(count=1, floor_bytes=10 * GIB, ceiling_gib=24), Tier(count=1, floor_bytes=10 * GIB, ceiling_gib=80))


def node(name: str, *, ready: bool = True, cordoned: bool = False, **labels: str) -> Node:
    shown = {"openrl.io/enabled": "true", **{f"openrl.io/{key}": value for key, value in labels.items()}}
    return Node(
        metadata=Meta(name=name, labels=shown),
        spec=NodeSpec(unschedulable=cordoned),
        status=NodeStatus(
            allocatable={"memory": "512Gi"}, conditions=[Condition(type="Ready", status="True" if ready else "Unknown")]
        ),
    )


def slice_of(
    name: str, sizes: list[int], *, generation: int = 1, count: int = 1, index: int = 0, taint: str = ""
) -> ResourceSlice:
    devices = [
        SliceDevice(
            name=f"gpu-{index}-{number}",
            capacity={"memory": Capacity(value=str(size * GIB))},
            taints=[DeviceTaint(effect=taint)] if taint else [],
        )
        for number, size in enumerate(sizes)
    ]
    return ResourceSlice(
        metadata=Meta(name=f"{name}-{generation}-{index}"),
        spec=SliceSpec(
            driver=DRIVER, node_name=name, pool=Pool(name=name, generation=generation, resource_slice_count=count),
            devices=devices,
        ),
    )  # fmt: skip


def pod(name: str, on: str, memory: str, *, ours: bool = False, phase: str = "Running") -> Pod:
    return Pod(
        metadata=Meta(name=name, namespace="openrl" if ours else "else", labels=MANAGED if ours else {}),
        spec=PodSpec(node_name=on, containers=[Container(resources=Resources(requests={"memory": memory}))]),
        status=PodStatus(phase=phase),
    )


def allocated(name: str, pool: str, device: str) -> ResourceClaim:
    result = AllocationResult(request="gpu/t1x80", driver=DRIVER, pool=pool, device=device)
    allocation = Allocation(devices=AllocatedDevices(results=[result]))
    return ResourceClaim(metadata=Meta(name=name), status=ClaimStatus(allocation=allocation))


@pytest.fixture
def fleet() -> Inventory:
    made = Inventory(driver=DRIVER, namespace="openrl")
    made.set_node("big", node("big"))
    made.set_slice("s1", slice_of("big", [80, 80]))
    made.set_node("small", node("small"))
    made.set_slice("s2", slice_of("small", [24]))
    return made


def pin(fleet: Inventory, claim: str, **fields: object) -> str:
    return fleet.pin(claim, TIERS, **{"role": Role.TRAINER, "host_bytes": GIB, **fields})  # type: ignore[arg-type]


def test_K2_only_the_newest_complete_generation_of_a_pool_counts(fleet: Inventory) -> None:
    fleet.set_slice("s3", slice_of("big", [80], generation=2, count=2))
    assert (fleet.record("big").complete, fleet.record("big").devices) == (False, ())
    fleet.set_slice("s4", slice_of("big", [80, 80], generation=2, count=2, index=1))
    record = fleet.record("big")
    assert (record.complete, len(record.devices)) == (True, 3)


def test_K2_a_tainted_device_and_one_of_another_driver_are_not_counted(fleet: Inventory) -> None:
    fleet.set_slice("s1", slice_of("big", [80, 80], taint="NoExecute"))
    assert fleet.record("big").devices == ()


def test_K2_what_others_request_is_reserved_and_what_is_ours_or_over_is_not(fleet: Inventory) -> None:
    fleet.set_pod("else/a", pod("a", "big", "5Gi"))
    fleet.set_pod("openrl/b", pod("b", "big", "7Gi", ours=True))
    fleet.set_pod("else/c", pod("c", "big", "9Gi", phase="Succeeded"))
    assert fleet.record("big").host_reserved_bytes == 5 * GIB
    fleet.set_pod("else/a", None)
    assert fleet.record("big").host_reserved_bytes == 0


@pytest.mark.parametrize(
    ("labels", "enabled", "roles"),
    [
        ({}, True, ()),
        ({"trainer": "true"}, True, (Role.TRAINER,)),
        ({"trainer": "false", "sampler": "true"}, True, (Role.SAMPLER,)),
        ({"trainer": "false", "sampler": "false"}, False, ()),
        ({"enabled": "false"}, False, ()),
    ],
)
def test_P1_labels_enable_a_node_and_limit_its_roles(
    fleet: Inventory, labels: dict[str, str], enabled: bool, roles: tuple[Role, ...]
) -> None:
    fleet.set_node("big", node("big", **labels))
    assert (fleet.record("big").enabled, fleet.record("big").roles) == (enabled, roles)


def test_F3_a_node_that_is_not_ready_or_gone_is_reported_lost_and_a_cordoned_one_takes_nobody(fleet: Inventory) -> None:
    fleet.set_node("big", node("big", ready=False))
    assert (fleet.record("big").suspect, fleet.record("big").lost) == (True, True)
    fleet.set_node("big", node("big", cordoned=True))
    assert (fleet.record("big").enabled, fleet.record("big").lost) == (False, False)
    fleet.set_node("big", None)
    assert fleet.record("big").lost


def test_K11_the_pin_is_the_tightest_tier_and_counts_until_it_is_given_back(fleet: Inventory) -> None:
    assert [pin(fleet, f"c{index}") for index in range(4)] == ["small", "big", "big", ""]
    fleet.unpin("c1")
    assert pin(fleet, "c4") == "big"


def test_K11_no_pin_where_devices_memory_role_or_the_avoid_list_say_no(fleet: Inventory) -> None:
    fleet.set_claim("else/x", allocated("x", "small", "gpu-0-0"))
    assert pin(fleet, "c1", avoid=("big",)) == ""
    assert pin(fleet, "c1", host_bytes=513 * GIB) == ""
    fleet.set_node("big", node("big", sampler="true"))
    assert pin(fleet, "c1") == ""
    fleet.set_claim("else/x", None)
    assert pin(fleet, "c1") == "small"


def test_K2_a_nodes_token_has_no_dots_and_can_be_read_back() -> None:
    assert node_token("ip-10-0-0-1.ec2.internal") == "ip-10-0-0-1_ec2_internal"
    assert node_name(node_token("a.b")) == "a.b"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512Gi", 512 * GIB), ("1e3", 1000), ("100m", 0), ("1.5Ki", 1536), ("129M", 129_000_000), ("", 0), ("x", 0)],
)
def test_K2_quantities_are_read_as_kubernetes_writes_them(text: str, size: int) -> None:
    assert quantity_bytes(text) == size


def test_K2_init_containers_and_side_cars_are_counted_as_the_scheduler_does() -> None:
    def box(memory: str, restart: str = "") -> Container:
        return Container(resources=Resources(requests={"memory": memory}), restart_policy=restart)

    spec = PodSpec(
        containers=[box("1Gi"), box("1Gi")],
        init_containers=[box("1Gi", "Always"), box("6Gi")],
        overhead={"memory": "1Gi"},
    )
    assert requested_bytes(Pod(metadata=Meta(name="p"), spec=spec)) == 8 * GIB
