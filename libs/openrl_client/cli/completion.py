"""``openrl completion``: print the script that makes a shell complete ``openrl`` (C6)."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script, for example: eval "$(openrl completion bash)"."""
    from click.shell_completion import get_completion_class

    from openrl_client.cli import cli

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(cli, {}, "openrl", "_OPENRL_COMPLETE").source())
