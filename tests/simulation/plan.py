"""What happens in one schedule, drawn from its seed before it begins: settings, machines, jobs, faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from openrl_common.quantities import GIB
from openrl_common.records import Role
from simulation.machines import Weather

FAULT_PHASE_S = 20.0
NUM_FIRST_JOBS = 5
"""Enough for eight workloads and 200 messages in every schedule."""


@dataclass(frozen=True)
class NodePlan:
    devices: tuple[int, ...]
    host_bytes: int
    roles: tuple[Role, ...] = ()


@dataclass(frozen=True)
class JobPlan:
    """One submission. ``ends``: ``finish``, ``cancel`` or nothing; both times in seconds from the start.

    A ``spare`` one is left out where the others have made messages enough.
    """

    name: str
    submission: str
    at_s: float
    kind: str
    device_gib: tuple[float, float]
    host_gib: float
    exclusive: bool | None
    priority: int
    ends: str = ""
    ends_at_s: float = 0.0
    spare: bool = False


@dataclass(frozen=True)
class Fault:
    """``what``: kill, away, stop, outage, stall, power-off, cut-off, ledger-lost, orphan. ``whom``: process or node.

    ``orphan``: the next worker that is started loses at once its launcher, which has not recorded that it runs, and
    the ledger's bucket with its seat (L7, B4).
    """

    what: str
    at_s: float
    whom: str = ""
    lasts_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    seed: int
    limit: int
    old_limit: int
    """What processes start with; the new one comes with their next start, at the latest when faults stop (S7)."""
    strategy: str
    owner_affinity: bool
    placement_timeout_s: float
    lora_jobs_per_runtime: int
    lora_idle_s: float
    num_ledgers: int
    num_placements: int
    duplicate_window_s: float
    nodes: tuple[NodePlan, ...]
    jobs: tuple[JobPlan, ...]
    faults: tuple[Fault, ...]
    weather: Weather
    worker_failure: float
    restarts_max: int
    works: bool = False
    """Workers work in turns on their devices (T1-T6); else they only hold their seats."""
    coresidency: bool = True
    max_turn_s: float = 3.0
    hangs: float = 0.0
    """Probability that a piece of work never ends (T3: fenced once somebody waits)."""
    leak: float = 0.0
    """Probability that a worker's end leaves device memory behind (B4: quarantine)."""
    skews_s: dict[str, float] = field(default_factory=dict)


def draw_plan(seed: int) -> Plan:
    """The plan of a seed: at least eight workloads and one crash."""
    random = Random(f"plan {seed}")
    nodes = tuple(_node(random) for _ in range(random.choice((1, 2, 2))))
    largest = max(size for node in nodes for size in node.devices)
    num_ledgers = random.choice((1, 2, 2, 3))
    num_placements = random.choice((1, 1, 2))
    services = [f"ledger-{index}" for index in range(num_ledgers)]
    services += [f"placement-{index}" for index in range(num_placements)]
    services += [f"launcher-n{index}" for index in range(len(nodes))]
    limit = random.choice((0, 1, 2, 2, 3))
    timeout_s = random.choice((0.0, 0.0, 900.0, 900.0, 15.0))
    return Plan(
        seed=seed,
        limit=limit,
        old_limit=random.choice((limit, limit, limit, 0, 1, 2, 3)),
        strategy=random.choice(("binpack", "binpack", "spread")),
        owner_affinity=random.random() < 0.7,
        placement_timeout_s=timeout_s,
        lora_jobs_per_runtime=random.choice((1, 2, 4)),
        lora_idle_s=random.choice((0.5, 3.0)),
        num_ledgers=num_ledgers,
        num_placements=num_placements,
        duplicate_window_s=random.choice((120.0, 120.0, 1.0)),
        nodes=nodes,
        jobs=_jobs(random, largest),
        faults=_faults(random, services, len(nodes)),
        weather=_weather(random),
        worker_failure=random.choice((0.0, 0.1, 0.3)),
        restarts_max=random.choice((0, 1, 3)),
        leak=random.choice((0.0, 0.0, 0.0, 0.0, 0.1)),
        works=random.random() < 0.4,
        coresidency=random.random() < 0.5,
        max_turn_s=random.choice((1.0, 3.0, 8.0)),
        hangs=random.choice((0.0, 0.0, 0.02, 0.1)),
        skews_s={name: random.uniform(-5.0, 5.0) for name in services if random.random() < 0.3},
    )


