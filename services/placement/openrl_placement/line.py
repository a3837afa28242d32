"""The waiting line (W1): priority descending, then the stream sequence of JobSubmitted; and what was promised to whom.

Waiters are grouped by what they need, because a freed seat fits all of a group or none of it: a wake-up merges the
heads of the few groups that fit instead of walking thousands of waiters; those who were promised as much as one may
stand apart, or it would walk over them. A claim offered to a waiter is promised to it until that waiter is settled, and
so is host memory of the claim's node, which all claims there share: nothing that an earlier waiter could use goes to a
later one.

Invariants: a workload stands in the line at most once; promises and aims exist only for workloads with a request under
way, and ``promised(claim)`` equals the number of workloads that hold one.

Not here: who waits and why (the records), whether something fits (``fleet``).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sortedcontainers import SortedList

from openrl_common.records import Shape
from openrl_placement.fleet import CANDIDATES_MAX

Place = tuple[int, int, str]
"""``(-priority, incarnation, workload)``: ascending is the line's order."""


@dataclass(frozen=True)
class Group:
    """Waiters that anything freed fits alike. ``seatless``: they hold no claim of their own, not even a pending one."""

    shape: Shape
    seatless: bool


@dataclass(frozen=True)
class Promise:
    """What one request under way may take: a seat on one of the claims, and ``host_bytes`` on one of their nodes."""

    claims: tuple[str, ...]
    nodes: frozenset[str]
    host_bytes: int


NOTHING = Promise((), frozenset(), 0)


