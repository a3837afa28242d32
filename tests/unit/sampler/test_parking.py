"""A sampler that leaves the device between two steps goes on as if nothing had been (T5, V5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sampler_support import save_full_version

from openrl_common.wire import SamplingParams
from openrl_sampler.engine import GenerateCall, Generated
from openrl_sampler.weights_keeper import apply

PROMPTS = [[5, 9, 13], [7, 8, 30, 31, 32, 40, 2], [44, 3]]


def call(name: str = "r") -> GenerateCall:
    params = SamplingParams(n=3, max_tokens=12, temperature=1.0)
    return GenerateCall(request=name, job="t.j.1", prompts=PROMPTS, params=params, seed=7)


def finish(engine: Any, between: Callable[[int], None] = lambda step: None) -> Generated:
    engine.add(call())
    for step in range(100):
        ended = engine.step()
        if ended:
            return ended[0]  # type: ignore[no-any-return]
        between(step)
    raise AssertionError("it does not end")


def test_t5_running_calls_go_on_bit_for_bit_after_every_step_was_parked(
    new_engine: Callable[..., Any], tmp_path: Path
) -> None:
    undisturbed = finish(new_engine())
    engine = new_engine()
    assert engine.can_park

    def leave(step: int) -> None:
        left = engine.park(tmp_path / "parked")
        assert left.bytes > 10_000
        assert all(
            parameter.untyped_storage().nbytes() == 0
            for parameter in engine._resident.model.parameters()
            if parameter.numel() >= 1024
        )
        weights, cache = engine.resume_weights(), engine.resume_cache()
        assert weights.bytes + cache.bytes == left.bytes

    parked = finish(engine, leave)
    assert parked.sequences == undisturbed.sequences


def test_v5_t5_an_update_between_weights_and_cache_serves_from_the_next_token_on(
    new_engine: Callable[..., Any], tmp_path: Path
) -> None:
    """V5: weights come back, the update is applied, then keys and values; tokens say which version made them."""
    record = save_full_version(tmp_path, 1)

    def run(parks: bool) -> Generated:
        engine = new_engine()

        def leave(step: int) -> None:
            if step != 3:
                return
            if parks:
                engine.park(tmp_path / "parked")
                engine.resume_weights()
            apply(engine, "t.j.1", record)
            if parks:
                engine.resume_cache()

        return finish(engine, leave)

    parked, resident = run(parks=True), run(parks=False)
    assert parked.sequences == resident.sequences
    versions = {version for group in parked.sequences for sequence in group for version in sequence.versions}
    assert versions == {0, 1}
    assert torch.is_grad_enabled()
