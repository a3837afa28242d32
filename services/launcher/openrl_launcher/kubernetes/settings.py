"""Settings of the Kubernetes backend: flags and ``OPEN_RL_*`` variables (E19), all visible in ``deploy/base``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from openrl_common import settings

BACKEND = settings.setting(
    "--backend",
    type=click.Choice(["local", "kubernetes"]),
    default="local",
    help="Where workers run: processes on this host, or pods of a Kubernetes cluster.",
)


class _File(click.ParamType[Path | None]):
    """A file that exists; empty = none."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | None:
        if value is None or isinstance(value, Path) or not str(value).strip():
            return value if isinstance(value, Path) else None
        path = Path(str(value)).expanduser().absolute()
        if not path.is_file():
            self.fail(f"{str(path)!r} is no file", param, ctx)
        return path


KUBECONFIG = settings.setting(
    "--kubeconfig", type=_File(), default="", help="How to reach the cluster; empty: this pod's service account."
)
NAMESPACE = settings.setting("--namespace", default="openrl", help="Namespace of claims, worker pods and mirrors.")
DRIVER = settings.setting(
    "--dra-driver", name="driver", default="gpu.nvidia.com", help="Driver whose ResourceSlices are the inventory (K2)."
)
DEVICE_CLASS = settings.setting("--device-class", default="gpu.nvidia.com", help="DeviceClass that claims ask for.")
TRAINER_IMAGE = settings.setting("--trainer-image", default="openrl/trainer:latest", help="Image of trainer pods.")
SAMPLER_IMAGE = settings.setting("--sampler-image", default="openrl/sampler:latest", help="Image of sampler pods.")
IMAGE_PULL_POLICY = settings.setting(
    "--image-pull-policy",
    type=click.Choice(["IfNotPresent", "Always", "Never"]),
    default="IfNotPresent",
    help="Of worker pods.",
)
SHARED_CLAIM = settings.setting(
    "--shared-volume",
    name="shared_volume",
    default="openrl-shared",
    help="PersistentVolumeClaim (ReadWriteMany) that is every worker's --home.",
)
WORKER_NATS_URL = settings.setting(
    "--worker-nats-url", default="", help="Where workers reach NATS; empty: as the launcher does."
)
WORKER_SETTINGS = settings.setting(
    "--worker-config-map",
    name="worker_config_map",
    default="openrl-workers",
    help="ConfigMap whose OPEN_RL_* entries every worker gets.",
)
POD_TEMPLATE = settings.setting(
    "--pod-template",
    type=_File(),
    default="",
    help="YAML of a pod that worker pods are laid over: tolerations, node selectors, side cars (K3). "
    "Fields that placement owns are refused by name.",
)
PIN = settings.setting(
    "--pin",
    type=settings.SWITCH,
    default="on",
    help="Pin a founder's pod to the node it would win, and give a joiner its node at once (K11); unpinned when that "
    "node cannot take it.",
)
MIRROR = settings.setting(
    "--mirror", type=settings.SWITCH, default="on", help="Mirror the bus in Workload and ClaimLedger objects (K5)."
)

ALL = (
    KUBECONFIG,
    NAMESPACE,
    DRIVER,
    DEVICE_CLASS,
    TRAINER_IMAGE,
    SAMPLER_IMAGE,
    IMAGE_PULL_POLICY,
    SHARED_CLAIM,
    WORKER_NATS_URL,
    WORKER_SETTINGS,
    POD_TEMPLATE,
    PIN,
    MIRROR,
)


@dataclass(frozen=True)
class KubernetesSettings:
    """The values of ALL and what of the launcher's own settings matters here."""

    nats_url: str
    kubeconfig: Path | None = None
    namespace: str = "openrl"
    driver: str = "gpu.nvidia.com"
    device_class: str = "gpu.nvidia.com"
    trainer_image: str = "openrl/trainer:latest"
    sampler_image: str = "openrl/sampler:latest"
    image_pull_policy: str = "IfNotPresent"
    shared_volume: str = "openrl-shared"
    worker_nats_url: str = ""
    worker_config_map: str = "openrl-workers"
    pod_template: Path | None = None
    pin: bool = True
    mirror: bool = True
    stop_grace_s: float = 10.0
    restarts_max: int = 3
