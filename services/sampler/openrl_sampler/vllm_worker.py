"""What runs inside every vLLM worker (one per device): vLLM mixes ``WorkerExtension`` into its worker class.

- ``openrl_prepare``   the model is loaded: logprobs as the port defines them, the plan that its own files give.
- ``openrl_plan``      V8, first call of an update: match a version with the parameters; nothing is written.
- ``openrl_write``     V7, second call: stream it. The engine makes it only when every rank has planned (V13). One
                       that broke off leaves a mix, which the engine must not serve.
- ``openrl_reload``, ``openrl_patch``  the same by vLLM's own loaders.
- ``openrl_digests``   what the parameters hold, to compare with a fresh load.

Importing this module times the capture of device graphs (V3), and on a CPU replaces some of vLLM's CPU kernels
(``vllm_cpu``).

Run with vllm-cpu 0.32; never on a GPU.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from openrl_common.errors import Rejected
from openrl_common.tensors import read_checkpoint
from openrl_sampler.streamed import Look, NotStreamable, Plan, make_plan, write
from openrl_sampler.torch_weights import Meter, free_bytes
from openrl_sampler.vllm_patches import patch_weights
from openrl_sampler.weights_layers import Layer, TensorShape

if current_platform.is_cpu():
    from openrl_sampler import vllm_cpu

    vllm_cpu.install()


_capture = GPUModelRunner.capture_model


def _capture_timed(runner: Any) -> int:
    started = time.perf_counter()
    captured: int = _capture(runner)
    runner._openrl_capture_seconds = time.perf_counter() - started
    return captured


GPUModelRunner.capture_model = _capture_timed


class TemperedSampler(Sampler):
    """vLLM's sampler, whose returned logprobs are those after the temperature and before the filters (V10).

    vLLM offers the model's own (raw) or those after the filters (processed), neither of which is what a trainer that
    knows the temperature can recompute.
    """

    _tempered: Tensor | None = None

    def apply_temperature(self, logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
        scaled = Sampler.apply_temperature(logits, temp, all_random)
        self._tempered = self.compute_logprobs(scaled)
        return scaled

    def sample(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        self._tempered = None
        sampled, _ = super().sample(*arguments, **named)
        tempered, self._tempered = self._tempered, None
        return sampled, tempered


class Prepared(NamedTuple):
    """``problem``: why this vLLM cannot serve; ``not_streamable``: why updates cannot be streamed; empty = they can."""

    problem: str
    not_streamable: str = ""
    planned_elements: int = 0
    capture_seconds: float = 0.0


class Written(NamedTuple):
    """What one rank's part of an update cost. ``elements``: of its parameters that were written; ``error``: it broke
    off."""

    seconds: float
    peak_extra_bytes: int
    elements: int
    error: str


class WorkerExtension:
    """See the module docstring. ``self`` is a vLLM worker. No call raises: a rank that raised would leave the answers
    of the others unread, and the next call would take them for its own."""

    model_runner: Any
    reload_weights: Callable[..., None]
    _openrl_base: Plan
    _openrl_plan: tuple[dict[str, TensorShape], Plan]

    def openrl_prepare(self, model_path: str, updates: bool) -> Prepared:
        sampler = self.model_runner.sampler
        if type(sampler) not in (Sampler, TemperedSampler):
            return Prepared(f"the sampler of this vLLM is {type(sampler).__qualname__}, not {Sampler.__qualname__}")
        sampler.__class__ = TemperedSampler
        why, num_elements = self._openrl_base_plan(model_path) if updates else ("its weights are never replaced", 0)
        return Prepared("", why, num_elements, getattr(self.model_runner, "_openrl_capture_seconds", 0.0))

    def _openrl_base_plan(self, model_path: str) -> tuple[str, int]:
        """Why updates cannot be streamed, or the elements of the plan of the model's own files."""
        try:
            shapes = {name: (t.dtype, t.shape) for name, t in read_checkpoint(Path(model_path)).tensors.items()}
            self._openrl_base = make_plan(self._openrl_load_weights, shapes)
        except (NotStreamable, Rejected) as error:
            return str(error), 0
        self._openrl_plan = (shapes, self._openrl_base)
        planned = {copy.target.untyped_storage()._cdata for copy in self._openrl_base.copies}
        for name, parameter in self.model_runner.model.named_parameters():
            if parameter.untyped_storage()._cdata not in planned:
                return f"parameter {name!r} is not filled from the model's files by copies", 0
        return "", self._openrl_base.num_elements

    def _openrl_load_weights(self, weights: Any) -> Any:
        return self.model_runner.model.load_weights(weights)

    def openrl_plan(self, shapes: dict[str, TensorShape]) -> str:
        """Returns what does not fit; empty = ``openrl_write`` may follow."""
        shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in shapes.items()}
        if shapes == self._openrl_plan[0]:
            return ""
        try:
            plan = make_plan(self._openrl_load_weights, shapes)
        except Exception as error:  # whatever a loader raises on names and shapes that do not fit
            return f"the model's loader does not take it: {type(error).__name__}: {error}"
        if plan.covered != self._openrl_base.covered:
            return (
                f"it fills {len(plan.covered)} places of the parameters,"
                f" the model's own files {len(self._openrl_base.covered)}"
            )
        self._openrl_plan = (shapes, plan)
        return ""

    def openrl_write(self, layers: list[Layer], chunk_bytes: int) -> Written:
        """Stream a version in, as planned."""
        plan = self._openrl_plan[1]
        return self._openrl_measured(lambda look: write(plan, layers, chunk_bytes=chunk_bytes, look=look))

    def openrl_reload(self, layer: Layer) -> Written:
        """A whole version by vLLM's ``reload_weights``."""
        return self._openrl_measured(lambda look: self._openrl_reloaded(layer))

    def openrl_patch(self, layer: Layer) -> Written:
        """A delta by vLLM's patch loader: one tensor after the other, staged whole (positions kept are NaN)."""
        return self._openrl_measured(lambda look: patch_weights(self.model_runner.model, layer, look))

    def _openrl_reloaded(self, layer: Layer) -> int:
        self.reload_weights(weights_path=layer.directory)
        return sum(math.prod(shape) for _, shape in layer.shapes.values())

    def _openrl_measured(self, work: Callable[[Look], int]) -> Written:
        meter, elements, error = Meter(self.model_runner.device), 0, ""
        try:
            elements = work(meter.look)
        except Exception as broken:  # the engine decides what becomes of the mix
            error = f"{type(broken).__name__}: {broken}"
        return Written(meter.seconds, meter.peak_extra_bytes, elements, error)

    def openrl_free_bytes(self, seat_bytes: int) -> int:
        runner = self.model_runner
        caches = (each if isinstance(each, list | tuple) else (each,) for each in runner.kv_caches)  # a list: Mamba's
        resident = itertools.chain(runner.model.parameters(), runner.model.buffers(), *caches)
        return free_bytes(runner.device, seat_bytes, resident)

    def openrl_held_bytes(self) -> int:
        """Device memory in use, by whatever process: vLLM's sleep frees what torch's allocator does not know of."""
        if current_platform.is_cpu():
            return int(psutil.Process().memory_info().rss)
        free, total = torch.cuda.mem_get_info(self.model_runner.device)
        return int(total - free)

    def openrl_digests(self) -> dict[str, str]:
        """SHA-256 of every parameter's bytes."""
        return {
            name: hashlib.sha256(p.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, p in self.model_runner.model.named_parameters()
        }
