"""``openrl drill``: many jobs at once, rendered for clients or rehearsed.

``rehearse`` and ``reference`` run the services' own cores, which this package never imports: they are looked up by name
when they are used, and are not listed where ``openrl_rehearsal`` is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex

import click

from openrl_client import drills
from openrl_client.cli.common import machine_readable

_REHEARSAL = "openrl_rehearsal"
_FOREIGN = {
    "rehearse": "Rehearse a drill on a virtual clock.",
    "reference": "Rehearse the reference drills.",
}


class _Drill(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *(_FOREIGN if _installed() else ())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _FOREIGN or not _installed():
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(importlib.import_module(f"{_REHEARSAL}.cli"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, _FOREIGN.get(name) or self.commands[name].get_short_help_str())
                    for name in self.list_commands(ctx)
                ]
            )


def _installed() -> bool:
    return importlib.util.find_spec(_REHEARSAL) is not None


@click.group(cls=_Drill)
def drill() -> None:
    """Many jobs at once: what clients run, and what would come of it on a fleet."""


@drill.command(short_help="Print what the clients of a drill run.", context_settings={"ignore_unknown_options": True})
@click.option("--jobs", required=True, help="KIND:MODEL:COUNT, several with commas; MODEL as `openrl run --model`.")
@click.option("--recipe", default="grpo", show_default=True, help="Of `openrl run`.")
@click.option("--image", default="", help="Write Kubernetes Jobs of this image, which has `openrl`.")
@click.option("--namespace", default="default", show_default=True, help="Of the Jobs.")
@click.option("--nats-url", default="nats://openrl-nats.openrl:4222", show_default=True, help="As the Jobs see it.")
@click.option(
    "--hf-cache-claim", "cache_claim", default="", help="Volume claim that each Job's own cache is filled from."
)
@click.option("--session", default="", help="A label of the Jobs, to find and delete them by.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def render(*, jobs: str, recipe: str, image: str, arguments: tuple[str, ...], **where: str) -> None:
    """Print what the clients of a drill run: a command each, or with --image a List of Jobs for `kubectl apply -f -`.

    ARGUMENTS are passed on to `openrl run`: -- --task letters:sort --steps 3
    """
    made = drills.client_jobs(drills.parse_jobs(jobs))
    if not image:
        click.echo("\n".join(shlex.join(drills.command(job, recipe, arguments)) for job in made))
        return
    place = drills.Where(image=image, **where)
    items = [drills.manifest(job, recipe, arguments, place) for job in made]
    click.echo(machine_readable({"apiVersion": "v1", "kind": "List", "items": items}, "json"))
