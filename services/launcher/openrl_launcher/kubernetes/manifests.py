"""The objects that the launcher writes: one ResourceClaim per claim (K1), one pod per assignment (K3). Pure.

Names are deterministic: a claim's own id, and ``<workload>-<assignment>`` for a pod, so that applying twice makes one
object and no assignment ever has two pods. Ids are never reused, so neither are names.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from openrl_common.errors import Rejected
from openrl_common.records import ClaimEntry, Role, Tier
from openrl_launcher.kubernetes.settings import KubernetesSettings

ENABLED = "openrl.io/enabled"
DEVICE_GIB = "openrl.io/device-gib"
CLAIM = "openrl.io/claim"
ASSIGNMENT = "openrl.io/assignment"
WORKLOAD = "openrl.io/workload"
OWNER = "openrl.io/owner"
ROLE = "openrl.io/role"
PINNED = "openrl.io/pinned"
MANAGED = {"app.kubernetes.io/managed-by": "openrl-launcher", "app.kubernetes.io/part-of": "openrl"}
SELECTOR = ",".join(f"{key}={value}" for key, value in MANAGED.items())
CLAIM_FINALIZER = "resource.kubernetes.io/delete-protection"
"""kube-scheduler sets it on a claim before it writes the allocation, kube-controller-manager takes it off one that is
deleted and not in use. A claim that has it from its birth is a write less (K11)."""
HOME = "/var/lib/openrl"
HEALTH_PORT = 8080
_STARTUP_PERIOD_S = 5
_STARTUP_S = 3600
"""A model load takes minutes, a first compilation more: the start-up probe gives up after an hour."""
_USER = 65532
_MODULES = {Role.TRAINER: "openrl_trainer", Role.SAMPLER: "openrl_sampler"}
_WORKER = "worker"


@dataclass(frozen=True, slots=True)
class PodPlan:
    """What one worker's pod is made of. ``pinned``: the node its scheduling is limited to; ``node``: no scheduling.

    ``avoid``: nodes that failed the workload lately (P13).
    """

    assignment: str
    claim: str
    entry: ClaimEntry
    tiers: tuple[Tier, ...]
    pinned: str = ""
    node: str = ""
    avoid: tuple[str, ...] = ()


def pod_name(workload: str, assignment: str) -> str:
    return f"{workload}-{assignment}".lower()[-253:].lstrip("-.")


def tier_name(tier: Tier) -> str:
    """Of a sub-request: the winning one's name says which tier won (K1)."""
    return f"t{tier.count}x{tier.ceiling_gib}"


def resource_claim(claim: str, tiers: tuple[Tier, ...], settings: KubernetesSettings) -> dict[str, Any]:
    """One request ``gpu`` whose alternatives are the tiers, tightest first: floor in exact bytes, ceiling in GiB."""
    memory = f"device.capacity['{settings.driver}'].memory"

    def expression(tier: Tier) -> str:
        floor = f"{memory}.compareTo(quantity('{tier.floor_bytes}')) >= 0"
        return f"{floor} && {memory}.compareTo(quantity('{tier.ceiling_gib}Gi')) <= 0" if tier.ceiling_gib else floor

    alternatives = [
        {
            "name": tier_name(tier),
            "deviceClassName": settings.device_class,
            "allocationMode": "ExactCount",
            "count": tier.count,
            "selectors": [{"cel": {"expression": expression(tier)}}],
        }
        for tier in tiers
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": claim,
            "namespace": settings.namespace,
            "labels": {**MANAGED, CLAIM: claim},
            "finalizers": [CLAIM_FINALIZER],
        },
        "spec": {"devices": {"requests": [{"name": "gpu", "firstAvailable": alternatives}]}},
    }


