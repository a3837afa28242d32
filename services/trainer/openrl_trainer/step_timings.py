"""How fast a trainer's passes are, and what they hold: ``openrl bench train`` runs this file once a measurement.

    python -m openrl_trainer.step_timings one|budget MODEL THREADS        64 sequences of 8 to 64 tokens, one a pass or
                                                                          by the budget
    python -m openrl_trainer.step_timings fft|lora MODEL THREADS DEVICES  the same by the budget, on a process a device
    python -m openrl_trainer.step_timings logprobs WAY THREADS            log-probabilities of 2,048 tokens, vocabulary
                                                                          32,000

One line of JSON: the best of several requests' seconds, tokens a second, and ``peak_bytes``: the most resident memory
of the process over what it had before (Linux), in a request of its own whose allocator gives back what is freed; the
timed ones have the allocator that a trainer has. ``logprobs``, forward and backward, by: ``whole`` logits, ``ours``
(chunked_logprobs), ``torch`` (linear_cross_entropy in chunks), ``cut`` (cut-cross-entropy by torch.compile), ``liger``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrl_common.records import LoraSpec
from openrl_common.wire import Datum, ForwardBackward
from openrl_trainer.commands import Begin
from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
from openrl_trainer.group import Group
from openrl_trainer.group_engine import GroupEngine
from openrl_trainer.losses import chunked_logprobs
from openrl_trainer.model import BaseModel, prepare_torch

NUM_SEQUENCES = 64
TIMES = 5
_DEVICE_BYTES = 4 << 30
_ROWS, _HIDDEN, _VOCABULARY, _CHUNK = 2048, 256, 32_000, 256
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def passes(one_by_one: bool, model: Path, num_threads: int) -> dict[str, float]:
    """FFT of ``model``; the budget is what a seat of 4 GiB gives."""
    base = BaseModel(str(model), dtype="float32", device=prepare_torch(num_threads, 0), frozen=False)
    data = _data(base.vocabulary)
    with tempfile.TemporaryDirectory() as home:
        settings = EngineSettings(home=Path(home), device_bytes=_DEVICE_BYTES)
        engine = TrainEngine(base, JobSettings(tenant="t", job="bench", incarnation=1), settings)
        groups = [[datum] for datum in data] if one_by_one else [data]
        run = _learning(engine, groups)
        return _timed(run, _count(data)) | {"peak_bytes": _peak_bytes(run), "token_budget": engine.token_budget}


def on_devices(kind: str, model: Path, num_threads: int, num_devices: int) -> dict[str, float]:
    """A job of ``kind`` (fft, lora) on so many processes of ``num_threads`` each (R14)."""
    lora = LoraSpec(rank=16) if kind == "lora" else None
    job = JobSettings(tenant="t", job="bench", incarnation=1, lora=lora)
    with tempfile.TemporaryDirectory() as home:
        settings = EngineSettings(home=Path(home), device_bytes=_DEVICE_BYTES)
        if num_devices == 1:
            device = prepare_torch(num_threads, 0)
            base = BaseModel(str(model), dtype="float32", device=device, frozen=lora is not None)
            data = _data(base.vocabulary)
            return _timed(_learning(TrainEngine(base, job, settings), [data]), _count(data))
        group = Group(num_devices)
        try:
            begin = Begin(
                base_model=str(model),
                dtype="float32",
                sharded=lora is None,
                length_max=0,
                num_threads=num_threads,
                device_bytes=_DEVICE_BYTES,
            )
            base = group.begin(begin)
            data = _data(base.vocabulary)
            return _timed(_learning(GroupEngine(base, job, settings, group), [data]), _count(data))
        finally:
            group.close()


def _data(vocabulary: int) -> list[Datum]:
    generator = random.Random(1)
    lengths = [generator.randint(8, 64) for _ in range(NUM_SEQUENCES)]
    return [Datum(tokens=[generator.randrange(vocabulary) for _ in range(length)]) for length in lengths]


def _count(data: list[Datum]) -> int:
    return sum(len(datum.tokens) for datum in data)


def _learning(engine: TrainEngine, groups: list[list[Datum]]) -> Callable[[], None]:
    """A request for each of ``groups``."""

    def run() -> None:
        for group in groups:
            request = ForwardBackward(seq=1, incarnation=1, data=group, loss="cross_entropy", normalizer=1.0)
            result = engine.apply(request).result
            assert result.error is None, result.error

    return run


def logprobs(way: str, num_threads: int) -> dict[str, float]:
    prepare_torch(num_threads, 0)
    torch.manual_seed(1)
    hidden = torch.randn(_ROWS, _HIDDEN, requires_grad=True)
    weight = (torch.randn(_VOCABULARY, _HIDDEN) * 0.05).requires_grad_()
    targets = torch.randint(_VOCABULARY, (_ROWS,))
    sums = _way(way)

    def run() -> None:
        hidden.grad = weight.grad = None
        sums(hidden, weight, targets).backward()

    figures = _timed(run, _ROWS) | {"peak_bytes": _peak_bytes(run)}
    reference = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    error = float((sums(hidden, weight, targets) - reference).abs() / reference)
    return figures | {"relative_error": error}


def _way(way: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Minus the sum of the log-probabilities of ``targets``: what every way can do."""
    functional: Any = torch.nn.functional
    if way == "whole":
        return lambda hidden, weight, targets: functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    if way == "ours":
        return lambda hidden, weight, targets: (
            -chunked_logprobs(hidden, targets, lambda rows: rows @ weight.T, _CHUNK).sum()
        )
    if way == "torch":
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=_CHUNK)
        return lambda hidden, weight, targets: functional.linear_cross_entropy(
            hidden, weight, targets, reduction="sum", options=options
        )
    if way == "cut":
        from cut_cross_entropy import linear_cross_entropy

        return lambda hidden, weight, targets: linear_cross_entropy(
            hidden, weight, targets, reduction="sum", impl="torch_compile"
        )
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused: Any = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda hidden, weight, targets: fused(weight, hidden, targets)


def _timed(run: Callable[[], None], tokens: int) -> dict[str, float]:
    run()
    seconds = []
    for _ in range(TIMES):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    best = min(seconds)
    return {"seconds": best, "tokens_per_s": tokens / best}


def _peak_bytes(run: Callable[[], None]) -> int:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    gc.collect()
    libc.malloc_trim(0)
    held = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    run()
    return max(0, _status("VmHWM") - held)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def main(what: str, argument: str, num_threads: str, num_devices: str = "1") -> None:
    if what == "logprobs":
        figures = logprobs(argument, int(num_threads))
    elif what in ("one", "budget"):
        figures = passes(what == "one", Path(argument), int(num_threads))
    else:
        figures = on_devices(what, Path(argument), int(num_threads), int(num_devices))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
