"""Parking on a real GPU (T5, R13). Skipped where there is none; run it alone, other work slows the copies down."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from openrl_common.parking import Parking
from openrl_trainer.model import prepare_torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GIB = 1 << 30
SHARE = 0.7


def bandwidth(source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes a second of one plain copy, best of three."""
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, source.numel() * source.element_size() / (time.perf_counter() - began))
    return best


def test_t5_r13_parking_frees_the_device_at_most_of_the_copy_bandwidth_and_changes_no_bit(tmp_path: Path) -> None:
    """R13: ≥ 70 % of this machine's own pinned copies, once the pinned memory is there (the second park on)."""
    device = prepare_torch(1, 0)  # as a trainer sets torch up
    tensors = [torch.randint(0, 1 << 30, (GIB // 16,), dtype=torch.int32, device=device) for _ in range(16)]
    expected = [int(tensor.sum()) for tensor in tensors]
    parking = Parking(torch, device, tmp_path / "unused")
    for _ in range(2):
        before = parking.device_bytes()
        left = parking.park(tensors)
        assert left.bytes == 4 * GIB
        assert parking.device_bytes() <= before - left.bytes
        back = parking.restore()
        assert [int(tensor.sum()) for tensor in tensors] == expected
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    block = torch.empty(GIB, dtype=torch.uint8, device=device)
    assert left.bytes / left.seconds >= SHARE * bandwidth(block, host)
    assert back.bytes / back.seconds >= SHARE * bandwidth(host, block)
