"""``openrl model``: make a tiny model to try things with, or a model directory of a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from openrl_client.cli.common import run_async


@click.group()
def model() -> None:
    """Models on this machine."""


@model.command("make-tiny", short_help="Make a tiny Qwen3 model.")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1, 100_000), default=400, show_default=True, help="Training steps of 64.")
def make_tiny(out: Path, steps: int) -> None:
    """Make a 0.3 M parameter Qwen3 model in OUT that half knows the tasks letters:sort and letters:desc."""
    from openrl_client.tiny import make_tiny_model

    if out.exists():
        raise click.UsageError(f"{str(out)!r} exists already: choose another directory or remove it")
    run_async(make_tiny_model(out, steps=steps, on_line=click.echo, environment=dict(os.environ)))


@model.command("import", short_help="Make a model directory of a GGUF file.")
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
def import_(source: Path, out: Path) -> None:
    """Make a Hugging Face model directory OUT of the GGUF file SOURCE, dequantised to bfloat16. Needs `gguf`."""
    from openrl_client.tiny import import_model

    if out.exists():
        raise click.UsageError(f"{str(out)!r} exists already: choose another directory or remove it")
    run_async(import_model(source, out, on_line=click.echo, environment=dict(os.environ)))
