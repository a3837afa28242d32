"""Workers forked from a warm parent are workers like any other (B6): found, ended, reported; never two, never none."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from bus.launcher.launcher_helpers import Ledger, alive, starts, until
from openrl_client import processes
from openrl_common import zygote
from openrl_common.controls import StopWorkers, WorkersStopped
from openrl_common.events import WorkerExited, WorkerGone, WorkerLaunched
from openrl_common.names import query_subject
from openrl_common.records import Role
from openrl_launcher.warm import Forked, WarmStart

OWN = {"OPEN_RL_WORKLOAD": "team--probe--trainer", "OPEN_RL_ASSIGNMENT": "probe-1"}


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A directory of modules that a warm parent and its workers find."""
    path = tmp_path / "modules"
    path.mkdir()
    return path


@pytest.fixture
async def warm(home: Path, modules: Path) -> AsyncIterator[Callable[..., WarmStart]]:
    """``warm("module", …)``: a warm parent that has imported these modules, kept until the test ends."""
    tasks: list[asyncio.Task[None]] = []

    def start(*names: str, **environment: str) -> WarmStart:
        common = {**os.environ, "PYTHONPATH": str(modules), "OPEN_RL_HOME": str(home), "OPEN_RL_NODE": "here"}
        made = WarmStart(
            environment=common | environment, modules=names, cwd=home, log_path=home / "logs" / "warm-start.log"
        )
        tasks.append(asyncio.create_task(made.keep()))
        return made

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def fork(warm: WarmStart, module: str, log: Path, **environment: str) -> Forked | None:
    with log.open("ab") as output:
        return await warm.launch(zygote.Order(module=module, environment=environment or OWN), output.fileno())


def write(directory: Path, name: str, body: str) -> None:
    (directory / f"{name}.py").write_text(textwrap.dedent(body))


async def test_B6_a_forked_worker_looks_like_one_that_was_executed(
    warm: Callable[..., WarmStart], modules: Path, home: Path
) -> None:
    write(modules, "slow", "loaded = True")
    write(
        modules,
        "probe",
        """
        import json, os, subprocess, sys
        assert sys.modules["slow"].loaded
        child = subprocess.run([sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"],
                               capture_output=True, text=True, check=True)
        print(json.dumps({
            "name": __name__, "own": dict(os.environ), "child": json.loads(child.stdout),
            "leader": os.getsid(0) == os.getpid(), "cwd": os.getcwd(), "files": len(os.listdir("/proc/self/fd")) - 1,
        }), flush=True)
        sys.stdin.read()
        import time
        for _ in range(6000):  # until the test has looked at it, a minute at most
            if os.path.exists("seen"):
                break
            time.sleep(0.01)
        sys.exit(7)
        """,
    )
    worker = await fork(warm("slow"), "probe", home / "probe.log")
    assert worker is not None
    process = psutil.Process(worker.pid)
    assert (process.ppid(), process.cmdline()[:3]) == (os.getpid(), [sys.executable, "-m", "probe"])
    shown = process.environ()
    assert OWN.items() <= shown.items()
    assert processes.SERVICE_MARK not in shown
    assert worker.pid in [found.pid for found in processes.workers_of(home)]
    assert worker.pid not in [found.pid for found in processes.services_of(home)]
    (home / "seen").touch()
    assert await asyncio.to_thread(worker.wait) == 7
    said = msgspec.json.decode((home / "probe.log").read_bytes())
    assert (said["name"], said["leader"], said["cwd"], said["files"]) == ("__main__", True, str(home), 3)
    assert OWN.items() <= said["own"].items()
    assert processes.SERVICE_MARK not in said["own"]
    assert said["own"].items() <= said["child"].items()


