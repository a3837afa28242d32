"""``python -m openrl_common.make_streams``: make every stream and bucket, or bring them up to date; then exit.

An installation runs it before the ledger starts; on one host ``openrl up`` does the same by itself.
"""

from __future__ import annotations

import asyncio
import sys

import click

from openrl_common import settings, streams
from openrl_common.bus import Bus
from openrl_common.errors import OpenRLError, Unreachable


@click.command(help=__doc__)
@settings.settings(settings.NATS_URL)
@click.option("--replicas", type=click.IntRange(1, 5), default=1, show_default=True, help="Copies of each stream.")
def main(nats_url: str, replicas: int) -> None:
    async def make() -> None:
        bus = await Bus.connect(nats_url, name="openrl-make-streams")
        try:
            await streams.ensure(bus, replicas=replicas)
        finally:
            await bus.close()

    try:
        asyncio.run(make())
    except OpenRLError as error:
        click.echo(f"openrl make-streams: {error}", err=True)
        sys.exit(5 if isinstance(error, Unreachable) else 1)


if __name__ == "__main__":
    main()
