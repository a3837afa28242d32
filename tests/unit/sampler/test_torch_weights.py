"""Weight updates of the torch engine: all or nothing, bit-identical, every token says its version (V5, V8, V9)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sampler_support import flip_a_byte, new_record, remove, truncate

from openrl_common.errors import Bug, Rejected
from openrl_common.quantities import GIB
from openrl_common.records import JobKind
from openrl_common.wire import SamplingParams
from openrl_sampler import torch_engine
from openrl_sampler.engine import GenerateCall
from openrl_sampler.streamed import Plan
from openrl_sampler.torch_weights import free_bytes

PROMPTS = [[5, 9, 13], [7, 8, 30, 31]]


def _state(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine._resident.model.state_dict().items()}


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def _tokens(result: Any) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in group] for group in result.sequences]


@pytest.mark.parametrize("tied", [True, False])
def test_v8_a_full_update_is_bit_identical_to_a_fresh_load(
    tied: bool,
    new_engine: Callable[..., Any],
    save_tiny_model: Callable[..., Path],
    save_full: Callable[..., Any],
    apply: Callable[..., Any],
    generate: Callable[..., Any],
    tmp_path: Path,
) -> None:
    engine = new_engine(save_tiny_model(tmp_path / "base", tied=tied))
    record = save_full(3, tied=tied)
    generate(engine, PROMPTS, max_tokens=4)
    applied = apply(engine, record)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(Path(record.manifest).parent)
    assert _same(_state(engine), dict(fresh.state_dict()))
    assert engine.version("t.j.1") == 3
    assert applied.seconds > 0
    assert applied.peak_extra_bytes >= 0
    again = new_engine(Path(record.manifest).parent)
    assert _tokens(generate(engine, PROMPTS, n=2, max_tokens=8)) == _tokens(generate(again, PROMPTS, n=2, max_tokens=8))


@pytest.mark.parametrize("damage", [flip_a_byte, remove, truncate])
def test_v8_damaged_files_change_nothing(
    damage: Callable[[Path], None],
    new_engine: Callable[..., Any],
    save_full: Callable[..., Any],
    apply: Callable[..., Any],
) -> None:
    """V8: bad digest, missing file, short file: a typed error that names the file; the old version serves on."""
    engine = new_engine()
    apply(engine, save_full(1))
    before = _state(engine)
    record = save_full(2)
    damage(Path(record.manifest).parent)
    with pytest.raises(Rejected, match=r"model\.safetensors"):
        apply(engine, record)
    assert _same(_state(engine), before)
    assert engine.version("t.j.1") == 1


def test_v8_a_wrong_shape_or_tensor_is_found_before_the_first_write(
    new_engine: Callable[..., Any], save_full: Callable[..., Any], apply: Callable[..., Any]
) -> None:
    engine = new_engine()
    before = _state(engine)
    with pytest.raises(Rejected, match=r"shape \[61, 16\], the model's is \[61, 32\]"):
        apply(engine, save_full(1, hidden_size=16))
    with pytest.raises(Rejected, match="is not in the model"):
        apply(engine, save_full(2, num_hidden_layers=3))
    with pytest.raises(Rejected):
        apply(engine, save_full(3, num_hidden_layers=1))
    assert _same(_state(engine), before)
    assert engine.version("t.j.1") == 0


def test_v8_another_version_than_announced_is_refused(
    new_engine: Callable[..., Any], save_full: Callable[..., Any], apply: Callable[..., Any]
) -> None:
    engine = new_engine()
    with pytest.raises(Rejected, match="announced were"):
        apply(engine, msgspec.structs.replace(save_full(1), version=2))
    with pytest.raises(Rejected, match="announced was"):
        apply(engine, msgspec.structs.replace(save_full(3), digest="0" * 64))


def test_v8_an_update_that_breaks_off_in_the_middle_never_serves_a_mix(
    new_engine: Callable[..., Any],
    save_full: Callable[..., Any],
    apply: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V8: past the first write the engine is rebuilt to the version before; if that fails, the process ends."""
    engine = new_engine()
    first = save_full(1)
    apply(engine, first)
    before = _state(engine)
    real = torch_engine.write_update
    broken = iter([True, False, True])

    def break_off(planned: Any, layers: Any, **rest: Any) -> Any:
        if next(broken):
            real(Plan(planned.copies[: len(planned.copies) // 2]), layers, **rest)
            raise OSError("the share went away")
        return real(planned, layers, **rest)

    monkeypatch.setattr(torch_engine, "write_update", break_off)
    with pytest.raises(Rejected, match="the share went away"):
        apply(engine, save_full(2))
    assert _same(_state(engine), before)
    assert engine.version("t.j.1") == 1
    Path(first.manifest).unlink()
    with pytest.raises(Bug, match="cannot be rebuilt"):
        apply(engine, save_full(3))


def test_v9_lora_logprobs_are_those_of_plain_peft_and_versions_replace_each_other(
    new_engine: Callable[..., Any],
    save_lora: Callable[..., Any],
    apply: Callable[..., Any],
    generate: Callable[..., Any],
    plain_logprobs: Callable[..., Any],
    model_path: Path,
) -> None:
    """V9, V12: each version is its own adapter; the one before is dropped, the base stays reachable as version 0."""
    engine = new_engine(kind=JobKind.LORA)
    base = generate(engine, PROMPTS, max_tokens=8)
    seen = []
    for version in (1, 2, 5):
        record = save_lora(version)
        apply(engine, record)
        result = generate(engine, PROMPTS, max_tokens=8)
        for prompt, (sequence,) in zip(PROMPTS, result.sequences, strict=True):
            expected = plain_logprobs(model_path, prompt + sequence.tokens, adapter=Path(record.manifest).parent)
            assert sequence.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=5e-5)
            assert set(sequence.versions) == {version}
        seen.append(_tokens(result))
    assert seen[0] != seen[1] != seen[2]
    assert list(engine._shelf.loaded) == ["t_j_1_v5"]
    again = generate(engine, PROMPTS, max_tokens=8, exact=0)
    assert _tokens(again) == _tokens(base)
    assert engine.serves("t.j.1", 5)
    assert not engine.serves("t.j.1", 2)


def test_v9_an_adapter_that_does_not_fit_leaves_the_served_one(
    new_engine: Callable[..., Any],
    save_lora: Callable[..., Any],
    apply: Callable[..., Any],
    generate: Callable[..., Any],
) -> None:
    """V8, V9: too large a rank, a missing tensor, a full version on a LoRA sampler."""
    engine = new_engine(kind=JobKind.LORA, max_rank=4)
    apply(engine, save_lora(1))
    expected = _tokens(generate(engine, PROMPTS, max_tokens=8))
    with pytest.raises(Rejected, match="rank 8, this runtime holds at most 4"):
        apply(engine, save_lora(2, rank=8))
    record = save_lora(3)
    path = Path(record.manifest).parent / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors[sorted(tensors)[0]]
    save_file(tensors, path)
    with pytest.raises(Rejected):
        apply(engine, record)
    assert engine.version("t.j.1") == 1
    assert _tokens(generate(engine, PROMPTS, max_tokens=8)) == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int64], ids=str)
