"""One rehearsal from plan and profile to a report: ``rehearse(plan, profile)``.

warm-up (D3): one job per warm model founds its LoRA runtime, and is over before kickoff; the runtime stays (P12)
kickoff: every client submits, drives its steps, finishes; until all are over or the horizon is reached
"""

from __future__ import annotations

import random
import time

from openrl_common.errors import Rejected
from openrl_common.events import Event, JobEnded, JobFailed, JobReady
from openrl_common.records import ClaimEntry, ClaimRecord, JobKind, Role, WorkloadRecord
from openrl_ledger.core.ops import Table
from openrl_ledger.core.turns import TurnPolicy
from openrl_placement.state import Policy
from openrl_rehearsal.agenda import Agenda
from openrl_rehearsal.clients import Client
from openrl_rehearsal.control import Control
from openrl_rehearsal.devices import SharedDevice, Sharing
from openrl_rehearsal.launcher import Launcher
from openrl_rehearsal.plan import Plan
from openrl_rehearsal.profile import Profile
from openrl_rehearsal.report import Report, make_report
from openrl_rehearsal.workers import FileCache, Worker

_GIB = 1 << 30
_WARM_UP_MAX_S = 3_600.0


class Rehearsal:
    """Everything of one run. Made once, run once."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.plan = plan
        self.profile = profile
        self.agenda = Agenda()
        self.kickoff_s = 0.0
        self.random = random.Random(plan.seed)
        self.control = Control(
            self.agenda,
            limit=plan.max_seats_per_claim,
            owner_affinity=plan.owner_affinity,
            policy=Policy(
                strategy=plan.placement_strategy,
                placement_timeout_s=plan.placement_timeout_s,
                lora_jobs_per_runtime=plan.lora_jobs_per_runtime,
            ),
            message_s=profile.control.message.seconds,
            names=self.random if plan.shuffled else None,
            sampler_asks_after_s=plan.sampler_asks_after_s,
        )
        self.nodes = plan.nodes()
        self.launcher = Launcher(self.control, profile.control, self.nodes, self._make_worker)
        self.control.on_change = self._on_change
        self.control.on_event = self._on_event
        self.devices: dict[str, SharedDevice] = {}
        self.num_over = 0
        self.seats_peak: dict[str, int] = {}
        """Per workload: most seats that its claim had while it was listed there."""
        self._files = FileCache(cached=profile.files_cached)
        self._sharing = Sharing(
            policy=TurnPolicy(
                coresidency=plan.co_residency, reserve_bytes=plan.device_reserve_bytes, max_turn_s=plan.max_turn_s
            ),
            park_bytes_per_s=profile.control.park.gib_per_s * _GIB,
        )
        self.clients = self._make_clients()
        self._warming: dict[str, Client] = {}
        self._by_job = {client.job: client for client in self.clients}

    def run(self) -> Report:
        started_at, processor_at = time.perf_counter(), time.process_time()
        for node in self.nodes:
            self.control.join(node)
        self.control.start()
        self._warm_up()
        self.kickoff_s = self.agenda.now
        spacing_s = self.plan.client_spacing_s
        if spacing_s is None:
            spacing_s = self.profile.control.client_spacing.seconds
        order = list(self.clients)
        if self.plan.shuffled:
            self.random.shuffle(order)
        for index, client in enumerate(order):
            self.agenda.after(self.profile.control.client_start.seconds + index * spacing_s, client.submit)
        settled = self.agenda.run(lambda: self.num_over == len(self.clients), self.kickoff_s + self.plan.horizon_s)
        return make_report(
            self,
            settled=settled,
            wall_s=time.perf_counter() - started_at,
            processor_s=time.process_time() - processor_at,
        )

    def _make_clients(self) -> list[Client]:
        clients: list[Client] = []
        for spec in self.plan.jobs:
            stem = "".join(each if each.isalnum() else "-" for each in spec.model.lower())[:20].strip("-")
            clients += [
                self._client(f"{spec.kind}-{stem}-{len(clients) + index + 1}", spec.kind, spec.model)
                for index in range(spec.count)
            ]
        return clients

    def _client(self, job: str, kind: JobKind, model: str, steps: int | None = None) -> Client:
        times = self.profile.times(model, kind)
        return Client(
            self.control,
            self.launcher.by_workload.get,
            job=job,
            kind=kind,
            model_name=model,
            model=self.profile.models[model],
            times=times,
            steps=self.plan.goal_steps if steps is None else steps,
        )

    def _warm_up(self) -> None:
        """A warm runtime has served: one step of a job of its own, so that first-time costs are paid as well."""
        for index, model in enumerate(self.plan.warm):
            client = self._client(f"warm-{index + 1}", JobKind.LORA, model, steps=1)
            self._warming[client.job] = self._by_job[client.job] = client
            client.submit()
        if not self._warming:
            return
        self.agenda.run(lambda: all(client.over for client in self._warming.values()), _WARM_UP_MAX_S)
        if failed := [client.failure for client in self._warming.values() if client.failure]:
            raise Rejected(f"a runtime cannot be warmed: {failed[0]}", code="not-warm")
        workers = [client.worker(role) for client in self._warming.values() for role in Role]
        if not all(worker is not None and worker.is_ready and not worker.stopped for worker in workers):
            raise Rejected(
                f"the runtimes of {', '.join(self.plan.warm)} are not warm all at once: are there enough devices?",
                code="not-warm",
            )

    def _on_change(self, table: Table, key: str, value: object) -> None:
        if isinstance(value, ClaimRecord):
            for entry in value.entries.values():
                self.seats_peak[entry.workload] = max(self.seats_peak.get(entry.workload, 0), len(value.entries))
        self.launcher.on_change(table, key, value)

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, JobReady | JobEnded | JobFailed):
            return
        client = self._by_job[event.job]
        before = client.over
        client.on_event(event)
        if client.over and not before and event.job not in self._warming:
            self.num_over += 1

    def _make_worker(self, assignment: str, entry: ClaimEntry, claim: str, record: ClaimRecord) -> Worker:
        workload: WorkloadRecord = self.control.state.workloads[entry.workload]
        device = self.devices.get(claim)
        if device is None:
            device = self.devices[claim] = SharedDevice(self.agenda, record.device_bytes, self._sharing)

        return Worker(
            agenda=self.agenda,
            assignment=assignment,
            entry=entry,
            node=record.node,
            model_name=workload.base_model,
            kind=workload.kind,
            model=self.profile.models[workload.base_model],
            times=self.profile.times(workload.base_model, workload.kind),
            device=device,
            files=self._files,
            on_ready=self.control.ready,
        )


def rehearse(plan: Plan, profile: Profile) -> Report:
    """Run one rehearsal.

    Raises:
        Rejected: a model that the profile lacks; a runtime that cannot be warmed.
    """
    return Rehearsal(plan, profile).run()