def _node(random: Random) -> NodePlan:
    sizes = random.choice(((80,), (80, 80), (24, 80), (24, 24, 80), (80, 80, 80), (24, 24)))
    roles: tuple[Role, ...] = random.choice(((), (), (), (), (Role.TRAINER,)))
    return NodePlan(
        devices=tuple(size * GIB for size in sizes),
        host_bytes=random.choice((0, 64, 64, 24)) * GIB,
        roles=roles,
    )


def _jobs(random: Random, largest: int) -> tuple[JobPlan, ...]:
    names = ["a", "b", "c", "d", "e", "f"]
    jobs: list[JobPlan] = []
    for index in range(20):
        first = index < NUM_FIRST_JOBS  # of a name each and with two workloads of its own
        at_s = random.uniform(0.0, FAULT_PHASE_S * 0.8)
        ends = random.choice(("finish", "cancel", "cancel", ""))
        small, large = random.choice((4.0, 10.0)), random.choice((10.0, 30.0, 60.0))
        if random.random() < 0.05 and not first:
            large = 200.0  # impossible on every node
        jobs.append(
            JobPlan(
                name=names[index] if first else random.choice(names),
                submission=f"s{index}",
                at_s=at_s,
                kind="fft" if first else random.choice(("fft", "fft", "lora")),
                device_gib=(small, large) if random.random() < 0.5 else (small, small),
                host_gib=random.choice((1.0, 4.0, 8.0)),
                exclusive=random.choice((None, None, None, True, False)),
                priority=random.choice((0, 0, 0, 5)),
                spare=index > NUM_FIRST_JOBS,
                ends=ends,
                # Now and then the end overtakes its submission, or comes in the middle of the booking.
                ends_at_s=at_s
                + random.choice((-0.01, 0.01, 0.1, random.uniform(0.0, 12.0), random.uniform(0.0, 12.0))),
            )
        )
    return tuple(jobs)


def _faults(random: Random, services: list[str], num_nodes: int) -> tuple[Fault, ...]:
    faults = [Fault("kill", random.uniform(0.5, FAULT_PHASE_S), random.choice(services))]
    for _ in range(random.randint(1, 5)):
        at_s = random.uniform(0.5, FAULT_PHASE_S)
        kind = random.random()
        if kind < 0.38:
            faults.append(Fault("kill", at_s, random.choice(services)))
        elif kind < 0.45:  # a dead launcher is not a dead node (F3)
            faults.append(Fault("away", at_s, random.choice(services), random.uniform(5.0, 30.0)))
        elif kind < 0.55:
            faults.append(Fault("stop", at_s, random.choice(services)))
        elif kind < 0.68:
            faults.append(Fault("stall", at_s, random.choice(services), random.choice((0.3, 2.0, 5.0, 12.0))))
        elif kind < 0.8:
            faults.append(Fault("outage", at_s, lasts_s=random.choice((0.3, 2.0, 5.0, 25.0))))
        else:  # the longer ones lose the node (F3)
            what, node = random.choice(("power-off", "cut-off")), f"n{random.randrange(num_nodes)}"
            lasts_s = random.choice((random.uniform(0.5, 6.0), random.uniform(15.0, 40.0)))
            faults.append(Fault(what, at_s, node, lasts_s))
    draw = random.random()
    if draw < 0.06:
        faults.append(Fault("ledger-lost" if draw < 0.04 else "orphan", random.uniform(4.0, FAULT_PHASE_S)))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _weather(random: Random) -> Weather:
    bad = random.choice((0.0, 0.3, 1.0, 1.0))
    return Weather(
        slow=0.02 + 0.1 * bad,
        very_slow=0.01 * bad,
        request_lost=0.004 * bad,
        answer_lost=0.008 * bad,
        late=0.004 * bad,
        delivery_lost=0.02 * bad,
        delivered_twice=0.1 * bad,
        ack_lost=0.05 * bad,
        changes_late=0.05 * bad,
        crash_at_effect=random.choice((0.0, 0.0005, 0.002)),
    )
