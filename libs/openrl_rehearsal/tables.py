"""The ledger's tables in memory, and the ledger core run against them, one event at a time.

Every handling runs to its end before the next begins: no conflict ever happens here. What conflicts, crashes and lost
answers do to these rules is the business of ``tests/simulation`` and of the ledger's property tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from openrl_common.events import Event
from openrl_ledger.core.decide import decide
from openrl_ledger.core.ops import Emit, Environment, Lost, Pause, Read, Table, Write


@dataclass(frozen=True, slots=True)
class Stored:
    value: Any
    revision: int


class Tables:
    """``on_change(table, key, value)`` is called for every write that landed."""

    def __init__(self, on_change: Callable[[Table, str, Any], None]) -> None:
        self._tables: dict[Table, dict[str, Stored]] = {table: {} for table in Table}
        self._revisions = count(1)
        self._on_change = on_change

    def value(self, table: Table, key: str) -> Any:
        """None = there is no such key."""
        stored = self._tables[table].get(key)
        return None if stored is None else stored.value

    def values(self, table: Table) -> list[Any]:
        return [stored.value for stored in self._tables[table].values()]

    def read(self, table: Table, key: str) -> Stored | None:
        return self._tables[table].get(key)

    def write(self, table: Table, key: str, value: Any, last: int) -> int | Lost:
        """Compare-and-swap from revision ``last`` (0: must not exist)."""
        stored = self._tables[table].get(key)
        if (0 if stored is None else stored.revision) != last:
            return Lost.DEFINITE
        return self.put(table, key, value)

    def put(self, table: Table, key: str, value: Any) -> int:
        revision = next(self._revisions)
        self._tables[table][key] = Stored(value, revision)
        self._on_change(table, key, value)
        return revision


class Ledger:
    """One replica of the ledger's rules.

    Args:
        names: None numbers claims in the order of their founding; else random ids, as the service makes them (P4's last
            resort is the claim's id, so the two may seat differently).
    """

    def __init__(self, tables: Tables, *, limit: int, now: Callable[[], float], names: random.Random | None) -> None:
        numbers = count(1)

        def mint(prefix: str) -> str:
            number = f"{next(numbers):07d}"
            return f"{prefix}-{number}" if names is None else f"{prefix}-{names.getrandbits(32):08x}-{number}"

        self._tables = tables
        self._environment = Environment(limit=limit, now=now, mint=mint)

    def handle(self, event: Event) -> list[Event]:
        """Run the rules on one event; returns what they publish."""
        published: list[Event] = []
        steps = decide(event, self._environment)
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return published
            answer = None
            match step:
                case Read(table, key):
                    answer = self._tables.read(table, key)
                case Write(table, key, value, last):
                    answer = self._tables.write(table, key, value, last)
                case Emit(event):
                    published.append(event)
                case Pause():
                    raise AssertionError("nobody else writes here, yet the ledger lost a compare-and-swap")
