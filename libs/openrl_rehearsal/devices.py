"""One shared device on the virtual clock: the ledger's own arbiter of turns (T1-T5), and how fast work then goes.

    submit ──resident──▶ running ──▶ done
       └──not resident──▶ request ─▶ granted ─▶ resumed ─▶ running … pressed and idle, or asked ─▶ parked ─▶ released

Who may be resident is decided by ``openrl_ledger.core.turns``; here are the workers' side of it and the moves, which
cost the bytes they move. A worker that somebody waits for leaves once it is idle for ``LINGER_S``; one that is asked
leaves at once, unless what it does cannot be broken off (a start).

Residents that work at once share the device: as long as the busy parts of their work add up to no more than the whole
of it, nobody is slowed down; beyond that everybody is, by the sum. So under turns k workers with equal work each take k
times as long, and co-residents gain what their work leaves of the device: host-side work, waiting, launching kernels.

Invariants: the declared bytes of the residents never exceed the device's; work runs only for residents.
What it does not do: fence (a worker that is asked always leaves in the end here).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from openrl_common.records import ClaimEntry, ClaimRecord, ClaimState, Residency, Role, TurnRecord
from openrl_ledger.core import turns
from openrl_ledger.core.turns import TurnPolicy
from openrl_rehearsal.agenda import Agenda

LINGER_S = 0.1
"""As a worker's: requests of a step follow each other fast."""
_EPSILON_S = 1e-9


@dataclass(eq=False, slots=True)
class Tenant:
    """A worker as its device sees it. ``state_bytes``: what parking moves to host memory, and resuming back.

    ``on``: it is on the device and may work; ``moving``: it is being parked or resumed.
    """

    name: str
    owner: str
    declared_bytes: int
    state_bytes: int
    on: bool = False
    moving: bool = False
    parked: bool = False
    queue: list[Piece] = field(default_factory=list)


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


@dataclass(frozen=True)
class Sharing:
    """How devices are shared (T2, T3)."""

    policy: TurnPolicy
    park_bytes_per_s: float


