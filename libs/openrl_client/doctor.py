"""What ``openrl doctor`` looks at, and what it makes of it: each finding with its remedy (E18).

``look`` asks (NATS, the services, this host); everything that judges is a pure function of what was heard. It changes
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from openrl_client.home import deleted_remedy, deleted_under, is_locked, read_up
from openrl_common.controls import LedgerState, LedgerStateAnswer
from openrl_common.errors import OpenRLError, Unreachable
from openrl_common.names import query_subject
from openrl_common.quantities import GIB, MIB, format_bytes
from openrl_common.records import NodeRecord, SeatState, Standing
from openrl_common.streams import BUCKETS, STREAMS

if TYPE_CHECKING:
    from openrl_client.connection import Client

NATS_VERSION_MIN = (2, 11)
"""The first with a time to live per message (requests to samplers have one)."""
REPLICAS_IN_PRODUCTION = 3
SKEW_MAX_S = 1.0
FREE_SHARE_MIN = 0.1
FREE_BYTES_MIN = 2 * GIB
OPEN_FILES_MIN = 4096
SHARED_MEMORY_MIN_BYTES = 1 * GIB


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILED = "failed"


class Finding(msgspec.Struct, frozen=True):
    """``remedy``: what to do about it; empty when there is nothing to do."""

    level: Level
    about: str
    what: str
    remedy: str = ""


def ok(about: str, what: str) -> Finding:
    return Finding(Level.OK, about, what)


# --- NATS ---------------------------------------------------------------------------------------------------------


def judge_version(info: Mapping[str, Any]) -> Finding:
    text = str(info.get("version", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if numbers < NATS_VERSION_MIN:
        least = ".".join(map(str, NATS_VERSION_MIN))
        return Finding(Level.FAILED, "nats", f"server {text or 'unknown'}", f"use nats-server {least} or newer")
    return ok("nats", f"server {text}" + (f", cluster {info['cluster']}" if info.get("cluster") else ", one server"))


def judge_sync(sync: str | None) -> Finding:
    """``sync``: the server's setting as configured; None = it cannot be told from here."""
    if sync is None:
        return Finding(
            Level.NOTE,
            "durability",
            "sync_interval cannot be told from here",
            "see that the server has `sync_interval: always`, or name its monitoring port with --nats-monitor",
        )
    if sync == "always":
        return ok("durability", "sync_interval: always")
    return Finding(
        Level.FAILED,
        "durability",
        f"sync_interval is {sync}: a power cut loses what was acknowledged meanwhile",
        "set `jetstream { sync_interval: always }` on every server",
    )


def judge_skew(skew_s: float) -> Finding:
    if abs(skew_s) <= SKEW_MAX_S:
        return ok("clock", f"{abs(skew_s) * 1000:.0f} ms from the NATS server's")
    ahead = "ahead of" if skew_s > 0 else "behind"
    return Finding(
        Level.WARNING,
        "clock",
        f"this host is {abs(skew_s):.1f} s {ahead} the NATS server: deadlines and waits are told wrong",
        "run an NTP client on both",
    )


def judge_streams(found: Mapping[str, Mapping[str, Any]], *, clustered: bool) -> list[Finding]:
    """Streams and buckets that are missing, or configured otherwise than this release makes them.

    Args:
        found: configuration by stream name, as the JetStream API gives it (ages in nanoseconds).
    """
    findings = []
    wanted: dict[str, dict[str, Any]] = {}
    for stream in STREAMS:
        wanted[stream.name] = {
            "subjects": list(stream.subjects),
            "retention": "workqueue" if stream.work_queue else "limits",
            "max_age": int(stream.max_age_s * 1e9),
            "duplicate_window": int(stream.duplicate_window_s * 1e9),
            "allow_direct": True,
            "allow_msg_ttl": stream.message_ttl,
        }
    for bucket in BUCKETS:
        wanted[f"KV_{bucket.name}"] = {
            "max_msgs_per_subject": 1,
            "max_age": int(bucket.max_age_s * 1e9),
            "deny_delete": True,
            "allow_direct": True,
        }
    for name, config in wanted.items():
        if name not in found:
            remedy = "start the ledger: `openrl up` makes it"
            if name == "KV_openrl_ledger":
                remedy = "look at `openrl ledger rebuild`"
            findings.append(Finding(Level.FAILED, "streams", f"{name} is missing", remedy))
            continue
        wrong = [
            f"{key} is {found[name].get(key)}, not {value}"
            for key, value in config.items()
            if (found[name].get(key) or False) != (value or False)
        ]
        if found[name].get("storage") != "file":
            wrong.append("it is not on a disk")
        if wrong:
            findings.append(
                Finding(
                    Level.WARNING, "streams", f"{name}: {'; '.join(wrong)}", "`openrl up`, or streams.ensure, mends it"
                )
            )
    return (findings or [ok("streams", f"{len(wanted)} streams and buckets as they should be")]) + _judge_replicas(
        {name: found[name] for name in wanted if name in found}, clustered=clustered
    )