async def test_B6_forked_workers_do_not_share_random_numbers(
    warm: Callable[..., WarmStart], modules: Path, home: Path
) -> None:
    write(modules, "drawn", "import random, numpy; numpy.random.random(); random.random()")
    write(modules, "draw", "import random, numpy; print(random.random(), numpy.random.random())")
    parent = warm("drawn")
    for name in ("one", "two"):
        worker = await fork(parent, "draw", home / name)
        assert worker is not None
        assert await asyncio.to_thread(worker.wait) == 0
    assert not set((home / "one").read_text().split()) & set((home / "two").read_text().split())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import nothing_of_this_name", "bad cannot be imported: ModuleNotFoundError: No module named"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "2 threads"),
    ],
)
async def test_B6_a_parent_that_must_not_fork_is_given_up_with_the_reason(
    warm: Callable[..., WarmStart], modules: Path, home: Path, caplog: pytest.LogCaptureFixture, body: str, why: str
) -> None:
    write(modules, "bad", body)
    parent = warm("bad")
    assert await fork(parent, "bad", home / "log") is None
    assert [record for record in caplog.records if "given up" in record.message and why in record.message]
    assert parent.pid == 0


@pytest.mark.parametrize(
    "own", [OWN | {"PYTHONPATH": "/somewhere/else"}, OWN | {"OPEN_RL_LONG": "x" * 10_000}], ids=["changed", "too long"]
)
async def test_B6_an_environment_that_cannot_be_shown_is_not_pretended(
    warm: Callable[..., WarmStart], home: Path, caplog: pytest.LogCaptureFixture, own: dict[str, str]
) -> None:
    assert await fork(warm("json"), "json.tool", home / "log", **own) is None
    assert [record for record in caplog.records if "the worker starts plainly" in record.message]


async def test_B6_a_worker_whose_gate_closes_never_runs(
    warm: Callable[..., WarmStart], modules: Path, home: Path
) -> None:
    """Whoever gave up on it may have started another one."""
    write(modules, "probe", f"open({str(home / 'ran')!r}, 'w')")
    parent = warm("json")
    assert (first := await fork(parent, "probe", home / "log")) is not None
    assert await asyncio.to_thread(first.wait) == 0
    (home / "ran").unlink()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert parent._control is not None
    with (home / "log").open("ab") as log, ours:
        with theirs:
            order = msgspec.json.encode(zygote.Order(module="probe", environment=OWN))
            socket.send_fds(parent._control, [order], [log.fileno(), theirs.fileno()])
        ours.setblocking(False)
        started = msgspec.json.decode(await asyncio.get_running_loop().sock_recv(ours, 4096), type=zygote.Started)
        assert alive(started.pid)
    await until(lambda: not alive(started.pid))
    assert not (home / "ran").exists()


# --- a launcher with a warm parent -----------------------------------------------------------------------------------


@pytest.fixture
def launcher(nats_url: str, home: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """``launcher()``: a launcher process with warm start, whose workers are the stand-ins."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        arguments = ["--nats-url", nats_url, "--home", str(home), "--node-name", "here", "--devices", "2x8GiB"]
        with (home / "launcher.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "openrl_launcher", *arguments, "--stop-grace", "1s", "--warm-start", "on"],
                stderr=log,
                env={**os.environ, "OPEN_RL_HOME": str(home)},
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def parent_of_warm_workers(home: Path) -> int:
    return next((process.pid for process in processes.warm_parents_of(home)), 0)


async def warm_again(home: Path, not_pid: int = 0) -> int:
    """Wait until the launcher says that workers can be forked; the parent's pid."""

    def look() -> int:
        ready = [line for line in (home / "launcher.log").read_text().splitlines() if "warm start ready" in line]
        pid = parent_of_warm_workers(home)
        return pid if ready and f"pid {pid}," in ready[-1] and pid != not_pid else 0

    found: int = await until(look)
    return found


def forked(pid: int) -> bool:
    """A forked worker shows the room that its parent's longer command line had."""
    return psutil.Process(pid).cmdline()[-1] == ""


async def test_B6_a_forked_worker_lives_fails_and_ends_as_a_plain_one(
    ledger: Ledger, launcher: Callable[[], Any], home: Path
) -> None:
    launcher()
    await warm_again(home)
    workload, _, assignment, pid = await ledger.run("lease")
    assert forked(pid)
    await until(lambda: ledger.bus.store.ready.get(assignment))
    os.kill(pid, signal.SIGKILL)
    exited = await ledger.event(WorkerExited, assignment=assignment)
    assert (exited.exit_code, exited.will_restart) == (-signal.SIGKILL, True)
    pid = await ledger.started(assignment, times=2)
    assert forked(pid)
    await until(lambda: ledger.bus.store.ready.get(assignment))
    await ledger.release(workload)
    await ledger.event(WorkerGone, assignment=assignment)
    assert not psutil.pid_exists(pid), "it was not waited for"
    _, _, crashing, _ = await ledger.run("crash-once")
    crashed = await ledger.event(WorkerExited, assignment=crashing)
    assert (crashed.exit_code, crashed.why) == (3, "ValueError: the model is cursed")


async def test_B6_kill_9_of_the_parent_ends_no_worker_and_the_next_ones_start(
    ledger: Ledger, launcher: Callable[[], Any], home: Path
) -> None:
    launcher()
    parent = await warm_again(home)
    _, _, assignment, pid = await ledger.run("sleep")
    os.kill(parent, signal.SIGKILL)
    await until(lambda: "warm start ended" in (home / "launcher.log").read_text())
    _, _, _, plain = await ledger.run("sleep", role=Role.SAMPLER)
    # started anew before that could be seen, the next parent may have forked it
    assert not forked(plain) or await warm_again(home, not_pid=parent)
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)
    exited = await ledger.event(WorkerExited, assignment=assignment)
    assert exited.exit_code == -signal.SIGKILL, "the launcher is the worker's own parent"
    await warm_again(home, not_pid=parent)


