"""Group commit without a server: who goes alone, who goes together, and what each is told (E6, E7, E10)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from openrl_common.group_commit import ALONE_MAX, GROUP_BYTES_MAX, GROUP_MAX, GroupCommit, Stale, Write


class Stream:
    """Stores in order; answers when told to. A group with a refused subject in it stores nothing."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.groups: list[list[str]] = []
        self.refused: set[str] = set()
        self.open = asyncio.Event()
        self.group_error: Exception | None = None

    async def alone(self, write: Write) -> int:
        await self.open.wait()
        if write.subject in self.refused:
            raise ValueError(write.subject)
        self.stored.append(write.subject)
        return len(self.stored)

    async def group(self, writes: Sequence[Write]) -> int | None:
        self.groups.append([write.subject for write in writes])
        await self.open.wait()
        if self.group_error is not None:
            raise self.group_error
        if any(write.subject in self.refused for write in writes):
            return None
        self.stored.extend(write.subject for write in writes)
        return len(self.stored)


def write(subject: str, *, body: bytes = b"x", timeout: float = 30.0, expected: int | None = None) -> Write:
    return Write(f"s.s.{subject}", body, {}, timeout, expected)


def begin(commits: GroupCommit, writes: Sequence[Write]) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(commits.publish(each)) for each in writes]


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def commits(stream: Stream) -> GroupCommit:
    return GroupCommit(stream.alone, stream.group)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_few_writes_go_alone_and_at_once(stream: Stream, commits: GroupCommit) -> None:
    stream.open.set()
    assert sorted(await asyncio.gather(*begin(commits, [write(f"k{n}") for n in range(ALONE_MAX)]))) == list(
        range(1, ALONE_MAX + 1)
    )
    assert stream.groups == []


async def test_each_of_a_group_is_told_its_own_sequence(stream: Stream, commits: GroupCommit) -> None:
    tasks = begin(commits, [write(f"k{n}") for n in range(200)])
    await settle()
    stream.open.set()
    sequences = await asyncio.gather(*tasks)
    assert stream.groups
    assert [stream.stored[sequence - 1] for sequence in sequences] == [f"s.s.k{n}" for n in range(200)]
    assert max(map(len, stream.groups)) <= GROUP_MAX


async def test_a_refused_group_costs_only_the_one_at_fault(stream: Stream, commits: GroupCommit) -> None:
    """E10: what shares a batch with a conflict is stored all the same."""
    stream.refused.add("s.s.k40")
    tasks = begin(commits, [write(f"k{n}") for n in range(60)])
    await settle()
    stream.open.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[40], ValueError)
    assert sum(isinstance(answer, int) for answer in answers) == 59
    assert commits.refused == 1
    assert set(stream.stored) == {f"s.s.k{n}" for n in range(60)} - {"s.s.k40"}


async def test_a_group_without_an_answer_is_unknown_to_each(stream: Stream, commits: GroupCommit) -> None:
    """E7."""
    stream.group_error = TimeoutError()
    tasks = begin(commits, [write(f"k{n}") for n in range(60)])
    await settle()
    stream.open.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(answer, TimeoutError) for answer in answers) == 60 - ALONE_MAX
    stream.group_error = None
    assert await commits.publish(write("after")) == ALONE_MAX + 1


async def test_writes_to_one_subject_keep_their_order(stream: Stream, commits: GroupCommit) -> None:
    tasks = begin(commits, [write(f"k{n % 50}") for n in range(150)])
    await settle()
    stream.open.set()
    sequences = await asyncio.gather(*tasks)
    for first in range(50):
        assert sequences[first] < sequences[first + 50] < sequences[first + 100]


async def test_a_conflict_with_oneself_is_not_sent(stream: Stream, commits: GroupCommit) -> None:
    """E11: of many that expect the same revision the first goes; its landing answers the others."""
    tasks = begin(commits, [write("k", expected=0) for _ in range(50)])
    await settle()
    stream.open.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[0] == 1
    assert all(isinstance(answer, Stale) for answer in answers[1:])
    assert stream.stored == ["s.s.k"]


async def test_when_the_first_of_a_subject_fails_the_next_one_goes(stream: Stream, commits: GroupCommit) -> None:
    stream.refused.add("s.s.k")
    tasks = begin(commits, [write("k", expected=0) for _ in range(3)])
    await settle()
    stream.open.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ValueError] * 3


async def test_a_write_from_the_revision_just_landed_is_sent(stream: Stream, commits: GroupCommit) -> None:
    tasks = begin(commits, [write("k", expected=0), write("k", expected=1)])
    await settle()
    stream.open.set()
    assert await asyncio.gather(*tasks) == [1, 2]


async def test_one_that_waits_behind_another_keeps_its_deadline(stream: Stream, commits: GroupCommit) -> None:
    first = asyncio.create_task(commits.publish(write("k", expected=0)))
    await settle()
    with pytest.raises(TimeoutError):
        await commits.publish(write("k", expected=0, timeout=0.0))
    stream.open.set()
    assert await first == 1
    assert await commits.publish(write("k", expected=1)) == 2


async def test_streams_do_not_wait_for_each_other(stream: Stream, commits: GroupCommit) -> None:
    tasks = begin(commits, [write(f"k{n}") for n in range(100)])
    await settle()
    other = asyncio.create_task(commits.publish(Write("s.other.k", b"", {}, 30.0)))
    await settle()
    stream.open.set()
    await other
    await asyncio.gather(*tasks)
    assert "s.other.k" in stream.stored[: ALONE_MAX + 1]


async def test_a_write_that_waits_too_long_is_unknown_and_is_never_sent(stream: Stream, commits: GroupCommit) -> None:
    held = begin(commits, [write(f"k{n}") for n in range(ALONE_MAX)])
    await settle()
    with pytest.raises(TimeoutError):
        await commits.publish(write("late", timeout=0.0))
    stream.open.set()
    await asyncio.gather(*held)
    await settle()
    assert "s.s.late" not in stream.stored


@pytest.mark.parametrize("turns", range(6))
async def test_cancelled_writers_leave_no_place_taken(stream: Stream, commits: GroupCommit, turns: int) -> None:
    """At every point of its way: alone, behind its like, waiting, in a group, told to go alone after a refusal."""
    stream.refused.add("s.s.k20")
    tasks = begin(commits, [write(f"k{n}", expected=0) for n in [*range(60), *range(60)]])
    await settle()
    stream.open.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await settle()
    stream.refused.clear()
    async with asyncio.timeout(5):
        await asyncio.gather(*begin(commits, [write(f"again{n}") for n in range(200)]))
    for line in commits._lines.values():
        assert (line.alone, line.group, len(line.waiting), line.behind) == (0, None, 0, {})


async def test_large_bodies_make_small_groups(stream: Stream, commits: GroupCommit) -> None:
    body = bytes(GROUP_BYTES_MAX // 4)
    tasks = begin(commits, [write(f"k{n}", body=body) for n in range(60)])
    await settle()
    stream.open.set()
    await asyncio.gather(*tasks)
    assert stream.groups
    assert max(map(len, stream.groups)) <= 4