def _judge_replicas(found: Mapping[str, Mapping[str, Any]], *, clustered: bool) -> list[Finding]:
    few = sorted(name for name, config in found.items() if config.get("num_replicas", 1) < REPLICAS_IN_PRODUCTION)
    if not few:
        return [ok("replicas", f"every stream has {REPLICAS_IN_PRODUCTION}")]
    if not clustered:
        return [
            Finding(Level.NOTE, "replicas", "one NATS server: its disk is the only copy", "in production run three")
        ]
    shown = ", ".join(few[:3]) + (f" and {len(few) - 3} more" if len(few) > 3 else "")
    return [
        Finding(
            Level.WARNING,
            "replicas",
            f"{shown}: fewer than {REPLICAS_IN_PRODUCTION} replicas",
            f"nats stream edit NAME --replicas {REPLICAS_IN_PRODUCTION}",
        )
    ]


def judge_storage(account: Mapping[str, Any]) -> Finding:
    used, most = int(account.get("storage", 0)), int(account.get("limits", {}).get("max_storage", -1))
    if most > 0 and used > (1 - FREE_SHARE_MIN) * most:
        return Finding(
            Level.FAILED, "jetstream", f"{format_bytes(used)} of {format_bytes(most)} are used", "raise max_file_store"
        )
    return ok("jetstream", f"{format_bytes(used)} stored")


# --- the system ---------------------------------------------------------------------------------------------------


def judge_ledger(state: LedgerStateAnswer | None, num_seats: int) -> Finding:
    if state is None:
        return Finding(Level.FAILED, "ledger", "does not answer", "see `openrl logs ledger`; start it with `openrl up`")
    if not state.active:
        return Finding(
            Level.FAILED, "ledger", "its bucket is lost while workers run", "`openrl ledger rebuild`, then with --apply"
        )
    limit = state.seat_limit or "none"
    return ok("ledger", f"{num_seats} seats held, seat limit {limit}, bucket {state.identity}")


def judge_nodes(nodes: Mapping[str, NodeRecord], standings: Mapping[str, Standing]) -> list[Finding]:
    if not nodes:
        return [Finding(Level.WARNING, "nodes", "none has joined", "start a launcher: `openrl up`")]
    findings = []
    for name, record in sorted(nodes.items()):
        standing = standings.get(name, Standing.LIVE)
        if standing is Standing.LOST:
            findings.append(Finding(Level.FAILED, "nodes", f"{name} is lost", "see its machine and its launcher"))
        elif standing is Standing.SUSPECT:
            findings.append(Finding(Level.WARNING, "nodes", f"{name} missed heartbeats", "see its launcher's log"))
        elif not record.complete:
            findings.append(
                Finding(Level.WARNING, "nodes", f"{name} has no complete inventory", "`openrl logs launcher` says why")
            )
        elif not record.enabled:
            findings.append(Finding(Level.NOTE, "nodes", f"{name} is not enabled"))
    devices = sum(len(record.devices) for record in nodes.values())
    return findings or [ok("nodes", f"{len(nodes)} with {devices} devices")]