def pod(plan: PodPlan, settings: KubernetesSettings, template: Mapping[str, Any]) -> dict[str, Any]:
    """The worker's pod, laid over the user's template."""
    made: dict[str, Any] = copy.deepcopy(dict(template))
    own = _pod(plan, settings)
    metadata = made.setdefault("metadata", {})
    metadata["name"], metadata["namespace"] = own["metadata"]["name"], own["metadata"]["namespace"]
    for field in ("labels", "annotations"):
        metadata[field] = {**metadata.get(field, {}), **own["metadata"][field]}
    spec = made.setdefault("spec", {})
    containers = spec.get("containers", [])
    worker: dict[str, Any] = next((each for each in containers if each.get("name") == _WORKER), {})
    others = [each for each in containers if each.get("name") != _WORKER]
    own_worker = own["spec"]["containers"][0]
    merged = {**worker, **own_worker}
    merged["env"] = [*own_worker["env"], *worker.get("env", [])]
    merged["envFrom"] = [*worker.get("envFrom", []), *own_worker["envFrom"]]
    merged["volumeMounts"] = [*own_worker["volumeMounts"], *worker.get("volumeMounts", [])]
    theirs, ours = worker.get("resources", {}), own_worker["resources"]
    merged["resources"] = {
        "claims": ours["claims"],
        "requests": {**theirs.get("requests", {}), **ours["requests"]},
        "limits": {**theirs.get("limits", {}), **ours["limits"]},
    }
    volumes = [*own["spec"]["volumes"], *spec.get("volumes", [])]
    affinity = {**spec.get("affinity", {}), **own["spec"].get("affinity", {})}
    made["spec"] = {**spec, **own["spec"], "containers": [merged, *others], "volumes": volumes}
    if affinity:
        made["spec"]["affinity"] = affinity
    made["apiVersion"], made["kind"] = "v1", "Pod"
    return made


def _pod(plan: PodPlan, settings: KubernetesSettings) -> dict[str, Any]:
    entry = plan.entry
    shared_memory = plan.tiers and plan.tiers[0].count > 1
    volumes: list[dict[str, Any]] = [
        {"name": "openrl-home", "persistentVolumeClaim": {"claimName": settings.shared_volume}},
        {"name": "openrl-tmp", "emptyDir": {}},
    ]
    mounts = [{"name": "openrl-home", "mountPath": HOME}, {"name": "openrl-tmp", "mountPath": "/tmp"}]
    if shared_memory:  # collectives of several ranks on one node (K10)
        volumes.append({"name": "openrl-shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "openrl-shm", "mountPath": "/dev/shm"})
    memory = {"memory": str(entry.host_bytes)} if entry.host_bytes else {}
    probe = {"httpGet": {"path": "/livez", "port": "health"}}
    ready = {"httpGet": {"path": "/readyz", "port": "health"}}
    worker = {
        "name": _WORKER,
        "image": settings.trainer_image if entry.role is Role.TRAINER else settings.sampler_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-m", _MODULES[entry.role]],
        "env": _environment(plan, settings),
        "envFrom": [{"configMapRef": {"name": settings.worker_config_map, "optional": True}}],
        "ports": [{"name": "health", "containerPort": HEALTH_PORT}],
        "resources": {"claims": [{"name": "gpu"}], "requests": memory, "limits": memory},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "startupProbe": {
            **ready, "periodSeconds": _STARTUP_PERIOD_S, "failureThreshold": _STARTUP_S // _STARTUP_PERIOD_S
        },
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {**ready, "periodSeconds": 5},
        "volumeMounts": mounts,
    }  # fmt: skip
    spec: dict[str, Any] = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(settings.stop_grace_s),
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "resourceClaims": [{"name": "gpu", "resourceClaimName": plan.claim}],
        "containers": [worker],
        "volumes": volumes,
    }  # fmt: skip
    if plan.node:
        spec["nodeName"] = plan.node
    else:
        spec["affinity"] = {"nodeAffinity": _node_affinity(plan)}
    annotations = {WORKLOAD: entry.workload, OWNER: entry.owner}
    if plan.pinned:
        annotations[PINNED] = plan.pinned
    return {
        "metadata": {
            "name": pod_name(entry.workload, plan.assignment),
            "namespace": settings.namespace,
            "labels": {**MANAGED, CLAIM: plan.claim, ASSIGNMENT: plan.assignment, ROLE: str(entry.role)},
            "annotations": annotations,
        },
        "spec": spec,
    }


def _node_affinity(plan: PodPlan) -> dict[str, Any]:
    """Enabled nodes of the role; those of tight shapes first (K1). A pin limits it to one node by name (K11)."""
    enabled = {"key": ENABLED, "operator": "In", "values": ["true"]}
    of_role = {"key": f"openrl.io/{plan.entry.role}", "operator": "In", "values": ["true"]}
    unlabelled = [{"key": f"openrl.io/{role}", "operator": "DoesNotExist"} for role in Role]
    terms: list[dict[str, Any]] = [
        {"matchExpressions": [enabled, of_role]},
        {"matchExpressions": [enabled, *unlabelled]},
    ]
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in plan.avoid]
    if plan.pinned:
        fields = [{"key": "metadata.name", "operator": "In", "values": [plan.pinned]}]
    if fields:
        terms = [{**term, "matchFields": fields} for term in terms]
    affinity: dict[str, Any] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    preferred = preferences(plan.tiers)
    if preferred and not plan.pinned:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {
                "weight": weight,
                "preference": {"matchExpressions": [{"key": DEVICE_GIB, "operator": "In", "values": [str(gib)]}]},
            }
            for gib, weight in preferred
        ]
    return affinity


