"""The memory model and the token budget (R2, R3). Measured peaks are compared with it in tests/e2e."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openrl_common.records import LoraSpec
from openrl_common.wire import Datum, Forward
from openrl_trainer.checkpoints import checkpoint_directory
from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
from openrl_trainer.memory_model import MemoryModel, is_out_of_memory, memory_model
from openrl_trainer.model import BaseModel
from openrl_trainer.packing import TOKEN_BUDGET_MAX, TOKEN_BUDGET_MIN
from openrl_trainer.shortage import found
from unit.trainer.conftest import learn, random_data, step

Engines = Callable[..., TrainEngine]

MODEL = MemoryModel(
    weights_bytes=16 << 30, gradient_bytes=1 << 30, optimizer_bytes=2 << 30, largest_gradient_bytes=1 << 28,
    kept_bytes_per_token=2e6, layers=36, vocabulary=262_144, chunk_bytes_max=256 << 20,
)  # fmt: skip


@given(st.integers(1, 400 << 30))
def test_a_pass_of_the_budget_fits_what_the_seat_declares_R2(device_bytes: int) -> None:
    budget = MODEL.token_budget(device_bytes)
    assert TOKEN_BUDGET_MIN <= budget <= TOKEN_BUDGET_MAX
    assert MODEL.peak_bytes(budget) <= device_bytes or budget == TOKEN_BUDGET_MIN


def test_the_budget_grows_with_declared_memory_and_a_large_vocabulary_takes_of_it_R2() -> None:
    budgets = [MODEL.token_budget(size << 30) for size in (24, 40, 80)]
    assert budgets == sorted(set(budgets))
    assert MODEL.token_budget(80 << 30) > 4096
    assert MODEL.token_budget(10_000 << 30) == TOKEN_BUDGET_MAX
    small = replace(MODEL, kept_bytes_per_token=2e5)
    assert replace(small, vocabulary=1000).token_budget(24 << 30) > small.token_budget(24 << 30)


@given(st.integers(1, TOKEN_BUDGET_MAX), st.integers(100, 300_000))
def test_logits_of_a_chunk_stay_below_their_bound_whatever_the_vocabulary_R3(tokens: int, vocabulary: int) -> None:
    model = replace(MODEL, vocabulary=vocabulary)
    chunk = model.chunk_tokens(tokens)
    assert chunk == 1 or 4 * chunk * vocabulary <= model.chunk_bytes_max
    assert chunk <= model.chunk_tokens(2 * tokens)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["fft", "lora"])
def test_what_autograd_keeps_is_counted_without_the_parameters_and_grows_with_the_layers_R2(
    new_engine: Engines, lora: LoraSpec | None
) -> None:
    engine = new_engine(lora=lora)
    kept = engine.memory.kept_bytes_per_token
    config = engine.base.model.config
    one_value_each = 4 * config.num_hidden_layers * (4 * config.intermediate_size + 4 * config.hidden_size)
    assert one_value_each < kept < 10 * one_value_each
    assert engine.memory.gradient_bytes < engine.memory.weights_bytes or lora is None
    assert memory_model(engine.base, engine._parameters, adapter=engine.job.adapter) == engine.memory


def short_of_memory(engine: TrainEngine, tokens_max: int, calls: list[int]) -> Callable[[Tensor], Tensor]:
    """The decoder, on a device that takes no more than ``tokens_max`` tokens: as CUDA says it."""
    hidden = engine.base.hidden

    def limited(ids: Tensor) -> Tensor:
        calls.append(ids.numel())
        if ids.numel() > tokens_max:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return hidden(ids)

    return limited


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["fft", "lora"])
def test_out_of_memory_halves_the_budget_once_and_the_request_runs_again_with_gradients_as_before_R2_R6(
    new_engine: Engines, lora: LoraSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calm = new_engine(lora=lora, token_budget=4000), new_engine(lora=lora, token_budget=4000)
    data = random_data(5, count=12)
    for each in (engine, calm):
        assert each.apply(learn(1, data[:4])).result.error is None
    whole = len(data) * max(len(datum.tokens) for datum in data)
    calls: list[int] = []
    monkeypatch.setattr(engine.base, "hidden", short_of_memory(engine, whole - 1, calls))
    result = engine.apply(learn(2, data)).result
    monkeypatch.undo()
    assert result.error is None
    assert calls[0] == whole
    assert max(calls[1:]) <= whole // 2
    assert result.metrics["token_budget"] == engine.token_budget == whole // 2
    calm.token_budget = engine.token_budget
    assert calm.apply(learn(2, data)).result.metrics["loss"] == result.metrics["loss"]
    for name, gradient in engine._gradients.items():
        assert torch.equal(gradient, calm._gradients[name])


@pytest.mark.parametrize("kind", ["forward", "learn"])
def test_a_trainer_started_again_packs_on_as_the_one_that_was_short_of_memory_R2_R5(
    new_engine: Engines, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whether it replays the shortage or starts from a checkpoint behind it; the shortage itself is not repeated."""
    engine, replayed, restored = (new_engine(token_budget=4000) for _ in range(3))
    data = random_data(5, count=12)
    request = learn(1, data) if kind == "learn" else Forward(seq=1, incarnation=7, data=data)
    monkeypatch.setattr(engine.base, "hidden", short_of_memory(engine, 12 * max(len(d.tokens) for d in data) - 1, []))
    stored = engine.apply(request).result
    monkeypatch.undo()
    assert stored.error is None
    assert stored.metrics["halved_to"] == engine.halved_to == engine.token_budget < 4000
    replayed.apply(request, stored)
    restored.restore(engine.copy_state(), 0, engine.halved_to)
    for each in (engine, replayed, restored):
        assert each.token_budget == engine.token_budget
        for seq, entry in enumerate((learn(2, random_data(6, count=12)), step(3)), start=2):
            result = each.apply(entry).result
            assert (result.seq, result.error) == (seq, None)
    for other in (replayed, restored):
        assert all(torch.equal(value, other._parameters[name]) for name, value in engine._parameters.items())


