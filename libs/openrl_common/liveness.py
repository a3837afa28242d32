"""Who is alive, judged by the reader's own clock (E13, B5): the periods of beats and leases, and how they get old.

Beats, leases and duties (``duty``) are values that somebody keeps rewriting. Nothing in them says when they expire: one
is old when the reader has seen no new revision for long enough; while the reader was cut off nothing gets old.

A holder counts from the moment it *sent* its last renewal that succeeded, a judge from the moment it first saw the
revision, which is later: when a judge calls it lapsed, the holder has known for some time that it is not held.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

BEAT_S = 2.0
"""A launcher beats for its node this often (B5)."""
BEATS_MISSED_MAX = 3
LEASE_S = 10.0
"""A worker that could not renew for this long must not touch the device until it has renewed again (B7)."""
RENEW_S = 2.0


@dataclass
class Pulses:
    """Which values still change, by the reader's own clock: nothing of it comes from their content.

    ``cut_off`` whenever the bus was not readable: nobody is judged by a time in which nobody could be heard.
    """

    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def lapsed(self, key: str, revision: int, now: float, *, limit_s: float) -> bool:
        """Has ``key`` stood at ``revision`` for ``limit_s``? The first look at a revision starts its time."""
        known = self._seen.get(key)
        if known is None or known[0] != revision:
            self._seen[key] = (revision, now)
            return False
        return now - known[1] >= limit_s

    def cut_off(self) -> None:
        self._seen.clear()

    def keep(self, keys: Set[str]) -> None:
        """Forget everybody else."""
        self._seen = {key: seen for key, seen in self._seen.items() if key in keys}
