"""The waiting line of one sampler (V10): bounded, first come first served, a wait for a version blocks nobody else.

Pure: time and what is served come in as arguments. A request leaves the line exactly once: started, removed, or refused
with a typed error (``version-not-served``, ``deadline``). ``busy`` is raised at the door when the line is full.
Not here: generation, answers, redelivery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypedDict

from openrl_common.errors import Rejected
from openrl_common.wire import ErrorInfo, SampleRequest

ANSWER_MARGIN_S = 0.2
"""A refusal for a version that did not come leaves this long before the deadline, so that the client still hears it."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """``job``: the job key ``<tenant>.<job>.<incarnation>``. ``key``: unique among those in the line and the engine."""

    key: str
    job: str
    request: SampleRequest

    @property
    def num_sequences(self) -> int:
        return len(self.request.prompts) * self.request.params.n

    @property
    def wants_version(self) -> bool:
        return self.request.at_least is not None or self.request.exact is not None


class Versions(TypedDict):
    """What of the versions served ``take`` and ``has_startable`` ask alike."""

    newest: Callable[[str], int]
    serves: Callable[[str, int], bool]
    held_back: Callable[[Waiter], bool]


@dataclass(slots=True)
class Taken:
    start: list[Waiter] = field(default_factory=list)
    refused: list[tuple[Waiter, ErrorInfo]] = field(default_factory=list)


class WaitingLine:
    """``bound``: requests held at most."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._line: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._line)

    def offer(self, waiter: Waiter) -> None:
        """Join the line. Raises Rejected ``busy`` when it is full."""
        if len(self._line) >= self._bound:
            raise Rejected(f"{len(self._line)} requests already wait, the bound is {self._bound}: retry", code="busy")
        self._line.append(waiter)

    def remove(self, key: str) -> bool:
        """Leave the line unanswered; whether it was in it."""
        left = [waiter for waiter in self._line if waiter.key != key]
        found = len(left) < len(self._line)
        self._line = left
        return found

    def take(
        self,
        now: float,
        *,
        room: int,
        newest: Callable[[str], int],
        serves: Callable[[str, int], bool],
        why_behind: Callable[[str], str] = lambda job: "",
        held_back: Callable[[Waiter], bool] = lambda waiter: False,
    ) -> Taken:
        """What leaves the line at ``now`` (Unix seconds).

        Args:
            room: sequences the engine can start; the first request starts whenever this is positive, however big.
            newest/serves: versions by job key, as the engine says.
            why_behind: why the newest known version of a job is not applied, for the refusal's sentence.
            held_back: requests that must not start now (exact calls on a version that is about to be replaced).
        """
        taken = Taken()
        stay: list[Waiter] = []
        for waiter in self._line:
            state = _version_state(waiter.request, newest(waiter.job), partial(serves, waiter.job))
            deadline = waiter.request.deadline
            if state == "never" or (state == "later" and now >= deadline - ANSWER_MARGIN_S):
                taken.refused.append((waiter, _not_served(waiter, newest(waiter.job), why_behind(waiter.job))))
            elif now >= deadline:
                taken.refused.append((waiter, ErrorInfo(code="deadline", message="the deadline passed in the queue")))
            elif state == "now" and room > 0 and not held_back(waiter):
                room -= waiter.num_sequences
                taken.start.append(waiter)
            else:
                stay.append(waiter)
        self._line = stay
        return taken

    def has_startable(
        self,
        *,
        newest: Callable[[str], int],
        serves: Callable[[str, int], bool],
        held_back: Callable[[Waiter], bool] = lambda waiter: False,
    ) -> bool:
        """Whether anybody in line would start now, had the engine room; the arguments are those of ``take``."""
        return any(
            _version_state(waiter.request, newest(waiter.job), partial(serves, waiter.job)) == "now"
            and not held_back(waiter)
            for waiter in self._line
        )

    def drain(self) -> list[Waiter]:
        """Everyone in line, who then is no longer."""
        line, self._line = self._line, []
        return line

    def wake_at(self) -> float | None:
        """When the next deadline matters, Unix seconds; None when the line is empty."""
        return min(
            (w.request.deadline - (ANSWER_MARGIN_S if w.wants_version else 0.0) for w in self._line), default=None
        )


def _version_state(request: SampleRequest, newest: int, serves: Callable[[int], bool]) -> str:
    """``now``, ``later`` (it may still come) or ``never`` (an older version than the one that serves)."""
    if request.exact is not None:
        if serves(request.exact):
            return "now"
        return "later" if request.exact > newest else "never"
    if request.at_least is not None and newest < request.at_least:
        return "later"
    return "now"


def _not_served(waiter: Waiter, newest: int, why: str) -> ErrorInfo:
    request = waiter.request
    wanted = f"exactly {request.exact}" if request.exact is not None else f"at least {request.at_least}"
    return ErrorInfo(
        code="version-not-served",
        message=f"weights version {wanted} of {request.tenant}/{request.job} is not served, {newest} is"
        + (f": {why}" if why else ""),
    )
