"""K1, K3, K10, K11: the objects that the launcher writes, and the template that a user lays under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrl_common.errors import Rejected
from openrl_common.quantities import GIB
from openrl_common.records import ClaimEntry, Role, Tier
from openrl_launcher.kubernetes.manifests import (
    PodPlan,
    check_template,
    pod,
    preferences,
    read_template,
    resource_claim,
)
from openrl_launcher.kubernetes.settings import KubernetesSettings

SETTINGS = KubernetesSettings(nats_url="nats://nats:4222", driver="gpu.example.com", device_class="gpus")
TIERS = (
    Tier(count=1, floor_bytes=5 * GIB + 1, ceiling_gib=23),
    Tier(count=1, floor_bytes=5 * GIB + 1, ceiling_gib=48),
    Tier(count=1, floor_bytes=5 * GIB + 1, ceiling_gib=80),
)


def plan(**fields: Any) -> PodPlan:
    entry = ClaimEntry(
        workload="team--job--trainer", tenant="team", owner="team/job", role=Role.TRAINER, device_bytes=5 * GIB,
        host_bytes=3 * GIB, exclusive=False, incarnation=1, reserved_at=0.0,
    )  # fmt: skip
    return PodPlan(**{"assignment": "a-1", "claim": "c-1", "entry": entry, "tiers": TIERS, **fields})


def worker(made: dict[str, Any]) -> dict[str, Any]:
    (container,) = [each for each in made["spec"]["containers"] if each["name"] == "worker"]
    return container


def test_K1_the_tiers_are_alternatives_in_order_with_an_exact_floor_and_a_ceiling_in_gib() -> None:
    (request,) = resource_claim("c-1", TIERS, SETTINGS)["spec"]["devices"]["requests"]
    alternatives = request["firstAvailable"]
    assert [each["name"] for each in alternatives] == ["t1x23", "t1x48", "t1x80"]
    expression = alternatives[0]["selectors"][0]["cel"]["expression"]
    assert f"quantity('{5 * GIB + 1}')) >= 0" in expression
    assert "quantity('23Gi')) <= 0" in expression


def test_K1_the_pod_prefers_nodes_in_the_same_order_and_none_of_the_largest() -> None:
    assert preferences(TIERS) == [(23, 100), (48, 67)]
    affinity = pod(plan(), SETTINGS, {})["spec"]["affinity"]["nodeAffinity"]
    preferred = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [(each["weight"], each["preference"]["matchExpressions"][0]["values"]) for each in preferred] == [
        (100, ["23"]),
        (67, ["48"]),
    ]


def test_K3_the_pod_is_tight_and_its_memory_is_what_its_seat_declares() -> None:
    made = pod(plan(), SETTINGS, {})
    assert made["metadata"]["name"] == "team--job--trainer-a-1"
    spec, container = made["spec"], worker(made)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"]["requests"] == container["resources"]["limits"] == {"memory": str(3 * GIB)}
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 1800
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["OPEN_RL_ASSIGNMENT"] == "a-1"
    assert (environment["OPEN_RL_CLAIM"], environment["OPEN_RL_OWNER"]) == ("c-1", "team/job")
    assert made["metadata"]["labels"]["openrl.io/claim"] == "c-1"
    assert made["metadata"]["labels"]["openrl.io/assignment"] == "a-1"
    assert made["metadata"]["annotations"]["openrl.io/owner"] == "team/job"
    assert environment["OPEN_RL_NATS_URL"] == "nats://nats:4222"
    assert "affinity" in spec


def test_K3_applying_twice_is_the_same_object_byte_for_byte() -> None:
    assert pod(plan(), SETTINGS, {}) == pod(plan(), SETTINGS, {})


def test_K10_only_several_devices_get_shared_memory() -> None:
    one = {each["name"] for each in pod(plan(), SETTINGS, {})["spec"]["volumes"]}
    several = pod(plan(tiers=(Tier(count=4, floor_bytes=GIB, ceiling_gib=80),)), SETTINGS, {})["spec"]["volumes"]
    assert "openrl-shm" not in one
    assert "openrl-shm" in {each["name"] for each in several}


def test_K11_a_pin_limits_the_pod_to_one_node_and_a_joiner_names_its_node() -> None:
    pinned = pod(plan(pinned="n1"), SETTINGS, {})
    terms = pinned["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert all(term["matchFields"][0]["values"] == ["n1"] for term in terms["nodeSelectorTerms"])
    assert pinned["metadata"]["annotations"]["openrl.io/pinned"] == "n1"
    joiner = pod(plan(node="n2"), SETTINGS, {})["spec"]
    assert joiner["nodeName"] == "n2"
    assert "affinity" not in joiner


def test_P13_an_avoided_node_is_left_out_of_the_schedulers_choice() -> None:
    affinity = pod(plan(avoid=("bad",)), SETTINGS, {})["spec"]["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert all(
        {"key": "metadata.name", "operator": "NotIn", "values": ["bad"]} in term["matchFields"] for term in terms
    )


def test_K3_a_users_template_is_kept_beside_what_is_ours() -> None:
    template = {
        "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "containers": [
                {
                    "name": "worker",
                    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                    "resources": {"limits": {"cpu": "8"}},
                },
                {"name": "side-car", "image": "s"},
            ],
        },
    }
    check_template(template, "t.yaml")
    made = pod(plan(), SETTINGS, template)
    assert made["metadata"]["labels"]["team"] == "x"
    assert made["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert set(made["spec"]["affinity"]) == {"podAntiAffinity", "nodeAffinity"}
    assert [each["name"] for each in made["spec"]["containers"]] == ["worker", "side-car"]
    assert worker(made)["resources"]["limits"] == {"cpu": "8", "memory": str(3 * GIB)}
    assert "NCCL_DEBUG" in {each["name"] for each in worker(made)["env"]}


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"spec": {"nodeName": "n"}}, "spec.nodeName"),
        ({"spec": {"resourceClaims": []}}, "spec.resourceClaims"),
        ({"spec": {"affinity": {"nodeAffinity": {}}}}, "spec.affinity.nodeAffinity"),
        ({"spec": {"containers": [{"name": "worker", "command": ["x"]}]}}, "spec.containers[worker].command"),
        (
            {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"memory": "1"}}}]}},
            "resources.limits.memory",
        ),
        ({"spec": {"containers": [{"name": "worker", "env": [{"name": "OPEN_RL_HOME"}]}]}}, "env[OPEN_RL_HOME]"),
        ({"spec": {"volumes": [{"name": "openrl-home"}]}}, "spec.volumes[openrl-home]"),
    ],
)
def test_K3_a_template_that_sets_what_placement_owns_is_refused_by_field_name(
    template: dict[str, Any], field: str
) -> None:
    with pytest.raises(Rejected, match="placement owns that") as refused:
        check_template(template, "t.yaml")
    assert field in str(refused.value)
    assert "t.yaml" in str(refused.value)


def test_K3_a_template_that_is_no_pod_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    for text in ("- a", "kind: Service", ": :"):
        path.write_text(text)
        with pytest.raises(Rejected) as refused:
            read_template(path)
        assert str(path) in str(refused.value)
    assert read_template(None) == {}
