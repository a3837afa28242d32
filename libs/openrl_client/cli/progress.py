"""Progress of one job: a live line on a terminal, plain lines elsewhere (C6). On stderr: stdout is the result."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

if TYPE_CHECKING:
    from openrl_client.job import Progress

PLAIN_INTERVAL_S = 5.0


class Reporter:
    """Says where a job is: why it waits, then its steps."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._status: Any = None
        self._told: set[str] = set()
        self._printed_at = 0.0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status(f"{self._name}: submitting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._status is not None:
            self._status.console.print(f"{self._name}: {text}", markup=False, highlight=False)
        else:
            click.echo(f"{self._name}: {text}", err=True)

    def waiting(self, progress: Progress) -> None:
        """What changed on the way to ready: phase of each worker, and why it waits."""
        for text in progress.lines():
            if text not in self._told:
                self.line(text)
        self._told = set(progress.lines())
        self._live(progress.job.phase.value)

    def phase(self, phase: str, reward: float | None) -> None:
        self.line(phase if reward is None else f"{phase}, held-out reward {reward:.3f}")
        self._live(phase)

    def step(self, metrics: dict[str, Any]) -> None:
        """One step of a recipe; elsewhere than on a terminal at most every few seconds."""
        parts = [f"{metrics['recipe']} step {metrics['step']}"]
        parts += [f"{key} {metrics[key]:.4g}" for key in ("loss", "reward", "kl") if metrics.get(key) is not None]
        if self._status is not None:
            self._live(", ".join(parts))
        elif time.monotonic() - self._printed_at >= PLAIN_INTERVAL_S:
            self._printed_at = time.monotonic()
            self.line(", ".join(parts))

    def _live(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{self._name}: {text}")