class SharedDevice:
    """``switches`` counts moves to or from host memory, ``switching_s`` their seconds (T7)."""

    def __init__(self, agenda: Agenda, size_bytes: int, sharing: Sharing) -> None:
        self._agenda = agenda
        self._sharing = sharing
        self._claim = ClaimRecord(state=ClaimState.ALLOCATED, device_bytes=size_bytes)
        self._tenants: dict[str, Tenant] = {}
        self.record = TurnRecord()
        self._running: dict[Piece, None] = {}
        self._advanced_at = 0.0
        self._plan = 0
        self.switches = 0
        self.switching_s = 0.0
        self.used_s = 0.0
        """Seconds in which at least one piece ran."""

    def submit(self, piece: Piece) -> None:
        piece.queued_at = self._agenda.now
        tenant = piece.tenant
        if tenant.name not in self._tenants:
            self._enter(tenant)
        tenant.queue.append(piece)
        if tenant.on:
            self._begin(tenant)
        elif tenant.name not in self.record.residents:
            self._decide(turns.request(self.record, tenant.name, self._agenda.now))

    def leave(self, tenant: Tenant) -> None:
        """The worker is gone: what it had under way is dropped."""
        self._advance()
        for piece in [each for each in self._running if each.tenant is tenant]:
            del self._running[piece]
        tenant.on = tenant.moving = False
        tenant.queue.clear()
        self._tenants.pop(tenant.name, None)
        self._claim.entries.pop(tenant.name, None)
        self._replan()
        self._decide(self.record)

    def _enter(self, tenant: Tenant) -> None:
        self._tenants[tenant.name] = tenant
        self._claim.entries[tenant.name] = ClaimEntry(
            workload=tenant.name,
            tenant="",
            owner=tenant.owner,
            role=Role.TRAINER,
            device_bytes=tenant.declared_bytes,
            host_bytes=0,
            exclusive=False,
            incarnation=1,
            reserved_at=self._agenda.now,
        )

    # --- turns ---------------------------------------------------------------------------------------------------

    def _decide(self, record: TurnRecord) -> None:
        """Let the arbiter settle, and do what follows."""
        before = self.record
        policy, now = self._sharing.policy, self._agenda.now
        self.record = turns.settle(record, self._claim, policy, now)
        assert not turns.double_hold(self.record, self._claim, policy)
        for name, residency in self.record.residents.items():
            known = before.residents.get(name)
            if known is None or known.epoch != residency.epoch:
                self._resume(self._tenants[name])
            if residency.asked_at is not None:
                self._break_off(self._tenants[name])
            elif residency.pressed_at is not None and (known is None or known.pressed_at is None):
                self._linger(self._tenants[name])
        if self.record.waiting:
            ends = [each.until for each in self.record.residents.values() if each.until > now]
            if ends:
                self._agenda.after(min(ends) - now, self._turn_over)

    def _turn_over(self) -> None:
        if self.record.waiting:
            self._decide(self.record)

    def _resume(self, tenant: Tenant) -> None:
        tenant.moving = True
        self._agenda.after(self._move_s(tenant) if tenant.parked else 0.0, self._resumed, tenant)

    def _resumed(self, tenant: Tenant) -> None:
        if tenant.name in self._tenants:
            tenant.moving = tenant.parked = False
            tenant.on = True
            self._begin(tenant)
            self._heed(tenant)

    def _heed(self, tenant: Tenant) -> None:
        """Leave now when it is asked to, soon when it is idle and somebody waits."""
        residency = self.record.residents.get(tenant.name)
        if residency is not None and residency.asked_at is not None:
            self._break_off(tenant)
        elif residency is not None and residency.pressed_at is not None:
            self._linger(tenant)

    def _linger(self, tenant: Tenant) -> None:
        if self._idle(tenant):
            self._agenda.after(LINGER_S, self._lingered, tenant, self._residency(tenant).epoch)

    def _lingered(self, tenant: Tenant, epoch: int) -> None:
        residency = self.record.residents.get(tenant.name)
        same = residency is not None and residency.epoch == epoch and residency.pressed_at is not None
        if same and self._idle(tenant):
            self._park(tenant)

    def _break_off(self, tenant: Tenant) -> None:
        """Asked to yield: at once where the work has boundaries, else when it is done (``_look``)."""
        own = [piece for piece in self._running if piece.tenant is tenant]
        if tenant.on and all(piece.breakable for piece in own):
            self._advance()
            for piece in own:
                del self._running[piece]
            tenant.queue[:0] = own
            self._replan()
            self._park(tenant)

    def _park(self, tenant: Tenant) -> None:
        tenant.on, tenant.moving = False, True
        self._agenda.after(self._move_s(tenant), self._parked, tenant)

    def _parked(self, tenant: Tenant) -> None:
        if tenant.name not in self._tenants:
            return
        tenant.moving, tenant.parked = False, True
        record = turns.release(self.record, tenant.name, self._residency(tenant).epoch)
        if tenant.queue:
            record = turns.request(record, tenant.name, self._agenda.now)
        self._decide(record)

    def _move_s(self, tenant: Tenant) -> float:
        seconds = tenant.state_bytes / self._sharing.park_bytes_per_s
        self.switches += 1
        self.switching_s += seconds
        return seconds

    def _residency(self, tenant: Tenant) -> Residency:
        return self.record.residents[tenant.name]

    def _idle(self, tenant: Tenant) -> bool:
        return tenant.on and not tenant.queue and all(piece.tenant is not tenant for piece in self._running)

    # --- work ----------------------------------------------------------------------------------------------------

    def _begin(self, tenant: Tenant) -> None:
        self._advance()
        for piece in tenant.queue:
            piece.began_at = self._agenda.now if piece.began_at is None else piece.began_at
            self._running[piece] = None
        tenant.queue.clear()
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
        self._replan()
        for piece in finished:
            piece.done()
            self._heed(piece.tenant)