def test_a_second_shortage_is_an_answer_that_names_the_budget_and_changes_nothing_R2_R6(
    new_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(token_budget=4000)
    data = random_data(6, count=12)
    monkeypatch.setattr(engine.base, "hidden", short_of_memory(engine, 3, []))
    result = engine.apply(learn(1, data)).result
    assert result.error is not None
    assert result.error.code == "out-of-memory"
    assert f"{engine.token_budget} tokens a pass" in result.error.message
    assert not engine._gradients
    monkeypatch.undo()
    assert engine.apply(learn(2, data)).result.error is None


def test_one_sequence_that_does_not_fit_is_not_run_twice_R2(
    new_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(token_budget=4000)
    calls: list[int] = []
    monkeypatch.setattr(engine.base, "hidden", short_of_memory(engine, 3, calls))
    result = engine.apply(Forward(seq=1, incarnation=7, data=[Datum(tokens=[1] * 40)])).result
    assert result.error is not None
    assert calls == [40]
    assert engine.token_budget == 4000


def test_a_shortage_in_the_middle_of_an_update_ends_this_life_and_the_next_refuses_the_entry_R5_R6(
    new_engine: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An optimizer step changes in place: no answer may say that everything is as before when a part is not."""
    engine, again = new_engine(), new_engine()
    data = random_data(4)
    engine.apply(learn(1, data))
    before = {name: value.detach().clone() for name, value in engine.parameters().items()}
    update = engine._adam._adam.step

    def short() -> None:
        update()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(engine._adam._adam, "step", short)
    with pytest.raises(torch.OutOfMemoryError):
        engine.apply(step(2))
    assert not all(torch.equal(value, before[name]) for name, value in engine.parameters().items())

    again.apply(learn(1, data))
    again.recall(found(checkpoint_directory(tmp_path, "default", "job", 7)))
    refused = again.apply(step(2)).result
    assert refused.error is not None
    assert refused.error.code == "out-of-memory"
    assert all(torch.equal(value, before[name]) for name, value in again.parameters().items())
    assert again.apply(step(3)).result.error is None


def test_errors_that_are_not_about_memory_are_not_taken_for_it_R2() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_the_budget_of_a_job_is_the_same_whoever_came_to_its_base_before_R2_R5(
    new_base: Callable[..., BaseModel], tmp_path: Path
) -> None:
    """A trainer that is started again makes its jobs in another order, or without those that are over."""

    def budgets(*jobs: str) -> dict[str, int]:
        base, settings = new_base(frozen=True), EngineSettings(home=tmp_path, device_bytes=20 << 20)
        made = [JobSettings(tenant="t", job=job, incarnation=1, lora=LoraSpec(rank=16)) for job in jobs]
        return {job.job: TrainEngine(base, job, settings).token_budget for job in made}

    assert TOKEN_BUDGET_MIN < budgets("a")["a"] < TOKEN_BUDGET_MAX
    assert budgets("a", "b") == budgets("b", "a") == {**budgets("a"), **budgets("b")}
