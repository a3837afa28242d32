"""How a seat's device memory is shared out in a vLLM sampler (V4), and what a weight update needs (V6). Pure.

    seat = weights + engine + adapter slots + room for the update + keys and values

Keys and values get what is left, never more than the sequences that may run at once can fill. Their size is then told
to vLLM, which would otherwise derive it from a profile that a cold compilation inflates. Figures of engine and
staging: M2, M3.
"""

from __future__ import annotations

from dataclasses import dataclass

from openrl_common.errors import Rejected
from openrl_common.quantities import GIB

ENGINE_BYTES = GIB // 2
ENGINE_BYTES_PER_PARAMETER = 0.125
STAGING_FACTOR = 2.5
STAGING_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Of one device's share of the model. ``kv_bytes_per_token``: keys and values over all layers."""

    parameters: int
    weights_bytes: int
    largest_tensor_bytes: int
    kv_bytes_per_token: int
    slots_bytes: int = 0


def update_bytes(method: str, sizes: ModelSizes, *, chunk_bytes: int, headroom_bytes: int = 0) -> int:
    """Device memory that an update takes beside the resident weights (V6).

    ``streamed``: the chunk, or the largest tensor where that is smaller. ``reload`` and ``patch`` stage dense tensors:
    2.5 × the largest + 1 GiB. ``headroom_bytes`` above 0 replaces the formula.
    """
    if headroom_bytes:
        return headroom_bytes
    if method == "streamed":
        return min(chunk_bytes, sizes.largest_tensor_bytes)
    return int(STAGING_FACTOR * sizes.largest_tensor_bytes) + STAGING_BYTES


def kv_cache_bytes(device_bytes: int, sizes: ModelSizes, *, update: int, most_tokens: int, least_tokens: int) -> int:
    """Bytes for keys and values on one device.

    Args:
        device_bytes: what the seat declares for one device; 0 = not known.
        update: ``update_bytes``, 0 where weights are never replaced.
        most_tokens: what the sequences that may run at once can fill.
        least_tokens: one sequence of the model's length.

    Raises:
        Rejected: ``too-small``, with every figure.
    """
    most = most_tokens * sizes.kv_bytes_per_token
    if not device_bytes:
        return most
    engine = ENGINE_BYTES + int(ENGINE_BYTES_PER_PARAMETER * sizes.parameters)
    left = device_bytes - sizes.weights_bytes - engine - sizes.slots_bytes - update
    if left < least_tokens * sizes.kv_bytes_per_token:
        raise Rejected(
            f"the seat declares {_gib(device_bytes)}: weights {_gib(sizes.weights_bytes)}, engine {_gib(engine)},"
            f" adapters {_gib(sizes.slots_bytes)}, weight update {_gib(update)} leave {_gib(left)} for keys and values,"
            f" one sequence of {least_tokens} tokens needs {_gib(least_tokens * sizes.kv_bytes_per_token)}:"
            " declare more device memory, or a smaller max_model_len of the job",
            code="too-small",
        )
    return min(left, most)


def memory_share(device_bytes: int, total_bytes: int, explicit: float) -> float:
    """vLLM's ``gpu_memory_utilization``: the seat's bytes of the device's, or the explicit share, checked against it.

    Raises:
        Rejected: ``bad-setting``: the explicit share is more than the seat declares.
    """
    if explicit:
        if device_bytes and explicit * total_bytes > device_bytes:
            raise Rejected(
                f"--vllm-memory-share {explicit} of {_gib(total_bytes)} is {_gib(int(explicit * total_bytes))},"
                f" the seat declares {_gib(device_bytes)}: use at most {device_bytes / total_bytes:.3f}",
                code="bad-setting",
            )
        return explicit
    return min(1.0, device_bytes / total_bytes) if device_bytes else 0.9


def check_room(need_bytes: int, free_bytes: int, method: str) -> None:
    """Raise Rejected ``no-room`` with the numbers when an update would not fit (V6)."""
    if free_bytes < need_bytes:
        raise Rejected(
            f"a {method} update needs {_gib(need_bytes)} of device memory, {_gib(free_bytes)} are free", code="no-room"
        )


def capture_sizes(setting: str, max_num_seqs: int) -> list[int] | None:
    """Batch sizes to capture device graphs for (V2): powers of two up to the limit, and the limit.

    Args:
        setting: empty = those; ``default`` = vLLM's own list (None); else a list like ``1,2,4,8``.

    Raises:
        Rejected: ``bad-setting``.
    """
    if setting == "default":
        return None
    if not setting:
        sizes = {1 << power for power in range(max_num_seqs.bit_length())} | {max_num_seqs}
        return sorted(sizes)
    try:
        sizes = {int(part) for part in setting.split(",")}
    except ValueError:
        sizes = {0}
    if min(sizes) < 1:
        raise Rejected(
            f"--vllm-cudagraph-capture-sizes {setting!r}: use `default` or whole numbers above 0 with commas between",
            code="bad-setting",
        )
    return sorted(sizes)


def _gib(value: int) -> str:
    return f"{value / GIB:.3f} GiB"
