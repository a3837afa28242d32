"""``openrl drill``: rehearsals of many jobs at once.

``rehearse`` and ``reference`` run the services' own cores, which this package never imports: they are looked up by name
when they are used, and are not listed where ``openrl_rehearsal`` is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util

import click

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
    """Rehearse what many jobs at once would do on a fleet."""
