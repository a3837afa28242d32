"""``python -m openrl_ledger``: the ledger service."""

from __future__ import annotations

import sys

import click

from openrl_common import settings
from openrl_common.service import SERVICE_SETTINGS, ServiceContext, collect_seldom, run
from openrl_ledger.core.retention import KEEP_S_MIN
from openrl_ledger.service import LedgerSettings, serve
from openrl_ledger.turns_service import TURN_SETTINGS

JANITOR_EVERY_S = settings.setting(
    "--janitor-every",
    name="janitor_every_s",
    type=settings.SECONDS,
    default="10s",
    help="How often the janitor looks; what it sees twice it repairs.",
)


KEEP_RECORDS_S = settings.setting(
    "--keep-records",
    name="keep_records_s",
    type=settings.SECONDS,
    default="8d",
    help="How long records of what is over are kept: gone claims, empty seats, fenced leases, what workers said. More "
    "than the 7 days that messages live.",
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@settings.settings(*SERVICE_SETTINGS, settings.MAX_SEATS_PER_CLAIM, JANITOR_EVERY_S, KEEP_RECORDS_S, *TURN_SETTINGS)
def main(**parameters: object) -> None:
    """The ledger: owns every seat, books, refuses and releases by compare-and-swap."""
    config = settings.from_parameters(LedgerSettings, parameters)
    if config.keep_records_s <= KEEP_S_MIN:
        raise click.BadParameter(
            f"{config.keep_records_s:g} s is too short: messages live {KEEP_S_MIN:g} s and a late one is to be refused",
            param_hint="--keep-records / OPEN_RL_KEEP_RECORDS",
        )

    async def body(context: ServiceContext) -> None:
        await serve(context, config)

    collect_seldom()
    sys.exit(run("ledger", config, body))


if __name__ == "__main__":
    main()
