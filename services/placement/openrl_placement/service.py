"""Placement's shell: feeds events and mirrors to the core, and carries out what it decides.

    event ──▶ decide (synchronous) ──▶ write records ──▶ publish events ──▶ ack        (E6)
    mirror change ──▶ decide ──▶ the same, from a queue

Decisions are made in the order in which events arrive, without an await in between (JobSubmitted may first wait for its
model's files; those of one name keep their order). Effects of one record keep the order of their decisions: each waits
for those before it (``outbox``). An effect that could not be carried out is kept and tried with the next ones, so that
memory never runs ahead for good.

One replica is active, under a duty (W1, E4); the others stand by, with nothing but the duty in mind. A replica that
loses it ends its process and comes back as a stand-by: nothing of its view can be trusted any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from prometheus_client import Counter, Gauge, Histogram

from openrl_common.bus import Bus, Delivery
from openrl_common.duty import Duty
from openrl_common.errors import OpenRLError, Poison, Rejected, Transient
from openrl_common.events import (
    AnyEvent,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobSubmitted,
    SeatReleaseRequested,
    WorkerExited,
)
from openrl_common.health import check
from openrl_common.identity import LedgerIdentity
from openrl_common.names import short_workload
from openrl_common.pause import pause
from openrl_common.process_name import process_is_gone, this_process
from openrl_common.queries import (
    CLAIMS,
    EXPLAIN,
    JOBS,
    NODES,
    WORKLOADS,
    ClaimsAnswer,
    ExplainAnswer,
    ExplainQuery,
    JobsAnswer,
    ListQuery,
    NodesAnswer,
    WorkloadsAnswer,
)
from openrl_common.records import ClaimRecord, JobSpec, SeatRecord
from openrl_common.service import ServiceContext, ServiceSettings, until_stopped
from openrl_common.store import Entry, Mirror
from openrl_placement import core, explain, jobs
from openrl_placement.estimator import Constants, Model
from openrl_placement.fleet import Fleet, Kind
from openrl_placement.look_ahead import LookAhead
from openrl_placement.models import Models
from openrl_placement.outbox import Outbox
from openrl_placement.passes import Pass, Strays, overdue, tick
from openrl_placement.state import Effects, Policy, State

log = logging.getLogger(__name__)

T = TypeVar("T")

# What ``core.decide`` and ``jobs`` act on, and nothing else: every message costs the server and this process.
SUBJECTS = [
    "openrl.ev.client.>",
    "openrl.ev.ledger.*.seat.*.refused",
    "openrl.ev.ledger.*.seat.*.released",
    "openrl.ev.launcher.*.worker.*.launched",
    "openrl.ev.launcher.*.worker.*.unschedulable",
    "openrl.ev.launcher.*.worker.*.exited",
    "openrl.ev.launcher._fleet.claim.*.freed",
]
_CONCURRENCY = 32
_TICK_S = 1.0
_READS_AT_ONCE = 64
_READ_S = 5.0
_ORPHANS_EVERY_S = 300.0
_REST = 4.0
"""What the repairing pass rests, in multiples of what it took."""
_SUBMISSION_BYTES_MAX = 64 * 1024
_EARLY_END_S = 600.0
"""Longer than any redelivery: an end of which nothing is known then is of what was refused, or is over."""


@dataclass(frozen=True)
class PlacementSettings(ServiceSettings):
    max_seats_per_claim: int
    placement_strategy: str
    owner_affinity: bool
    placement_timeout_s: float
    lora_jobs_per_runtime: int
    lora_idle_s: float
    trainer_host_base_bytes: int
    sampler_host_base_bytes: int
    trainer_device_base_bytes: int
    sampler_device_base_bytes: int
    sampler_cache_tokens: int
    update_method: str
    update_chunk_bytes: int
    update_staging_factor: float
    scalable_shapes: tuple[tuple[int, int], ...]
    pass_every_s: float
    wedge_grace_s: float = 300.0
    verdict_wait_s: float = 10.0


class Placement:
    """The active replica. ``handle`` is what the consumer calls. Without a duty nobody else may write (tests)."""

    def __init__(self, bus: Bus, config: PlacementSettings, duty: Duty | None = None) -> None:
        self._bus = bus
        self._config = config
        self._duty = duty
        self._constants = constants_of(config)
        fleet = Fleet(
            limit=config.max_seats_per_claim,
            owner_affinity=config.owner_affinity,
            scalable=tuple(Kind(device_bytes, count) for count, device_bytes in config.scalable_shapes),
        )
        policy = Policy(
            strategy=config.placement_strategy,
            placement_timeout_s=config.placement_timeout_s,
            lora_jobs_per_runtime=config.lora_jobs_per_runtime,
            lora_idle_s=config.lora_idle_s,
            wedge_grace_s=config.wedge_grace_s,
            verdict_wait_s=config.verdict_wait_s,
            logs_directory=str(config.home / "logs"),
            update_method=config.update_method,
            update_chunk_bytes=config.update_chunk_bytes,
        )
        self.state = State(fleet, policy)
        self._outbox = Outbox(bus, self.state, duty)
        self._models = Models()
        self.look_ahead = LookAhead(bus, self.state, self._models, self._constants, self._handle_submitted)
        self._names: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._pass = Pass()
        self._strays = Strays()
        self._orphans: dict[str, int] = {}
        """Workload → revision of its record, which the last look found and memory has not."""
        self._orphans_at = time.monotonic()
        self._num_behind = 0
        """Messages behind the one that was delivered last."""
        self._mirrors: list[Mirror[Any]] = []
        self._seats: Mirror[SeatRecord] | None = None
        self._claims: Mirror[ClaimRecord] | None = None
        # No bound of its own (E16): the state has changed already, so none may be dropped. They grow for one round of
        # writes, which has a deadline; then all are merged into the next (``follow_mirrors``).
        self._changes: asyncio.Queue[Effects] = asyncio.Queue()

    async def start(self) -> None:
        """Rebuild the state from the buckets; from here on the mirrors keep it current."""
        store = self._bus.store
        self._mirrors = [
            await store.nodes.mirror(on_change=self._follow(core.node_changed)),
            await store.ledger_nodes.mirror(on_change=self._follow(core.budget_changed)),
        ]
        for entry in (await store.jobs.list()).values():
            self.state.put_job(entry.value)
            self._outbox.found(store.jobs, entry)
        for workload in (await store.workloads.list()).values():
            self.state.put_workload(workload.value)
            self._outbox.found(store.workloads, workload)
        for job in self.state.jobs.values():
            for admitted in job.workloads:
                self.state.put_admitted(admitted, job, time.time())
        if self.state.fleet.known:
            self.state.sweep_at = time.time() + core.SWEEP_AFTER_S
        self._seats = await store.ledger_seats.mirror(on_change=self._follow(core.seat_changed))
        self._claims = await store.ledger_claims.mirror(on_change=self._follow(core.claim_changed))
        self._mirrors += [
            self._seats,
            self._claims,
            await store.ready.mirror(on_change=self._follow(core.ready_changed)),
            await store.workers.mirror(on_change=self._follow(core.worker_changed)),
        ]

    async def close(self) -> None:
        for mirror in self._mirrors:
            await mirror.close()

    def _follow(
        self, change: Callable[[State, str, T | None, float], Effects]
    ) -> Callable[[str, Entry[T] | None], None]:
        def on_change(key: str, entry: Entry[T] | None) -> None:
            effects = change(self.state, key, entry.value if entry is not None else None, time.time())
            if effects:
                self._changes.put_nowait(effects)

        return on_change

    async def handle(self, delivery: Delivery) -> None:
        """Handle one event to the end; raising leaves it to redelivery, which re-derives and re-publishes (E6)."""
        self._num_behind = delivery.pending
        event = _refused_spec(delivery) or delivery.event()
        if isinstance(event, JobFailed):
            await self._bus.publish(event)
            return
        if event.subject != delivery.subject:
            raise Poison(f"message {delivery.sequence} on {delivery.subject} speaks for {event.subject}")
        if isinstance(event, JobSubmitted):
            with self.look_ahead.in_hand(delivery):
                await self._handle_submitted(jobs.Submission(event, delivery.sequence, delivery.published_at))
            return
        effects = core.decide(self.state, event, time.time())
        # Looked at now: what comes while this waits below may know the submission, and is not written yet.
        too_early = self._came_early(event, delivery)
        await self._carry_out(event, effects)
        if too_early:
            raise Transient(too_early)

    async def _handle_submitted(self, submission: jobs.Submission) -> None:
        await self._carry_out(submission.event, await self._submitted(submission))

    async def _carry_out(self, event: AnyEvent, effects: Effects) -> None:
        await self._outbox.carry_out(effects)
        await self._outbox.settle(event)
        if self._duty is not None and not self._duty.held:
            raise Transient("this replica may have been replaced meanwhile: its successor has to see this too")

    async def _submitted(self, submission: jobs.Submission) -> Effects:
        """Decide once the model is read. A later submission of the name waits, or it would get the name first."""
        event = submission.event
        async with self._names.setdefault(f"{event.tenant}.{event.job}", asyncio.Lock()):
            model: Model | Rejected | None = None
            if jobs.wants_model(self.state, submission):
                model = await self._models.read(event.spec.base_model)
            if model is None and jobs.wants_model(self.state, submission):
                raise Transient(f"job {event.job}: the name came free meanwhile, deciding again")
            return jobs.submitted(self.state, submission, model, self._constants, time.time())

    def _came_early(self, event: AnyEvent, delivery: Delivery) -> str:
        """Why an end must not be acknowledged: memory alone has it, until what it ends is known. "" for all else."""
        if isinstance(event, JobCancelled | JobFinished):
            known = jobs.is_decided(self.state, f"{event.tenant}.{event.job}", event.submission)
            why = f"job {event.job}: its end came before its submission {event.submission}"
        elif isinstance(event, WorkerExited) and not event.will_restart:
            known = not core.is_early(self.state, event)
            why = f"{event.workload}: its worker's end came before its booking {event.assignment}"
        else:
            return ""
        return "" if known or time.time() - delivery.published_at >= _EARLY_END_S else why

    async def follow_mirrors(self) -> None:
        """Carry out what mirror changes led to, in order; a failure is kept by the outbox and tried again."""
        stopping = asyncio.create_task(self._bus.stopping.wait())
        stopping.add_done_callback(lambda _: self._changes.put_nowait(Effects()))
        try:
            while not self._bus.stopping.is_set():
                effects = await self._changes.get()
                while not self._changes.empty():
                    effects.add(self._changes.get_nowait())
                await self._try(effects)
        finally:
            stopping.cancel()

    async def follow_time(self) -> None:
        """Deadlines, and whatever else is due, every second."""
        while not self._bus.stopping.is_set():
            # Cut off from the bus, the view is old: no deadline passes and nothing is repaired until it is back.
            if self._bus.connected:
                await self._tick(time.time())
            await pause(self._bus.stopping, _TICK_S)

    async def _tick(self, now: float) -> None:
        read: set[str] = set()
        late = overdue(self.state, now)
        for start in range(0, len(late), _READS_AT_ONCE):
            part = late[start : start + _READS_AT_ONCE]
            if not all(await asyncio.gather(*map(self._read_again, part))):
                break
            read.update(part)
        await self._try(tick(self.state, now, read))

    async def _read_again(self, workload: str) -> bool:
        """W3: take in what the ledger has of one that is to fail; False: nobody can tell.

        A connection that is back says nothing of the mirrors: they list again only then, and what was allocated
        meanwhile is no wait any more.
        """
        store = self._bus.store
        try:
            async with asyncio.timeout(_READ_S):
                seat = await store.ledger_seats.get(workload)
                named = seat.value.claim if seat is not None else ""
                claim = await store.ledger_claims.get(named) if named else None
        except (Transient, TimeoutError) as error:
            log.info("workload %s is overdue, and does not fail before its seat can be read: %r", workload, error)
            return False
        except Poison:
            return True  # no mirror can read it either
        if claim is not None and self._claims is not None:
            self._claims.learn(claim)
        if seat is not None and self._seats is not None:
            self._seats.learn(seat)
        return True

    async def repair(self) -> None:
        """The repairing pass every ``pass_every_s``, beside the ticks: with thousands of workloads it lasts seconds."""
        while not self._bus.stopping.is_set():
            await pause(self._bus.stopping, self._config.pass_every_s)
            if self._bus.connected:
                await self._repair_once()
                await self._release_strays()
                await self._drop_orphans()

    async def _repair_once(self) -> None:
        """One pass, which leaves most of the core to events: a wake-up comes through the loop many times."""
        began = time.monotonic()
        for part in self._pass.slices(self.state, time.time):
            took = time.monotonic() - began
            if not self._bus.connected or self._bus.stopping.is_set():
                return
            await self._try(part)
            await pause(self._bus.stopping, _REST * took)
            began = time.monotonic()

    async def _release_strays(self) -> None:
        for request in self._strays.look(self.state, time.monotonic(), caught_up=self._num_behind == 0):
            if not self._bus.connected or self._bus.stopping.is_set():
                return
            if await self._has_no_record(request):
                log.warning("seat of %s is released: placement has no record of it", request.workload)
                await self._try(Effects(events=[request]))

    async def _drop_orphans(self) -> None:
        """Delete workloads that the bucket alone has: written late by a replica that was replaced, nobody goes on with
        them (E7), and a seat of theirs would pass for known (L6). Only what two looks show: what is written or
        forgotten at this moment is none.
        """
        now = time.monotonic()
        if now - self._orphans_at < _ORPHANS_EVERY_S:
            return
        self._orphans_at, bucket = now, self._bus.store.workloads
        try:
            listed = await bucket.list(rest=_REST)
            found = {key: entry.revision for key, entry in listed.items() if key not in self.state.workloads}
            for key, revision in found.items() & self._orphans.items():
                if self._duty is None or self._duty.held:
                    log.warning("the record of workload %s is deleted: a replica that was replaced wrote it late", key)
                    await bucket.delete(key, last=revision)
            self._orphans = found
        except Transient as error:
            log.warning("workloads are looked through again later: %s", error)

    async def _has_no_record(self, request: SeatReleaseRequested) -> bool:
        """A record that this version cannot read is one: it is missing in the state all the same."""
        try:
            async with asyncio.timeout(_READ_S):
                job, _, _ = short_workload(request.workload).partition("/")
                await self._bus.store.jobs.get(f"{request.tenant}.{job}")
                workload = await self._bus.store.workloads.get(request.workload)
        except (Transient, Poison, TimeoutError) as error:
            log.warning("seat of %s stays: its record cannot be read (%r)", request.workload, error)
            return False
        return workload is None or workload.value.incarnation < request.incarnation

    async def _try(self, effects: Effects) -> None:
        try:
            await self._outbox.carry_out(effects)
        except (Transient, Rejected) as error:
            log.warning("kept for the next try: %s", error)

    async def answer_queries(self) -> None:
        """Serve the questions of ``openrl get`` and ``openrl explain``."""

        async def on_jobs(query: ListQuery) -> JobsAnswer:
            return explain.jobs(self.state, query)

        async def on_workloads(query: ListQuery) -> WorkloadsAnswer:
            return explain.workloads(self.state, query, time.time())

        async def on_claims(query: ListQuery) -> ClaimsAnswer:
            return explain.claims(self.state)

        async def on_nodes(query: ListQuery) -> NodesAnswer:
            return explain.nodes(self.state)

        async def on_explain(query: ExplainQuery) -> ExplainAnswer:
            return explain.explain(self.state, query, time.time())

        await self._bus.serve(JOBS, ListQuery, on_jobs)
        await self._bus.serve(WORKLOADS, ListQuery, on_workloads)
        await self._bus.serve(CLAIMS, ListQuery, on_claims)
        await self._bus.serve(NODES, ListQuery, on_nodes)
        await self._bus.serve(EXPLAIN, ExplainQuery, on_explain)


class _LooseSubmission(msgspec.Struct):
    """Just enough of a JobSubmitted to answer it when its spec cannot be read."""

    type: str
    tenant: str
    job: str
    submission: str
    spec: Any


def _refused_spec(delivery: Delivery) -> JobFailed | None:
    """The answer to a submission whose spec has unknown or wrong fields, or is too large to be kept in records (E2).

    None for anything else.
    """
    if not (delivery.subject.startswith("openrl.ev.client.") and delivery.subject.endswith(".submitted")):
        return None
    try:
        loose = msgspec.json.decode(delivery.body, type=_LooseSubmission)
    except msgspec.MsgspecError:
        return None
    try:
        if len(delivery.body) > _SUBMISSION_BYTES_MAX:
            raise msgspec.ValidationError(f"{len(delivery.body)} bytes, at most {_SUBMISSION_BYTES_MAX} are taken")
        msgspec.convert(loose.spec, JobSpec)
    except msgspec.ValidationError as error:
        failed = JobFailed(
            tenant=loose.tenant,
            job=loose.job,
            submission=loose.submission,
            code="bad-spec",
            message=f"the job's spec is not usable: {error}",
        )
        return (
            failed
            if failed.subject == delivery.subject.replace(".client.", ".placement.").replace(".submitted", ".failed")
            else None
        )
    return None


def constants_of(config: PlacementSettings) -> Constants:
    gib = 1 << 30
    return Constants(
        trainer_device_gib=config.trainer_device_base_bytes / gib,
        sampler_device_gib=config.sampler_device_base_bytes / gib,
        update_method=config.update_method,
        update_chunk_gib=config.update_chunk_bytes / gib,
        staging_factor=config.update_staging_factor,
        kv_tokens=config.sampler_cache_tokens,
        trainer_host_gib=config.trainer_host_base_bytes / gib,
        sampler_host_gib=config.sampler_host_base_bytes / gib,
    )


async def serve(context: ServiceContext, config: PlacementSettings) -> None:
    """The body of the service: stand by until the duty is this replica's (W1), then act."""
    duty = Duty(
        context.bus.store.duties, "placement", holder=this_process(), clock=time.monotonic, gone=process_is_gone
    )
    synced, bound = asyncio.Event(), asyncio.Event()
    # A stand-by is ready: it can take over.
    for name, done, why in (
        ("caches", synced, "the buckets are not read yet"),
        ("consumer", bound, "placement's consumer is not bound yet"),
    ):
        context.checks[name] = check(lambda done=done: done.is_set() or duty.elsewhere, why)  # type: ignore[misc]
    drained = asyncio.Event()
    keeping = asyncio.create_task(duty.keep(drained), name="duty")
    try:
        if await duty.wait_held(context.stopping):
            await _act(context, config, duty, synced, bound)
    finally:
        drained.set()  # only now: a successor must not read what is still being written
        await keeping


