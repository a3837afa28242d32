"""NATS accounts that keep tenants apart: prints the ``accounts`` part of a server's configuration.

    python scripts/nats_accounts.py team-a team-b > accounts.conf        # then, in nats.conf: include accounts.conf

One account for the services, where the streams are, and one a tenant, that imports what a client of that tenant uses
and nothing else. Passwords come from the server's environment: ``OPENRL_NATS_PASSWORD`` (services, user ``openrl``),
``OPENRL_NATS_PASSWORD_TEAM_A`` (tenant ``team-a``, user ``team-a``).

Accounts, not permissions of users: in one account the answer to a request goes to whatever subject the request names,
another tenant's training log too, and no permission is asked (tests/bus/client/test_tenants.py).

What stays shared: which jobs and workers there are, and why they wait (``openrl get|explain|status``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from openrl_common.errors import Rejected
from openrl_common.names import check_tenant
from openrl_common.tenancy import inbox_prefix

SERVICES = "OPENRL"
_READABLE = ("openrl_workloads", "openrl_workers", "openrl_ready", "openrl_turns")
"""Buckets that ``openrl status`` and its like list."""


def services_of(tenant: str) -> list[str]:
    """What a tenant's clients ask, or have stored."""
    get, create, pull = "$JS.API.DIRECT.GET", "$JS.API.CONSUMER.CREATE", "$JS.API.CONSUMER.MSG.NEXT"
    return [
        f"openrl.ev.client.{tenant}.job.*.*",
        f"openrl.train.{tenant}.*",
        f"openrl.sample.*.*.{tenant}",
        "openrl.q.placement.*",
        f"openrl.q.sampler.{tenant}.>",
        "openrl.q.sampler._shared.>",
        "$O.openrl_payloads.C.*",
        "$O.openrl_payloads.M.*",
        f"{get}.OPENRL_EVENTS.openrl.ev.*.{tenant}.>",
        f"{get}.OPENRL_TRAIN.openrl.train.{tenant}.*",
        f"{create}.OPENRL_TRAIN.*.openrl.train.{tenant}.*",
        f"{pull}.OPENRL_TRAIN.*",
        f"{get}.KV_openrl_jobs.$KV.openrl_jobs.{tenant}.*",
        f"{get}.KV_openrl_results.$KV.openrl_results.{tenant}.>",
        f"{get}.KV_openrl_workloads.$KV.openrl_workloads.*",
        *(f"{create}.KV_{bucket}.*.$KV.{bucket}.>" for bucket in _READABLE),
        *(f"{pull}.KV_{bucket}.*" for bucket in _READABLE),
    ]


def streams_of(tenant: str) -> list[str]:
    """What is sent to a tenant's clients."""
    return [f"{inbox_prefix(tenant)}.>", f"openrl.ev.placement.{tenant}.job.>"]


def accounts(tenants: list[str]) -> str:
    """The ``accounts`` block. Raises Rejected: ``bad-name``."""
    exports: dict[tuple[str, str], list[str]] = {("service", "openrl.nobody.>"): []}
    imports: dict[str, list[str]] = {}
    for tenant in map(check_tenant, tenants):
        # JetStream's own answers to an account that has none of it come first otherwise, and say that it has none.
        lines = [f'{{service: {{account: {SERVICES}, subject: "openrl.nobody.>"}}, to: "$JS.API.>"}}']
        exports["service", "openrl.nobody.>"].append(_account(tenant))
        for kind, subjects in (("service", services_of(tenant)), ("stream", streams_of(tenant))):
            for subject in subjects:
                exports.setdefault((kind, subject), []).append(_account(tenant))
                lines.append(f'{{{kind}: {{account: {SERVICES}, subject: "{subject}"}}}}')
        imports[tenant] = lines
    blocks = [
        f"  {SERVICES} {{\n    jetstream: enabled\n    users: [{{user: openrl, password: $OPENRL_NATS_PASSWORD}}]\n"
        f"    exports: [\n{_lines(_export(*key, to) for key, to in exports.items())}    ]\n  }}\n"
    ]
    for tenant, lines in imports.items():
        password = f"$OPENRL_NATS_PASSWORD_{tenant.upper().replace('-', '_')}"
        blocks.append(
            f"  {_account(tenant)} {{\n    users: [{{user: {tenant}, password: {password}}}]\n"
            f"    imports: [\n{_lines(lines)}    ]\n  }}\n"
        )
    return f"# scripts/nats_accounts.py {' '.join(tenants)}\naccounts {{\n{''.join(blocks)}}}\n"


def _account(tenant: str) -> str:
    return f"TENANT_{tenant}"


def _export(kind: str, subject: str, to: list[str]) -> str:
    several = ", response_type: stream" if ".MSG.NEXT." in subject else ""
    return f'{{{kind}: "{subject}", accounts: [{", ".join(to)}]{several}}}'


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"      {line}\n" for line in lines)


if __name__ == "__main__":
    try:
        sys.stdout.write(accounts(sys.argv[1:]))
    except Rejected as error:
        sys.exit(f"nats_accounts: {error}")
