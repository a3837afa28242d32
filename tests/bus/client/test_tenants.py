"""E1: tenants in NATS accounts of their own (scripts/nats_accounts.py), on a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.client import Client as Nats

from openrl_client import Datum, JobSpec, Rejected, connect
from openrl_client.connection import Client
from openrl_common import queries, streams
from openrl_common.bus import Bus, Delivery
from openrl_common.errors import Unreachable
from openrl_common.events import JobAdmitted, JobCancelled, JobEnded, JobFailed, JobFinished, JobSubmitted
from openrl_common.names import SHARED, sample_subject, train_subject
from openrl_common.nats_server import find_binary
from openrl_common.records import JobKind, JobPhase, JobRecord, Role, Shape, WorkloadPhase, WorkloadRecord
from openrl_common.wire import (
    SAMPLE_DECODER,
    TRAIN_DECODER,
    AdamParams,
    PayloadRef,
    SampleResult,
    Sequence,
    TrainResult,
)

ROOT = Path(__file__).parents[3]
ACCOUNTS = ROOT / "scripts" / "nats_accounts.py"
RUNTIME = "lora-m-1"
Url = Callable[[str], str]


@contextlib.contextmanager
def server(directory: Path, configuration: str) -> Iterator[Url]:
    """A server with more in its configuration; gives the address for a user."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (directory / "nats.conf").write_text(
        f'host: "127.0.0.1"\nport: {port}\nmax_payload: 8388608\n'
        f'jetstream: {{store_dir: "{directory}/store"}}\n{configuration}'
    )
    users = {"OPENRL_NATS_PASSWORD": "of-openrl"} | {f"OPENRL_NATS_PASSWORD_{t.upper()}": f"of-{t}" for t in "ab"}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [find_binary(), "-c", directory / "nats.conf"], env=os.environ | users, stdout=log, stderr=log
        )
    try:
        yield lambda user: f"nats://{user}:of-{user}@127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_the_component_for_clusters_has_what_the_script_writes_and_a_server_takes_it_K8(tmp_path: Path) -> None:
    files = ROOT / "deploy" / "components" / "tenants"
    written = subprocess.run([sys.executable, ACCOUNTS, "team-a", "team-b"], check=True, capture_output=True, text=True)
    assert (files / "accounts.conf").read_text() == written.stdout
    for path in (ROOT / "deploy" / "base" / "nats.conf", files / "accounts.conf", files / "tenants.conf"):
        (tmp_path / path.name).write_text(path.read_text())
    passwords = {f"OPENRL_NATS_PASSWORD{of}": "secret" for of in ("", "_TEAM_A", "_TEAM_B")}
    checked = subprocess.run(
        [find_binary(), "-t", "-c", tmp_path / "tenants.conf"], env=os.environ | passwords | {"POD_NAME": "n-0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("tenant", ["_shared", "a.b", 'x"}', ""])
def test_a_tenant_that_is_none_gets_no_account(tenant: str) -> None:
    refused = subprocess.run([sys.executable, ACCOUNTS, tenant], check=False, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert repr(tenant) in refused.stderr


@pytest.fixture
def url(tmp_path: Path) -> Iterator[Url]:
    accounts = subprocess.run([sys.executable, ACCOUNTS, "a", "b"], check=True, capture_output=True, text=True).stdout
    (tmp_path / "accounts.conf").write_text(accounts)
    with server(tmp_path, "include accounts.conf\n") as url:
        yield url


@pytest.fixture
async def far_side(url: Url) -> AsyncIterator[Bus]:
    """The services' account, and they in it, played."""
    bus = await Bus.connect(url("openrl"), name="far-side")
    await streams.ensure(bus)
    await bus.serve(queries.JOBS, queries.ListQuery, lambda _: _answer(queries.JobsAnswer()))
    playing = [asyncio.ensure_future(each) for each in (place(bus), train(bus), sample(bus))]
    yield bus
    for each in playing:
        each.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    await bus.close()


async def _answer(answer: queries.JobsAnswer) -> queries.JobsAnswer:
    return answer


async def place(bus: Bus) -> None:
    """Admits, refuses what has a priority below 0, ends."""
    async for delivery in bus.tail(stream="OPENRL_EVENTS", subject="openrl.ev.client.>"):
        event = delivery.event()
        assert isinstance(event, JobSubmitted | JobFinished | JobCancelled)
        ids: Any = {"tenant": event.tenant, "job": event.job, "submission": event.submission}
        if not isinstance(event, JobSubmitted):
            entry = await bus.store.jobs.get(f"{event.tenant}.{event.job}")
            assert entry is not None
            await bus.store.jobs.put(entry.key, msgspec.structs.replace(entry.value, phase=JobPhase.FINISHED))
            await bus.publish(JobEnded(**ids, outcome="finished"))
        elif event.spec.priority < 0:
            await bus.publish(JobFailed(**ids, code="impossible", message="too large"))
        else:
            record = JobRecord(
                **ids, incarnation=delivery.sequence, spec=event.spec, phase=JobPhase.READY, runtime_tenant=SHARED,
                runtime=RUNTIME, trainer="shared--m--trainer", sampler="shared--m--sampler", submitted_at=0.0,
            )  # fmt: skip
            await bus.store.jobs.put(f"{event.tenant}.{event.job}", record)
            await bus.publish(JobAdmitted(**ids, incarnation=delivery.sequence, workloads=("a", "b")))


async def train(bus: Bus) -> None:
    """Answers with the number of data; every second answer gets lost on its way."""
    async for delivery in bus.tail(stream="OPENRL_TRAIN", subject="openrl.train.>"):
        try:
            request = TRAIN_DECODER.decode(delivery.body)
        except msgspec.DecodeError:
            continue
        if isinstance(request, PayloadRef):
            request = TRAIN_DECODER.decode(await bus.get_payload(request))
        result = TrainResult(seq=request.seq, metrics={"data": float(len(getattr(request, "data", ())))})
        _, _, tenant, job = delivery.subject.split(".")
        await bus.store.results.put(f"{tenant}.{job}.{request.incarnation}.{request.seq}", result)
        if request.seq % 2:
            await bus.send(request.reply_to, msgspec.json.encode(result))


async def sample(bus: Bus) -> None:
    async def handle(delivery: Delivery) -> None:
        request = SAMPLE_DECODER.decode(delivery.body)
        tokens = Sequence(tokens=[1], logprobs=[0.0], versions=[0], finish_reason="stop")
        await bus.send(
            request.reply_to, msgspec.json.encode(SampleResult(request=request.request, sequences=[[tokens]]))
        )

    subjects = [sample_subject(SHARED, RUNTIME, "*")]
    await bus.consume(stream="OPENRL_SAMPLE", durable="sampler", subjects=subjects, handler=handle, concurrency=4)


def spec(**changes: Any) -> JobSpec:
    return JobSpec(**{"name": "j", "kind": JobKind.LORA, "base_model": "/m"} | changes)


@pytest.fixture
async def client(url: Url, far_side: Bus) -> AsyncIterator[Client]:
    async with connect(url("a"), "a") as client:
        yield client


async def test_a_client_in_its_tenants_account_does_all_that_a_client_does_E1(client: Client, far_side: Bus) -> None:
    with pytest.raises(Rejected, match="too large"):
        await client.submit(spec(priority=-1))
    job = await client.submit(spec())
    await job.ready(5.0)
    data = [Datum(tokens=list(range(1000)))] * 100
    large = job.forward_backward(data, loss="cross_entropy")  # by reference (R7)
    step = job.optim_step(AdamParams(learning_rate=1e-3))  # its answer is lost: the stored result is read
    assert (await large).metrics["data"] == 100
    assert (await step).seq == 2
    assert (await job.sample([[5]], n=1)).sequences[0][0].tokens == [1]
    again = await client.attach("j")
    assert (await again.forward([Datum(tokens=[1, 2])])).seq == 3
    assert await client.query("jobs", queries.ListQuery(), queries.JobsAnswer) == queries.JobsAnswer()
    workload = WorkloadRecord(
        workload="shared--m--trainer", tenant=SHARED, owner="m", owner_name="m", kind=JobKind.LORA, jobs=("a.j",),
        incarnation=1, shape=Shape(role=Role.TRAINER, device_bytes=1), base_model="/m", phase=WorkloadPhase.READY,
        submitted_at=0.0,
    )  # fmt: skip
    await far_side.store.workloads.put(workload.workload, workload)
    assert list(await client.bus.store.workloads.list()) == [workload.workload]
    assert (await job.finish()).phase is JobPhase.FINISHED


async def test_a_client_that_says_another_tenant_than_its_account_is_not_heard_E1(url: Url, far_side: Bus) -> None:
    async with connect(url("a"), "b") as client:
        with pytest.raises(Exception, match="not confirm"):
            await client.submit(spec(), timeout_s=0.5)
    assert await far_side.last(stream="OPENRL_EVENTS", subject="openrl.ev.client.>") is None


@pytest.mark.parametrize("user", ["a:wrong@", ""])
async def test_a_wrong_password_is_said_and_not_shown(url: Url, user: str) -> None:
    address = url("a").replace("a:of-a@", user)
    with pytest.raises(Unreachable, match="refused the user or password") as caught:
        await Bus.connect(address, name="x", deadline_s=1.0)
    assert "wrong" not in str(caught.value)


@contextlib.asynccontextmanager
async def raw(url: str) -> AsyncIterator[Nats]:
    """Whoever has the tenant's password and keeps to nothing."""

    async def silent(_: Exception) -> None:
        pass

    connection = await nats.connect(url, error_cb=silent, inbox_prefix=b"_INBOX_a", allow_reconnect=False)
    try:
        yield connection
    finally:
        await connection.close()


async def answered(connection: Nats, subject: str, body: object = None) -> bytes:
    """The answer; empty where there is none, or none but an error."""
    try:
        message = await connection.request(subject, b"" if body is None else json.dumps(body).encode(), timeout=0.5)
    except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
        return b""
    return b"" if b'"error"' in message.data else message.data


FORGED = b'{"op":"delete_state","seq":1,"incarnation":1,"name":"best"}'
VICTIMS = (train_subject("b", "j"), "openrl.ev.client.b.job.j.cancelled", sample_subject(SHARED, RUNTIME, "b"))
OWN = {"train": train_subject("a", "x"), "get": f"$JS.API.DIRECT.GET.OPENRL_TRAIN.{train_subject('a', 'x')}"}


async def forge(connection: Nats, victim: str) -> None:
    """Every way to have something stored on ``victim`` that is known here."""
    await connection.publish(victim, FORGED)
    await connection.publish("openrl.ev.ledger.b.seat.w.booked", FORGED)
    await connection.publish("$KV.openrl_jobs.b.j", FORGED)
    await connection.request(OWN["train"], FORGED, timeout=2)
    await connection.publish(OWN["train"], FORGED, reply=victim)  # JetStream's acknowledgement goes there
    await connection.publish(OWN["get"], b"", reply=victim)  # and what is stored
    create = "$JS.API.CONSUMER.CREATE.OPENRL_TRAIN"
    config = {"filter_subject": OWN["train"], "ack_policy": "none", "deliver_policy": "all"}
    for name, more in (("pull", {}), ("push", {"deliver_subject": victim})):
        body = {"stream_name": "OPENRL_TRAIN", "config": config | {"name": name} | more}
        await answered(connection, f"{create}.{name}.{OWN['train']}", body)
    await connection.publish("$JS.API.CONSUMER.MSG.NEXT.OPENRL_TRAIN.pull", b"2", reply=victim)
    await connection.flush()
    await asyncio.sleep(0.2)  # for what must not happen


async def stored_on(bus: Bus, victim: str) -> object:
    stream = next(config.name for config in streams.STREAMS if victim.startswith(config.subjects[0][:-1]))
    return await bus.last(stream=stream, subject=victim)


@pytest.mark.parametrize("victim", VICTIMS)
async def test_no_account_can_have_anything_stored_for_another_tenant_E1(url: Url, far_side: Bus, victim: str) -> None:
    async with raw(url("a")) as connection:
        await forge(connection, victim)
    assert await stored_on(far_side, train_subject("a", "x")) is not None, "its own is stored"
    assert await stored_on(far_side, victim) is None
    assert await far_side.store.jobs.get("b.j") is None
    assert await far_side.last(stream="OPENRL_EVENTS", subject="openrl.ev.ledger.>") is None


async def test_permissions_in_one_account_would_not_hold(tmp_path: Path) -> None:
    """Why accounts: the answer to a's own question is stored on b's log, its whole content a's."""
    allowed = json.dumps([OWN["train"], OWN["get"]])
    users = (
        "authorization {users: [{user: openrl, password: of-openrl}, {user: a, password: of-a, permissions:"
        f' {{publish: {allowed}, subscribe: ["_INBOX_a.>"]}}}}]}}\n'
    )
    with server(tmp_path, users) as url:
        bus = await Bus.connect(url("openrl"), name="far-side")
        await streams.ensure(bus)
        async with raw(url("a")) as connection:
            await connection.publish(VICTIMS[0], FORGED)
            await connection.flush()
            assert await stored_on(bus, VICTIMS[0]) is None
            await forge(connection, VICTIMS[0])
        entries = bus.tail(stream="OPENRL_TRAIN", subject=VICTIMS[0])
        async with asyncio.timeout(20), contextlib.aclosing(entries):
            async for entry in entries:
                if entry.body == FORGED:
                    break
        await bus.close()


async def test_no_account_reads_another_tenants_requests_results_payloads_or_answers_E1(
    url: Url, far_side: Bus
) -> None:
    log, key = train_subject("b", "j"), "$KV.openrl_jobs.b.j"
    async with connect(url("b"), "b") as other, raw(url("a")) as a:
        job = await other.submit(spec())
        everything = await a.subscribe(">")
        await a.flush()
        await job.forward_backward([Datum(tokens=list(range(1000)))] * 100, loss="cross_entropy")
        get, create = "$JS.API.DIRECT.GET", "$JS.API.CONSUMER.CREATE"
        filtered = {"name": "c", "ack_policy": "none", "filter_subject": log}
        both = {"name": "c", "ack_policy": "none", "filter_subjects": [OWN["train"], log]}
        tries: list[tuple[str, object]] = [
            (f"{get}.OPENRL_TRAIN.{log}", None),
            (f"{get}.OPENRL_TRAIN", {"last_by_subj": log}),
            (f"{get}.OPENRL_TRAIN.openrl.train.*.j", None),
            (OWN["get"], {"last_by_subj": log}),
            (f"{get}.KV_openrl_jobs.{key}", None),
            (f"{get}.OBJ_openrl_payloads.$O.openrl_payloads.M.>", None),
            ("$JS.API.STREAM.MSG.GET.OPENRL_TRAIN", {"last_by_subj": log}),
            ("$JS.API.STREAM.MSG.GET.OBJ_openrl_payloads", {"seq": 1}),
            (f"{create}.OPENRL_TRAIN", {"stream_name": "OPENRL_TRAIN", "config": filtered}),
            (f"{create}.OPENRL_TRAIN.c.{log}", {"stream_name": "OPENRL_TRAIN", "config": filtered}),
            (f"{create}.OPENRL_TRAIN.c.{OWN['train']}", {"stream_name": "OPENRL_TRAIN", "config": filtered}),
            (f"{create}.OPENRL_TRAIN.c.{OWN['train']}", {"stream_name": "OPENRL_TRAIN", "config": both}),
            ("$JS.API.CONSUMER.NAMES.OPENRL_TRAIN", None),
            ("$JS.API.CONSUMER.MSG.NEXT.OPENRL_SAMPLE.sampler", None),
            ("$JS.API.CONSUMER.MSG.NEXT.OPENRL_EVENTS.placement", None),
            ("$JS.API.STREAM.INFO.OPENRL_TRAIN", {"subjects_filter": ">"}),
            ("$JS.API.STREAM.PURGE.OPENRL_TRAIN", None),
            ("$JS.API.STREAM.DELETE.OPENRL_TRAIN", None),
        ]
        for subject, body in tries:
            assert await answered(a, subject, body) == b"", subject
        heard = []
        with contextlib.suppress(nats.errors.TimeoutError):
            while True:
                heard.append((await everything.next_msg(timeout=0.3)).subject)
        assert all(subject.startswith(("_INBOX_a.", "$JS.API.", OWN["train"])) for subject in heard), heard
        assert await stored_on(far_side, log) is not None, "nothing was purged"
