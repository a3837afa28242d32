"""V11: when a step counts as stuck."""

from __future__ import annotations

import math

import pytest

from openrl_sampler.watchdog import StepWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_v11_a_step_is_stuck_once_it_takes_longer_than_the_limit() -> None:
    clock = Clock()
    watch = StepWatch(5.0, clock)
    clock.now += 60.0
    assert watch.check() is None, "nothing is asked of the engine"
    with watch.step():
        clock.now += 5.0
        assert watch.check() is None
        clock.now += 0.5
        assert watch.check() == "the engine has been at one step for 5.5 s, the limit is 5 s"
    assert watch.check() is None
    with watch.step():
        assert watch.check() is None, "each step has the whole limit"


def test_v11_a_step_that_raised_is_over() -> None:
    clock = Clock()
    watch = StepWatch(5.0, clock)
    with pytest.raises(RuntimeError), watch.step():
        raise RuntimeError("out of memory")
    clock.now += 60.0
    assert watch.check() is None


def test_v11_without_a_limit_nothing_is_stuck() -> None:
    clock = Clock()
    watch = StepWatch(math.inf, clock)
    with watch.step():
        clock.now += 1e9
        assert watch.check() is None
