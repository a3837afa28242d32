"""Connect to an OpenRL system and publish jobs (C1).

A client needs one address: ``--nats-url`` / ``OPEN_RL_NATS_URL``, else the address that ``openrl up`` left in
``<home>/up.json``. It holds one bus connection, shared by all of its jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from openrl_client.errors import JobEndedError, Rejected, TimedOut, Unreachable
from openrl_common.events import EVENT_DECODER, JobAdmitted, JobCancelled, JobEnded, JobFailed, JobSubmitted
from openrl_common.names import DEFAULT_TENANT, check_job, check_tenant, query_subject
from openrl_common.records import JobSpec

if TYPE_CHECKING:
    from openrl_client.job import Job
    from openrl_client.sampling import SampleClient
    from openrl_common.bus import Bus

Answer = TypeVar("Answer", bound=msgspec.Struct)

EVENTS_STREAM = "OPENRL_EVENTS"
ADMISSION_TIMEOUT_S = 10.0
ADMISSION_LOOK_S = 1.0
_HEARD_MAX = 100
QUERY_RETRY_S = 0.2


def home_directory() -> Path:
    return Path(os.environ.get("OPEN_RL_HOME", "~/.openrl")).expanduser()


def find_url(url: str | None = None, home: str | Path | None = None) -> str:
    """Return the NATS address to use.

    Raises:
        Unreachable: no address was given, and no system runs from ``home`` or it was deleted under one.
    """
    if url:
        return url
    if configured := os.environ.get("OPEN_RL_NATS_URL"):
        return configured
    path = Path(home or home_directory()).expanduser() / "up.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["nats_url"]
    except (OSError, KeyError, msgspec.MsgspecError):
        from openrl_client.home import deleted_remedy, deleted_under

        if what := deleted_under(path.parent):
            raise Unreachable(what, remedy=deleted_remedy(path.parent)) from None
        raise Unreachable(
            f"no OpenRL system is up for {path.parent}",
            remedy="start one with `openrl up`, or name one with OPEN_RL_NATS_URL",
        ) from None
    return str(found)


@contextlib.asynccontextmanager
async def connect(
    url: str | None = None, tenant: str = DEFAULT_TENANT, *, home: str | Path | None = None
) -> AsyncIterator[Client]:
    """Open a connection; everything the client started ends with the block (jobs themselves go on).

    Raises:
        Unreachable: no address is known, or no server answered.
        Rejected: the tenant's name is not usable.
    """
    check_tenant(tenant)
    from openrl_common.bus import Bus

    bus = await Bus.connect(find_url(url, home), name=f"client-{tenant}", tenant=tenant)
    client = Client(bus, tenant)
    try:
        yield client
    finally:
        await client.close()


def _with_absolute_model(spec: JobSpec) -> JobSpec:
    """Placement and workers run elsewhere: a relative path means this process's directory, as on the command line."""
    if not spec.base_model.strip():
        return spec  # placement says what is missing
    return msgspec.structs.replace(spec, base_model=str(Path(spec.base_model).expanduser().absolute()))


def _admits(body: bytes, submission: str) -> bool:
    """Whether this is placement's yes to ``submission`` (or its end, before it was admitted). Raises Rejected: no."""
    try:
        event = EVENT_DECODER.decode(body)
    except msgspec.MsgspecError:
        return False
    if getattr(event, "submission", "") != submission:
        return False
    if isinstance(event, JobFailed):
        raise Rejected(event.message, code=event.code)
    return isinstance(event, JobAdmitted | JobEnded)


