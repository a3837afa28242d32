"""Unit tests never sleep: time comes into a pure core as an argument. A test that waits is in the wrong folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    yield_to_loop: Callable[..., Awaitable[Any]] = asyncio.sleep

    def refuse(delay_s: float, *_: object) -> NoReturn:
        raise AssertionError(f"a unit test slept for {delay_s} s: pass the time in, or move the test to tests/bus")

    async def only_yield(delay: float, result: object = None) -> object:
        if delay > 0:
            refuse(delay)
        return await yield_to_loop(0, result)

    monkeypatch.setattr(time, "sleep", refuse)
    monkeypatch.setattr(asyncio, "sleep", only_yield)
