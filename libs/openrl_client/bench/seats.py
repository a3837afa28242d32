"""``openrl bench seats``: seat grants of the real placement and ledger, over a real nats-server, on a disk.

    saturated   a bounded window of unanswered jobs: grants a second, CPU and memory of the services
    paced       an open loop at a given rate: latency; and at others, from the lowest, for a curve
    waiting     jobs too large for anything free fill the line, then seats of full claims are freed one by one, then as
                many all at once
    one tenth   saturated once more on a fresh system with a tenth of the claims: how the cost grows

Half of the grants join a seated claim, half found one. Jobs that no node could hold are submitted in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from openrl_client.bench.figures import (
    Memory,
    cpu_seconds,
    machine_busy_s,
    memory_of,
    milliseconds,
    percentile,
)
from openrl_client.bench.fleet import Fleet, Size
from openrl_client.bench.load import Load, Tally
from openrl_client.bench.machine import Machine, StorePlace, describe, store_place
from openrl_client.errors import Rejected, TimedOut
from openrl_client.home import Progress
from openrl_client.local_system import LocalSystem
from openrl_common.bus import Bus
from openrl_common.queries import NODES, ListQuery, NodesAnswer

SERVICES = ("ledger", "placement")
CLAIMS_RATIO = 10
PACED_SHARE = 0.3
CURVE_POINT_S = 3.0
_SEEN_DEADLINE_S = 60.0
_LINE_DEADLINE_S = 120.0
_IMPOSSIBLE_EVERY_S = 0.5

# Sizes of Qwen3-0.6B: its trainer and its sampler fit every device of the ordinary nodes.
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Plan:
    """What to run. ``window`` are jobs (two seats each) without an answer; ``rate_per_s`` are grants."""

    num_nodes: int
    num_claims: int
    num_jobs: int
    num_waiting: int
    num_wakes: int
    rate_per_s: float
    window: int
    curve_rates_per_s: tuple[float, ...] = ()
    store: Path | None = None

    def num_jobs_at(self, rate_per_s: float) -> int:
        """Jobs that one point of the curve publishes."""
        return max(1, round(rate_per_s * CURVE_POINT_S / 2))

    @property
    def num_curve(self) -> int:
        return sum(map(self.num_jobs_at, self.curve_rates_per_s))

    @property
    def num_paced(self) -> int:
        return max(1, round(self.num_jobs * PACED_SHARE))

    @property
    def num_saturated(self) -> int:
        return self.num_jobs - self.num_paced

    @property
    def size(self) -> Size:
        return Size(num_nodes=self.num_nodes, num_claims=self.num_claims, num_wakes=2 * self.num_wakes)

    @property
    def tenth(self) -> Plan:
        """The same with a tenth of the claims, and as many jobs as those let join."""
        num_claims = max(self.num_claims // CLAIMS_RATIO, self.size.num_full + 1)
        small = replace(self, num_claims=num_claims, curve_rates_per_s=())
        return replace(small, num_jobs=min(self.num_jobs, small.size.joins_max))

    def check(self) -> None:
        """Raises Rejected, naming the flag, when the plan cannot be run."""
        if self.num_jobs < 2:
            raise Rejected(f"--jobs {self.num_jobs} is too few: use at least 2", code="usage")
        if 2 * self.num_wakes > self.num_waiting:
            raise Rejected(
                f"--wakes {self.num_wakes}, one by one and again all at once, is more than --waiting "
                f"{self.num_waiting}: a wake needs a waiter",
                code="usage",
            )
        self.size.check(self.num_jobs + self.num_curve)
        self.tenth.size.check(self.tenth.num_jobs)


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Latency from JobSubmitted to SeatBooked at an offered rate; ``took_per_s`` is the rate that was reached."""

    rate_per_s: float
    took_per_s: float
    p50_ms: float
    p99_ms: float


class SeatsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``--json``.

    Attributes:
        grants_per_s: saturated: JobSubmitted sent → SeatBooked stored, seats over the time from first to last.
        p50_ms, p99_ms: the same, at ``rate_per_s`` grants a second; ``sent_per_s`` is what was really sent.
        curve: the same at other rates.
        impossible_s: the longest that a job no node could hold waited for its answer, under any of these loads;
            ``impossible_paced_s`` without the saturated one, where it stands behind ``window`` others.
        wake_p50_ms, wake_p99_ms: WorkerGone sent → SeatBooked of the first in line stored, ``waiting`` in line.
        burst_s: ``wakes`` seats freed at once → the last of them booked.
        wakes_out_of_order: freed seats that went to a later one than the first in line; of those freed at once, to one
            behind the first so many.
        cpu_ms_per_grant: user and system time of each process while saturated, this one included.
        cost_ratio_10x: that of placement and ledger, over the same with a tenth of the claims.
        other_cores: cores that processes outside this benchmark kept busy while it was saturated; 0 on a quiet machine.
    """

    grants_per_s: float
    joined: int
    founded: int
    refused: int
    saturated_p99_ms: float
    p50_ms: float
    p99_ms: float
    rate_per_s: float
    sent_per_s: float
    curve: list[CurvePoint]
    impossible_s: float
    impossible_paced_s: float
    wake_p50_ms: float
    wake_p99_ms: float
    wakes: int
    burst_s: float
    wakes_out_of_order: int
    waiting: int
    waiting_fill_per_s: float
    nodes: int
    seated_claims: int
    cost_ratio_10x: float
    other_cores: float
    cpu_ms_per_grant: dict[str, float]
    memory: dict[str, Memory]
    store: StorePlace
    machine: Machine


@dataclass(frozen=True)
class _Saturated:
    tally: Tally
    cpu_s: dict[str, float]
    impossible_s: list[float]
    other_cores: float

    @property
    def cpu_s_per_grant(self) -> float:
        return sum(self.cpu_s[name] for name in SERVICES) / len(self.tally.grants)


async def measure(plan: Plan, *, progress: Progress) -> SeatsReport:
    """Run the plan on fresh systems in a new directory of the store, which is removed afterwards.

    Raises:
        Rejected: the plan cannot be run, or the store is in memory.
        TimedOut: seats stopped coming. Unreachable: a service did not become ready.
    """
    plan.check()
    place = store_place(plan.store)
    progress(f"store {place.path} ({place.file_system})")
    async with _system(plan.tenth, place, progress) as (system, load):
        small = await _saturate(system, load, plan.tenth, progress)
    async with _system(plan, place, progress) as (system, load):
        full = await _saturate(system, load, plan, progress)
        memory = {name: memory_of(pid) for name, pid in system.pids.items()}
        async with _probing(load) as told_paced:
            paced = await load.pace(plan.num_paced, grants_per_s=plan.rate_per_s)
        progress(f"paced: p99 {milliseconds(percentile(paced.latencies_s, 99))} ms at {plan.rate_per_s:g}/s")
        curve = [await _point(load, plan, rate_per_s, progress) for rate_per_s in sorted(plan.curve_rates_per_s)]
        line = await _fill_line(system, load, plan, progress)
        told_paced.append(await load.impossible())
        wakes, burst_s, out_of_order = await _wake(load, line, plan.num_wakes)
        progress(
            f"woken: p99 {milliseconds(percentile(wakes, 99))} ms with {plan.num_waiting} waiting; "
            f"{plan.num_wakes} at once in {burst_s:.2f} s"
        )
        memory_waiting = {f"{name} with the line": memory_of(system.pids[name]) for name in SERVICES}
        restarts = sum(system.restarts.values())
    if restarts:
        raise Rejected(f"a service ended {restarts} times while it was measured: the figures mean nothing")
    sent = sorted(grant.sent_at for grant in paced.grants.values())
    return SeatsReport(
        grants_per_s=round(full.tally.grants_per_s, 1),
        joined=full.tally.joined,
        founded=full.tally.founded,
        refused=len(full.tally.refused) + len(paced.refused),
        saturated_p99_ms=milliseconds(percentile(full.tally.latencies_s, 99)),
        p50_ms=milliseconds(percentile(paced.latencies_s, 50)),
        p99_ms=milliseconds(percentile(paced.latencies_s, 99)),
        rate_per_s=plan.rate_per_s,
        sent_per_s=round((len(sent) - 2) / max(1e-9, sent[-1] - sent[0]), 1),
        curve=curve,
        impossible_s=round(max(full.impossible_s + told_paced), 4),
        impossible_paced_s=round(max(told_paced), 4),
        wake_p50_ms=milliseconds(percentile(wakes, 50)),
        wake_p99_ms=milliseconds(percentile(wakes, 99)),
        wakes=len(wakes),
        burst_s=round(burst_s, 3),
        wakes_out_of_order=out_of_order,
        waiting=plan.num_waiting,
        waiting_fill_per_s=round(line.grants_per_s, 1),
        nodes=plan.num_nodes,
        seated_claims=plan.num_claims,
        cost_ratio_10x=round(full.cpu_s_per_grant / small.cpu_s_per_grant, 3),
        other_cores=round(full.other_cores, 2),
        cpu_ms_per_grant={
            name: round(seconds * 1000 / len(full.tally.grants), 3) for name, seconds in full.cpu_s.items()
        },
        memory=memory | memory_waiting,
        store=place,
        machine=describe(),
    )


@contextlib.asynccontextmanager
async def _system(plan: Plan, place: StorePlace, progress: Progress) -> AsyncIterator[tuple[LocalSystem, Load]]:
    """A fresh control plane with the plan's fleet, which placement has seen in full."""
    parent = Path(place.path)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="openrl-bench-", dir=parent) as scratch:
        home = Path(scratch)
        model = home / "model"
        model.mkdir()
        (model / "config.json").write_bytes(msgspec.json.encode(MODEL_CONFIG))
        environment = {
            "OPEN_RL_MAX_SEATS_PER_CLAIM": "16",
            "OPEN_RL_PLACEMENT_TIMEOUT": "0",
            "OPEN_RL_WEDGE_GRACE": "0",
        }
        async with LocalSystem(home, environment=environment, services=SERVICES) as system:
            bus = await Bus.connect(system.nats_url, name="openrl-bench")
            try:
                fleet = Fleet(bus, plan.size)
                await fleet.seed()
                await _fleet_is_seen(bus, plan.num_claims)
                progress(f"fleet: {plan.num_nodes} nodes, {plan.num_claims} claims seated")
                async with Load(bus, fleet, str(model)).following() as load:
                    yield system, load
            finally:
                await bus.close()


