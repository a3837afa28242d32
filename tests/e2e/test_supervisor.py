"""``openrl up`` and ``openrl down``: ready, kept running, and never a process left, whatever interrupts (B2, E17).

The services are the real ones; only the workers stand in (``tests/bus/launcher/fake_workers``), so that no model loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from openrl_client import JobSpec, cli, connect, processes
from openrl_client.supervisor import LocalSystem, down, read_up, up
from openrl_common import nats_server
from openrl_common.errors import Rejected
from openrl_common.queries import JobsAnswer, ListQuery
from openrl_common.records import JobKind
from support import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

OPENRL = str(Path(sys.executable).parent / "openrl")
FAKE_WORKERS = Path(__file__).parents[1] / "bus" / "launcher" / "fake_workers"
SMALL_HOST = {"OPEN_RL_DEVICES": "2x16GiB", "OPEN_RL_HOST_MEMORY": "64GiB", "OPEN_RL_MAX_SEATS_PER_CLAIM": "2"}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "home"
    monkeypatch.setenv("PYTHONPATH", str(FAKE_WORKERS))
    for name in [name for name in os.environ if name.startswith("OPEN_RL_")]:
        monkeypatch.delenv(name)
    yield path
    left = leftovers(path)
    down(path, progress=lambda line: None)
    assert left == [], "processes were left running"


def leftovers(home: Path) -> list[str]:
    """What still runs of a home."""
    found = []
    for process in processes.services_of(home) + processes.workers_of(home):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end while we look
            found.append(" ".join(process.cmdline()[:3]))
    if (pid := nats_server.running_pid(home / "nats")) is not None:
        found.append(f"nats-server {pid}")
    found += [f"nats-server {process.pid}" for process in processes.nats_of(home) if process.pid != pid]
    return found


def await_warm_parent(home: Path) -> None:
    """It is no part of being ready."""
    deadline = time.monotonic() + 20.0
    while not processes.warm_parents_of(home) and time.monotonic() < deadline:
        time.sleep(0.02)


def delete(home: Path) -> None:
    """As ``rm -rf`` does, at once: NATS writes there meanwhile."""
    home.rename(home.with_name("deleted"))
    shutil.rmtree(home.with_name("deleted"), ignore_errors=True)


def quiet(line: str) -> None:
    """Progress that nobody reads."""


def interrupted(process: subprocess.Popen[bytes], deadline_s: float = 40.0) -> int:
    process.send_signal(signal.SIGINT)
    return process.wait(deadline_s)


async def test_it_comes_up_is_kept_running_and_ends_whole(home: Path) -> None:
    lines: list[str] = []
    async with LocalSystem(home, environment=SMALL_HOST, progress=lines.append) as system:
        assert lines[0].startswith("nats ")
        assert {line.split()[0] for line in lines} == {"nats", "ledger", "placement", "launcher"}
        info = read_up(home)
        assert info is not None
        assert (info.pid, info.nats_url, info.pids) == (os.getpid(), system.nats_url, system.pids)
        before = dict(system.pids)
        for name in before:
            system.kill(name)
        while not all(system.pids[name] not in (0, before[name]) for name in before):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert system.nats_url == info.nats_url
        for name in ("ledger", "placement", "launcher"):
            await system.ready(name)
        assert set(system.restarts.values()) == {1}
    assert leftovers(home) == []
    assert read_up(home) is None


async def test_an_error_in_the_block_leaves_nothing(home: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with LocalSystem(home, environment=SMALL_HOST):
            _ = 1 / 0
    assert leftovers(home) == []


def test_up_returns_when_ready_a_second_up_is_refused_and_down_ends_all(home: Path) -> None:
    info = up(home, environment=SMALL_HOST, progress=quiet)
    with pytest.raises(Rejected, match=rf"home {home} is in use by pid {info.pid}: stop it with `openrl down"):
        up(home, environment=SMALL_HOST, progress=quiet)
    assert read_up(home) == info
    await_warm_parent(home)
    assert down(home, progress=quiet) == 5  # the supervisor, three services, the parent of warm workers
    assert leftovers(home) == []
    assert down(home, progress=quiet) == 0


async def test_down_stops_workers_and_the_next_up_resumes_them_under_their_seats(home: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))

    async def running() -> dict[str, int]:
        found: dict[str, int] = {}
        deadline = time.monotonic() + 30.0
        while len(found) < 2 and time.monotonic() < deadline:
            found = {p.environ()["OPEN_RL_ASSIGNMENT"]: p.pid for p in processes.workers_of(home)}
            await asyncio.sleep(0.1)
        return found

    async with LocalSystem(home, environment=SMALL_HOST, trainer_host_base="1GiB", sampler_host_base="1GiB") as system:
        async with connect(system.nats_url) as client:
            await client.submit(JobSpec(name="sleep", kind=JobKind.FFT, base_model=str(model)))
        first = await running()
        assert len(first) == 2
    assert leftovers(home) == []
    async with LocalSystem(home, environment=SMALL_HOST):
        second = await running()
        assert second.keys() == first.keys()
        assert not set(second.values()) & set(first.values())


async def test_a_client_that_saw_down_and_up_goes_on(home: Path) -> None:
    """Invariant 9: the port stays, so that a running recipe is not lost; one that is taken meanwhile is given up."""
    async with contextlib.AsyncExitStack() as stack:
        async with LocalSystem(home, environment=SMALL_HOST) as first:
            url = first.nats_url
            client = await stack.enter_async_context(connect(url))
        async with LocalSystem(home, environment=SMALL_HOST) as second:
            assert second.nats_url == url
            assert (await client.query("jobs", ListQuery(), JobsAnswer, timeout_s=20.0)).jobs == []
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        async with LocalSystem(home, environment=SMALL_HOST) as third:
            assert third.nats_url != url
    (home / "nats" / "port").write_text("99999 nonsense")
    async with LocalSystem(home, environment=SMALL_HOST):
        pass


def test_down_ends_what_a_killed_supervisor_left(home: Path) -> None:
    info = up(home, environment=SMALL_HOST, progress=quiet)
    os.kill(info.pid, signal.SIGKILL)
    assert len(leftovers(home)) >= 4
    assert down(home, progress=quiet) >= 3
    assert leftovers(home) == []


def test_a_home_that_was_deleted_under_a_system_is_told_and_down_ends_what_runs(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C5: not "no system is up", for one is."""
    info = up(home, environment=SMALL_HOST, progress=quiet)
    delete(home)
    for command in ("status", "doctor"):
        assert cli.run([command, "--home", str(home)]) == 5
        assert f"a system runs on {home}, but that directory was deleted" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="1"):
        cli.run(["doctor", "--home", str(home), "--nats-url", info.nats_url])
    assert f"openrl down --home {home}" in capsys.readouterr().out
    down(home, progress=quiet)
    assert [pid for pid in (info.pid, *info.pids.values()) if psutil.pid_exists(pid)] == []
    assert leftovers(home) == []


