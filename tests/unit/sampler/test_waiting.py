"""The waiting line: bounded, in order, versions waited for without blocking others (V10)."""

from __future__ import annotations

from typing import Any

import pytest

from openrl_common.errors import Rejected
from openrl_common.wire import SampleRequest, SamplingParams
from openrl_sampler.waiting import ANSWER_MARGIN_S, Taken, Waiter, WaitingLine


def _waiter(key: str, *, prompts: int = 1, n: int = 1, deadline: float = 100.0, **versions: Any) -> Waiter:
    request = SampleRequest(
        request=key, tenant="t", job="j", incarnation=1, prompts=[[1]] * prompts, params=SamplingParams(n=n),
        deadline=deadline, **versions,
    )  # fmt: skip
    return Waiter(key, "t.j.1", request)


def _take(line: WaitingLine, now: float = 0.0, *, room: int = 100, newest: int = 0, **more: Any) -> Taken:
    return line.take(now, room=room, newest=lambda job: newest, serves=lambda job, version: version == newest, **more)


def _keys(taken: Taken) -> list[str]:
    return [waiter.key for waiter in taken.start]


def test_v10_a_full_line_answers_busy() -> None:
    line = WaitingLine(2)
    line.offer(_waiter("a"))
    line.offer(_waiter("b"))
    with pytest.raises(Rejected, match="2 requests already wait") as caught:
        line.offer(_waiter("c"))
    assert caught.value.code == "busy"
    assert _keys(_take(line)) == ["a", "b"]
    line.offer(_waiter("c"))


def test_v10_requests_start_in_order_while_there_is_room() -> None:
    line = WaitingLine(10)
    for key, n in (("a", 3), ("b", 50), ("c", 1)):
        line.offer(_waiter(key, prompts=2, n=n))
    assert _keys(_take(line, room=7)) == ["a", "b"], "one that is larger than the room starts too, and fills it"
    assert _keys(_take(line, room=0)) == []
    assert _keys(_take(line, room=1)) == ["c"]


def test_v10_a_wait_for_a_version_blocks_nobody_and_ends_when_it_serves() -> None:
    line = WaitingLine(10)
    line.offer(_waiter("later", at_least=2))
    line.offer(_waiter("exactly", exact=3))
    line.offer(_waiter("now"))
    assert _keys(_take(line)) == ["now"]
    assert _keys(_take(line, newest=1)) == []
    assert _keys(_take(line, newest=3)) == ["later", "exactly"]


def test_v10_a_version_that_never_came_is_refused_before_the_deadline_with_the_reason() -> None:
    line = WaitingLine(10)
    line.offer(_waiter("a", at_least=2, deadline=10.0))
    assert line.wake_at() == pytest.approx(10.0 - ANSWER_MARGIN_S)
    assert _take(line, now=9.7).refused == []
    ((waiter, error),) = _take(line, now=9.85, newest=1, why_behind=lambda job: "its digest is wrong").refused
    assert (waiter.key, error.code) == ("a", "version-not-served")
    assert "at least 2" in error.message
    assert "1 is: its digest is wrong" in error.message
    assert len(line) == 0


def test_v10_an_exact_version_that_was_passed_is_refused_at_once() -> None:
    line = WaitingLine(10)
    line.offer(_waiter("a", exact=1))
    ((_, error),) = _take(line, newest=2).refused
    assert error.code == "version-not-served"


def test_v10_an_expired_request_never_starts() -> None:
    line = WaitingLine(10)
    line.offer(_waiter("a", deadline=10.0))
    line.offer(_waiter("b", deadline=20.0))
    taken = _take(line, now=10.0)
    assert _keys(taken) == ["b"]
    assert [(waiter.key, error.code) for waiter, error in taken.refused] == [("a", "deadline")]


def test_v5_exact_calls_are_held_back_while_an_update_waits_for_the_ones_that_run() -> None:
    line = WaitingLine(10)
    line.offer(_waiter("exact", exact=0))
    line.offer(_waiter("free"))
    assert _keys(_take(line, held_back=lambda waiter: waiter.request.exact is not None)) == ["free"]
    assert _keys(_take(line)) == ["exact"]


def test_e17_a_drained_line_is_empty() -> None:
    line = WaitingLine(10)
    line.offer(_waiter("a"))
    assert [waiter.key for waiter in line.drain()] == ["a"]
    assert len(line) == 0
    assert line.wake_at() is None


def test_v10_who_is_taken_back_leaves_the_line_and_makes_room() -> None:
    line = WaitingLine(2)
    line.offer(_waiter("a", at_least=2))
    line.offer(_waiter("b"))
    assert line.remove("a")
    assert not line.remove("a")
    line.offer(_waiter("c"))
    assert _keys(_take(line, newest=2)) == ["b", "c"]
