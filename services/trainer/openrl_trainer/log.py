"""The training log's order (R4): which entry is next, which is a repetition, which must wait. Pure.

Decisions depend on the log alone, never on the clock or on how fast entries are applied, so that reading the log again
after a restart decides the same (R5)::

    seq == expected        apply it, then every held successor
    seq <  expected        a repetition: answer with the stored result
    seq >  expected        hold it until the missing ones arrive; too far ahead is refused
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD_MAX = 256
"""How far ahead of the expected entry one may be; a client has far fewer in flight."""


@dataclass(frozen=True)
class Apply(Generic[T]):
    """Apply these entries, in this order."""

    entries: tuple[T, ...]


@dataclass(frozen=True)
class Repeat:
    """Answered before: send the stored result of ``seq`` again."""

    seq: int


@dataclass(frozen=True)
class Hold:
    """Wait for ``missing`` first."""

    missing: int


@dataclass(frozen=True)
class Refuse:
    """Not taken into the log's order at all; ``seq`` stays free."""

    code: str
    message: str


Decision = Apply[T] | Repeat | Hold | Refuse


@dataclass
class LogOrder(Generic[T]):
    """``expected``: the seq of the next entry. ``held``: entries that came too early, at most AHEAD_MAX."""

    expected: int = 1
    held: dict[int, T] = field(default_factory=dict)

    def decide(self, seq: int, entry: T) -> Decision[T]:
        if seq < 1:
            return Refuse("bad-seq", f"seq is {seq}: the first request of a job has seq 1")
        if seq < self.expected:
            return Repeat(seq)
        if seq > self.expected + AHEAD_MAX:
            return Refuse(
                "gap",
                f"seq is {seq}, expected is {self.expected}: at most {AHEAD_MAX} may be ahead, send the missing ones",
            )
        if seq > self.expected:
            self.held.setdefault(seq, entry)
            return Hold(self.expected)
        self.expected += 1
        return Apply((entry, *self._successors()))

    def give_up(self) -> tuple[T, ...]:
        """The missing entries will never come: what was held goes on from the first one held."""
        self.expected = min(self.held)
        return self._successors()

    def _successors(self) -> tuple[T, ...]:
        ready = []
        while self.expected in self.held:
            ready.append(self.held.pop(self.expected))
            self.expected += 1
        return tuple(ready)