def judge_strays(seats: Iterable[str], workloads: Iterable[str]) -> list[Finding]:
    """Seats of workloads that placement does not know: nobody will ask for their release."""
    strays = sorted(set(seats) - set(workloads))
    if not strays:
        return []
    return [
        Finding(
            Level.WARNING,
            "seats",
            f"{len(strays)} of workloads that placement does not know: {', '.join(strays[:3])}",
            "placement's bucket was lost or changed by hand: submit jobs of the same names again, and end them",
        )
    ]


def judge_dead_letters(num: int) -> Finding:
    if num:
        return Finding(
            Level.WARNING, "dead letters", f"{num} messages could not be handled", "`openrl dlq list`, then requeue"
        )
    return ok("dead letters", "none")


def judge_supervisor(pid: int, *, held: bool) -> list[Finding]:
    """``held``: somebody has the home locked, as the process behind `openrl up` does while it lives."""
    if held:
        return []
    return [
        Finding(
            Level.WARNING,
            "supervisor",
            f"pid {pid} of `openrl up` is gone: whatever ends is not started again",
            "`openrl up` takes over, `openrl down` ends what is left",
        )
    ]


def judge_services(answers: Mapping[str, str]) -> list[Finding]:
    """``answers``: service → what its /readyz says ("" = ready)."""
    bad = [
        Finding(Level.FAILED, "services", f"{name}: {why}", f"`openrl logs {name}`")
        for name, why in sorted(answers.items())
        if why
    ]
    return bad or ([ok("services", f"{', '.join(sorted(answers))} are ready")] if answers else [])


# --- this host ----------------------------------------------------------------------------------------------------


def judge_disk(path: Path, free_bytes: int, total_bytes: int) -> Finding:
    text = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free on {path}"
    if free_bytes < FREE_BYTES_MIN:
        return Finding(Level.FAILED, "disk", text, "make room: NATS stores nothing on a full disk")
    if free_bytes < FREE_SHARE_MIN * total_bytes:
        return Finding(Level.WARNING, "disk", text, "make room before it is full")
    return ok("disk", text)


def judge_open_files(soft: int, hard: int) -> Finding:
    if 0 <= soft < OPEN_FILES_MIN:
        return Finding(
            Level.WARNING, "limits", f"a process may open {soft} files (at most {hard})", f"ulimit -n {OPEN_FILES_MIN}"
        )
    return ok("limits", f"{soft if soft >= 0 else 'any number of'} open files a process")


def judge_shared_memory(total_bytes: int | None) -> Finding:
    if total_bytes is None:
        return Finding(Level.NOTE, "limits", "there is no /dev/shm")
    if total_bytes < SHARED_MEMORY_MIN_BYTES:
        return Finding(
            Level.WARNING,
            "limits",
            f"/dev/shm has {total_bytes // MIB} MiB: workers of several devices exchange tensors through it",
            "give the container more (--shm-size, or an emptyDir of medium Memory)",
        )
    return ok("limits", f"/dev/shm has {format_bytes(total_bytes)}")


# --- looking ------------------------------------------------------------------------------------------------------


async def look(client: Client, home: Path, monitor: str | None) -> list[Finding]:
    """Everything, in the order in which it is shown. Raises Unreachable only when NATS itself does not answer."""
    bus = client.bus
    info = bus.server_info
    findings = [judge_version(info), judge_sync(await asyncio.to_thread(_sync_of, home, monitor))]
    findings.append(judge_storage(await bus.jetstream_api("INFO")))
    found = await _streams(client)
    findings.append(judge_skew(await _skew_s(client, next(iter(found), ""))))
    findings += judge_streams(found, clustered=bool(info.get("cluster")))
    findings += await asyncio.to_thread(_services, home)
    if not any(finding.about == "streams" and "missing" in finding.what for finding in findings):
        findings += await _system(client)
    return findings + look_at_host(home)


def look_at_host(home: Path) -> list[Finding]:
    """This machine, whether a system runs or not."""
    findings = []
    if home.is_dir():
        usage = shutil.disk_usage(home)
        findings.append(judge_disk(home, usage.free, usage.total))
    findings.append(judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)))
    shared = Path("/dev/shm")
    findings.append(judge_shared_memory(shutil.disk_usage(shared).total if shared.is_dir() else None))
    return findings


