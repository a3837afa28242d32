"""The demo's live view: one table on a terminal, plain lines elsewhere (C6)."""

from __future__ import annotations

import asyncio
import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self

import click

REFRESH_S = 0.25
PLAIN_INTERVAL_S = 10.0


class Row(Protocol):
    """What the view shows of a job."""

    name: str
    phase: str
    step: str
    reward: str
    seats: str
    reason: str


class Screen:
    """``rows`` is asked again for every refresh."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._live: Any = None
        self._told: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._started = time.monotonic()
        self._printed = time.monotonic()

    async def __aenter__(self) -> Self:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(self._table(), refresh_per_second=4, transient=False)
            self._live.start()
        self._task = asyncio.create_task(self._loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._refresh()
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            click.echo(f"[{time.monotonic() - self._started:6.1f} s] {text}")

    async def _loop(self) -> None:
        while True:
            self._refresh()
            await asyncio.sleep(REFRESH_S)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table())
            return
        regular = time.monotonic() - self._printed >= PLAIN_INTERVAL_S
        for row in self._rows():
            told = f"{row.phase} {row.reason}"
            if told != self._told.get(row.name) or (regular and row.step):
                self._told[row.name] = told
                parts = [f"{row.name:<10} {row.phase:<10}", row.step, row.reward and f"reward {row.reward}"]
                parts.append(row.seats and f"claims {row.seats}")
                parts.append(row.reason and f"waits: {row.reason}")
                self.line("  ".join(part for part in parts if part))
        if regular:
            self._printed = time.monotonic()

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(title=f"OpenRL demo, {time.monotonic() - self._started:.0f} s", title_justify="left", expand=True)
        for column in ("job", "phase", "step", "held-out reward", "claims"):
            table.add_column(column, no_wrap=True)
        table.add_column("waits", ratio=1)
        for row in self._rows():
            table.add_row(row.name, row.phase, row.step, row.reward, row.seats, row.reason)
        return table
