"""``python -m openrl_launcher``: settings, then the launcher as a service. SIGTERM leaves workers running (E17)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import click
from prometheus_client import Gauge

from openrl_common.errors import Bug, Rejected
from openrl_common.service import ServiceContext, collect_seldom, run
from openrl_common.settings import from_parameters, settings
from openrl_launcher.kubernetes import settings as kubernetes
from openrl_launcher.local import LocalBackend
from openrl_launcher.service import Launcher
from openrl_launcher.settings import ALL, LauncherSettings

WARM_MODULES = ("openrl_trainer.warm", "openrl_sampler.warm")
"""These import all that both kinds of workers import before they work."""


@click.command()
@settings(*ALL, kubernetes.BACKEND, *kubernetes.ALL)
def main(**parameters: object) -> None:
    """Cut claims on devices, start and stop workers, report what the machine or the cluster says."""
    config = from_parameters(LauncherSettings, parameters)
    collect_seldom()
    try:
        if parameters["backend"] == "kubernetes":
            sys.exit(_run_for_cluster(config, from_parameters(kubernetes.KubernetesSettings, parameters)))
        with _only_launcher(config):
            backend = LocalBackend(
                home=config.home,
                node=config.node,
                nats_url=config.nats_url,
                declared=config.devices,
                host_memory_bytes=config.host_memory_bytes,
                logs_kept=config.logs_kept,
            )

            async def body(context: ServiceContext) -> None:
                async with _kept_warm(context, backend, config) as stop_waiting:
                    await _body(context, Launcher(context.bus, backend, config, before_stop=stop_waiting))

            sys.exit(run("launcher", config, body, instance=config.node))
    except Rejected as error:
        click.echo(f"openrl launcher: {error}", err=True)
        sys.exit(2)


def _run_for_cluster(config: LauncherSettings, cluster: kubernetes.KubernetesSettings) -> int:
    try:
        from openrl_launcher.kubernetes.main import body
    except ModuleNotFoundError as error:
        raise Rejected(f"--backend kubernetes needs more packages ({error}): pip install kubernetes pyyaml") from error
    return run("launcher", config, functools.partial(body, settings=cluster), instance="kubernetes")


@contextlib.contextmanager
def _only_launcher(config: LauncherSettings) -> Iterator[None]:
    """One launcher per node and home: two would judge the same devices. Released by the kernel when it dies."""
    path = config.home / "state" / f"launcher-{config.node}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+")
    except OSError as error:
        raise Rejected(f"home {config.home} cannot be written: {error.strerror}; choose another --home") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise Rejected(
                f"a launcher of node {config.node} already runs (pid {lock.read().strip() or 'unknown'}): "
                "stop it, or give this one another --node-name"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


@contextlib.asynccontextmanager
async def _kept_warm(
    context: ServiceContext, backend: LocalBackend, config: LauncherSettings
) -> AsyncIterator[Callable[[], None]]:
    """Workers are forked from a warm parent for as long as the block lasts (B6); it imports meanwhile.

    Gives what ends every worker's wait for it.
    """
    if config.warm_start == "off" or (config.warm_start == "auto" and not backend.inventory().declared):
        yield lambda: None
        return
    warm = backend.warm_start(WARM_MODULES)
    Gauge("openrl_launcher_warm_ready", "Whether workers are forked", registry=context.registry).set_function(
        lambda: float(warm.ready)
    )
    Gauge("openrl_launcher_warm_bytes", "Memory of the warm parent (PSS)", registry=context.registry).set_function(
        warm.memory_bytes
    )
    Gauge("openrl_launcher_warm_pid", "Process id of the warm parent", registry=context.registry).set_function(
        lambda: float(warm.pid)
    )
    keeping = asyncio.create_task(warm.keep(), name="warm start")
    try:
        yield warm.stop_waiting
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


async def _body(context: ServiceContext, launcher: Launcher) -> None:
    """Run the launcher until the service stops; what it does at any moment is finished by the next one (B1)."""
    context.checks.update(launcher.readiness())
    Gauge("openrl_launcher_workers", "Worker processes on this node", registry=context.registry).set_function(
        lambda: launcher.workers.running
    )
    running = asyncio.create_task(launcher.run(), name="launcher")
    stopping = asyncio.create_task(context.stopping.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if running.done():
        running.result()
        raise Bug("the launcher's loop has ended")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    main()
