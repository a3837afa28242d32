"""A real Kubernetes control plane on loopback: etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kwok.

For tests and ``openrl bench kube``. The programs are taken from the folder that ``KUBEBUILDER_ASSETS`` names, the
convention of Kubernetes' own test suites, so whoever has them can run this. RBAC is on; ``kubeconfig_of`` gives the
identity of a service account, so that what runs under it may do what its role says and nothing else.

Invariants: each program can be killed and started again on its port and data; ``stop`` leaves no process; all listen on
loopback only. The kubelets are fake (kwok): pods run when ``kwok_stages.yaml`` says so, no container starts.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from openrl_common.errors import Rejected, Unreachable

PROGRAMS = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kwok", "kubectl")
ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
HOW_TO_GET = (
    f"set {ASSETS_VARIABLE} to a folder with {', '.join(PROGRAMS)} (Kubernetes 1.34 or newer; setup-envtest brings the "
    "first two and kubectl, the others are on the Kubernetes and kwok release pages)"
)
_READY_S = 90.0
_STAGES = Path(__file__).with_name("kwok_stages.yaml")
_KUBECTL_S = 180.0


def missing_assets(environment: Mapping[str, str] = os.environ) -> str:
    """Why no control plane can be started here, "" when one can."""
    folder = environment.get(ASSETS_VARIABLE, "")
    if not folder:
        return f"{ASSETS_VARIABLE} is not set: {HOW_TO_GET}"
    absent = [name for name in PROGRAMS if not os.access(Path(folder) / name, os.X_OK)]
    return f"{ASSETS_VARIABLE}={folder} lacks {', '.join(absent)}: {HOW_TO_GET}" if absent else ""


class ControlPlane:
    """Use as ``with``. ``kill``, ``start_program`` and ``restart`` take a program's name.

    Args:
        directory: data, certificates and logs; made when missing.
        arguments: more flags by program.

    Raises:
        Rejected: the programs are not there. Unreachable: one did not become ready; the message names its log.
    """

    def __init__(self, directory: Path, *, arguments: Mapping[str, Iterable[str]] | None = None) -> None:
        if why := missing_assets():
            raise Rejected(why, code="no-control-plane")
        self._assets = Path(os.environ[ASSETS_VARIABLE])
        self.directory = directory.absolute()
        self.admin_kubeconfig = self.directory / "admin.kubeconfig"
        self._extra = {name: list(flags) for name, flags in (arguments or {}).items()}
        self._ports = {name: _free_port() for name in ("etcd", "peer", "api", "scheduler", "controllers", "kwok")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self._ports['api']}"

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items() if process.poll() is None}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- life cycle ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for name in ("logs", "certs", "etcd"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        self._make_credentials()
        self.start_program("etcd")
        self.start_program("kube-apiserver")
        self.await_api()
        for name in ("kube-scheduler", "kube-controller-manager", "kwok"):
            self.start_program(name)
        self._await(lambda: self._answers("get", "serviceaccount", "default"), "kube-controller-manager")

    def stop(self) -> None:
        """End everything and wait until it is gone: at once, for nothing of it is kept."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def kill(self, name: str) -> None:
        """``kill -9``, as a crash would; it stays down until ``start_program``."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start_program(name)

    def start_program(self, name: str) -> None:
        with (self.directory / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = _spawn([str(self._assets / name), *self._flags(name)], log)

    def await_api(self) -> None:
        self._await(lambda: self._answers("get", "--raw", "/readyz"), "kube-apiserver")

    def _await(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + _READY_S
        while not condition():
            log = self.directory / "logs" / f"{name}.log"
            ended = [each for each, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                what = f"{ended[0]} ended" if ended else f"{name} is not ready after {_READY_S:g} s"
                raise Unreachable(f"the control plane does not start: {what}; see {log}")
            time.sleep(0.1)

    # --- use ----------------------------------------------------------------------------------------------------------

    def kubectl(self, *arguments: str, stdin: str | bytes | None = None, kubeconfig: Path | None = None) -> str:
        """Run kubectl as admin, or as whoever ``kubeconfig`` is. Raises Rejected with what it said."""
        answer = self._kubectl(*arguments, stdin=stdin, kubeconfig=kubeconfig)
        if answer.returncode != 0:
            raise Rejected(f"kubectl {' '.join(arguments[:4])}: {answer.stderr.decode().strip()[:4000]}")
        return answer.stdout.decode()

    def apply(self, *objects: object) -> None:
        """Apply objects server-side, as admin."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(listed))

    def kubeconfig_of(self, namespace: str, service_account: str, *, hours: int = 12) -> Path:
        """A kubeconfig whose token is that service account's."""
        token = self.kubectl("create", "token", service_account, "-n", namespace, f"--duration={hours}h").strip()
        path = self.directory / f"{namespace}-{service_account}.kubeconfig"
        self._write_kubeconfig(path, service_account, token)
        return path

    def _kubectl(
        self, *arguments: str, stdin: str | bytes | None = None, kubeconfig: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [str(self._assets / "kubectl"), "--kubeconfig", str(kubeconfig or self.admin_kubeconfig), *arguments],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            timeout=_KUBECTL_S,
            check=False,
            env={**os.environ, "HOME": str(self.directory)},
        )

    def _answers(self, *arguments: str) -> bool:
        return self._kubectl(*arguments).returncode == 0

    # --- set-up -------------------------------------------------------------------------------------------------------

    def _make_credentials(self) -> None:
        certs = self.directory / "certs"
        if (certs / "sa.key").exists():
            return
        for command in (["genrsa", "-out", "sa.key", "2048"], ["rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"]):
            try:
                subprocess.run(["openssl", *command], cwd=certs, check=True, capture_output=True, timeout=60)
            except (OSError, subprocess.SubprocessError) as error:
                raise Rejected(f"openssl cannot make the service accounts' key: {error}") from error
        token = secrets.token_hex(16)
        (certs / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        self._write_kubeconfig(self.admin_kubeconfig, "admin", token)

    def _write_kubeconfig(self, path: Path, user: str, token: str) -> None:
        authority = self.directory / "certs" / "apiserver.crt"  # self-signed by the API server itself
        cluster: dict[str, object] = {"server": self.server, "insecure-skip-tls-verify": True}
        if authority.exists():
            data = base64.b64encode(authority.read_bytes()).decode()
            cluster = {"server": self.server, "certificate-authority-data": data}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
                    "clusters": [{"name": "test", "cluster": cluster}],
                    "users": [{"name": user, "user": {"token": token}}],
                }
            )
        )
        path.chmod(0o600)

    def _flags(self, name: str) -> list[str]:
        ports, certs = self._ports, str(self.directory / "certs")
        etcd, peer = f"http://127.0.0.1:{ports['etcd']}", f"http://127.0.0.1:{ports['peer']}"
        secure = ["--bind-address=127.0.0.1", f"--cert-dir={certs}"]
        kubeconfig = f"--kubeconfig={self.admin_kubeconfig}"
        flags = {
            "etcd": [
                "--name=default", f"--data-dir={self.directory / 'etcd'}", "--unsafe-no-fsync",
                "--quota-backend-bytes=4294967296", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
                f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
            ],
            "kube-apiserver": [
                f"--etcd-servers={etcd}", *secure, "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
                f"--secure-port={ports['api']}", f"--service-account-key-file={certs}/sa.pub",
                f"--service-account-signing-key-file={certs}/sa.key",
                "--service-account-issuer=https://kubernetes.default.svc", f"--token-auth-file={certs}/tokens.csv",
                "--authorization-mode=Node,RBAC", "--service-cluster-ip-range=10.0.0.0/16", "--allow-privileged",
            ],
            "kube-scheduler": [
                kubeconfig, *secure, f"--secure-port={ports['scheduler']}", "--leader-elect=false",
                "--kube-api-qps=2000", "--kube-api-burst=4000",
            ],
            "kube-controller-manager": [
                kubeconfig, *secure, f"--secure-port={ports['controllers']}", "--leader-elect=false",
                "--kube-api-qps=1000", "--kube-api-burst=2000", f"--service-account-private-key-file={certs}/sa.key",
                "--use-service-account-credentials=false",
            ],
            "kwok": [
                kubeconfig, "--manage-all-nodes=false",
                "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                f"--server-address=127.0.0.1:{ports['kwok']}", f"--config={_STAGES}",
            ],
        }[name]  # fmt: skip
        return [*flags, *self._extra.get(name, [])]


def fake_node(
    name: str,
    *,
    devices_bytes: Iterable[int],
    driver: str,
    host_bytes: int = 512 << 30,
    labels: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """A kwok node and the ResourceSlice of its devices, as API objects."""
    sizes = list(devices_bytes)
    resources = {"cpu": "128", "memory": str(host_bytes), "pods": "1000"}
    shape = {"openrl.io/device-gib": str(-(-max(sizes) // (1 << 30)))} if sizes else {}
    node: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "openrl.io/enabled": "true", **shape, **(labels or {})},
        },
        "status": {"allocatable": resources, "capacity": resources},
    }
    devices = [
        {"name": f"gpu-{index}", "capacity": {"memory": {"value": str(size)}}} for index, size in enumerate(sizes)
    ]
    resource_slice: dict[str, Any] = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{name}-gpu"},
        "spec": {
            "driver": driver,
            "nodeName": name,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }
    return [node, resource_slice]


def device_class(driver: str) -> dict[str, object]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": driver},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{driver}'"}}]},
    }


def _spawn(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
