"""One shared device on the virtual clock: who is resident, whose turn it is, how fast work then goes (T1-T5).

    submit ──resident──▶ running ──▶ done
       └──not resident──▶ waiting ──turn (parks others, resumes this one)──▶ running

Without co-residency one worker is resident at a time; with it, as many as their declared bytes allow beside a reserve.
A worker leaves only when another needs its place: between two pieces of work, or when its turn has lasted
``max_turn_s``. The next turn goes to the least recently served owner, then to who waited longest.

Residents that work at once share the device: as long as the busy parts of their work add up to no more than the whole
of it, nobody is slowed down; beyond that everybody is, by the sum. So under turns k workers with equal work each take k
times as long, and co-residents gain what their work leaves of the device: host-side work, waiting, launching kernels.

Invariants: the declared bytes of the residents never exceed the device's; work runs only for residents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from openrl_rehearsal.agenda import Agenda

_EPSILON_S = 1e-9


@dataclass(eq=False, slots=True)
class Tenant:
    """A worker as its device sees it. ``state_bytes``: what parking moves to host memory, and resuming back."""

    owner: str
    declared_bytes: int
    state_bytes: int
    parked: bool = False
    resident_since: float | None = None
    active_at: float = 0.0


@dataclass(eq=False, slots=True)
class Piece:
    """A piece of work: ``seconds`` on an idle device. ``breakable``: it has safe boundaries at which a turn may end."""

    tenant: Tenant
    seconds: float
    busy: float
    done: Callable[[], None]
    breakable: bool = True
    queued_at: float = 0.0
    began_at: float | None = None
    number: int = 0


@dataclass(frozen=True)
class Sharing:
    """How devices are shared (T2, T3)."""

    co_residency: bool
    reserve_bytes: int
    max_turn_s: float
    park_bytes_per_s: float


class SharedDevice:
    """``switches`` and ``switching_s`` count turns that had to move somebody, and the seconds that took (T7)."""

    def __init__(self, agenda: Agenda, size_bytes: int, sharing: Sharing) -> None:
        self._agenda = agenda
        self._room_bytes = size_bytes - sharing.reserve_bytes
        self._sharing = sharing
        self._residents: dict[Tenant, None] = {}
        self._running: dict[Piece, None] = {}
        self._waiting: dict[Tenant, list[Piece]] = {}
        self._served_at: dict[str, float] = {}
        self._numbers = count()
        self._advanced_at = 0.0
        self._plan = 0
        self._switching = False
        self.switches = 0
        self.switching_s = 0.0
        self.used_s = 0.0
        """Seconds in which at least one piece ran."""

    def submit(self, piece: Piece) -> None:
        piece.queued_at = self._agenda.now
        piece.number = next(self._numbers)
        if piece.tenant in self._residents and not self._switching and not self._waiting:
            self._begin([piece])
            return
        self._waiting.setdefault(piece.tenant, []).append(piece)
        self._grant()

    def leave(self, tenant: Tenant) -> None:
        """The worker is gone: what it had under way is dropped."""
        self._advance()
        for piece in [each for each in self._running if each.tenant is tenant]:
            del self._running[piece]
        self._waiting.pop(tenant, None)
        self._residents.pop(tenant, None)
        self._replan()
        self._grant()

    # --- turns ---------------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Give turns while somebody waits that can be let in now."""
        while self._waiting and not self._switching:
            chosen = min(
                self._waiting,
                key=lambda each: (self._served_at.get(each.owner, -1.0), self._waiting[each][0].number),
            )
            leaving = self._make_room(chosen)
            if leaving is None:
                return
            self._let_in(chosen, leaving)

    def _make_room(self, chosen: Tenant) -> list[Tenant] | None:
        """Residents to park for ``chosen``, least recently active first; None: those who work cannot be parked yet."""
        if chosen in self._residents:
            return []
        working = {piece.tenant for piece in self._running}
        staying = dict(self._residents)
        leaving: list[Tenant] = []
        idle = sorted((each for each in staying if each not in working), key=lambda each: each.active_at)
        overdue = [each for each in staying if each in working and self._overdue(each)]
        for each in [*idle, *overdue]:
            if self._fits(staying, chosen):
                break
            del staying[each]
            leaving.append(each)
        if self._fits(staying, chosen):
            return leaving
        turns_end_at = [self._turn_ends_at(each) for each in staying if self._breakable(each)]
        if turns_end_at:
            self._agenda.after(max(0.0, min(turns_end_at) - self._agenda.now), self._grant)
        return None

    def _fits(self, residents: dict[Tenant, None], chosen: Tenant) -> bool:
        if not residents:
            return True
        declared = chosen.declared_bytes + sum(each.declared_bytes for each in residents)
        return self._sharing.co_residency and declared <= self._room_bytes

    def _breakable(self, tenant: Tenant) -> bool:
        return all(piece.breakable for piece in self._running if piece.tenant is tenant)

    def _turn_ends_at(self, tenant: Tenant) -> float:
        return (tenant.resident_since or 0.0) + self._sharing.max_turn_s

    def _overdue(self, tenant: Tenant) -> bool:
        return self._breakable(tenant) and self._turn_ends_at(tenant) <= self._agenda.now + _EPSILON_S

    def _let_in(self, chosen: Tenant, leaving: list[Tenant]) -> None:
        self._advance()
        moved_bytes = chosen.state_bytes if chosen.parked else 0
        for tenant in leaving:
            del self._residents[tenant]
            tenant.parked, tenant.resident_since = True, None
            moved_bytes += tenant.state_bytes
            for piece in [each for each in self._running if each.tenant is tenant]:
                del self._running[piece]
                self._waiting.setdefault(tenant, []).append(piece)
        self._replan()
        self._served_at[chosen.owner] = self._agenda.now
        if chosen not in self._residents:
            self._residents[chosen] = None
            chosen.parked, chosen.resident_since = False, self._agenda.now
        pieces = self._waiting.pop(chosen)
        if moved_bytes == 0:
            self._begin(pieces)
            return
        took_s = moved_bytes / self._sharing.park_bytes_per_s
        self.switches += 1
        self.switching_s += took_s
        self._switching = True
        self._agenda.after(took_s, self._switched, chosen, pieces)

    def _switched(self, chosen: Tenant, pieces: list[Piece]) -> None:
        self._switching = False
        if chosen in self._residents:
            self._begin(pieces)
        self._grant()

    # --- work ----------------------------------------------------------------------------------------------------

    def _begin(self, pieces: list[Piece]) -> None:
        self._advance()
        for piece in pieces:
            piece.began_at = self._agenda.now if piece.began_at is None else piece.began_at
            piece.tenant.active_at = self._agenda.now
            self._running[piece] = None
        self._replan()

    def _rate(self) -> float:
        return 1.0 / max(1.0, sum(piece.busy for piece in self._running))

    def _advance(self) -> None:
        """Bring what runs up to date."""
        elapsed_s = self._agenda.now - self._advanced_at
        if self._running and elapsed_s > 0:
            self.used_s += elapsed_s
            rate = self._rate()
            for piece in self._running:
                piece.seconds -= elapsed_s * rate
        self._advanced_at = self._agenda.now

    def _replan(self) -> None:
        """Look again when the first of what runs now is done; an older plan is void."""
        self._plan += 1
        if self._running:
            left_s = min(piece.seconds for piece in self._running)
            self._agenda.after(max(0.0, left_s / self._rate()), self._look, self._plan)

    def _look(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        finished = [piece for piece in self._running if piece.seconds <= _EPSILON_S]
        for piece in finished:
            del self._running[piece]
            piece.tenant.active_at = self._agenda.now
        self._replan()
        # Between two pieces of work is where a turn ends: who waits is looked at before the next piece is asked for.
        self._grant()
        for piece in finished:
            piece.done()
