"""``python -m openrl_client.demo``: exit code 0 when every job finished and GRPO raised its held-out reward, else 1."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from openrl_client.errors import EXIT_FAILED, EXIT_INTERRUPTED, OpenRLError, exit_code
from openrl_common.records import ENGINES


@click.command()
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    default=".openrl-demo",
    show_default=True,
    help="Where the demo keeps model, state and report.",
)
@click.option("--base-steps", type=click.IntRange(1), default=300, show_default=True, help="Training of the model.")
@click.option("--sft-steps", type=click.IntRange(1), default=80, show_default=True, help="SFT steps of every job.")
@click.option("--grpo-steps", type=click.IntRange(1), default=100, show_default=True, help="GRPO steps of every job.")
@click.option("--evaluate", type=click.IntRange(1), default=800, show_default=True, help="Held-out samples each time.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="Sampling engine; with vllm two jobs on four devices (from .venv-vllm: make setup-vllm).",
)
def main(home: Path, base_steps: int, sft_steps: int, grpo_steps: int, evaluate: int, seed: int, engine: str) -> None:
    """Run the whole loop on this machine: four jobs share three devices, their rewards rise, a report says how."""
    from openrl_client.demo.run import Demo, DemoSettings, closing_lines

    settings = DemoSettings(home.absolute(), base_steps, sft_steps, grpo_steps, evaluate, seed, engine)
    try:
        report, path = asyncio.run(Demo(settings).run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("interrupted: everything was stopped", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except OpenRLError as error:
        click.echo(f"demo: {error}", err=True)
        sys.exit(exit_code(error))
    for line in closing_lines(report, path):
        click.echo(line)
    sys.exit(0 if report.passed else EXIT_FAILED)


if __name__ == "__main__":
    main()
