"""A service's readiness follows its connection to NATS (E16)."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

from openrl_common.nats_server import NatsServer
from openrl_common.service import ServiceContext, ServiceSettings, _serve


def asked(port: int, path: str) -> tuple[int, dict[str, str]]:
    """The status, and what fails."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)["failing"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["failing"]


async def test_E16_a_service_is_ready_while_it_is_connected_and_again_once_nats_is_back(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """E16: it lives on meanwhile, and reconnects by itself."""
    running: asyncio.Future[ServiceContext] = asyncio.get_running_loop().create_future()

    async def body(context: ServiceContext) -> None:
        running.set_result(context)
        await context.stopping.wait()

    config = ServiceSettings(
        nats_url=nats_server.url, home=tmp_path, log_level="info", log_format="json", health_host="127.0.0.1",
        health_port=0,
    )  # fmt: skip
    serving = asyncio.create_task(_serve("test", config, body))
    async with asyncio.timeout(20):
        context = await running

    async def answers(path: str, expected: tuple[int, dict[str, str]], *, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while (said := await asyncio.to_thread(asked, context.health_port, path)) != expected:
                assert said[0] in (200, 503)
                await asyncio.sleep(0.05)

    await answers("/readyz", (200, {}), within_s=5)
    nats_server.kill()
    await answers("/readyz", (503, {"bus": "not connected to NATS"}), within_s=10)
    await answers("/livez", (200, {}), within_s=5)
    nats_server.start()
    await answers("/readyz", (200, {}), within_s=30)
    context.stopping.set()
    async with asyncio.timeout(15):
        assert await serving == 0
