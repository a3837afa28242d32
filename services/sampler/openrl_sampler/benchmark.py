"""``python -m openrl_sampler.benchmark``: one measurement of the vLLM engine in a process of its own, as one line of
JSON.

``openrl bench update`` and ``openrl bench coldstart`` start it once per method, because memory and compiled code of one
measurement must not be there in the next. Not a benchmark of a model: it is random, and as large as asked.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from openrl_common.deltas import DELTA_FILE, INDEX, VALUE
from openrl_common.records import JobKind
from openrl_common.settings import Directory
from openrl_sampler.vllm_options import VllmOptions, set_environment

METHODS = (
    "streamed", "streamed_converted", "streamed_delta", "vllm_patched_delta", "vllm_reload_weights",
    "reload_weights_plain_layers",
)  # fmt: skip
_POLL_S = 0.0005


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("out", type=Directory())
@click.option("--vocabulary", type=int, default=65_536)
@click.option("--hidden", type=int, default=512)
@click.option("--layers", type=int, default=4)
@click.option("--seed", type=int, default=1)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16")
def make(out: Path, vocabulary: int, hidden: int, layers: int, seed: int, dtype: str) -> None:
    """A random tied Qwen3 model of this shape in OUT."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), head_dim=64,
        max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(str(out))


@main.command()
@click.argument("before", type=Directory())
@click.argument("after", type=Directory())
@click.option("--share", type=float, default=0.05)
def delta(before: Path, after: Path, share: float) -> None:
    """Random changes of SHARE of BEFORE's elements, as a delta in AFTER."""
    import torch
    from safetensors.torch import load_file, save_file

    changed: dict[str, Any] = {}
    for name, tensor in load_file(before / "model.safetensors").items():
        index = (torch.rand(tensor.numel()) < share).nonzero().reshape(-1)
        changed |= {name + INDEX: index.to(torch.int32), name + VALUE: tensor.reshape(-1)[index] + 1}
    after.mkdir(parents=True)
    save_file(changed, after / DELTA_FILE)


@main.command()
@click.argument("method", type=click.Choice(METHODS))
@click.argument("model", type=Directory())
@click.argument("version", type=Directory())
@click.option("--chunk-bytes", type=int, required=True)
@click.option("--times", type=int, default=3)
def update(method: str, model: Path, version: Path, chunk_bytes: int, times: int) -> None:
    """Apply VERSION to an engine that serves MODEL, several times; the first one is reported apart."""
    set_environment(os.environ)
    from openrl_common.tensors import read_checkpoint
    from openrl_sampler.vllm_engine import VllmEngine
    from openrl_sampler.weights_layers import Layer

    engine = VllmEngine(VllmOptions(model_path=model, kind=JobKind.FFT, dtype="bfloat16", max_num_seqs=8))
    if method == "vllm_reload_weights":  # as vLLM keeps its weights: its CPU kernels pack them
        with _unpatched():
            engine.load()
    else:
        engine.load()
    held = read_checkpoint(model if method.endswith("delta") else version)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in held.tensors.items()}
    if method.endswith("delta"):
        layer = Layer(str(version), True, {}, shapes)
    else:
        layer = Layer(str(version), False, {name: path.name for name, path in held.files.items()}, shapes)

    def stream() -> None:
        if not layer.delta:
            assert not any(engine.rpc("openrl_plan", layer.shapes))
        (written,) = engine.rpc("openrl_write", [layer], chunk_bytes)
        assert not written.error, written.error

    def patch() -> None:
        (written,) = engine.rpc("openrl_patch", layer)
        assert not written.error, written.error

    def reload() -> None:
        engine.rpc("reload_weights", weights_path=str(version))

    work = stream if method.startswith("streamed") else patch if method == "vllm_patched_delta" else reload
    measured = [_measured(work) for _ in range(times + 1)]
    later = measured[1:] or measured
    print(
        json.dumps(
            {
                "seconds": sorted(seconds for seconds, _ in later)[len(later) // 2],
                "first_seconds": measured[0][0],
                "peak_extra_bytes": max(peak for _, peak in measured),
            }
        )
    )
    os._exit(0)


@contextmanager
def _unpatched() -> Iterator[None]:
    import vllm.model_executor.layers.utils as layer_utils

    packing = layer_utils.dispatch_cpu_unquantized_gemm
    import openrl_sampler.vllm_worker  # noqa: F401  (replaces it)

    plain, layer_utils.dispatch_cpu_unquantized_gemm = layer_utils.dispatch_cpu_unquantized_gemm, packing
    assert plain is not packing
    yield


def _measured(work: Callable[[], None]) -> tuple[float, int]:
    """Seconds, and by how much the process's anonymous memory rose at its peak, looked at every half millisecond."""
    with _peak() as peak:
        started = time.perf_counter()
        work()
        seconds = time.perf_counter() - started
    return seconds, peak[0]


@contextmanager
def _peak() -> Iterator[list[int]]:
    before, peak, done = _anonymous(), [0], threading.Event()

    def look() -> None:
        while not done.wait(_POLL_S):
            peak[0] = max(peak[0], _anonymous() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        peak[0] = max(peak[0], _anonymous() - before)
        done.set()
        thread.join()


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


@main.command()
@click.argument("model", type=Directory())
@click.argument("cache", type=Directory())
@click.option("--compile/--eager", "compiled", default=True)
def start(model: Path, cache: Path, compiled: bool) -> None:
    """Construct an engine; imports are done before the clock runs."""
    from openrl_sampler.compile_cache import CompileCache

    kept = CompileCache(cache, None, "bench")
    set_environment(os.environ, kept.path)
    import vllm.v1.engine.llm_engine  # noqa: F401

    from openrl_sampler.vllm_engine import VllmEngine

    engine = VllmEngine(VllmOptions(model_path=model, kind=JobKind.FFT, max_num_seqs=8, compile=compiled, cache=kept))
    started, busy = time.perf_counter(), time.process_time()
    engine.load()
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - started,
                "cpu_s": time.process_time() - busy,
                "cache": engine.cache_state,
                "parts": engine.load_parts,
            }
        )
    )
    os._exit(0)


if __name__ == "__main__":
    main()
