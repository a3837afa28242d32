"""O4: what dashboards and alerts ask for is there: a real Prometheus and a real Jaeger hear a system at work.

Two programs that are not Python's: ``prometheus`` and ``promtool`` of Debian's package, and the Jaeger whose path
``OPENRL_TEST_JAEGER`` names; tests that need one that is not here are skipped and say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml

from e2e.conftest import SETTINGS
from openrl_client import agreement, connect
from openrl_client.job import Job
from openrl_client.supervisor import LocalSystem
from openrl_common.records import JobKind, JobSpec, Overrides
from openrl_common.wire import AdamParams, Datum, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "observability" / "base"
BOARDS = sorted((BASE / "dashboards").glob("*.json"))
STEPS = 4
WINDOW = "20s"
"""For Grafana's ``$__rate_interval``; a scrape is a second."""


@dataclass
class Observed:
    """What Prometheus answered, by expression (finite values of the whole run), and the spans that Jaeger holds."""

    values: dict[str, list[float]] = field(default_factory=dict)
    metrics: set[str] = field(default_factory=set)
    spans: list[dict[str, Any]] = field(default_factory=list)


def targets(kind: str) -> list[dict[str, Any]]:
    """All queries of all dashboards to data sources of one type."""
    found = []
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            if panel["datasource"]["type"] == kind:
                found += panel["targets"]
    return found


