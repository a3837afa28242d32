"""``python -m openrl_ledger``: the ledger service."""

from __future__ import annotations

import sys

import click

from openrl_common import settings
from openrl_common.service import SERVICE_SETTINGS, ServiceContext, run
from openrl_ledger.service import LedgerSettings, serve
from openrl_ledger.turns_service import TURN_SETTINGS

JANITOR_EVERY_S = settings.setting(
    "--janitor-every",
    name="janitor_every_s",
    type=settings.SECONDS,
    default="10s",
    help="How often the janitor looks; what it sees twice it repairs.",
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@settings.settings(*SERVICE_SETTINGS, settings.MAX_SEATS_PER_CLAIM, JANITOR_EVERY_S, *TURN_SETTINGS)
def main(**parameters: object) -> None:
    """The ledger: owns every seat, books, refuses and releases by compare-and-swap."""
    config = settings.from_parameters(LedgerSettings, parameters)

    async def body(context: ServiceContext) -> None:
        await serve(context, config)

    sys.exit(run("ledger", config, body))


if __name__ == "__main__":
    main()
