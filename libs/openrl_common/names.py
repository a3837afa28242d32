"""Identifiers and subjects (rule E1): lowercase tokens ``[a-z0-9-]``, no dots inside ids.

A workload id is ``<tenant>--<job>--<role>`` (``shared--<runtime>--<role>`` for a LoRA runtime). Tenant and job names
may not contain a double hyphen, so the parts cannot be confused and ids of two tenants cannot collide.
"""

from __future__ import annotations

import hashlib
import re

from openrl_common.errors import Rejected

FLEET = "_fleet"
"""Reserved tenant token of fleet-wide facts (claims, nodes)."""
SHARED = "_shared"
"""Reserved tenant token of LoRA runtimes, which serve jobs of several tenants."""
DEFAULT_TENANT = "default"

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_RESERVED = frozenset({FLEET, SHARED, "shared", "fleet"})
_TENANT_CHARACTERS_MAX = 24
_JOB_CHARACTERS_MAX = 40


def check_name(kind: str, name: str, characters_max: int) -> str:
    """Return ``name`` when it is a legal token; raise Rejected, naming the value and the rule, when it is not."""
    if not _NAME.fullmatch(name) or len(name) > characters_max:
        raise Rejected(
            f"{kind} {name!r} is not usable: use 1 to {characters_max} characters a-z, 0-9 and single hyphens between",
            code="bad-name",
        )
    return name


def check_tenant(tenant: str) -> str:
    if tenant in _RESERVED:
        raise Rejected(f"tenant {tenant!r} is reserved: choose another name", code="bad-name")
    return check_name("tenant", tenant, _TENANT_CHARACTERS_MAX)


def check_job(job: str) -> str:
    return check_name("job name", job, _JOB_CHARACTERS_MAX)


def workload_id(tenant: str, owner: str, role: str) -> str:
    """The id of one trainer or sampler: ``owner`` is the job (FFT) or the runtime (LoRA, tenant ``_shared``)."""
    return f"{tenant.removeprefix('_')}--{owner}--{role}"


def short_workload(workload: str) -> str:
    """What tables print and the command line accepts: ``<owner>/<role>``."""
    return "/".join(workload.split("--")[-2:])


def runtime_id(base_model: str, max_rank: int, exclusive: bool, index: int) -> str:
    """The id of a LoRA runtime (P12): one per base model, maximum rank and exclusivity, numbered when one is full."""
    digest = hashlib.sha256(f"{base_model}\0{max_rank}\0{exclusive}".encode()).hexdigest()[:6]
    stem = re.sub(r"[^a-z0-9]+", "-", base_model.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-")[:16].strip("-")
    return f"lora-{stem or 'model'}-{digest}-{index}"


def event_subject(source: str, tenant: str, entity: str, entity_id: str, fact: str) -> str:
    return f"openrl.ev.{source}.{tenant}.{entity}.{entity_id}.{fact}"


def train_subject(tenant: str, job: str) -> str:
    return f"openrl.train.{tenant}.{job}"


def sample_subject(tenant: str, runtime: str, asker: str) -> str:
    """Requests to the samplers of one runtime (the job itself for FFT; tenant ``_shared`` for LoRA).

    ``asker``: the tenant whose job is asked for, ``*`` for all; last, so that a credential can be limited to it.
    """
    return f"openrl.sample.{tenant}.{runtime}.{asker}"


def cancel_subject(tenant: str, runtime: str) -> str:
    """What a client no longer waits for: every sampler of the runtime hears it, nothing is stored."""
    return query_subject("sampler", f"{tenant}.{runtime}.cancel")


def agreement_subject(tenant: str, runtime: str) -> str:
    """What clients measured of a runtime's samplers against its trainer (V12)."""
    return query_subject("sampler", f"{tenant}.{runtime}.agreement")


def query_subject(service: str, query: str) -> str:
    return f"openrl.q.{service}.{query}"
