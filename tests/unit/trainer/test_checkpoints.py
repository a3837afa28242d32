"""Checkpoints on disk, when they are due, and the order of what is written beside the training (R5, R12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch

from openrl_common.errors import Rejected
from openrl_common.records import LoraSpec
from openrl_trainer.background import WAITING_MAX, Background
from openrl_trainer.cadence import Cadence, CadenceType
from openrl_trainer.checkpoints import (
    Mark,
    checkpoint_directory,
    clean,
    marks,
    pinned_load,
    read_newest,
    remove_ended,
    write_checkpoint,
)
from openrl_trainer.engine import TrainEngine
from unit.trainer.conftest import learn, random_data, step
from unit.trainer.test_weights_out import file_size_limit

Engines = Callable[..., TrainEngine]


@pytest.fixture
def engine(new_engine: Engines) -> TrainEngine:
    return new_engine(lora=LoraSpec(rank=2))


def take(engine: TrainEngine, directory: Path, seq: int) -> Mark:
    """Train a step up to entry ``seq`` and write a checkpoint of it."""
    engine.apply(learn(seq - 1, random_data(seq)))
    engine.apply(step(seq))
    mark = Mark(seq=seq, position=10 * seq, version=seq // 4, payloads={"object": seq})
    write_checkpoint(directory, mark, engine.copy_state(), engine.state_info(seq))
    return mark


def test_two_are_kept_and_the_newest_gives_every_bit_back_R5(
    engine: TrainEngine, new_engine: Engines, tmp_path: Path
) -> None:
    directory = checkpoint_directory(tmp_path, "default", "job", 7)
    taken = [take(engine, directory, seq) for seq in (2, 4, 6)]
    assert marks(directory) == [taken[2], taken[1]]
    again = new_engine(lora=LoraSpec(rank=2), seed=99)
    newest = read_newest(directory, again.parameters())
    assert newest is not None
    assert newest[0] == taken[2]
    again.restore(newest[1], newest[0].version)
    assert again.version == 1
    for each in (engine, again):
        each.apply(learn(7, random_data(7)))
        assert each.apply(step(8)).result.error is None
    assert all(torch.equal(value, again._parameters[name]) for name, value in engine._parameters.items())
    assert read_newest(directory.with_name("8"), engine.parameters()) is None


def test_a_damaged_one_is_passed_over_and_none_left_is_said_R5(engine: TrainEngine, tmp_path: Path) -> None:
    directory = checkpoint_directory(tmp_path, "default", "job", 7)
    older, newer = (take(engine, directory, seq) for seq in (2, 4))
    files = sorted(directory.glob("[0-9]*.safetensors"))
    body = bytearray(files[1].read_bytes())
    body[-1] ^= 1
    files[1].write_bytes(body)
    found = read_newest(directory, engine.parameters())
    assert found is not None
    assert found[0] == older != newer
    files[0].unlink()
    with pytest.raises(Rejected) as caught:
        read_newest(directory, engine.parameters())
    assert caught.value.code == "bad-state"
    assert str(directory) in str(caught.value)


def test_a_disk_that_takes_no_more_leaves_the_checkpoints_before_R5(engine: TrainEngine, tmp_path: Path) -> None:
    directory = checkpoint_directory(tmp_path, "default", "job", 7)
    before = take(engine, directory, 2)
    with file_size_limit(2000), pytest.raises(Rejected) as caught:
        take(engine, directory, 4)
    assert caught.value.code == "disk-full"
    found = read_newest(directory, engine.parameters())
    assert found is not None
    assert found[0] == before
    assert {path.suffix for path in directory.iterdir()} == {".json", ".safetensors"}
    assert len(list(directory.iterdir())) == 2


def test_what_no_checkpoint_needs_goes_and_jobs_that_are_over_leave_nothing_R5(
    engine: TrainEngine, tmp_path: Path
) -> None:
    directory = checkpoint_directory(tmp_path, "default", "job", 7)
    take(engine, directory, 4)
    take(engine, directory, 8)
    for seq in (3, 4, 6, 9):
        pinned_load(directory, seq).write_bytes(b"a state that an entry loaded")
    (directory / "000000000009-half.safetensors").write_bytes(b"killed before its mark stood")
    clean(directory)
    assert sorted(path.name for path in directory.glob("load-*")) == [pinned_load(directory, s).name for s in (6, 9)]
    assert len(list(directory.glob("0*"))) == 4
    running = checkpoint_directory(tmp_path, "default", "other", 8)
    running.mkdir(parents=True)
    (tmp_path / "checkpoints/default/job/notes").mkdir()
    assert remove_ended(tmp_path, lambda _tenant, job, incarnation: (job, incarnation) == ("job", 7)) == [directory]
    assert not directory.exists()
    assert running.exists()


def test_due_by_time_by_steps_or_never_and_writing_takes_a_tenth_at_most_R5() -> None:
    assert Cadence(seconds=60).due(since_s=60, steps=0, cost_s=1.0)
    assert not Cadence(seconds=60).due(since_s=59, steps=99, cost_s=1.0)
    assert not Cadence(seconds=60).due(since_s=149, steps=99, cost_s=15.0)
    assert Cadence(seconds=60).due(since_s=150, steps=0, cost_s=15.0)
    assert Cadence(steps=20).due(since_s=0, steps=20, cost_s=1e9)
    assert not Cadence(steps=20).due(since_s=1e9, steps=19, cost_s=0)
    assert not Cadence().due(since_s=1e9, steps=10**9, cost_s=0)


def test_the_setting_says_what_it_takes_C5() -> None:
    kind = CadenceType()
    wanted = {"90s": Cadence(seconds=90), "1h": Cadence(seconds=3600), "20steps": Cadence(steps=20), "off": Cadence()}
    assert {text: kind.convert(text, None, None) for text in wanted} == wanted
    assert kind.convert("1step", None, None) == Cadence(steps=1)
    for wrong in ("0", "-5s", "0steps", "1.5steps", "soon", "steps"):
        with pytest.raises(click.BadParameter, match=r"20steps|off"):
            kind.convert(wrong, None, None)


async def test_pieces_are_written_in_order_and_the_giver_waits_for_room_R12() -> None:
    written: list[int] = []
    gates = [asyncio.Event() for _ in range(4)]

    def piece(number: int) -> Callable[[], object]:
        async def write() -> None:
            await gates[number].wait()
            written.append(number)

        return write

    async with asyncio.TaskGroup() as tasks:
        background = Background(tasks.create_task)
        for number in range(WAITING_MAX):
            await background.give(piece(number))  # type: ignore[arg-type]
        third = asyncio.ensure_future(background.give(piece(2)))  # type: ignore[arg-type]
        gates[1].set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert written == [], "the second waits for the first"
        assert not third.done(), "no third copy is held"
        gates[0].set()
        await third
        assert written[:1] == [0]
        gates[2].set()
        await background.idle()
        assert written == [0, 1, 2]
        await background.idle()


async def test_a_piece_that_fails_ends_its_runner_R12() -> None:
    async def fails() -> None:
        raise ValueError("a fault")

    async def runner() -> None:
        async with asyncio.TaskGroup() as tasks:
            await Background(tasks.create_task).give(fails)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await runner()
    assert str(caught.value.exceptions[0]) == "a fault"
