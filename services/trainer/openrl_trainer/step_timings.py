"""How fast a trainer's passes are, and what they hold: ``openrl bench train`` runs this file once a measurement.

    python -m openrl_trainer.step_timings passes MODEL THREADS            64 sequences of 8 to 64 tokens: one a request
                                                                          (``one``), by the budget (``budget``), and as
                                                                          a plain loop without a trainer (``plain``)
    python -m openrl_trainer.step_timings fft|lora MODEL THREADS DEVICES  the same by the budget on so many processes of
                                                                          THREADS (``several``), and on one (``one``)
    python -m openrl_trainer.step_timings logprobs WAY THREADS            log-probabilities of 2,048 tokens, vocabulary
                                                                          32,000, forward and backward

Says one line of JSON: the best seconds of several rounds, in which the ways take turns, so that a load that changes
meets all of them; and ``peak_bytes``: the most resident memory of the process over what it had before (Linux), in a
run of its own whose allocator gives back what is freed. The timed runs have the allocator that a trainer has. Ways of
``logprobs``: ``whole`` logits, ``ours`` (chunked_logprobs), ``torch`` (linear_cross_entropy in chunks), ``cut``
(cut-cross-entropy by torch.compile), ``liger``.
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
from math import inf
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


def passes(model: Path, num_threads: int) -> dict[str, Any]:
    """FFT of ``model``; the budget is what a seat of 4 GiB gives."""
    base = BaseModel(str(model), dtype="float32", device=prepare_torch(num_threads, 0), frozen=False)
    data = _data(base.vocabulary)
    with tempfile.TemporaryDirectory() as home:
        engine = TrainEngine(base, JobSettings(tenant="t", job="bench", incarnation=1), _settings(home))
        ways = {
            "one": _learning(engine, [[datum] for datum in data]),
            "budget": _learning(engine, [data]),
            "plain": lambda: _plain_loop(base, data),
        }
        figures = _timed(ways, sum(len(datum.tokens) for datum in data))
        figures = {way: figures[way] | {"peak_bytes": _peak_bytes(run)} for way, run in ways.items()}
        return {**figures, "token_budget": engine.token_budget}


def on_devices(kind: str, model: Path, num_threads: int, num_devices: int) -> dict[str, Any]:
    """A job of ``kind`` (fft, lora) in this process alone, and on a group of which it is the first rank (R14)."""
    lora = LoraSpec(rank=16) if kind == "lora" else None
    job = JobSettings(tenant="t", job="bench", incarnation=1, lora=lora)
    begin = Begin(
        base_model=str(model),
        dtype="float32",
        sharded=lora is None,
        length_max=0,
        num_threads=num_threads,
        device_bytes=_DEVICE_BYTES,
    )
    group = Group(num_devices)
    try:
        with tempfile.TemporaryDirectory() as home:
            several = GroupEngine(group.begin(begin), job, _settings(home), group)
            base = BaseModel(str(model), dtype="float32", device=prepare_torch(num_threads, 0), frozen=lora is not None)
            one = TrainEngine(base, job, _settings(home))
            data = _data(base.vocabulary)
            ways = {"one": _learning(one, [data]), "several": _learning(several, [data])}
            return _timed(ways, sum(len(datum.tokens) for datum in data))
    finally:
        group.close()


def _settings(home: str) -> EngineSettings:
    return EngineSettings(home=Path(home), device_bytes=_DEVICE_BYTES)


def _data(vocabulary: int) -> list[Datum]:
    generator = random.Random(1)
    lengths = [generator.randint(8, 64) for _ in range(NUM_SEQUENCES)]
    return [Datum(tokens=[generator.randrange(vocabulary) for _ in range(length)]) for length in lengths]


def _learning(engine: TrainEngine, groups: list[list[Datum]]) -> Callable[[], None]:
    """A request for each of ``groups``."""

    def run() -> None:
        for group in groups:
            request = ForwardBackward(seq=1, incarnation=1, data=group, loss="cross_entropy", normalizer=1.0)
            result = engine.apply(request).result
            assert result.error is None, result.error

    return run


def _plain_loop(base: BaseModel, data: list[Datum]) -> None:
    """As anybody writes it first: nothing is checked, nothing is told."""
    for datum in data:
        ids = torch.tensor([datum.tokens])
        logits = base.model(input_ids=ids, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
    base.model.zero_grad()


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

    figures = _timed({way: run}, _ROWS)[way] | {"peak_bytes": _peak_bytes(run)}
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


def _timed(ways: dict[str, Callable[[], None]], tokens: int) -> dict[str, dict[str, float]]:
    best = dict.fromkeys(ways, inf)
    for count in range(1 + TIMES):
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            if count > 0:  # the first round warms up
                best[way] = min(best[way], time.perf_counter() - started)
    return {way: {"seconds": seconds, "tokens_per_s": tokens / seconds} for way, seconds in best.items()}


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
    figures: dict[str, Any]
    if what == "logprobs":
        figures = logprobs(argument, int(num_threads))
    elif what == "passes":
        figures = passes(Path(argument), int(num_threads))
    else:
        figures = on_devices(what, Path(argument), int(num_threads), int(num_devices))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
