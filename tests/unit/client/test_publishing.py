"""A recipe goes on over a full disk: it asks again for the version that could not be written (C4, R6)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any

import pytest

from openrl_client.errors import Rejected
from openrl_client.recipes.publishing import published


class Job:
    """Answers ``publish_weights`` with what a test lists, first things first."""

    def __init__(self, *answers: int | Rejected) -> None:
        self.answers = list(answers)

    def publish_weights(self) -> Awaitable[int]:
        async def answer() -> int:
            given = self.answers.pop(0)
            if isinstance(given, Rejected):
                raise given
            return given

        return answer()


def full() -> Rejected:
    return Rejected("v000018 cannot be written: No space left on device", code="disk-full")


async def publish(job: Any) -> int:
    return await published(job, job.publish_weights(), pause_s=0)


async def test_c4_a_full_disk_is_told_once_and_outlasted(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(full(), full(), 18)
    with caplog.at_level(logging.WARNING):
        assert await publish(job) == 18
    assert job.answers == []
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


async def test_c4_another_refusal_ends_the_run() -> None:
    job = Job(full(), Rejected("v000018 cannot be written: read-only", code="write-failed"), 19)
    with pytest.raises(Rejected, match="read-only"):
        await publish(job)
    assert job.answers == [19]