async def _streams(client: Client) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    while True:
        page = await client.bus.jetstream_api("STREAM.LIST", json.dumps({"offset": len(found)}).encode())
        before = len(found)
        found |= {each["config"]["name"]: each["config"] for each in page.get("streams") or ()}
        if len(found) >= page.get("total", 0) or len(found) == before:
            return found


async def _skew_s(client: Client, stream: str) -> float:
    """This host's clock less the server's, taken in the middle of a question."""
    if not stream:
        return 0.0
    before = time.time()
    answer = await client.bus.jetstream_api(f"STREAM.INFO.{stream}")
    after = time.time()
    stamp = re.sub(r"(\.\d{1,6})\d*", r"\1", str(answer.get("ts", ""))).replace("Z", "+00:00")
    try:
        return (before + after) / 2 - datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


async def _system(client: Client) -> list[Finding]:
    store = client.bus.store
    try:
        state: LedgerStateAnswer | None = await client.bus.request(
            query_subject("ledger", "state"), LedgerState(), LedgerStateAnswer, timeout_s=2.0
        )
    except OpenRLError:
        state = None
    seats = {key: each.value for key, each in (await store.ledger_seats.list()).items()}
    held = [key for key, seat in seats.items() if seat.state is not SeatState.EMPTY]
    nodes = {key: each.value for key, each in (await store.nodes.list()).items()}
    standings = {key: each.value.standing for key, each in (await store.ledger_nodes.list()).items()}
    workloads = set(await store.workloads.list())
    for job in (await store.jobs.list()).values():
        workloads |= {record.workload for record in job.value.workloads}
    letters = await client.bus.jetstream_api("STREAM.INFO.OPENRL_DLQ")
    num_letters = int(letters.get("state", {}).get("messages", 0))
    return [
        judge_ledger(state, len(held)),
        *judge_nodes(nodes, standings),
        *judge_strays(held, workloads),
        judge_dead_letters(num_letters),
    ]


def _sync_of(home: Path, monitor: str | None) -> str | None:
    """From the server's monitoring port, else from the configuration of this home's embedded server."""
    if monitor:
        try:
            with urllib.request.urlopen(f"{monitor.rstrip('/')}/varz", timeout=3) as answer:
                config = json.loads(answer.read()).get("jetstream", {}).get("config", {})
        except (OSError, ValueError) as error:
            raise Unreachable(f"no NATS monitoring at {monitor} ({error})", remedy="name its http port") from None
        if config.get("sync_always"):
            return "always"
        return f"{int(config.get('sync_interval', 120e9)) / 1e9:g} s"
    with contextlib.suppress(OSError):
        match = re.search(r"sync_interval\"?\s*[:=]\s*\"?([\w.]+)", (home / "nats" / "nats.conf").read_text())
        return match[1] if match else "2m (the default)"
    return None


def not_ready(body: bytes) -> str:
    """Why, in one line, of what a service's /readyz answers."""
    try:
        failing = msgspec.json.decode(body, type=dict[str, Any])["failing"]
        return "; ".join(str(why) for why in failing.values())
    except (msgspec.MsgspecError, KeyError, AttributeError):
        return " ".join(body.decode(errors="replace").split())[:300]


def _services(home: Path) -> list[Finding]:
    """Of a system that runs on this home: what each service's /readyz says."""
    info = read_up(home)
    if info is None:
        deleted = deleted_under(home)
        return [Finding(Level.FAILED, "home", deleted, deleted_remedy(home))] if deleted else []
    answers = {}
    for name, port in info.health_ports.items():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=3):
                answers[name] = ""
        except urllib.error.HTTPError as error:
            answers[name] = f"not ready: {not_ready(error.read())}"
        except OSError as error:
            answers[name] = f"does not answer on port {port} ({os.strerror(error.errno) if error.errno else error})"
    return judge_services(answers) + judge_supervisor(info.pid, held=is_locked(home))
