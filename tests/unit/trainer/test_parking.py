"""Leaving the device between any two micro-batches and coming back changes no bit (T5, R5, R6)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from openrl_common.parking import Parking
from openrl_common.records import LoraSpec
from openrl_common.wire import TrainResult
from openrl_trainer.engine import Outcome, TrainEngine
from unit.trainer.conftest import learn, random_data, step

Engines = Callable[..., TrainEngine]
KINDS = pytest.mark.parametrize(
    "lora",
    [None, LoraSpec(rank=4, alpha=8.0), LoraSpec(rank=4, alpha=8.0, dropout=0.2)],
    ids=["fft", "lora", "dropout"],
)


@pytest.fixture
def parking(tmp_path: Path, device: torch.device) -> Parking:
    return Parking(torch, device, tmp_path / "parked" / "a")


def tensors(engine: TrainEngine) -> list[torch.Tensor]:
    return [*engine.base.tensors(), *engine.tensors()]


def run(engine: TrainEngine, parking: Parking | None) -> list[TrainResult]:
    """Three steps of several micro-batches; with ``parking`` the device is left at every boundary."""
    results = []
    for seq in range(1, 10):
        request = step(seq) if seq % 3 == 0 else learn(seq, random_data(seq, count=9))
        steps = engine.steps(request)
        boundaries = 0
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                outcome: Outcome = ended.value
                break
            boundaries += 1
            if parking is not None:
                leave_and_come_back(engine, parking)
        assert outcome.result.error is None
        assert seq % 3 == 0 or boundaries > 1
        if parking is not None:
            leave_and_come_back(engine, parking)
        outcome.result.metrics.pop("seconds", None)
        results.append(outcome.result)
    return results


def leave_and_come_back(engine: TrainEngine, parking: Parking) -> None:
    kept = tensors(engine)
    moved = parking.park(kept)
    assert moved.bytes > 0
    large = [tensor for tensor in kept if tensor.numel() * tensor.element_size() >= 4096]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in large), "something large stayed on the device"
    back = parking.restore()
    assert back.bytes == moved.bytes
    assert parking.parked_bytes == 0


@KINDS
def test_t5_r5_a_run_that_parks_at_every_boundary_is_bit_for_bit_the_undisturbed_one(
    new_engine: Engines, lora: LoraSpec | None, parking: Parking
) -> None:
    undisturbed, parked = new_engine(lora=lora, token_budget=40), new_engine(lora=lora, token_budget=40)
    assert run(undisturbed, None) == run(parked, parking)
    for name, parameter in undisturbed._parameters.items():
        assert torch.equal(parameter, parked._parameters[name]), name


def test_t5_parking_really_frees_memory_and_says_how_much(tmp_path: Path) -> None:
    """T5: anonymous memory of the process falls by what was parked, and rises by it again; views and ties survive."""
    parking = Parking(torch, torch.device("cpu"), tmp_path / "parked" / "a")
    gc.collect()
    weight = torch.nn.Parameter(torch.randn(64, 1024, 256))
    view = weight.detach()[3:5]
    expected, expected_view = weight.detach().sum().item(), view.sum().item()
    size = weight.numel() * 4
    left = parking.park([weight, weight, view])
    assert left.bytes == parking.parked_bytes == size
    assert left.freed_bytes > 0.9 * size
    assert left.seconds > 0
    back = parking.restore()
    assert back.freed_bytes > 0.9 * size
    assert (weight.detach().sum().item(), view.sum().item()) == (expected, expected_view)
    assert view.data_ptr() == weight[3:5].data_ptr()


def test_t5_a_park_that_cannot_be_written_leaves_everything_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    parking = Parking(torch, torch.device("cpu"), tmp_path / "file" / "a")
    weight = torch.randn(4096)
    expected = weight.clone()
    with pytest.raises(OSError, match="file"):
        parking.park([weight])
    assert torch.equal(weight, expected)
    assert parking.parked_bytes == 0


def test_t5_only_what_is_asked_for_comes_back(parking: Parking) -> None:
    """V5 needs it: weights first, the cache later."""
    weights, cache = torch.randn(4096), torch.randn(8192)
    expected = cache.clone()
    parking.park([weights, cache])
    assert parking.restore([weights]).bytes == 4096 * 4
    assert cache.untyped_storage().nbytes() == 0
    weights.zero_()
    parking.restore()
    assert torch.equal(cache, expected)
    assert torch.equal(weights, torch.zeros(4096))


def test_r5_r13_only_deterministic_algorithms_run_and_memory_that_is_to_be_written_is_not_filled(
    device: torch.device,
) -> None:
    """warn_only leaves CUDA's attention non-deterministic; filling pinned memory takes far longer than the copy."""
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