async def test_B1_B6_kill_9_of_the_launcher_ends_the_parent_and_the_next_one_adopts_forked_workers(
    ledger: Ledger, launcher: Callable[[], subprocess.Popen[bytes]], home: Path
) -> None:
    first = launcher()
    parent = await warm_again(home)
    workload, _, assignment, pid = await ledger.run("sleep")
    assert forked(pid)
    await ledger.event(WorkerLaunched, assignment=assignment)
    first.kill()
    first.wait()
    await until(lambda: not alive(parent))
    assert alive(pid)
    second = launcher()
    await warm_again(home, not_pid=parent)
    await ledger.release(workload)
    await ledger.event(WorkerGone, assignment=assignment)
    assert not alive(pid)
    assert starts(home / f"starts-{assignment}") == [str(pid)]
    second.terminate()
    assert await asyncio.to_thread(second.wait, 10) == 0
    assert processes.warm_parents_of(home) == []


def let_the_parent_import_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It goes on once the file that is returned is there, or after a minute."""
    slow = tmp_path / "slow"
    slow.mkdir()
    go_on = slow / "go-on"
    write(
        slow,
        "sitecustomize",
        f"""
        import os, sys, time
        ends_at = time.monotonic() + 60
        if any("zygote" in word for word in sys.orig_argv):
            while not os.path.exists({str(go_on)!r}) and time.monotonic() < ends_at:
                time.sleep(0.02)
        """,
    )
    monkeypatch.setenv("PYTHONPATH", f"{slow}{os.pathsep}{os.environ['PYTHONPATH']}")
    return go_on


async def a_worker_waits(home: Path) -> None:
    await until(lambda: "a worker waits for the warm start" in (home / "launcher.log").read_text())


async def test_B6_a_worker_asked_for_while_the_parent_imports_waits_for_it(
    ledger: Ledger, launcher: Callable[[], Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = let_the_parent_import_slowly(tmp_path, monkeypatch)
    launcher()
    running = asyncio.create_task(ledger.run("sleep"))
    await a_worker_waits(home)
    go_on.touch()
    _, _, _, pid = await running
    assert forked(pid)


async def test_B6_workers_that_wait_for_the_parent_do_not_hold_up_the_end(
    ledger: Ledger, launcher: Callable[[], Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_the_parent_import_slowly(tmp_path, monkeypatch)
    launcher()
    running = asyncio.create_task(ledger.run("sleep"))
    await a_worker_waits(home)
    running.cancel()
    await ledger.bus.request(
        query_subject("launcher", "here.stop-workers"), StopWorkers(), WorkersStopped, timeout_s=10.0
    )
    assert processes.workers_of(home) == []
