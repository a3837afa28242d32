"""How long one way to read a checkpoint takes, cold: ``openrl bench prefetch`` runs this file once a measurement.

    python load_timings.py make DIRECTORY              a Qwen3 of 0.6 B random parameters in bfloat16, 1.1 GiB
    python load_timings.py METHOD DIRECTORY            one line of JSON: seconds, detail, how the cache was emptied

What is timed, after all imports and with nothing of the checkpoint in the page cache, is the time until every byte of
every tensor has been in memory:

    mmap             from_pretrained at the checkpoint's dtype, then each parameter copied, as to a device, by as many
                     threads as from_pretrained itself uses
    warm             the same with everything in the page cache: what of all the others is not waiting for the disk
    openrl           as mmap, after ``openrl_common.prefetch`` on auto; openrl-always: on always
    vllm             vLLM's iterator with its prefetch strategy (8 threads, 16 MiB, beside mapped reads), each copied
    runai            the Run:ai streamer as it comes, its own copies
    fastsafetensors  without GPUDirect, into its own buffers

The last three build no model, which is to their advantage.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Timed = Callable[[], str]
_SHARD = "400MB"


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
    return _loading(directory, lambda: "")


def openrl(directory: Path, mode: str = "auto") -> Timed:
    from openrl_common.prefetch import PrefetchMode, prefetch

    return _loading(directory, lambda: str(prefetch(directory, mode=PrefetchMode(mode))))


def openrl_always(directory: Path) -> Timed:
    return openrl(directory, "always")


def _loading(directory: Path, first: Callable[[], str]) -> Timed:
    import transformers
    import transformers.models.qwen3.modeling_qwen3

    transformers.utils.logging.disable_progress_bar()
    num_threads = min(4, os.cpu_count() or 1)

    def timed() -> str:
        said = first()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), local_files_only=True, dtype="auto"
        )
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(_copy, model.parameters()))
        return said

    return timed


def vllm(directory: Path) -> Timed:
    import vllm as package
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    def timed() -> str:
        files = [str(path) for path in _files(directory)]
        for _, tensor in safetensors_weights_iterator(files, False, safetensors_load_strategy="prefetch"):
            _copy(tensor)
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


def _copy(tensor: Any) -> None:
    tensor.detach().clone()


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
    started = time.perf_counter()
    detail = timed()
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "detail": detail, "cache_emptied_by": emptied}), flush=True)
    os._exit(0)  # taking down torch and the streamers' threads in order takes seconds


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
