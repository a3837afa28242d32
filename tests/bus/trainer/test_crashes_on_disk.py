"""A trainer that dies while it writes: at every system call that makes files last, and at any byte (R5, R11).

A forked child writes and is ended, without a word, before or after its n-th such call, or when a file reaches n bytes.
Then the disk is looked at as the next trainer finds it.
"""

from __future__ import annotations

import os
import random
import resource
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrl_common.deltas import read_chain
from openrl_common.records import LoraSpec
from openrl_common.states import state_path
from openrl_common.weights import verify_files
from openrl_common.wire import DeleteState, LoadState, SaveState, SaveWeights
from openrl_trainer.checkpoints import Mark, checkpoint_directory, marks, read_newest, write_checkpoint
from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
from openrl_trainer.model import BaseModel, prepare_torch
from unit.trainer.conftest import learn, random_data, save_tiny_model, step

CALLS = ("fsync", "rename", "replace", "link", "mkdir", "rmdir", "unlink")
DIED, FINISHED = 9, 0
Write = Callable[[TrainEngine], None]


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def engine(request: pytest.FixtureRequest, base_path: Path, tmp_path: Path) -> TrainEngine:
    """A job with a version, a named state and a checkpoint, trained on since."""
    lora = LoraSpec(rank=4) if request.param == "lora" else None
    base = BaseModel(str(base_path), dtype="bfloat16", device=prepare_torch(1, 0), frozen=lora is not None)
    job = JobSettings(tenant="default", job="job", incarnation=7, lora=lora, float32_masters=True)
    engine = TrainEngine(base, job, EngineSettings(home=tmp_path, keep_weights=2))
    engine.deltas = request.param == "delta"
    train(engine, 1)
    for write in (weights, state, checkpoint):
        write(engine)
    train(engine, 5)
    return engine


def train(engine: TrainEngine, seq: int) -> None:
    engine.apply(learn(seq, random_data(seq)))
    assert engine.apply(step(seq + 1, 1e-6)).result.error is None


def weights(engine: TrainEngine) -> None:
    assert engine.apply(SaveWeights(seq=20, incarnation=7)).result.error is None
    engine.retain()


def state(engine: TrainEngine) -> None:
    assert engine.apply(SaveState(seq=21, incarnation=7, name="s")).result.error is None


def checkpoint(engine: TrainEngine) -> None:
    directory = checkpoint_directory(engine._settings.home, "default", "job", 7)
    seq = 2 + 2 * len(marks(directory))
    mark = Mark(seq=seq, position=seq + 1, version=engine.version)
    write_checkpoint(directory, mark, engine.copy_state(), engine.state_info(seq))


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a fork; its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(FINISHED)
        except BaseException:  # a child must never return into pytest
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def die_at(call: int, *, after: bool) -> None:
    """End this process at its ``call``-th system call of CALLS, before or after it is done."""
    count = 0

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == call and not after:
                os._exit(DIED)
            try:
                return real(*arguments, **named)
            finally:
                if count == call:
                    os._exit(DIED)

        return run

    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))


def die_at_byte(size_bytes: int) -> None:
    """End this process when it makes a file longer than this, as SIGKILL would."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def look(engine: TrainEngine) -> None:
    """Whatever stands is whole: versions with all they build on, the named state, the newest checkpoint."""
    home = engine._settings.home
    found = [path for path in (home / "weights/default/job/7").iterdir() if path.name.startswith("v")]
    assert found, "a version stood before"
    for path in found:
        for link in read_chain(path / "manifest.json"):
            verify_files(link.manifest, link.directory)
    newest = read_newest(checkpoint_directory(home, "default", "job", 7), engine.parameters())
    assert newest is not None
    if not engine.job.adapter:
        return
    assert in_child(lambda: _load(engine)) == FINISHED


def _load(engine: TrainEngine) -> None:
    assert engine.apply(LoadState(seq=30, incarnation=7, name="s")).result.error is None


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("engine", "write"),
    [("full", weights), ("delta", weights), ("lora", weights), ("lora", state), ("lora", checkpoint)],
    indirect=["engine"],
)
def test_death_at_any_call_or_byte_leaves_what_stood_and_the_next_writer_succeeds_R5_R11(
    engine: TrainEngine, write: Write
) -> None:
    call, deaths = 0, 0
    for after in (False, True):
        call = 0
        while True:
            call += 1
            code = in_child(lambda call=call, after=after: (die_at(call, after=after), write(engine)))  # type: ignore[misc]
            look(engine)
            if code == FINISHED:
                break
            assert code == DIED
            deaths += 1
    assert deaths >= 2 * 3, "it makes its files last by several calls"
    seed = secrets.randbits(32)
    numbers, killed = random.Random(seed), 0
    for _ in range(6):
        size_bytes = int(10 ** numbers.uniform(0, 6))
        code = in_child(lambda size_bytes=size_bytes: (die_at_byte(size_bytes), write(engine)))  # type: ignore[misc]
        assert code in (FINISHED, -signal.SIGXFSZ), f"{code}, {size_bytes} bytes, seed {seed}"
        killed += code != FINISHED
        look(engine)
    write(engine)
    look(engine)
    leftovers = [path for path in engine._settings.home.rglob("*writing*") if path.exists()]
    assert leftovers == [], "the next writer clears what killed ones left"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", ["lora"], indirect=True)
def test_a_removal_broken_off_at_any_call_is_answered_as_done_when_it_comes_again_E6_R4(engine: TrainEngine) -> None:
    """The state was gone by the request's own hand, and the request said `state-missing`."""
    path, seq, deaths = state_path(engine._settings.home, "default", "job", "s"), 30, 0
    for after in (False, True):
        call, code = 0, DIED
        while code != FINISHED:
            call, seq = call + 1, seq + 1
            state(engine)
            request = DeleteState(seq=seq, incarnation=7, name="s")
            code = in_child(lambda call=call, after=after, it=request: (die_at(call, after=after), engine.apply(it)))  # type: ignore[misc]
            assert code in (DIED, FINISHED)
            assert engine.apply(request).result.error is None, f"died at call {call}, {after=}"
            assert not path.exists()
            deaths += code == DIED
    assert deaths >= 2 * 2, "it notes what it found, and removes it"
    refused = engine.apply(DeleteState(seq=seq + 1, incarnation=7, name="s")).result.error
    assert refused is not None
    assert refused.code == "state-missing"