def test_v8_a_version_of_types_that_no_model_is_made_of_is_rejected_and_changes_nothing(
    dtype: torch.dtype, new_engine: Callable[..., Any], save_full: Callable[..., Any], apply: Callable[..., Any]
) -> None:
    """One that raised anything else ended the process, and every one after it: the version is still the newest."""
    engine = new_engine()
    before = _state(engine)
    directory = Path(save_full(1).manifest).parent
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "manifest.json").unlink()
    record = new_record(directory, weights_format="full", job="j", version=1, incarnation=1)
    with pytest.raises(Rejected, match=r"model\.norm\.weight") as caught:
        apply(engine, record)
    assert caught.value.code == "weights-shape"
    assert _same(_state(engine), before)


@pytest.mark.parametrize(
    "odd",
    [{"rank_pattern": None}, {"r": None}, {"r": [4]}, {"modules_to_save": ["norm"]}, {"use_dora": True}],
    ids=str,
)
def test_v9_an_adapter_with_odd_settings_is_rejected_and_the_next_one_of_any_job_is_served(
    odd: dict[str, Any], new_engine: Callable[..., Any], save_lora: Callable[..., Any], apply: Callable[..., Any],
    generate: Callable[..., Any],
) -> None:  # fmt: skip
    engine = new_engine(kind=JobKind.LORA, max_rank=8)
    directory = Path(save_lora(1).manifest).parent
    settings = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(settings | odd))
    (directory / "manifest.json").unlink()
    with pytest.raises(Rejected):
        apply(engine, new_record(directory, weights_format="lora", job="j", version=1, incarnation=1))
    generate(engine, PROMPTS, job="t.other.1", max_tokens=2)
    apply(engine, save_lora(2, job="other"))
    assert generate(engine, PROMPTS, job="t.other.1", max_tokens=2).sequences[0][0].versions == [2, 2]


