"""What a sampler does with versions as they come (V5, V8): the keeper with a real engine and real files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry

from openrl_common.records import JobKind, WeightsRecord
from openrl_common.store import Entry
from openrl_sampler.metrics import Metrics
from openrl_sampler.weights_keeper import WeightsKeeper

T = TypeVar("T")


async def here(work: Callable[[], T]) -> T:
    return work()


def new_keeper(engine: Any) -> WeightsKeeper:
    workload = SimpleNamespace(kind=JobKind.FFT, jobs=("t.j",), incarnation=1)
    context = SimpleNamespace(workload=workload, assignment="a1")
    in_thread = cast(Callable[[Callable[[], Any]], Awaitable[Any]], here)
    return WeightsKeeper(cast(Any, context), engine, in_thread, asyncio.Event(), Metrics(CollectorRegistry()))


def announce(keeper: WeightsKeeper, record: WeightsRecord) -> None:
    keeper._saw_weights(f"{record.tenant}.{record.job}", Entry("", record, record.version))


async def test_v8_versions_that_come_faster_than_they_are_looked_through_are_applied_all_the_same(
    new_engine: Callable[..., Any], save_full: Callable[..., WeightsRecord]
) -> None:
    """Each was passed over for the next, which was not looked through yet either: the first weights served on."""
    engine = new_engine()
    keeper = new_keeper(engine)
    announce(keeper, save_full(1))
    for version in (1, 2, 3):
        keeper.look_ahead()
        announce(keeper, save_full(version + 1))  # while it is looked through
        await asyncio.gather(*keeper._looking.values())
        assert keeper.look_ahead(), "there is something to apply"
        await keeper.apply_due()
        assert engine.version("t.j.1") >= version
    await keeper.looked_ahead()
    await keeper.apply_due()
    assert engine.version("t.j.1") == 4
    assert not keeper.look_ahead()


async def test_v8_a_version_that_is_refused_does_not_take_the_good_one_before_it_along(
    new_engine: Callable[..., Any], save_full: Callable[..., WeightsRecord]
) -> None:
    engine = new_engine()
    keeper = new_keeper(engine)
    announce(keeper, save_full(1))
    await keeper.looked_ahead()
    announce(keeper, save_full(2, intermediate_size=32))
    await keeper.looked_ahead()
    await keeper.apply_due()
    assert engine.version("t.j.1") in (0, 1)
    await keeper.looked_ahead()
    await keeper.apply_due()
    assert "version 2 was rejected" in keeper.why_behind("t.j.1")
    announce(keeper, save_full(3))
    await keeper.looked_ahead()
    await keeper.apply_due()
    assert engine.version("t.j.1") == 3
    assert keeper.why_behind("t.j.1") == ""