async def test_a_deleted_home_is_said_and_nothing_is_started_on_an_empty_one(home: Path) -> None:
    """E18: a new NATS would have forgotten every seat. Nobody is ended for it."""
    lines: list[str] = []
    async with LocalSystem(home, environment=SMALL_HOST, progress=lines.append) as system:
        delete(home)
        await until(lambda: any(f"{home} was deleted" in line for line in lines))
        assert "openrl down" in lines[-1]
        assert all(psutil.pid_exists(pid) for pid in system.pids.values())
        killed = {name: system.kill(name) for name in system.pids}
        await asyncio.sleep(0.5)
        assert system.pids == killed, "nothing was started again"
    assert leftovers(home) == []


@pytest.mark.long
async def test_a_system_whose_home_another_one_took_over_leaves_that_one_alone(home: Path) -> None:
    async with LocalSystem(home, environment=SMALL_HOST):
        delete(home)
        info = await asyncio.to_thread(up, home, environment=SMALL_HOST, progress=quiet)
    assert read_up(home) == info
    assert all(psutil.pid_exists(pid) for pid in info.pids.values())
    assert await asyncio.to_thread(down, home, progress=quiet) >= 4


def test_the_next_up_ends_what_a_killed_supervisor_left_and_goes_on(home: Path) -> None:
    killed = up(home, environment=SMALL_HOST, progress=quiet)
    os.kill(killed.pid, signal.SIGKILL)
    info = up(home, environment=SMALL_HOST, progress=quiet)
    assert not set(killed.pids.values()) & set(info.pids.values())
    await_warm_parent(home)
    assert len(leftovers(home)) == 6
    down(home, progress=quiet)


@pytest.mark.parametrize(
    "after_s", [0.1, *[pytest.param(after, marks=pytest.mark.long) for after in (0.4, 1.0, 2.2)], 0.7, 1.5]
)
def test_ctrl_c_while_coming_up_leaves_nothing(home: Path, after_s: float) -> None:
    arguments = [OPENRL, "up", "--home", str(home), "--devices", "2x8GiB"]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(after_s)
    code = interrupted(process)
    if code == 0:  # it was ready before the signal came: a system that is up stays up
        down(home, progress=quiet)
    assert leftovers(home) == []


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGINT, signal.SIGINT, signal.SIGINT], [signal.SIGTERM]])
def test_a_foreground_system_ends_on_signals(home: Path, signals: list[signal.Signals]) -> None:
    arguments = [OPENRL, "up", "--foreground", "--home", str(home)]
    process = subprocess.Popen(
        [*arguments, "--devices", "2x8GiB"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30.0
    while read_up(home) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    process.wait(40.0)
    assert leftovers(home) == []
    assert read_up(home) is None


def test_a_refused_setting_is_said_in_one_line_and_nothing_is_left(home: Path) -> None:
    with pytest.raises(Rejected, match=r"OPEN_RL_MAX_SEATS_PER_CLAIM.*-1") as raised:
        up(home, environment=SMALL_HOST | {"OPEN_RL_MAX_SEATS_PER_CLAIM": "-1"}, progress=quiet)
    assert "\n" not in str(raised.value)
    assert leftovers(home) == []


def test_o2_a_collector_that_is_no_address_is_said_before_anything_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "garbage")
    lines: list[str] = []
    with pytest.raises(
        Rejected, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is 'garbage'.*write for example http://"
    ) as raised:
        up(home, environment=SMALL_HOST, progress=lines.append)
    assert raised.value.code == "usage"
    assert lines == []


def test_no_device_is_said_with_what_to_do(home: Path) -> None:
    with pytest.raises(Rejected, match=r"launcher does not start: .*no GPU on this host.*--devices"):
        up(home, environment={"OPEN_RL_DEVICES": ""}, progress=quiet)
    assert leftovers(home) == []


def test_a_home_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(Rejected, match=rf"home {blocked}/home cannot be written: Not a directory; choose another"):
        up(blocked / "home", progress=quiet)


def test_control_services_are_small(home: Path) -> None:
    """Under 120 MB resident each."""
    info = up(home, environment=SMALL_HOST, progress=quiet)
    sizes = {name: psutil.Process(pid).memory_info().rss / 1e6 for name, pid in info.pids.items()}
    down(home, progress=quiet)
    assert all(size < 120 for size in sizes.values()), sizes