def preferences(tiers: tuple[Tier, ...]) -> list[tuple[int, int]]:
    """Device size in GiB and its weight, 100 for the tightest down to none for the largest (K1, P9)."""
    sizes = list(dict.fromkeys(tier.ceiling_gib for tier in tiers if tier.ceiling_gib))
    return [(gib, max(1, 100 - 100 * index // len(sizes))) for index, gib in enumerate(sizes[:-1])]


def _environment(plan: PodPlan, settings: KubernetesSettings) -> list[dict[str, Any]]:
    values = {
        "OPEN_RL_WORKLOAD": plan.entry.workload,
        "OPEN_RL_ASSIGNMENT": plan.assignment,
        "OPEN_RL_CLAIM": plan.claim,  # for whoever looks into the pod (K3); the worker takes it from its seat
        "OPEN_RL_OWNER": plan.entry.owner,
        "OPEN_RL_DEVICE_BYTES": str(plan.entry.device_bytes),
        "OPEN_RL_NATS_URL": settings.worker_nats_url or settings.nats_url,
        "OPEN_RL_HOME": HOME,
        "OPEN_RL_HEALTH_HOST": "0.0.0.0",  # the kubelet probes from outside the pod
        "OPEN_RL_HEALTH_PORT": str(HEALTH_PORT),
        "OPEN_RL_START_GATE_WAIT": "15m",
        "HOME": "/tmp",  # the root file system is read-only
        "PYTHONUNBUFFERED": "1",
    }
    node = {"name": "OPEN_RL_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    return [*({"name": name, "value": value} for name, value in values.items()), node]


# --- the user's template ------------------------------------------------------------------------------------------

_OWNED = (
    ("metadata", "name"), ("metadata", "namespace"), ("metadata", "generateName"), ("spec", "nodeName"),
    ("spec", "resourceClaims"), ("spec", "restartPolicy"), ("spec", "schedulingGates"), ("spec", "resources"),
    ("spec", "terminationGracePeriodSeconds"), ("spec", "affinity", "nodeAffinity"),
)  # fmt: skip
_OWNED_IN_WORKER = ("image", "command", "args", "imagePullPolicy", "startupProbe", "livenessProbe", "readinessProbe")


def read_template(path: Path | None) -> dict[str, Any]:
    """The user's pod template, empty without one.

    Raises:
        Rejected: unreadable, no pod, or it sets a field that placement owns; the message names the field.
    """
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise Rejected(f"pod template {path} cannot be read: {error}", code="bad-template") from error
    if not isinstance(loaded, dict) or loaded.get("kind", "Pod") != "Pod":
        raise Rejected(
            f"pod template {path} is no pod: write a YAML object with metadata and spec", code="bad-template"
        )
    check_template(loaded, str(path))
    return loaded


def check_template(template: Mapping[str, Any], where: str) -> None:
    """Raises Rejected, naming the field, when the template sets what placement owns."""
    owned = [".".join(keys) for keys in _OWNED if _at(template, keys) is not None]
    spec = template.get("spec") or {}
    for container in spec.get("containers") or []:
        if container.get("name") != _WORKER:
            continue
        prefix = "spec.containers[worker]"
        owned += [f"{prefix}.{field}" for field in _OWNED_IN_WORKER if field in container]
        resources = container.get("resources") or {}
        owned += [f"{prefix}.resources.claims"] if "claims" in resources else []
        owned += [
            f"{prefix}.resources.{kind}.memory"
            for kind in ("requests", "limits")
            if "memory" in resources.get(kind, {})
        ]
        owned += [
            f"{prefix}.env[{each.get('name')}]"
            for each in container.get("env") or []
            if str(each.get("name", "")).startswith("OPEN_RL_")
        ]
    names = [*(spec.get("volumes") or [])]
    owned += [f"spec.volumes[{each['name']}]" for each in names if str(each.get("name", "")).startswith("openrl-")]
    if owned:
        raise Rejected(
            f"pod template {where} sets {', '.join(owned)}: placement owns that, leave it out", code="bad-template"
        )


def _at(value: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