async def _act(
    context: ServiceContext, config: PlacementSettings, duty: Duty, synced: asyncio.Event, bound: asyncio.Event
) -> None:
    handled = Histogram("openrl_placement_handle_seconds", "Time to handle one event", registry=context.registry)
    failures = Counter("openrl_placement_jobs_failed", "Jobs refused or failed", ["code"], registry=context.registry)
    waiting = Gauge("openrl_placement_waiting", "Workloads in the waiting line", registry=context.registry)
    overtakings = Gauge(
        "openrl_placement_overtakings",
        "Own claims that got a device before an earlier waiter's, which would have taken it; kube-scheduler decides.",
        registry=context.registry,
    )
    placement = Placement(context.bus, config, duty)
    overtakings.set_function(lambda: placement.state.overtakings)
    waiting.set_function(lambda: len(placement.state.line))

    async def handle(delivery: Delivery) -> None:
        with handled.time():
            try:
                await placement.handle(delivery)
            except OpenRLError as error:
                failures.labels(type(error).__name__).inc()
                raise

    identity = LedgerIdentity(context.bus)
    await identity.wait(context.stopping)
    await placement.start()
    await placement.answer_queries()
    synced.set()
    try:
        await until_stopped(
            context.stopping,
            context.bus.consume(
                stream="OPENRL_EVENTS",
                durable="placement",
                subjects=SUBJECTS,
                handler=handle,
                concurrency=_CONCURRENCY,
                bound=bound,
            ),
            placement.follow_mirrors(),
            placement.follow_time(),
            placement.look_ahead.run(),
            placement.repair(),
            duty.wait_lost(context.stopping),
            identity.watch(context.stopping),
        )
    finally:
        await placement.close()
