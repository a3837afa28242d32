"""``openrl bench train``: what the token budget gives (R2), ways to take log-probabilities (R3), several devices (R14).

Each measurement is a process of its own (``openrl_trainer/step_timings.py``), so that peaks of memory do not add up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from openrl_client.bench.machine import Machine, describe
from openrl_client.home import Progress
from openrl_common.errors import Rejected

WAYS = ("whole", "ours", "torch", "cut", "liger")
_ONE_S = 600.0


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities, forward and backward. ``skipped``: why there are no figures."""

    way: str
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    relative_error: float | None = None
    skipped: str = ""


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """The same sequences by the budget on ``devices`` processes and on one, each of ``threads``; ``ratio`` of both."""

    kind: str
    devices: int
    threads: int
    one_device_tokens_per_s: float
    tokens_per_s: float
    ratio: float


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """64 sequences of 8 to 64 tokens, forward and backward; ``ratio`` of the two rates. Peaks are over the resident.

    ``plain_loop``: one sequence a pass by transformers alone, without requests, checks and answers.
    """

    one_by_one_tokens_per_s: float
    budget_tokens_per_s: float
    ratio: float
    peak_bytes: int
    one_by_one_peak_bytes: int
    plain_loop_tokens_per_s: float
    token_budget: int
    threads: int
    logprobs: list[Way]
    several_devices: list[Devices]
    load_average: tuple[float, float]
    machine: Machine


def measure(model: Path | None, *, threads: int, devices: int, progress: Progress) -> TrainReport:
    """Measure on ``model``, or the demo's tiny one; on several devices too where ``devices`` is more than one.

    Raises:
        Rejected: a measurement of the trainer itself failed.
    """
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        if model is None:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="openrl-bench-"))
            model = Path(scratch) / "model"
            progress("making the demo's model")
            _checked(_run("openrl_trainer.tiny_model", str(model)))
        passes = _figures(_checked(_step("passes", str(model), threads)))
        one, budget, plain = passes["one"], passes["budget"], passes["plain"]
        progress(f"one by one: {one['tokens_per_s']:.0f} tokens/s, by the budget: {budget['tokens_per_s']:.0f}")
        kinds = ("fft", "lora") if devices > 1 else ()
        several_devices = [_several(kind, model, threads, devices, progress) for kind in kinds]
    return TrainReport(
        one_by_one_tokens_per_s=round(one["tokens_per_s"], 1),
        budget_tokens_per_s=round(budget["tokens_per_s"], 1),
        ratio=round(budget["tokens_per_s"] / one["tokens_per_s"], 2),
        peak_bytes=int(budget["peak_bytes"]),
        one_by_one_peak_bytes=int(one["peak_bytes"]),
        plain_loop_tokens_per_s=round(plain["tokens_per_s"], 1),
        token_budget=int(passes["token_budget"]),
        threads=threads,
        logprobs=[_way(way, threads, progress) for way in WAYS],
        several_devices=several_devices,
        load_average=(round(load_before, 2), round(os.getloadavg()[0], 2)),
        machine=describe(),
    )


def _several(kind: str, model: Path, threads: int, devices: int, progress: Progress) -> Devices:
    each = max(1, threads // devices)
    figures = _figures(_checked(_step(kind, str(model), each, str(devices))))
    one, several = figures["one"]["tokens_per_s"], figures["several"]["tokens_per_s"]
    progress(f"{kind} on {devices} devices: {several:.0f} tokens/s, on one: {one:.0f}")
    return Devices(
        kind=kind,
        devices=devices,
        threads=each,
        one_device_tokens_per_s=round(one, 1),
        tokens_per_s=round(several, 1),
        ratio=round(several / one, 2),
    )


def _way(way: str, threads: int, progress: Progress) -> Way:
    try:
        done = _step("logprobs", way, threads)
    except subprocess.TimeoutExpired:
        return Way(way=way, skipped=f"took longer than {_ONE_S:g} s")
    if done.returncode != 0:
        progress(f"log-probabilities, {way}: not run: {_last_line(done.stderr)}")
        return Way(way=way, skipped=_last_line(done.stderr))
    figures = _figures(done)
    progress(f"log-probabilities, {way}: {figures['tokens_per_s']:.0f} tokens/s")
    return Way(
        way=way,
        tokens_per_s=round(figures["tokens_per_s"], 1),
        peak_bytes=int(figures["peak_bytes"]),
        relative_error=figures["relative_error"],
    )


def _step(what: str, argument: str, threads: int, *more: str) -> subprocess.CompletedProcess[str]:
    return _run("openrl_trainer.step_timings", what, argument, str(threads), *more, threads=threads)


def _run(module: str, *arguments: str, threads: int = 1) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_ONE_S, check=False, env=environment)


def _checked(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode != 0:
        raise Rejected(f"the trainer could not be measured: {_last_line(done.stderr)}", code="bench-failed")
    return done


def _figures(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no word was said"
