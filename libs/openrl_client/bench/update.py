"""``openrl bench update``: one weight update by every method on the same files, its seconds and its extra memory (V7).

The model is random and has one tensor many times the chunk (its embedding). Times are of the update alone, the median
of later ones; digests are checked before and cost the same for all, so they are left out. Memory is the process's
anonymous memory, looked at every half millisecond: on a CPU that is the device's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from openrl_client.bench import engine
from openrl_client.bench.machine import Machine, describe
from openrl_client.home import Progress
from openrl_common.tensors import read_checkpoint

METHODS = (
    "streamed", "streamed_converted", "streamed_delta", "vllm_patched_delta", "vllm_reload_weights",
    "reload_weights_plain_layers",
)  # fmt: skip


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds``: median; ``first_seconds``: the first one, which also plans or allocates."""

    seconds: float
    first_seconds: float
    peak_extra_bytes: int


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """``methods``: ``streamed`` (files of the model's type), ``streamed_converted`` (float32 files into bfloat16
    weights),
    ``streamed_delta`` (5 % of the elements), ``vllm_patched_delta`` (the same by vLLM's patch loader),
    ``vllm_reload_weights`` (as vLLM does it), ``reload_weights_plain_layers``
    (the same beside linear layers that are not packed)."""

    chunk_bytes: int
    largest_tensor_bytes: int
    total_bytes: int
    methods: dict[str, Method]
    streamed_over_reload: float
    machine: Machine


async def measure(
    model: Path | None, *, vocabulary: int, hidden: int, layers: int, chunk_bytes: int, progress: Progress
) -> UpdateReport:
    """Raises Rejected: vllm is not installed here, or a measurement failed."""
    with tempfile.TemporaryDirectory(prefix="openrl-bench-") as scratch:
        root = Path(scratch)
        shape = ("--vocabulary", str(vocabulary), "--hidden", str(hidden), "--layers", str(layers))
        if model is None:
            progress("making the models")
            model = root / "base"
            await engine.run("make", str(model), *shape)
            await engine.run("make", str(root / "next"), *shape, "--seed", "2")
            await engine.run("make", str(root / "float32"), *shape, "--seed", "2", "--dtype", "float32")
            versions = {"streamed_converted": root / "float32"}
        else:
            versions = {}
        await engine.run("delta", str(model), str(root / "delta"))
        versions |= dict.fromkeys(("streamed_delta", "vllm_patched_delta"), root / "delta")
        whole = root / "next" if (root / "next").exists() else model
        methods = {}
        for name in METHODS:
            if name == "streamed_converted" and name not in versions:
                continue
            arguments = (name, str(model), str(versions.get(name, whole)), "--chunk-bytes", str(chunk_bytes))
            methods[name] = await engine.measure(Method, "update", *arguments)
            progress(f"{name}: {methods[name].seconds:.3f} s, {methods[name].peak_extra_bytes / 2**20:.1f} MiB")
        held = read_checkpoint(whole)
    return UpdateReport(
        chunk_bytes=chunk_bytes,
        largest_tensor_bytes=held.largest.num_bytes,
        total_bytes=held.total_bytes,
        methods=methods,
        streamed_over_reload=round(methods["streamed"].seconds / methods["vllm_reload_weights"].seconds, 3),
        machine=describe(),
    )
