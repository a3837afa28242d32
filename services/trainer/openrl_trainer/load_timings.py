"""How long one way to read a checkpoint takes, cold: ``openrl bench prefetch`` runs this file once a measurement.

    python load_timings.py make DIRECTORY              a Qwen3 of 0.6 B random parameters in bfloat16, 1.1 GiB
    python load_timings.py METHOD DIRECTORY            one line of JSON: seconds, and what they were spent on

What is timed, after all imports and with nothing of the checkpoint in the page cache, is the time until every byte of
every tensor has been in memory and on its way to a device:

    mmap             from_pretrained at the checkpoint's dtype, each tensor going through a buffer as it is loaded
    warm             the same with everything in the page cache: what of all the others is not waiting for the disk
    openrl           as mmap, beside ``openrl_common.prefetch`` on auto; openrl-always: on always
    vllm             vLLM's iterator with its prefetch strategy (8 threads, 16 MiB, mapped reads), the same buffer
    runai            the Run:ai streamer as it comes, into its own buffers
    fastsafetensors  without GPUDirect, into its own buffers

The buffer stands for a device that is not here: a driver takes pageable memory to a GPU through one, in the thread that
asks, which with ``device_map`` is one of from_pretrained's own. The last three build no model, to their advantage.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Timed = Callable[[], str]
_SHARD = "400MB"
_BUFFER_BYTES = 4 << 20
_BUFFERS = threading.local()


def make(directory: Path) -> None:
    import torch
    import transformers

    config = transformers.Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    model: Any = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(str(directory), max_shard_size=_SHARD)


def mmap(directory: Path) -> Timed:
    return _loading(directory, None)


def openrl(directory: Path) -> Timed:
    return _loading(directory, "auto")


def openrl_always(directory: Path) -> Timed:
    return _loading(directory, "always")


def _loading(directory: Path, mode: str | None) -> Timed:
    import torch
    import transformers
    import transformers.models.qwen3.modeling_qwen3

    from openrl_common.arriving import load_arriving
    from openrl_common.prefetch import Prefetch, PrefetchMode

    transformers.utils.logging.disable_progress_bar()
    _load_through_a_buffer()

    def timed() -> str:
        prefetch = None if mode is None else Prefetch(directory, mode=PrefetchMode(mode))
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(lambda: "" if prefetch is None else str(prefetch.run()))
            dtype, device = torch.bfloat16, torch.device("cpu")
            load_arriving(transformers, directory, dtype=dtype, device=device, prefetch=prefetch)
            return reading.result()

    return timed


def _load_through_a_buffer() -> None:
    """Where from_pretrained would copy a tensor to its device."""
    from transformers import core_model_loading as loading

    materialize = loading._materialize_copy

    def through_a_buffer(*arguments: Any, **named: Any) -> Any:
        tensor = materialize(*arguments, **named)
        _through_a_buffer(tensor)
        return tensor

    loading._materialize_copy = through_a_buffer


def _through_a_buffer(tensor: Any) -> None:
    import torch

    if not hasattr(_BUFFERS, "bytes"):
        _BUFFERS.bytes = torch.zeros(_BUFFER_BYTES, dtype=torch.uint8)
    for piece in tensor.flatten().view(torch.uint8).split(_BUFFER_BYTES):
        _BUFFERS.bytes[: piece.numel()].copy_(piece)


def vllm(directory: Path) -> Timed:
    import vllm as package
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    def timed() -> str:
        files = [str(path) for path in _files(directory)]
        for _, tensor in safetensors_weights_iterator(files, False, safetensors_load_strategy="prefetch"):
            _through_a_buffer(tensor)
        return f"vllm {package.__version__}"

    return timed


def runai(directory: Path) -> Timed:
    from importlib.metadata import version

    from runai_model_streamer import SafetensorsStreamer

    def timed() -> str:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in _files(directory)])
            for _ in streamer.get_tensors():
                pass
        return f"runai-model-streamer {version('runai-model-streamer')}"

    return timed


def fastsafetensors(directory: Path) -> Timed:
    from importlib.metadata import version

    from fastsafetensors import fastsafe_open

    def timed() -> str:
        with fastsafe_open([str(path) for path in _files(directory)], nogds=True, device="cpu") as opened:
            for name in list(opened.keys()):
                opened.get_tensor(name)
        return f"fastsafetensors {version('fastsafetensors')}"

    return timed


def warm(directory: Path) -> Timed:
    timed = mmap(directory)
    for path in _files(directory):
        path.read_bytes()
    return timed


METHODS: dict[str, Callable[[Path], Timed]] = {
    "mmap": mmap,
    "warm": warm,
    "openrl": openrl,
    "openrl-always": openrl_always,
    "vllm": vllm,
    "runai": runai,
    "fastsafetensors": fastsafetensors,
}


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def empty_page_cache(directory: Path) -> str:
    """Drop a checkpoint from the page cache; how: ``drop_caches`` or, where that is forbidden, ``fadvise``."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "drop_caches"
    except OSError:
        for path in _files(directory):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        return "fadvise"


def main(method: str, directory: Path) -> None:
    if method == "make":
        make(directory)
        return
    timed = METHODS[method](directory)
    emptied = "" if method == "warm" else empty_page_cache(directory)
    started, cpu_started = time.perf_counter(), time.process_time()
    detail = timed()
    figures = {
        "seconds": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu_started,
        "detail": detail,
        "cache_emptied_by": emptied,
    }
    print(json.dumps(figures), flush=True)
    os._exit(0)  # taking down torch and the streamers' threads in order takes seconds


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
