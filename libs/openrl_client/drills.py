"""A drill's client jobs out of ``KIND:MODEL:COUNT`` (D1): as commands of a shell, or as Jobs of a cluster. Pure.

A client on a cluster has a Hugging Face cache of its own, filled from the shared one before it starts: of twelve
clients that locked one NFS directory one was once lost to a stale handle. Not here: running them, and what comes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import msgspec

from openrl_common.errors import Rejected
from openrl_common.records import JobKind

JOBS_MAX = 100_000
SESSION = "openrl.io/session"
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_USER = 65532


class JobsSpec(msgspec.Struct, frozen=True):
    """``kind:model:count`` (D1)."""

    kind: JobKind
    model: str
    count: int


class ClientJob(msgspec.Struct, frozen=True):
    name: str
    kind: JobKind
    model: str


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster's part of the Jobs. ``cache_claim``: volume claim with the shared Hugging Face cache, "" = none."""

    image: str
    namespace: str
    nats_url: str
    cache_claim: str = ""
    session: str = ""


def parse_jobs(text: str) -> tuple[JobsSpec, ...]:
    """``fft:qwen3-0.6b:6,lora:gemma-4-e2b:3``.

    Raises:
        Rejected: code ``usage``: names the part that cannot be read.
    """
    found = []
    for part in text.split(","):
        kind, _, rest = part.strip().partition(":")
        model, _, count = rest.rpartition(":")
        if kind not in list(JobKind) or not model or not (count.isascii() and count.isdigit() and int(count) > 0):
            raise Rejected(
                f"{part.strip()[:60]!r} is not KIND:MODEL:COUNT: write for example fft:qwen3-0.6b:6 "
                f"({' or '.join(JobKind)}, a model of the profile, a number from 1)",
                code="usage",
            )
        found.append(JobsSpec(JobKind(kind), model, int(count)))
    if sum(each.count for each in found) > JOBS_MAX:
        raise Rejected(f"{sum(each.count for each in found)} jobs: at most {JOBS_MAX}", code="usage")
    return tuple(found)


def client_jobs(specs: Iterable[JobsSpec]) -> list[ClientJob]:
    """One for each count, numbered by kind and model, so that two parts of the same never share a name."""
    numbers: dict[str, int] = {}
    jobs = []
    for spec in specs:
        stem = _NOT_IN_NAMES.sub("-", f"{spec.kind}-{PurePosixPath(spec.model).name}".lower()).strip("-")[:40]
        for _ in range(spec.count):
            numbers[stem] = numbers.get(stem, 0) + 1
            jobs.append(ClientJob(f"{stem}-{numbers[stem]}", spec.kind, spec.model))
    return jobs


def command(job: ClientJob, recipe: str, arguments: Iterable[str]) -> list[str]:
    """``openrl run …``: what one client does. ``arguments``: more of that command's own."""
    return ["openrl", "run", recipe, "--name", job.name, "--kind", str(job.kind), "--model", job.model, *arguments]


def manifest(job: ClientJob, recipe: str, arguments: Iterable[str], where: Where) -> dict[str, Any]:
    """The same as a Kubernetes Job, tried once. Raises Rejected when the session is no label's value."""
    if where.session and not _LABEL.fullmatch(where.session):
        raise Rejected(
            f"--session {where.session[:80]!r} is no label: letters, digits, -, _ and ., at most 63", code="usage"
        )
    labels = {"app.kubernetes.io/name": "openrl-client", "app.kubernetes.io/part-of": "openrl-drill"}
    labels |= {SESSION: where.session} if where.session else {}
    tight = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    client: dict[str, Any] = {
        "name": "client",
        "image": where.image,
        "command": command(job, recipe, [*arguments, "--out", f"/tmp/{job.name}"]),
        "env": [
            {"name": name, "value": value}
            for name, value in (("OPEN_RL_NATS_URL", where.nats_url), ("HF_HOME", "/cache"), ("HOME", "/tmp"))
        ],
        "securityContext": tight,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "cache", "mountPath": "/cache"}],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [client],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "cache", "emptyDir": {}}],
    }  # fmt: skip
    if where.cache_claim:
        spec["initContainers"] = [
            {
                "name": "seed-cache",
                "image": where.image,
                "command": ["cp", "-r", "/shared/.", "/cache"],
                "securityContext": tight,
                "volumeMounts": [
                    {"name": "shared", "mountPath": "/shared", "readOnly": True},
                    {"name": "cache", "mountPath": "/cache"},
                ],
            }
        ]
        claim = {"claimName": where.cache_claim, "readOnly": True}
        spec["volumes"].append({"name": "shared", "persistentVolumeClaim": claim})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name, "namespace": where.namespace, "labels": labels},
        "spec": {"backoffLimit": 0, "template": {"metadata": {"labels": labels}, "spec": spec}},
    }
