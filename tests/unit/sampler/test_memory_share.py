"""How a seat's memory is shared out, what an update needs, what vLLM is told (V2, V4, V6). Pure: no vllm is
imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from sampler_support import save_model

from openrl_common.errors import Rejected
from openrl_common.quantities import GIB, MIB
from openrl_common.records import JobKind
from openrl_common.tensors import read_checkpoint
from openrl_sampler.compile_cache import cache_key
from openrl_sampler.memory_share import (
    ModelSizes,
    capture_sizes,
    check_room,
    kv_cache_bytes,
    memory_share,
    update_bytes,
)
from openrl_sampler.seeds import seed_of
from openrl_sampler.vllm_options import VllmOptions, compile_facts, engine_arguments, set_environment, sizes_of

GEMMA_LARGEST_BYTES = 262_144 * 8_960 * 2
GEMMA = ModelSizes(
    parameters=5_440_000_000,
    weights_bytes=2 * 5_440_000_000,
    largest_tensor_bytes=GEMMA_LARGEST_BYTES,
    kv_bytes_per_token=7_168,
)


def test_v6_check_figures_of_the_known_model() -> None:
    """V6, M4: staging gemma-4-e2b whole takes about 12 GiB, streaming it the chunk."""
    assert update_bytes("reload", GEMMA, chunk_bytes=256 * MIB) / GIB == pytest.approx(11.9, abs=0.1)
    assert update_bytes("streamed", GEMMA, chunk_bytes=256 * MIB) == 256 * MIB
    assert update_bytes("streamed", GEMMA, chunk_bytes=64 * GIB) == GEMMA_LARGEST_BYTES
    assert update_bytes("reload", GEMMA, chunk_bytes=1, headroom_bytes=3 * GIB) == 3 * GIB


def test_v4_keys_and_values_get_what_the_rest_leaves_and_no_more_than_they_can_use() -> None:
    seat = 24 * GIB
    staged = update_bytes("reload", GEMMA, chunk_bytes=256 * MIB)
    streamed = update_bytes("streamed", GEMMA, chunk_bytes=256 * MIB)
    tokens = {"most_tokens": 256 * 131_072, "least_tokens": 8_192}
    less, more = (kv_cache_bytes(seat, GEMMA, update=update, **tokens) for update in (staged, streamed))
    assert more - less == staged - streamed
    assert kv_cache_bytes(seat, GEMMA, update=streamed, most_tokens=8_192, least_tokens=8_192) == 8_192 * 7_168
    with pytest.raises(
        Rejected, match=r"the seat declares 11\.700 GiB: .*weight update 11\.\d+ GiB leave -\d"
    ) as caught:
        kv_cache_bytes(int(11.7 * GIB), GEMMA, update=staged, **tokens)
    assert caught.value.code == "too-small"
    assert kv_cache_bytes(0, GEMMA, update=staged, most_tokens=10, least_tokens=10) == 10 * 7_168


def test_v4_an_explicit_share_wins_and_is_checked_against_the_seat() -> None:
    assert memory_share(20 * GIB, 80 * GIB, 0.0) == 0.25
    assert memory_share(20 * GIB, 80 * GIB, 0.2) == 0.2
    assert memory_share(0, 80 * GIB, 0.0) == 0.9
    with pytest.raises(Rejected, match=r"0\.5 of 80\.000 GiB is 40\.000 GiB, the seat declares 20\.000 GiB"):
        memory_share(20 * GIB, 80 * GIB, 0.5)


def test_v6_too_little_room_is_said_with_both_numbers() -> None:
    check_room(GIB, GIB, "streamed")
    with pytest.raises(Rejected, match=r"needs 2\.000 GiB of device memory, 1\.000 GiB are free"):
        check_room(2 * GIB, GIB, "reload")


def test_v2_graphs_are_captured_for_powers_of_two_up_to_the_limit() -> None:
    assert capture_sizes("", 256) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert capture_sizes("", 48) == [1, 2, 4, 8, 16, 32, 48]
    assert capture_sizes("default", 256) is None
    assert capture_sizes("8, 1,2", 256) == [1, 2, 8]
    for wrong in ("0,1", "a", "1,,2"):
        with pytest.raises(Rejected, match="capture-sizes"):
            capture_sizes(wrong, 8)


def test_v2_v9_what_vllm_is_told(tmp_path: Path) -> None:
    """V2, V9: graphs and sleep on GPUs only; adapters of every matrix of a layer, never of the head; ranks rounded
    up."""
    path = save_model(tmp_path / "m", tied=False)
    held = read_checkpoint(path)
    options = VllmOptions(model_path=path, kind=JobKind.LORA, max_rank=24, max_num_seqs=16, max_adapters=4)
    on_gpu, on_cpu = (engine_arguments(options, held, on_cpu=cpu) for cpu in (False, True))
    assert on_gpu["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16]
    assert "cudagraph_capture_sizes" not in on_cpu
    assert (on_gpu["enable_sleep_mode"], on_cpu["enable_sleep_mode"]) == (True, False)
    assert (on_gpu["dtype"], on_cpu["dtype"]) == ("bfloat16", "float32")
    assert on_gpu["max_lora_rank"] == 32
    assert on_gpu["lora_target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert on_gpu["max_loras"] == 4
    assert on_gpu["async_scheduling"] is False
    sizes = sizes_of(held, options, value_bytes=2, kv_bytes_per_token=1)
    assert sizes.weights_bytes == 2 * held.num_elements
    assert sizes.slots_bytes > 0
    with pytest.raises(Rejected, match="at most 512"):
        engine_arguments(VllmOptions(model_path=path, kind=JobKind.LORA, max_rank=1024), held, on_cpu=True)


def test_v1_the_key_of_compiled_code_covers_model_device_and_configuration(tmp_path: Path) -> None:
    path = save_model(tmp_path / "m")
    other = save_model(tmp_path / "o", hidden_size=64)

    def key(device: str = "d", model_path: Path = path, vllm: str = "1", **changes: object) -> str:
        options = VllmOptions(**{"model_path": model_path, "kind": JobKind.FFT, **changes})
        return cache_key(compile_facts(options, device=device, versions={"vllm": vllm}))

    keys = [
        key(), key(device="e"), key(vllm="2"), key(model_path=other), key(kind=JobKind.LORA), key(dtype="bfloat16"),
        key(max_model_len=9), key(max_num_seqs=9), key(num_devices=2), key(capture_sizes="1"), key(compile=True),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key() == key()
    assert key(chunk_bytes=1) == key(), "what compiled code does not depend on shares it"


def test_v1_everything_compiled_goes_under_the_caches_path() -> None:
    environment: dict[str, str] = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    set_environment(environment, Path("/c"))
    assert {name: value for name, value in environment.items() if value.startswith("/c/")}.keys() == {
        "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    }  # fmt: skip
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG", "what a person set stays"


def test_v10_every_sample_has_a_seed_of_its_own() -> None:
    seeds = {seed_of(seed, prompt, sample) for seed in range(5) for prompt in range(5) for sample in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(2**62, 1, 2) == seed_of(2**62, 1, 2)
