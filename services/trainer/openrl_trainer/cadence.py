"""How often a job is checkpointed (R5): the setting, and when the next one is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from openrl_common.quantities import parse_seconds

_COST_SHARE = 10.0
"""By time, writing takes at most a tenth of it, whatever was asked for."""


@dataclass(frozen=True)
class Cadence:
    """Every ``seconds``, or every ``steps`` optimizer steps; both 0 = never."""

    seconds: float = 0.0
    steps: int = 0

    def due(self, *, since_s: float, steps: int, cost_s: float) -> bool:
        """``since_s`` and ``steps`` count from the last checkpoint, which took ``cost_s`` to copy and write."""
        if self.steps:
            return steps >= self.steps
        return self.seconds > 0 and since_s >= max(self.seconds, _COST_SHARE * cost_s)


class CadenceType(click.ParamType[Cadence]):
    """``60s`` or ``20steps``; ``off`` for none."""

    name = "duration|steps|off"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Cadence:
        if isinstance(value, Cadence):
            return value
        text = str(value).strip().lower()
        if text == "off":
            return Cadence()
        number = text.removesuffix("steps").removesuffix("step")
        if number != text:
            if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 10**9):
                self.fail(f"{text[:40]!r} is no number of steps: use for example 20steps", param, ctx)
            return Cadence(steps=int(number))
        try:
            seconds = parse_seconds(text)
        except ValueError as error:
            self.fail(f"{error}, or a number of steps such as 20steps, or off", param, ctx)
        if seconds <= 0:
            self.fail(f"{text[:40]!r} is not above 0: use off for no checkpoints", param, ctx)
        return Cadence(seconds=seconds)
