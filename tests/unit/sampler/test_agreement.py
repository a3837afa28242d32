"""Trainer and sampler on the same weights (V12): what the trainer writes, the sampler loads, and both say the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrl_common.records import JobKind, LoraSpec
from openrl_common.wire import AdamParams, Datum, Forward, ForwardBackward, OptimStep, SaveWeights
from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
from openrl_trainer.model import BaseModel, prepare_torch

PROMPTS = [[5, 9, 13], [7, 8, 30, 31, 32, 40, 2], [44, 3]]


def _train(trainer: TrainEngine, seq: int) -> Any:
    """One step of SFT on fixed data, then a weights version; returns its record."""
    data = [Datum(tokens=[5, 9, 13, 20, 21, 22]), Datum(tokens=[44, 3, 17, 18])]
    requests = (
        ForwardBackward(seq=seq, incarnation=1, data=data, loss="cross_entropy"),
        OptimStep(seq=seq + 1, incarnation=1, adam=AdamParams(learning_rate=0.02)),
        SaveWeights(seq=seq + 2, incarnation=1),
    )
    for request in requests:
        outcome = trainer.apply(request)
        assert outcome.result.error is None, outcome.result.error
    return outcome.weights


@pytest.mark.parametrize("kind", [JobKind.FFT, JobKind.LORA])
def test_v12_trainer_and_sampler_give_the_same_logprobs(
    kind: JobKind,
    model_path: Path,
    tmp_path: Path,
    new_engine: Callable[..., Any],
    generate: Callable[..., Any],
    apply: Callable[..., Any],
) -> None:
    """V12: float32 on one device: nothing but the order of sums may differ."""
    lora = LoraSpec(rank=4) if kind is JobKind.LORA else None
    base = BaseModel(str(model_path), dtype="float32", device=prepare_torch(1, 0), frozen=lora is not None)
    trainer = TrainEngine(
        base,
        JobSettings(tenant="t", job="j", incarnation=1, seed=0, lora=lora),
        EngineSettings(home=tmp_path, token_budget=1024, keep_weights=4),
    )
    sampler = new_engine(kind=kind)
    previous: list[list[int]] = []
    for step in range(3):
        record = _train(trainer, 10 * step + 1)
        apply(sampler, record)
        result = generate(sampler, PROMPTS, max_tokens=10)
        sequences = [group[0] for group in result.sequences]
        assert {version for sequence in sequences for version in sequence.versions} == {record.version}
        data = [Datum(tokens=prompt + one.tokens) for prompt, one in zip(PROMPTS, sequences, strict=True)]
        theirs = trainer.apply(Forward(seq=10 * step + 9, incarnation=1, data=data)).result.logprobs
        for prompt, sequence, logprobs in zip(PROMPTS, sequences, theirs, strict=True):
            assert sequence.logprobs == pytest.approx(logprobs[len(prompt) :], abs=5e-5)
        assert [sequence.tokens for sequence in sequences] != previous
        previous = [sequence.tokens for sequence in sequences]