def test_v6_an_update_has_what_its_seat_has_left_however_much_the_host_has(
    new_engine: Callable[..., Any],
    save_full: Callable[..., Any],
    apply: Callable[..., Any],
    generate: Callable[..., Any],
) -> None:
    """V6, B2: the seat is counted for files as wide as the parameters; these are twice as wide."""
    plain = new_engine(dtype="bfloat16")
    sizes = [p.numel() * p.element_size() for p in plain._resident.model.parameters()]
    seat_bytes = sum(sizes) + 2 * max(sizes)
    assert psutil.virtual_memory().available > 1000 * seat_bytes
    tight = new_engine(dtype="bfloat16", device_bytes=seat_bytes)
    with pytest.raises(Rejected, match="a streamed update needs") as caught:
        apply(tight, save_full(1))
    assert caught.value.code == "no-room"
    assert tight.version("t.j.1") == 0
    assert generate(tight, PROMPTS, max_tokens=3).error is None
    roomy = new_engine(dtype="bfloat16", device_bytes=seat_bytes + max(sizes))
    apply(roomy, save_full(2))
    assert roomy.version("t.j.1") == 2


def test_v6_running_sequences_leave_the_room_for_an_update(
    new_engine: Callable[..., Any], save_full: Callable[..., Any], apply: Callable[..., Any]
) -> None:
    """V4, V6: as many as the seat takes are running, with all the keys and values that they may have."""
    sizes = [p.numel() * p.element_size() for p in new_engine()._resident.model.parameters()]
    engine = new_engine(device_bytes=sum(sizes) + 2 * max(sizes))
    params = SamplingParams(n=500, max_tokens=20, stop_token_ids=[])
    engine.add(GenerateCall(request="r", job="t.j.1", prompts=[[3, 4]], params=params, seed=0))
    for _ in range(18):
        engine.step()
    assert engine._batches
    apply(engine, save_full(1))
    assert engine.version("t.j.1") == 1


def test_v6_what_partners_on_a_device_do_not_use_is_not_this_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    """V6, T2: 80 GiB, this seat of 20 holds 12 and torch keeps 1 beside them, its partner declared 50 and uses none."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (66 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 12 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 13 * GIB)
    device = torch.device("cuda", 0)
    assert free_bytes(device, 20 * GIB, ()) == 8 * GIB
    assert free_bytes(device, 11 * GIB, ()) == 0
    assert free_bytes(device, 79 * GIB, ()) == 67 * GIB, "no more than the device has"
    assert free_bytes(device, 0, ()) == 67 * GIB, "a seat that declares nothing"


def test_v6_a_storage_with_several_views_is_held_once() -> None:
    """V6, B2: tied parameters, and keys and values of one block."""
    whole = torch.zeros(1000, dtype=torch.float32)
    views = [whole, whole[:500], whole.view(10, 100), torch.zeros(1)]
    assert free_bytes(torch.device("cpu"), 10_000, views) == 10_000 - 4004
