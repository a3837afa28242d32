"""Sharing a device on the virtual clock (T1, T2, T3)."""

from __future__ import annotations

from openrl_common.turns import LINGER_S as WORKER_LINGER_S
from openrl_ledger.core.turns import TurnPolicy
from openrl_rehearsal.agenda import Agenda
from openrl_rehearsal.devices import LINGER_S, Piece, SharedDevice, Sharing, Tenant

GIB = 1 << 30


class Desk:
    """A device of 80 GiB and workers of 30; ``ended`` maps each finished piece's name to its moment."""

    def __init__(self, *, co_residency: bool, max_turn_s: float = 120.0, park_gib_per_s: float = 1e9) -> None:
        self.agenda = Agenda()
        policy = TurnPolicy(coresidency=co_residency, reserve_bytes=GIB, max_turn_s=max_turn_s)
        self.device = SharedDevice(self.agenda, 80 * GIB, Sharing(policy, park_gib_per_s * GIB))
        self.ended: dict[str, float] = {}
        self._tenants = 0

    def tenant(self, owner: str, gib: int = 30) -> Tenant:
        self._tenants += 1
        return Tenant(f"a-{self._tenants}", owner, gib * GIB, gib * GIB)

    def work(
        self, tenant: Tenant, name: str, seconds: float, *, busy: float = 1.0, then: int = 0, breakable: bool = True
    ) -> None:
        """Work, then again ``then`` times (named ``name1``, ``name2``, …), a second after the last."""

        def done() -> None:
            self.ended[name] = round(self.agenda.now, 3)
            if then:
                stem = name.rstrip("0123456789")
                number = int(name[len(stem) :] or 0) + 1
                self.agenda.after(1.0, lambda: self.work(tenant, f"{stem}{number}", seconds, busy=busy, then=then - 1))

        self.device.submit(Piece(tenant, seconds, busy, done, breakable))

    def run(self) -> dict[str, float]:
        self.agenda.run(lambda: False, 10_000)
        return self.ended


def test_a_simulated_worker_lingers_as_long_as_a_real_one() -> None:
    """T3."""
    assert LINGER_S == WORKER_LINGER_S == 0.1


def test_a_worker_alone_is_never_parked() -> None:
    """T1."""
    desk = Desk(co_residency=False, max_turn_s=5, park_gib_per_s=1)
    desk.work(desk.tenant("a"), "a", 30, then=2)
    assert desk.run() == {"a": 30, "a1": 61, "a2": 92}
    assert desk.device.switches == 0


def test_under_turns_each_of_three_takes_three_times_as_long() -> None:
    """T3: whoever works once more goes behind those who wait."""
    desk = Desk(co_residency=False)
    for name in ("a", "b", "c"):
        desk.work(desk.tenant(name), name, 10, then=1)
    assert desk.run() == {"a": 10, "b": 20.1, "c": 30.2, "a1": 40.3, "b1": 50.4, "c1": 60.5}


def test_an_owner_with_two_workers_gets_one_share() -> None:
    """T3: the least recently served owner is next, not the next worker."""
    desk = Desk(co_residency=False)
    desk.work(desk.tenant("a"), "first", 10)
    desk.work(desk.tenant("a"), "second", 10)
    desk.work(desk.tenant("b"), "other", 10)
    assert desk.run() == {"first": 10, "other": 20.1, "second": 30.2}


def test_a_turn_longer_than_allowed_is_broken_off_and_resumed() -> None:
    """T3; a start cannot be broken off."""
    desk = Desk(co_residency=False, max_turn_s=20)
    desk.work(desk.tenant("a"), "long", 50)
    desk.work(desk.tenant("b"), "short", 5)
    assert desk.run() == {"short": 25, "long": 55.1}
    start = Desk(co_residency=False, max_turn_s=20)
    start.work(start.tenant("a"), "start", 50, breakable=False)
    start.work(start.tenant("b"), "short", 5)
    assert start.run() == {"start": 50, "short": 55}


def test_moving_costs_what_it_moves() -> None:
    """T7: 30 GiB at 10 GiB/s take 3 s each way: a out, b in for the first time, b out, a back in."""
    desk = Desk(co_residency=False, park_gib_per_s=10)
    desk.work(desk.tenant("a"), "a", 10, then=1)
    desk.work(desk.tenant("b"), "b", 10)
    assert desk.run() == {"a": 10, "b": 23.1, "a1": 39.2}
    assert (desk.device.switches, desk.device.switching_s) == (3, 9.0)


def test_co_residents_work_side_by_side_as_far_as_the_device_goes() -> None:
    """T2: two that keep it busy for half the time are not slowed down, four are by the sum."""
    desk = Desk(co_residency=True, park_gib_per_s=0.001)
    for name in ("a", "b"):
        desk.work(desk.tenant(name), name, 10, busy=0.5)
    assert desk.run() == {"a": 10, "b": 10}
    crowd = Desk(co_residency=True)
    for name in ("a", "b", "c", "d"):
        crowd.work(crowd.tenant(name, 15), name, 10, busy=0.5)
    assert crowd.run() == dict.fromkeys("abcd", 20)
    assert desk.device.switches == crowd.device.switches == 0


def test_turns_begin_when_the_declared_sum_does_not_fit() -> None:
    """T2: 30 + 30 GiB fit beside the reserve, a third 30 does not; 79 + 1 of reserve is the most."""
    desk = Desk(co_residency=True)
    for name in ("a", "b", "c"):
        desk.work(desk.tenant(name), name, 10, busy=0.5)
    assert desk.run() == {"a": 10, "b": 10, "c": 20.1}
    exact = Desk(co_residency=True)
    exact.work(exact.tenant("a", 40), "a", 10, busy=0.5)
    exact.work(exact.tenant("b", 39), "b", 10, busy=0.5)
    assert exact.run() == {"a": 10, "b": 10}


def test_a_worker_that_leaves_makes_room_at_once() -> None:
    """T3."""
    desk = Desk(co_residency=False)
    leaver = desk.tenant("a")
    desk.work(leaver, "never", 100)
    desk.work(desk.tenant("b"), "b", 10)
    desk.agenda.after(4, desk.device.leave, leaver)
    assert desk.run() == {"b": 14}