async def _fleet_is_seen(bus: Bus, num_claims: int) -> None:
    async with asyncio.timeout(_SEEN_DEADLINE_S):
        while True:
            answer = await bus.request(NODES, ListQuery(), NodesAnswer, timeout_s=10.0)
            if sum(row.devices_claimed for row in answer.nodes) == num_claims:
                return
            await asyncio.sleep(0.2)


async def _saturate(system: LocalSystem, load: Load, plan: Plan, progress: Progress) -> _Saturated:
    pids = {**system.pids, "bench": os.getpid()}
    before, busy_s, began = {name: cpu_seconds(pid) for name, pid in pids.items()}, machine_busy_s(), time.monotonic()
    async with _probing(load) as impossible:
        tally = await load.saturate(plan.num_saturated, window=plan.window)
    spent = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    others_s = machine_busy_s() - busy_s - sum(spent.values())
    others = max(0.0, others_s) / (time.monotonic() - began)
    progress(
        f"saturated: {tally.grants_per_s:.0f} grants/s ({tally.joined} joined, {tally.founded} founded) "
        f"with {plan.num_claims} claims; other processes took {others:.1f} cores meanwhile"
    )
    return _Saturated(tally, spent, impossible, others)


@contextlib.asynccontextmanager
async def _probing(load: Load) -> AsyncIterator[list[float]]:
    """Submit a job that no node could hold again and again; seconds until each was told."""
    told: list[float] = []

    async def probe() -> None:
        while True:
            await asyncio.sleep(_IMPOSSIBLE_EVERY_S)
            told.append(await load.impossible())

    probing = asyncio.create_task(probe())
    try:
        yield told
    finally:
        probing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await probing


async def _point(load: Load, plan: Plan, rate_per_s: float, progress: Progress) -> CurvePoint:
    tally = await load.pace(plan.num_jobs_at(rate_per_s), grants_per_s=rate_per_s)
    point = CurvePoint(
        rate_per_s=rate_per_s,
        took_per_s=round(tally.grants_per_s, 1),
        p50_ms=milliseconds(percentile(tally.latencies_s, 50)),
        p99_ms=milliseconds(percentile(tally.latencies_s, 99)),
    )
    progress(f"at {rate_per_s:g}/s: p50 {point.p50_ms} ms, p99 {point.p99_ms} ms")
    return point


async def _fill_line(system: LocalSystem, load: Load, plan: Plan, progress: Progress) -> Tally:
    """Two workloads a job wait once their own claims were founded and no device was free for them."""
    line = await load.saturate(-(-plan.num_waiting // 2), window=plan.window, large=True)
    async with asyncio.timeout(_LINE_DEADLINE_S):
        while await asyncio.to_thread(_waiting, system.health_ports["placement"]) < len(line.grants):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    progress(f"waiting: {len(line.grants)} workloads")
    return line


def _waiting(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("openrl_placement_waiting "):
                return int(float(line.split()[1]))
    raise TimedOut("placement's /metrics do not say how many wait")


async def _wake(load: Load, line: Tally, num_wakes: int) -> tuple[list[float], float, int]:
    """Free seats one by one, then as many at once; they must go to the first of those still waiting (W1)."""
    in_line = sorted(line.grants.values(), key=lambda grant: (grant.incarnation, grant.workload))
    seconds, out_of_order = [], 0
    for first in in_line[:num_wakes]:
        took, grant = await load.wake()
        seconds.append(took)
        out_of_order += grant.workload != first.workload
    burst_s, grants = await load.wake_together(num_wakes)
    due = {grant.workload for grant in in_line[num_wakes : 2 * num_wakes]}
    out_of_order += len({grant.workload for grant in grants} - due)
    return seconds, burst_s, out_of_order
