"""Worker pods behind the launcher's port (``backend.Backend``): a pod is a process, a restart in place the next.

``Process.pid`` is how often the pod's container has been started again by its kubelet: a container that ended is the
end of that process, and the pod, with its device, stays for the next one (``restartPolicy: OnFailure``). A pod that
ended for good or vanished ends it too.

Invariants: deletes carry the pod's UID, so that a later pod of the same name is never hit; nothing is deleted by force
but on a lost node; gone means gone from the API server (B4). What was just written is known before the watch
says it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from openrl_common.errors import Transient
from openrl_launcher.backend import Inventory, Launch, Process
from openrl_launcher.kubernetes import manifests
from openrl_launcher.kubernetes.api import Absent, Exists, KubeApi, Refused
from openrl_launcher.kubernetes.manifests import ASSIGNMENT, CLAIM, MANAGED, WORKLOAD, PodPlan
from openrl_launcher.kubernetes.objects import Pod
from openrl_launcher.kubernetes.settings import KubernetesSettings

log = logging.getLogger(__name__)

_POD = msgspec.json.Decoder(Pod)
_RETRY_S = 0.5
_UNSEEN_S = 30.0
"""A pod that we made and that the watch has not shown for this long was deleted in between."""


class PodBackend:
    """The pods of one namespace.

    Args:
        spawn: runs a coroutine in the service's task group.
        plan: what the pod of a launch is made of.
    """

    def __init__(
        self,
        api: KubeApi,
        settings: KubernetesSettings,
        *,
        template: Mapping[str, Any],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        plan: Callable[[Launch], PodPlan],
    ) -> None:
        self._api = api
        self._settings = settings
        self.template = template
        self._spawn = spawn
        self._plan = plan
        self._path = f"/api/v1/namespaces/{settings.namespace}/pods"
        self._pods: dict[str, Pod] = {}
        self._unseen: dict[str, float] = {}
        self._of_claim: defaultdict[str, set[str]] = defaultdict(set)
        self._changes: dict[str, asyncio.Event] = {}
        self._deleting: set[str] = set()
        self._last_words: dict[str, str] = {}

    # --- what the watch says ------------------------------------------------------------------------------------------

    def set_pod(self, pod: Pod) -> None:
        assignment = pod.metadata.labels[ASSIGNMENT]
        self._unseen.pop(assignment, None)
        self._learn(assignment, pod)

    def forget_pod(self, assignment: str, uid: str) -> None:
        known = self._pods.get(assignment)
        if known is not None and known.metadata.uid == uid:
            self._drop(assignment)

    def drop_unseen(self) -> None:
        """Forget what was made and never shown (the watch listed anew over its whole life)."""
        for assignment, since in list(self._unseen.items()):
            if time.monotonic() - since > _UNSEEN_S:
                self._drop(assignment)

    def _learn(self, assignment: str, pod: Pod) -> None:
        self._pods[assignment] = pod
        self._of_claim[pod.metadata.labels.get(CLAIM, "")].add(assignment)
        words = _last_words(pod)
        if words:
            self._last_words[self._name(pod)] = words
        self._tell(assignment)

    def _drop(self, assignment: str) -> None:
        self._unseen.pop(assignment, None)
        pod = self._pods.pop(assignment)
        claim = pod.metadata.labels.get(CLAIM, "")
        self._of_claim[claim].discard(assignment)
        if not self._of_claim[claim]:
            del self._of_claim[claim]
        self._tell(assignment)

    def _tell(self, assignment: str) -> None:
        event = self._changes.get(assignment)
        if event is not None:
            event.set()

    # --- asking -------------------------------------------------------------------------------------------------------

    def pod(self, assignment: str) -> Pod | None:
        return self._pods.get(assignment)

    def pods_of(self, claim: str) -> tuple[Pod, ...]:
        return tuple(self._pods[assignment] for assignment in sorted(self._of_claim.get(claim, ())))

    @property
    def claims(self) -> set[str]:
        return set(self._of_claim)

    async def changed(self, assignment: str, *, within_s: float) -> None:
        """Return at the next change of the assignment's pod, or after ``within_s``."""
        event = self._changes.setdefault(assignment, asyncio.Event())
        event.clear()
        try:
            async with asyncio.timeout(within_s):
                await event.wait()
        except TimeoutError:
            pass

    # --- writing ------------------------------------------------------------------------------------------------------

    async def ensure(self, plan: PodPlan) -> Pod:
        """The assignment's pod, made when it is not there.

        Raises:
            Refused: the API server will not have it. Transient: its predecessor is not gone yet, or no answer.
        """
        pod = self._pods.get(plan.assignment)
        if pod is not None:
            if pod.ended and not pod.deleting:
                self.delete(pod)
            if pod.ended or pod.deleting:
                raise Transient(f"pod {self._name(pod)} has ended and is not gone yet")
            return pod
        made = manifests.pod(plan, self._settings, self.template)
        pod = _POD.decode(await self._api.ensure(self._path, made))
        if plan.assignment not in self._pods:
            self._unseen[plan.assignment] = time.monotonic()
            self._learn(plan.assignment, pod)
        return self._pods[plan.assignment]

    def delete(self, pod: Pod, *, force: bool = False) -> None:
        """Ask for this very pod's end, again until it is being deleted. Nothing happens when it is gone."""
        uid = pod.metadata.uid
        if not force and (uid in self._deleting or pod.deleting):
            return
        self._deleting.add(uid)
        self._spawn(self._delete(pod, force=force))

    async def _delete(self, pod: Pod, *, force: bool) -> None:
        body: dict[str, Any] = {"preconditions": {"uid": pod.metadata.uid}}
        if force:
            body["gracePeriodSeconds"] = 0
        try:
            while True:
                try:
                    await self._api.call("DELETE", f"{self._path}/{pod.metadata.name}", body=body)
                    return
                except (Absent, Exists):
                    return  # gone, or another pod of that name
                except Refused as error:
                    log.error("pod %s cannot be deleted: %s", self._name(pod), error)
                except Transient as error:
                    log.warning("%s; trying again", error)
                await asyncio.sleep(_RETRY_S)
        finally:
            self._deleting.discard(pod.metadata.uid)

    # --- the port -----------------------------------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        raise NotImplementedError("a cluster's inventory is told node by node")

    def running(self) -> dict[str, Process]:
        return {
            assignment: self._process(assignment, pod)
            for assignment, pod in self._pods.items()
            if pod.spec.node_name and not pod.ended
        }

    async def launch(self, launch: Launch) -> Process:
        try:
            pod = await self.ensure(self._plan(launch))
        except Refused as error:
            raise OSError(str(error)) from error
        return self._process(launch.assignment, pod)

    def log_path(self, launch: Launch) -> Path:
        """``<namespace>/<pod>``: what ``kubectl logs`` takes."""
        return Path(self._settings.namespace) / manifests.pod_name(launch.workload, launch.assignment)

    async def wait(self, process: Process) -> int | None:
        while True:
            pod = self._pods.get(process.assignment)
            if pod is None:
                return None
            if pod.ended or _restarts(pod) > process.pid:
                return _exit_code(pod)
            await self.changed(process.assignment, within_s=60.0)

    def terminate(self, process: Process) -> None:
        pod = self._pods.get(process.assignment)
        if pod is not None:
            self.delete(pod)

    def kill(self, process: Process) -> None:
        """The kubelet kills after the pod's grace; force would only hide a container that still runs."""

    def sweep(self, assignment: str) -> int:
        return 0

    def leaked(self, devices: tuple[str, ...], *, expect_idle: bool) -> str | None:
        return None

    def last_error(self, log_path: str) -> str:
        return self._last_words.pop(log_path, "")

    def _process(self, assignment: str, pod: Pod) -> Process:
        workload = pod.metadata.annotations.get(WORKLOAD, "")
        return Process(assignment, workload, _restarts(pod), _seconds(pod.metadata.creation_timestamp))

    def _name(self, pod: Pod) -> str:
        return f"{self._settings.namespace}/{pod.metadata.name}"


def is_worker(pod: Pod, namespace: str) -> bool:
    labels = pod.metadata.labels
    return (
        pod.metadata.namespace == namespace
        and bool(labels.get(ASSIGNMENT))
        and all(labels.get(key) == value for key, value in MANAGED.items())
    )


def _restarts(pod: Pod) -> int:
    return max((each.restart_count for each in pod.status.container_statuses if each.name == "worker"), default=0)


def _exit_code(pod: Pod) -> int | None:
    for each in pod.status.container_statuses:
        if each.name == "worker":
            over = each.state.terminated or each.last_state.terminated
            if over is not None:
                return over.exit_code
    return None


def _last_words(pod: Pod) -> str:
    """Why it ended, as far as the kubelet says."""
    if pod.ended and (pod.status.reason or pod.status.message):
        return f"{pod.status.reason}: {pod.status.message}".strip(": ")
    for each in pod.status.container_statuses:
        over = each.state.terminated or each.last_state.terminated
        if each.name == "worker" and over is not None:
            return (over.message.strip().splitlines() or [over.reason])[-1]
    return ""


def _seconds(timestamp: str | None) -> float:
    return 0.0 if timestamp is None else datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
