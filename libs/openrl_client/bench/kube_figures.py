"""The figures of ``openrl bench kube``, and where they are read: CPU time of processes, the launcher's own metrics."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from openrl_client.bench.control_plane import ControlPlane
from openrl_client.bench.figures import cpu_seconds
from openrl_client.bench.machine import Machine, StorePlace
from openrl_client.bench.plain_pods import Body
from openrl_client.errors import TimedOut

_SETTLE_S = 10.0
_SENT = "openrl_launcher_api_requests "
_WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE")
_NO_PODS = ("leases", "tokenreviews", "subjectaccessreviews")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class KubeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``--json``.

    Attributes:
        placed_per_s: workers over the seconds from submission until their pods run, both halves together.
        founders_per_s, joiners_per_s: the same of each half.
        joined: workers that really joined another's claim.
        ready_per_s: until their processes have said ready and placement has heard it.
        api_requests_per_worker: the launcher's, mirror writes included, each watch counted once.
        baseline_pods_per_s: plain pods (``plain``: bare or full), created → running, at most ``plain_waiting_max`` made
            that do not run yet (0 = no bound). ``ratio``: placed_per_s over it.
        api_writes_per_worker: by part, what anybody (scheduler, controllers, kubelets too) wrote to the API server.
        cpu_ms_per_worker: by part (plain, founders, joiners, and afterwards until the mirror has written all, what idle
            programs take included) and process; ``cpu_ratio``: plain over both halves' mean,
            all processes together. It holds on a machine that others keep busy, where rates do not.
        other_cores: cores that processes outside this benchmark kept busy meanwhile.
    """

    nodes: int
    workers: int
    plain: Body
    plain_waiting_max: int
    joined: int
    placed_per_s: float
    founders_per_s: float
    joiners_per_s: float
    ready_per_s: float
    api_requests_per_worker: float
    api_requests: dict[str, int]
    api_writes_per_worker: dict[str, dict[str, float]]
    launcher_rss_bytes: int
    baseline_pods_per_s: float
    ratio: float
    cpu_ms_per_worker: dict[str, dict[str, float]]
    cpu_ratio: float
    other_cores: float
    store: StorePlace
    machine: Machine


@dataclass(frozen=True)
class Part:
    """How ``count`` pods came: seconds until they ran and until they were ready; each one's CPU time and API writes."""

    count: int
    placed_s: float
    ready_s: float
    cpu_ms: dict[str, float]
    writes: dict[str, float]


class Cpu:
    """CPU time of processes since it was made."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()}

    def ms_each(self, count: int) -> dict[str, float]:
        now = self._now()
        return {name: round((now[name] - before) * 1000 / count, 2) for name, before in self._before.items()}


class Writes:
    """Writes to the API server since it was made, by verb and resource."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._before = self._now()

    def _now(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for line in self._plane.kubectl("get", "--raw", "/metrics").splitlines():
            if not line.startswith("apiserver_request_total{"):
                continue
            labels = dict(_LABEL.findall(line))
            if labels["verb"] in _WRITES and labels["resource"] not in _NO_PODS:
                what = "/".join(filter(None, (labels["resource"], labels["subresource"])))
                found[f"{labels['verb']} {what}"] += int(float(line.rsplit(" ", 1)[1]))
        return found

    def each(self, count: int) -> dict[str, float]:
        """Those that come to a tenth of one or more."""
        new = self._now() - self._before
        return {name: round(number / count, 2) for name, number in sorted(new.items()) if number >= count / 10}


async def settled_requests(port: int) -> int:
    """Requests once no more are sent: the mirror's writes come later, and are counted."""
    sent = -1
    while (now := await asyncio.to_thread(_metric, port, _SENT)) != sent:
        sent = now
        await asyncio.sleep(_SETTLE_S)
    return sent


def requests_sent(port: int) -> int:
    """By the launcher to the API server, until now."""
    return _metric(port, _SENT)


def _metrics(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        lines: list[str] = answer.read().decode().splitlines()
        return lines


def _metric(port: int, name: str) -> int:
    for line in _metrics(port):
        if line.startswith(name):
            return int(float(line.split()[1]))
    raise TimedOut(f"the launcher's /metrics do not have {name}")


def requests_by_kind(port: int) -> dict[str, int]:
    """Requests by verb and resource."""
    prefix = 'openrl_launcher_api_requests_by{request="'
    lines = [line.removeprefix(prefix) for line in _metrics(port) if line.startswith(prefix)]
    return {line.split('"')[0]: int(float(line.split()[-1])) for line in lines}
