"""Worker processes: the start gate, adoption, restarts, fenced and confirmed ends (B1, B4, B7, F4-F6, L4)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import psutil

from bus.launcher.launcher_helpers import Ledger, alive, starts, until
from openrl_common.controls import StopWorkers, WorkersStopped
from openrl_common.events import WorkerExited, WorkerGone, WorkerLaunched
from openrl_common.names import query_subject
from openrl_common.nats_server import NatsServer
from openrl_common.records import LeaseRecord, LeaseState, SeatRecord, SeatState, WorkerRecord, WorkerState
from openrl_common.store import Entry
from openrl_launcher.service import Launcher

Launch = Callable[..., AbstractAsyncContextManager[Launcher]]


async def lease(ledger: Ledger, assignment: str) -> LeaseRecord | None:
    entry = await ledger.bus.store.leases.get(assignment)
    return None if entry is None else entry.value


async def test_B7_the_lease_is_starting_before_the_process_and_the_worker_makes_it_live(
    ledger: Ledger, launch: Launch, home: Path
) -> None:
    async with launch():
        workload, claim, assignment, pid = await ledger.run("lease")
        launched = await ledger.event(WorkerLaunched, assignment=assignment)
        assert (launched.workload, launched.claim, launched.node, launched.pid) == (workload, claim, "here", pid)

        async def live() -> bool:
            found = await lease(ledger, assignment)
            return found is not None and found.state is LeaseState.LIVE

        await until(live)
        ready = await until(lambda: ledger.bus.store.ready.get(assignment))
        assert ready.value.workload == workload
        record = await ledger.bus.store.workers.get(assignment)
        assert record is not None
        assert (record.value.pid, record.value.state) == (pid, WorkerState.RUNNING)
        assert Path(record.value.log_path) == home / "logs" / f"{workload}.{assignment}.log"
        environment = psutil.Process(pid).environ()
        assert environment["OPEN_RL_DEVICE_BYTES"] == str(8 << 30)
        assert environment["OPEN_RL_NODE"] == "here"
        assert environment["CUDA_VISIBLE_DEVICES"] == ""


async def test_L4_a_released_worker_is_fenced_stopped_and_seen_gone_before_it_is_said(
    ledger: Ledger, launch: Launch
) -> None:
    async with launch():
        workload, _, assignment, pid = await ledger.run("lease")
        await until(lambda: ledger.bus.store.ready.get(assignment))
        await ledger.release(workload)
        await ledger.event(WorkerGone, assignment=assignment)
        assert not alive(pid)
        tombstone = await lease(ledger, assignment)
        assert tombstone is not None
        assert (tombstone.state, tombstone.found) == (LeaseState.TOMBSTONE, "live")
        assert await ledger.events(WorkerExited) == []


async def test_L4_a_releasing_seat_of_which_nothing_ran_is_ended_too(ledger: Ledger, launch: Launch) -> None:
    workload, claim, assignment = await ledger.found("sleep")
    await ledger.change_claim(claim, state="allocated", node="here", devices=("dev0",))
    await ledger.release(workload)
    async with launch():
        await ledger.event(WorkerGone, assignment=assignment)
        tombstone = await lease(ledger, assignment)
        assert tombstone is not None
        assert tombstone.found == "none"


async def test_B2_a_worker_that_ignores_SIGTERM_is_killed_after_its_grace(ledger: Ledger, launch: Launch) -> None:
    async with launch(stop_grace_s=0.3):
        workload, _, assignment, pid = await ledger.run("stubborn")
        await until(lambda: "will not go" in (ledger.home / "logs" / f"{workload}.{assignment}.log").read_text())
        await ledger.release(workload)
        await ledger.event(WorkerGone, assignment=assignment)
        assert not alive(pid)


async def test_B4_what_a_worker_started_ends_with_it(ledger: Ledger, launch: Launch) -> None:
    async with launch():
        workload, _, assignment, pid = await ledger.run("parent")
        (child,) = await until(lambda: psutil.Process(pid).children())
        await ledger.release(workload)
        await ledger.event(WorkerGone, assignment=assignment)
        assert not alive(child.pid)


async def test_F4_a_crashing_worker_is_restarted_on_its_booking_and_given_up_with_the_reason(
    ledger: Ledger, launch: Launch
) -> None:
    async with launch(restarts_max=1):
        workload, _, assignment, _ = await ledger.run("crash")
        last = await ledger.event(WorkerExited, assignment=assignment, will_restart=False)
        assert (last.exit_code, last.restarts, last.why) == (3, 1, "ValueError: the model is cursed")
        first = await ledger.event(WorkerExited, assignment=assignment, will_restart=True)
        assert first.restarts == 0
        assert len(starts(ledger.home / f"starts-{assignment}")) == 2
        assert await ledger.events(WorkerGone) == []
        await ledger.release(workload)
        await ledger.event(WorkerGone, assignment=assignment)


async def test_F4_a_worker_that_recovers_goes_on_under_the_same_assignment(ledger: Ledger, launch: Launch) -> None:
    async with launch():
        _, _, assignment, _ = await ledger.run("crash-once")
        pid = await ledger.started(assignment, times=2)
        await ledger.event(WorkerLaunched, assignment=assignment, restarts=1, pid=pid)
        found = await lease(ledger, assignment)
        assert found is not None
        assert found.state is LeaseState.STARTING
        assert alive(pid)


async def test_B7_nothing_starts_over_a_tombstone(ledger: Ledger, launch: Launch) -> None:
    workload, claim, assignment = await ledger.found("sleep")
    await ledger.bus.store.leases.write(assignment, LeaseRecord(state=LeaseState.TOMBSTONE, found="none"), last=0)
    async with launch():
        await ledger.allocate(claim)
        await ledger.event(WorkerGone, assignment=assignment, workload=workload)
        assert starts(ledger.home / f"starts-{assignment}") == []


async def test_B1_a_restarted_launcher_adopts_its_workers_and_starts_none_twice(ledger: Ledger, launch: Launch) -> None:
    async with launch():
        workload, _, assignment, pid = await ledger.run("sleep")
        await ledger.event(WorkerLaunched, assignment=assignment)
    assert alive(pid)
    async with launch() as launcher:
        assert launcher.workers.running == 1
        await ledger.release(workload)
        await ledger.event(WorkerGone, assignment=assignment)
        assert not alive(pid)
    assert starts(ledger.home / f"starts-{assignment}") == [str(pid)]


async def test_L7_a_worker_is_recorded_before_it_is_started(ledger: Ledger, launch: Launch) -> None:
    """Its launcher may die the moment it runs, and the ledger be lost: its claim and its entry are known."""
    stored: list[WorkerRecord] = []

    def on_change(_: str, entry: Entry[WorkerRecord] | None) -> None:
        if entry is not None:
            stored.append(entry.value)

    mirror = await ledger.bus.store.workers.mirror(on_change=on_change)
    async with launch():
        _, claim, assignment, pid = await ledger.run("sleep")
        await ledger.event(WorkerLaunched, assignment=assignment)
    await until(lambda: len(stored) >= 2)
    await mirror.close()
    first, second = stored[:2]
    assert (first.state, first.claim, first.pid) == (WorkerState.STARTING, claim, 0)
    assert (second.state, second.claim, second.pid) == (WorkerState.RUNNING, claim, pid)
    assert first.entry is not None
    assert first.entry == second.entry


async def test_L7_one_whose_launcher_died_before_or_after_the_start_is_adopted_or_started(
    ledger: Ledger, launch: Launch
) -> None:
    """B1: the record alone does not say which of both."""
    async with launch():
        _, _, assignment, pid = await ledger.run("sleep")
        await ledger.event(WorkerLaunched, assignment=assignment)
    entry = await ledger.bus.store.workers.get(assignment)
    assert entry is not None
    starting = msgspec.structs.replace(entry.value, state=WorkerState.STARTING, pid=0, started_at=0.0)
    await ledger.bus.store.workers.put(assignment, starting)
    async with launch() as launcher:
        assert launcher.workers.running == 1
        await until(lambda: _pid_of(ledger, assignment, pid))
    psutil.Process(pid).kill()
    await until(lambda: not alive(pid))
    await ledger.bus.store.workers.put(assignment, starting)
    async with launch():
        assert await ledger.started(assignment, times=2) != pid


async def _pid_of(ledger: Ledger, assignment: str, pid: int) -> bool:
    entry = await ledger.bus.store.workers.get(assignment)
    return entry is not None and (entry.value.state, entry.value.pid) == (WorkerState.RUNNING, pid)


async def test_B1_a_worker_started_but_not_recorded_is_found_by_its_environment(ledger: Ledger, launch: Launch) -> None:
    async with launch():
        _, _, assignment, pid = await ledger.run("sleep")
        await ledger.event(WorkerLaunched, assignment=assignment)
    await ledger.bus.store.workers.delete(assignment)
    async with launch() as launcher:
        assert launcher.workers.running == 1
        record = await until(lambda: ledger.bus.store.workers.get(assignment))
        assert record.value.pid == pid
    assert starts(ledger.home / f"starts-{assignment}") == [str(pid)]


async def test_B1_a_worker_that_no_seat_backs_is_fenced_and_stopped(ledger: Ledger, launch: Launch) -> None:
    async with launch():
        workload, claim, assignment, pid = await ledger.run("sleep")
        await ledger.event(WorkerLaunched, assignment=assignment)
    seat = await ledger.bus.store.ledger_seats.get(workload)
    assert seat is not None
    await ledger.change_claim(claim, entries={}, state="retiring")
    await ledger.bus.store.ledger_seats.write(workload, SeatRecord(closed=1), last=seat.revision)
    async with launch():
        await ledger.event(WorkerGone, assignment=assignment)
        assert not alive(pid)
        await until(lambda: forgotten(ledger, assignment))


async def forgotten(ledger: Ledger, assignment: str) -> bool:
    return await ledger.bus.store.workers.get(assignment) is None


async def test_F4_a_worker_that_died_while_no_launcher_ran_is_reported_and_restarted(
    ledger: Ledger, launch: Launch
) -> None:
    async with launch():
        _, _, assignment, pid = await ledger.run("sleep")
        await ledger.event(WorkerLaunched, assignment=assignment)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not alive(pid))
    async with launch():
        exited = await ledger.event(WorkerExited, assignment=assignment)
        assert (exited.exit_code, exited.will_restart) == (-1, True)
        assert "no launcher was its parent" in exited.why
        assert alive(await ledger.started(assignment, times=2))


async def test_F6_a_new_assignment_stops_the_old_worker_and_starts_a_fresh_one(ledger: Ledger, launch: Launch) -> None:
    async with launch():
        workload, claim, assignment, pid = await ledger.run("sleep")
        await ledger.event(WorkerLaunched, assignment=assignment)
        entry = await ledger.bus.store.ledger_claims.get(claim)
        assert entry is not None
        await ledger.change_claim(claim, entries={"fresh": entry.value.entries[assignment]})
        seat = await ledger.bus.store.ledger_seats.get(workload)
        assert seat is not None
        await ledger.bus.store.ledger_seats.write(
            workload,
            SeatRecord(state=SeatState.HELD, incarnation=1, assignment="fresh", claim=claim),
            last=seat.revision,
        )
        fresh = await ledger.started("fresh")
        await ledger.event(WorkerGone, assignment=assignment)
        assert (alive(pid), alive(fresh)) == (False, True)


async def test_openrl_down_stops_workers_keeps_their_seats_and_the_next_start_resumes_them(
    ledger: Ledger, launch: Launch
) -> None:
    subject = query_subject("launcher", "here.stop-workers")
    async with launch():
        _, _, assignment, pid = await ledger.run("sleep")
        await ledger.event(WorkerLaunched, assignment=assignment)
        answer = await ledger.bus.request(subject, StopWorkers(), WorkersStopped, timeout_s=10.0)
        assert answer.stopped == 1
        assert not alive(pid)
        await asyncio.sleep(0.2)
        assert len(starts(ledger.home / f"starts-{assignment}")) == 1
    async with launch():
        assert alive(await ledger.started(assignment, times=2))
        await ledger.event(WorkerLaunched, assignment=assignment, restarts=1)
    assert await ledger.events(WorkerExited) == []
    assert await ledger.events(WorkerGone) == []


async def test_E13_a_nats_outage_ends_no_worker(
    nats_server: NatsServer, home: Path, launch: Launch, ledger: Ledger
) -> None:
    """A short one, of a process that renews its lease; ``tests/bus/test_long_outage.py`` has the long one."""
    async with launch():
        workload, _, assignment, pid = await ledger.run("lease")
        await until(lambda: ledger.bus.store.ready.get(assignment))
        nats_server.kill()
        await asyncio.sleep(0.5)
        assert alive(pid)
        nats_server.start()
        before = await lease(ledger, assignment)

        async def renewed() -> bool:
            now = await lease(ledger, assignment)
            return before is not None and now is not None and now.renewals > before.renewals

        await until(renewed)
        assert alive(pid)
        await ledger.release(workload)
        await ledger.event(WorkerGone, assignment=assignment)
        assert not alive(pid)


async def test_B1_kill_9_of_the_launcher_process_leaves_its_workers_and_the_next_one_adopts_them(
    ledger: Ledger, nats_url: str, home: Path
) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "openrl_launcher", "--nats-url", nats_url, "--home", str(home)]
            + ["--node-name", "here", "--devices", "1x8GiB", "--stop-grace", "1s"],
            stderr=subprocess.DEVNULL,
        )

    first = start()
    try:
        workload, _, assignment, pid = await ledger.run("sleep")
        await ledger.event(WorkerLaunched, assignment=assignment)
    finally:
        first.kill()
        first.wait()
    assert alive(pid)
    second = start()
    try:
        await ledger.release(workload)
        await ledger.event(WorkerGone, assignment=assignment)
        assert not alive(pid)
        second.terminate()
        assert await asyncio.to_thread(second.wait, 10) == 0
    finally:
        second.kill()
        second.wait()
    assert starts(home / f"starts-{assignment}") == [str(pid)]