class Client:
    """One tenant's connection. Made by ``connect``."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self.bus = bus
        self.tenant = tenant
        self._samples: SampleClient | None = None
        self._jobs: list[Job] = []

    async def close(self) -> None:
        for job in self._jobs:
            await job.close()
        if self._samples is not None:
            await self._samples.close()
        await self.bus.close()

    async def samples(self) -> SampleClient:
        if self._samples is None:
            from openrl_client.sampling import SampleClient

            client = SampleClient(self.bus)
            await client.start()
            self._samples = client
        return self._samples

    async def submit(
        self,
        spec: JobSpec,
        *,
        timeout_s: float = ADMISSION_TIMEOUT_S,
        on_published: Callable[[str], None] | None = None,
    ) -> Job:
        """Publish a job and wait until placement has admitted or refused it.

        Args:
            spec: a relative ``base_model`` is taken from the current directory.
            on_published: called with the submission id once it is on the bus, so that a caller who is interrupted
                while waiting can still cancel it.

        Raises:
            Rejected: refused; ``code`` says why (``impossible``, ``duplicate-name``, ``model-unreadable`` …).
            TimedOut: nobody answered; the job may still be admitted later.
            Unreachable: the bus did not take it.
        """
        check_job(spec.name)
        spec = _with_absolute_model(spec)
        submission = uuid.uuid4().hex
        event = JobSubmitted(tenant=self.tenant, job=spec.name, submission=submission, spec=spec)
        await self.bus.publish(event, deadline_s=timeout_s)
        if on_published is not None:
            on_published(submission)
        try:
            async with asyncio.timeout(timeout_s):
                await self._admission(spec.name, submission)
        except TimeoutError:
            raise TimedOut(
                f"job {spec.name}: published, but placement did not answer within {timeout_s:.0f} s: "
                f"`openrl doctor` says why. Cancel it with `openrl cancel {spec.name}`"
            ) from None
        return await self.attach(spec.name, submission=submission)

    async def _admission(self, name: str, submission: str) -> None:
        """Listen for placement's answer, and look up what was said before or while the connection was away.

        No consumer of the events: who may pull from one of that stream may pull from those of the services (tenancy).
        """
        subject = f"openrl.ev.placement.{self.tenant}.job.{name}"
        heard: asyncio.Queue[bytes] = asyncio.Queue(_HEARD_MAX)

        async def on_event(body: bytes, _headers: dict[str, str]) -> None:
            with contextlib.suppress(asyncio.QueueFull):  # what is left out is looked up
                heard.put_nowait(body)

        unsubscribe = await self.bus.subscribe(f"{subject}.*", on_event)
        try:
            while True:
                for answer in (JobAdmitted, JobFailed, JobEnded):
                    last = await self.bus.last(stream=EVENTS_STREAM, subject=f"{subject}.{answer.FACT}")
                    if last is not None and _admits(last.body, submission):
                        return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ADMISSION_LOOK_S):
                        while not _admits(await heard.get(), submission):
                            pass
                        return
        finally:
            await unsubscribe()

    async def attach(self, name: str, *, submission: str | None = None) -> Job:
        """Drive a job that was submitted before; its training log goes on at the next free number (C2).

        Raises:
            Rejected: ``bad-name``; ``unknown-job``: no such job, or (with ``submission``) another one has its name.
        """
        from openrl_client.job import Job

        entry = await self.bus.store.jobs.get(f"{self.tenant}.{check_job(name)}")  # not a wildcard, nor empty
        if entry is None or (submission is not None and entry.value.submission != submission):
            raise Rejected(
                f"job {name!r} of tenant {self.tenant!r} is not known: see `openrl get jobs`", code="unknown-job"
            )
        job = Job(self, entry.value)
        await job.open()
        self._jobs.append(job)
        return job

    async def cancel(self, name: str, *, why: str = "") -> None:
        """Ask for the end of a job by name. Its record shows when that is done (``Job.wait_ended``).

        Raises:
            Rejected: ``unknown-job``, ``bad-name``, or ``ended`` when it is over already.
        """
        entry = await self.bus.store.jobs.get(f"{self.tenant}.{check_job(name)}")
        if entry is None:
            raise Rejected(
                f"job {name!r} of tenant {self.tenant!r} is not known: see `openrl get jobs`", code="unknown-job"
            )
        if entry.value.phase.ended:
            raise JobEndedError(f"job {name} is {entry.value.phase.value} already: nothing to cancel", code="ended")
        await self.cancel_submission(name, entry.value.submission, why=why)

    async def cancel_submission(self, name: str, submission: str, *, why: str = "") -> None:
        await self.bus.publish(JobCancelled(tenant=self.tenant, job=name, submission=submission, why=why))

    async def query(
        self, name: str, request: msgspec.Struct, answer: type[Answer], *, timeout_s: float = 5.0
    ) -> Answer:
        """Ask placement (``jobs``, ``workloads``, ``claims``, ``nodes``, ``explain``; see openrl_common.queries).

        A placement that is being started again is waited for, up to ``timeout_s``. Raises Unreachable after that.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left_s = max(0.1, deadline - time.monotonic())
                return await self.bus.request(query_subject("placement", name), request, answer, timeout_s=left_s)
            except Unreachable:
                if time.monotonic() + QUERY_RETRY_S > deadline:
                    raise
                await asyncio.sleep(QUERY_RETRY_S)