def expressions() -> list[str]:
    return [target["expr"].replace("$__rate_interval", WINDOW) for target in targets("prometheus")]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((BASE / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


# --- a busy system and who watches it -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Observed:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus here (Debian has it)")
    return asyncio.run(_observe(tmp_path_factory.mktemp("observed"), tiny_model))


async def _observe(folder: Path, model: Path) -> Observed:
    """A job whose two workers take turns on a device too small for both, scraped and traced from its submission on."""
    seen = Observed()
    environment = {**SETTINGS, "OPEN_RL_DEVICES": "1x6GiB", "OPEN_RL_MAX_TURN": "5s", "OPEN_RL_WARM_START": "on"}
    environment["OPEN_RL_CHECKPOINT_EVERY"] = "1steps"
    with contextlib.ExitStack() as stack:
        jaeger = os.environ.get("OPENRL_TEST_JAEGER", "")
        if jaeger:
            collector, query = stack.enter_context(running_jaeger(jaeger, folder))
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector}"
        async with LocalSystem(folder / "home", environment=environment) as system:
            scraped = folder / "targets.json"
            write_targets(scraped, system.health_ports)
            prometheus = stack.enter_context(running_prometheus(folder, scraped))
            began = time.time()
            async with connect(system.nats_url) as client:
                sizes = Overrides(
                    trainer_device_gib=4, sampler_device_gib=4, trainer_host_gib=0.3, sampler_host_gib=0.3
                )
                spec = JobSpec(
                    name="seen", kind=JobKind.FFT, base_model=str(model), dtype="float32", overrides=sizes,
                    exclusive=False,
                )  # fmt: skip
                job = await client.submit(spec)
                await job.ready(120)
                workers = [entry.value.pid for entry in (await client.bus.store.workers.list()).values()]
                write_targets(scraped, system.health_ports | {f"worker-{pid}": port_of(pid) for pid in workers})
                await asyncio.sleep(2.5)  # a scrape before anything is counted
                other = await client.submit(msgspec.structs.replace(spec, name="other"))  # finds no seat, and waits
                await _work(job)
                await other.cancel()
                await asyncio.sleep(2.5)  # and one after it
                answers = await asyncio.to_thread(_ask_all, prometheus, began)
                seen.values, seen.metrics = answers
                await job.finish()
        if jaeger:
            seen.spans = await asyncio.to_thread(spans, query)
    return seen


async def _work(job: Job) -> None:
    for step in range(STEPS):
        sampled = await job.sample([[1 + step, 2, 3]], params=SamplingParams(n=2, max_tokens=6, seed=step))
        data = [Datum(tokens=[7, 8, *row.tokens]) for group in sampled.sequences for row in group]
        await job.forward_backward(data, loss="cross_entropy")
        await job.optim_step(AdamParams(learning_rate=1e-2))
        version = await job.publish_weights()
        await job.save_state(f"s{step}")
        await asyncio.sleep(1.1)
    await agreement.measure(job, [[1, 2, 3]], version=version, max_tokens=4, stop_token_ids=[])


def _ask_all(prometheus: str, began: float) -> tuple[dict[str, list[float]], set[str]]:
    found = {}
    for expression in expressions():
        query = {"query": expression, "start": f"{began}", "end": f"{time.time()}", "step": "1"}
        result = get(f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(query)}")["data"]["result"]
        values = [float(value) for series in result for _, value in series["values"]]
        found[expression] = [value for value in values if math.isfinite(value)]
    names = get(f"{prometheus}/api/v1/label/__name__/values")["data"]
    described = get(f"{prometheus}/api/v1/metadata")["data"]
    return found, {*names, *described}


def write_targets(path: Path, ports: dict[str, int]) -> None:
    groups = [{"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in ports.items()]
    new = path.with_suffix(".new")
    new.write_text(json.dumps(groups))
    new.rename(path)


def port_of(pid: int) -> int:
    """Where a worker serves its health."""
    (port,) = {each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"}
    return int(port)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def program(command: list[str], folder: Path, ready: str) -> Iterator[None]:
    """Runs until the block ends; ready once ``ready`` answers."""
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(ready, timeout=5):
                break
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(20)


def deployed_config(scraped: Path) -> dict[str, Any]:
    """Prometheus's configuration of ``deploy/``, with these targets: Debian's knows no Kubernetes."""
    config: dict[str, Any] = yaml.safe_load((BASE / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(BASE / "alerts.yaml")]
    (job,) = config["scrape_configs"]
    del job["kubernetes_sd_configs"], job["relabel_configs"]
    job["file_sd_configs"] = [{"files": [str(scraped)], "refresh_interval": "1s"}]
    return config


@contextlib.contextmanager
def running_prometheus(folder: Path, scraped: Path) -> Iterator[str]:
    (folder / "prometheus.yml").write_text(yaml.safe_dump(deployed_config(scraped)))
    (port,) = free_ports(1)
    command = [
        str(shutil.which("prometheus")), f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with program(command, folder, f"{url}/-/ready"):
        yield url


@contextlib.contextmanager
def running_jaeger(path: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Ports for spans (OTLP over HTTP) and for queries; configured as deployed, on ports of its own."""
    collector, query_grpc, query = free_ports(3)
    config = yaml.safe_load((BASE.parent / "jaeger" / "jaeger-config.yaml").read_text())
    config["receivers"]["otlp"]["protocols"] = {"http": {"endpoint": f"127.0.0.1:{collector}"}}
    config["extensions"]["jaeger_query"]["http"]["endpoint"] = f"127.0.0.1:{query}"
    config["extensions"]["jaeger_query"]["grpc"] = {"endpoint": f"127.0.0.1:{query_grpc}"}
    config["service"]["telemetry"] = {"metrics": {"level": "none"}}
    (folder / "jaeger.yaml").write_text(yaml.safe_dump(config))
    with program([path, "--config", str(folder / "jaeger.yaml")], folder, f"http://127.0.0.1:{query}/api/services"):
        yield collector, query


def spans(query: int) -> list[dict[str, Any]]:
    """All spans, with their process's tags among theirs, once no more come."""
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        before, found = len(found), []
        for service in get(f"http://127.0.0.1:{query}/api/services")["data"] or []:
            answer = get(f"http://127.0.0.1:{query}/api/traces?service={service}&limit=1000&lookback=1h")
            for trace in answer["data"]:
                for span in trace["spans"]:
                    process = trace["processes"][span["processID"]]
                    tags = {tag["key"]: tag["value"] for tag in [*span["tags"], *process["tags"]]}
                    found.append({**span, "tags": {**tags, "service.name": process["serviceName"]}})
        if found and len(found) == before:
            break
        time.sleep(0.5)
    return found


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


# --- the tests ----------------------------------------------------------------------------------------------------


def test_O4_the_dashboards_are_what_their_code_writes() -> None:
    answer = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "dashboards.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout
    titles = {json.loads(path.read_text())["title"].removeprefix("OpenRL: ") for path in BOARDS}
    assert titles == {"Seats and waiting", "Job timeline", "Cold start", "Weights and turns", "Bus health"}


def test_O4_panels_and_links_name_data_sources_by_the_uids_that_are_provisioned() -> None:
    for folder in (BASE, BASE.parent / "jaeger"):
        sources = yaml.safe_load((folder / "datasources.yaml").read_text())["datasources"]
        uids = {source["uid"] for source in sources}
        assert uids == {"openrl-metrics", "openrl-traces", "openrl-logs"}
        assert set(re.findall(r"datasourceUid: ?\"?([\w-]+)", (folder / "datasources.yaml").read_text())) <= uids
    for path in BOARDS:
        assert {panel["datasource"]["uid"] for panel in json.loads(path.read_text())["panels"]} <= uids


@pytest.mark.long
def test_O4_no_query_of_a_dashboard_is_empty_on_a_system_at_work(observed: Observed) -> None:
    empty = [expression for expression, values in observed.values.items() if not values]
    assert observed.values
    assert not empty


@pytest.mark.long
def test_O4_every_metric_that_an_alert_asks_for_is_exported(observed: Observed) -> None:
    asked = {
        name for rule in alerts() for name in re.findall(r"\b(?:openrl|process)_\w+|\bup\b", rule["expr"])
    }  # fmt: skip
    known = observed.metrics | {f"{name}_total" for name in observed.metrics}
    assert asked
    assert asked <= known, asked - known


@pytest.mark.long
def test_O4_what_a_query_for_traces_names_is_in_real_traces(observed: Observed) -> None:
    if not observed.spans:
        pytest.skip("no Jaeger here: OPENRL_TEST_JAEGER names none")
    queries = [target["query"] for target in targets("tempo")]
    assert queries
    for query in queries:
        attributes = re.findall(r"(?:span|resource)\.([\w.]+)", query)
        names = re.findall(r'\bname = "([^"]+)"', query)
        matching = [
            span
            for span in observed.spans
            if all(attribute in span["tags"] for attribute in attributes)
            and all(span["operationName"] == name for name in names)
        ]
        assert matching, query


def test_O4_alerts_fire_on_what_they_name_and_on_nothing_else(tmp_path: Path) -> None:
    """Each alert beside the others, on series of its own; then on a healthy system."""
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here (Debian's package prometheus has it)")
    quiet = {
        'up{job="openrl"}': "1x60", "openrl_bus_connected": "1x60", "openrl_placement_waiting": "0x60",
        'openrl_ledger_nodes{standing="lost"}': "0x60", "openrl_turns_double_holds_total": "0x60",
        "openrl_turns_fenced_total": "0x60", "openrl_sampler_disagreements_total": "0x60",
        'openrl_bus_deliveries_total{consumer="ledger",outcome="dead"}': "0x60",
        'openrl_bus_deliveries_total{consumer="ledger",outcome="rejected"}': "0x60",
        'openrl_bus_deliveries_total{consumer="ledger",outcome="handled"}': "0+100x60",
        'openrl_trainer_checkpoints_total{outcome="ok"}': "0+1x60",
        'openrl_bus_age_seconds_bucket{consumer="ledger",le="1"}': "0+100x60",
        'openrl_bus_age_seconds_bucket{consumer="ledger",le="60"}': "0+100x60",
        'openrl_bus_age_seconds_bucket{consumer="ledger",le="+Inf"}': "0+100x60",
    }  # fmt: skip
    broken = {
        "OpenRLServiceDown": {'up{job="openrl"}': "0x60"},
        "OpenRLBusLost": {"openrl_bus_connected": "0x60"},
        "OpenRLDeadLetters": {'openrl_bus_deliveries_total{consumer="ledger",outcome="dead"}': "0+1x60"},
        "OpenRLBusLate": {'openrl_bus_age_seconds_bucket{consumer="ledger",le="1"}': "0x60"},
        "OpenRLNodeLost": {'openrl_ledger_nodes{standing="lost"}': "1x60"},
        "OpenRLDoubleHold": {"openrl_turns_double_holds_total": "0+1x60"},
        "OpenRLFenced": {"openrl_turns_fenced_total": "0+1x60"},
        "OpenRLWaitingLong": {"openrl_placement_waiting": "3x60"},
        "OpenRLEventsRefused": {'openrl_bus_deliveries_total{consumer="ledger",outcome="rejected"}': "0+1x60"},
        "OpenRLCheckpointsFail": {'openrl_trainer_checkpoints_total{outcome="disk-full"}': "_x30 1x30"},
        "OpenRLSamplerDisagrees": {"openrl_sampler_disagreements_total": "0+1x60"},
    }
    assert set(broken) == {rule["alert"] for rule in alerts()}
    tests = []
    again = ("OpenRLCheckpointsFail", {'openrl_trainer_checkpoints_total{outcome="disk-full"}': "1x30 2x30"})
    for alert, series in [("", {}), *broken.items(), again]:
        samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": v} for name, v in {**quiet, **series}.items()],
                "promql_expr_test": [
                    {
                        "expr": 'sum by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "50m",
                        "exp_samples": samples,
                    }
                ],
            }
        )
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(BASE / "alerts.yaml")], "evaluation_interval": "1m", "tests": tests})
    )
    answer = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