class Line:
    """Who waits, in order; who has a request under way, and which claims it was promised."""

    def __init__(self) -> None:
        self._all: SortedList[Place] = SortedList()
        self._groups: dict[Group, SortedList[Place]] = {}
        self._firsts: SortedList[Place] = SortedList()
        """The first of each group: a wake-up that ends with the first in line need not look at every group."""
        self._laden: SortedList[Place] = SortedList()
        """Those who are promised ``CANDIDATES_MAX`` claims; all others are in ``_groups``."""
        self._where: dict[str, tuple[Place, Group]] = {}
        self._promises: dict[str, Promise] = {}
        self._promised: Counter[str] = Counter()
        self._promised_bytes: Counter[str] = Counter()
        self._short: set[str] = set()
        self._aims: dict[str, str] = {}
        self._aimed: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, workload: str) -> bool:
        return workload in self._where

    def put(self, workload: str, place: Place, group: Group) -> None:
        """Stand in the line, or move when place or group changed."""
        if self._where.get(workload) == (place, group):
            return
        self.leave(workload)
        self._where[workload] = (place, group)
        self._all.add(place)
        self._add(place, group)

    def leave(self, workload: str) -> None:
        """Leave the line; a promise stays until it is settled."""
        place, group = self._where.pop(workload, (None, None))
        if place is None or group is None:
            return
        self._all.remove(place)
        self._drop(place, group)

    def _add(self, place: Place, group: Group) -> None:
        if self.is_laden(place[2]):
            self._laden.add(place)
            return
        members = self._groups.setdefault(group, SortedList())
        first = members[0] if members else None
        members.add(place)
        if members[0] is place:
            self._firsts.add(place)
            if first is not None:
                self._firsts.remove(first)

    def _drop(self, place: Place, group: Group) -> None:
        if self.is_laden(place[2]):
            self._laden.remove(place)
            return
        members = self._groups[group]
        first = members[0]
        members.remove(place)
        if first == place:
            self._firsts.remove(place)
            if members:
                self._firsts.add(members[0])
        if not members:
            del self._groups[group]

    def is_laden(self, workload: str) -> bool:
        """Is it promised as many claims as one may?"""
        return _is_full(self.promised_to(workload))

    def _set_promise(self, workload: str, promise: Promise) -> None:
        place, group = self._where.get(workload, (None, None))
        if place is None or group is None or self.is_laden(workload) == _is_full(promise):
            self._promises[workload] = promise
            return
        self._drop(place, group)  # it stands among the others from now on
        self._promises[workload] = promise
        self._add(place, group)

    def position(self, workload: str) -> int | None:
        """Place in the line, from 1; None = not waiting."""
        place, _ = self._where.get(workload, (None, None))
        return None if place is None else int(self._all.bisect_left(place)) + 1

    def groups(self) -> set[Group]:
        return {group for _, group in self._where.values()}

    def place(self, workload: str) -> Place:
        """Where it stands: KeyError for one that does not wait."""
        return self._where[workload][0]

    def waiting(
        self, fits: Callable[[Group], bool] | None = None, *, after: Place | None = None, laden: bool = True
    ) -> Iterator[str]:
        """Waiters of the groups that fit, first in line first, or first behind a place (which may have been left).

        A group is looked at when it is its turn. The line may be changed while this is read.

        Args:
            laden: also those who are promised as many claims as one may.
        """
        if fits is None and laden:
            yield from (place[2] for place in _walk(self._all, after))
            return
        firsts = self._firsts if after is None else SortedList(self._firsts_behind(after))
        heads: list[tuple[Place, SortedList[Place]]] = []
        if laden and (first := _next(self._laden, after)):
            heads.append((first, self._laden))
        begun: set[Group] = set()
        opening = _next(firsts, None)
        while heads or opening:
            if opening and not (heads and heads[0][0] < opening):
                _, group = self._where.get(opening[2], (None, None))
                if group in self._groups and group not in begun:
                    begun.add(group)
                    if fits is None or fits(group):
                        heapq.heappush(heads, (opening, self._groups[group]))
                opening = _next(firsts, opening)
                continue
            place, members = heads[0]
            _, group = self._where.get(place[2], (None, None))
            if group is not None and (members is not self._laden or fits is None or fits(group)):
                yield place[2]
            following = _next(members, place)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (following, members))

    def _firsts_behind(self, after: Place) -> Iterator[Place]:
        return (first for members in self._groups.values() if (first := _next(members, after)))

    # --- requests under way ------------------------------------------------------------------------------------

    def promise(self, workload: str, promise: Promise) -> None:
        """A request is under way."""
        self.settle(workload)
        self._set_promise(workload, promise)
        self._promised.update(promise.claims)
        self._promised_bytes.update(dict.fromkeys(promise.nodes, promise.host_bytes))

    def promised_to(self, workload: str) -> Promise:
        """What its request under way may take; ``NOTHING`` without one."""
        return self._promises.get(workload, NOTHING)

    def promise_also(self, workload: str, claim: str, node: str) -> None:
        """Keep a further claim for one whose request does not name it: it is offered this one if that is refused."""
        held = self._promises[workload]
        self._set_promise(workload, replace(held, claims=(*held.claims, claim), nodes=held.nodes | {node}))
        self._promised[claim] += 1
        if node not in held.nodes:
            self._promised_bytes[node] += held.host_bytes

    def aim(self, workload: str, claim: str) -> None:
        """A request is under way, of a waiter or not, whose first candidate is ``claim``."""
        self._unaim(workload)
        self._aims[workload] = claim
        self._aimed[claim] += 1

    def aimed(self, claim: str) -> int:
        """Requests under way that try this claim first: later ones do better elsewhere (E11)."""
        return self._aimed[claim]

    def _unaim(self, workload: str) -> None:
        claim = self._aims.pop(workload, None)
        if claim is not None:
            _take(self._aimed, {claim: 1})

    def busy(self, workload: str) -> bool:
        return workload in self._promises

    def settle(self, workload: str) -> tuple[Promise, frozenset[str]]:
        """The request was answered: what had been promised, and the nodes of it whose memory somebody went without."""
        self._unaim(workload)
        promise = self.promised_to(workload)
        self._set_promise(workload, NOTHING)
        del self._promises[workload]
        _take(self._promised, dict.fromkeys(promise.claims, 1))
        _take(self._promised_bytes, dict.fromkeys(promise.nodes, promise.host_bytes))
        short = promise.nodes & self._short
        self._short -= short
        return promise, short

    def promised(self, claim: str) -> int:
        return self._promised[claim]

    def promised_bytes(self, node: str) -> int:
        """Host memory of a node that those with a request under way may take."""
        return self._promised_bytes[node]

    def went_without(self, node: str) -> None:
        """A waiter was passed over because this node's memory is promised: told when some of it is given back."""
        self._short.add(node)

    def is_short(self, node: str) -> bool:
        """Does a waiter go without this node's memory? What is left of it may be what that one is going to need."""
        return node in self._short


def _is_full(promise: Promise) -> bool:
    return len(promise.claims) >= CANDIDATES_MAX


def _take(counts: Counter[str], amounts: dict[str, int]) -> None:
    for key, amount in amounts.items():
        counts[key] -= amount
        if counts[key] <= 0:
            del counts[key]


def _next(members: SortedList[Place], after: Place | None) -> Place | None:
    """The first member, or the first behind a place; O(log n)."""
    index = 0 if after is None else members.bisect_right(after)
    return members[index] if index < len(members) else None


def _walk(members: SortedList[Place], after: Place | None) -> Iterator[Place]:
    """Every member in order, also when members come and go meanwhile."""
    while (after := _next(members, after)) is not None:
        yield after
