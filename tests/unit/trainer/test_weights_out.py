"""Weights versions on disk (R11)."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import pytest
import torch
import transformers

from openrl_common.errors import Rejected
from openrl_common.records import LoraSpec, WeightsRecord
from openrl_common.weights import read_manifest, verify_files
from openrl_common.wire import SaveState, SaveWeights
from openrl_trainer.engine import TrainEngine
from unit.trainer.conftest import learn, random_data, save_tiny_model, step

Engines = Callable[..., TrainEngine]
IDS = torch.tensor([[1, 2, 3, 4, 5]])


def trained(engine: TrainEngine, seq: int = 1) -> WeightsRecord:
    engine.apply(learn(seq, random_data(1)))
    engine.apply(step(seq + 1))
    outcome = engine.apply(SaveWeights(seq=seq + 2, incarnation=7))
    assert outcome.result.error is None
    assert outcome.weights is not None
    return outcome.weights


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits  # type: ignore[operator]
    return result


@pytest.mark.parametrize("tied", [True, False])
def test_full_weights_load_with_from_pretrained_and_give_the_same_bits_R11(
    new_base: Callable[..., object], new_engine: Engines, tmp_path: Path, tied: bool
) -> None:
    path = save_tiny_model(tmp_path / "base", tied=tied)
    engine = new_engine(base=new_base(path=path))
    record = trained(engine)
    directory = Path(record.manifest).parent
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        str(directory), local_files_only=True, dtype=torch.float32
    )
    assert torch.equal(logits(loaded.eval()), logits(engine.base.model))
    same_storage = loaded.get_input_embeddings().weight.data_ptr() == loaded.get_output_embeddings().weight.data_ptr()
    assert same_storage is tied
    manifest = read_manifest(record.manifest, record.digest)
    verify_files(manifest, directory)
    assert ("lm_head.weight" in {tensor.name for tensor in manifest.tensors}) is not tied
    assert (manifest.format, manifest.version, manifest.parent) == ("full", 1, 0)
    assert manifest.total_bytes == sum(tensor.bytes for tensor in manifest.tensors) == record.total_bytes
    assert manifest.largest_tensor_bytes == max(tensor.bytes for tensor in manifest.tensors)


def test_adapters_load_with_plain_peft_and_give_the_same_bits_R11(new_engine: Engines, model_path: Path) -> None:
    spec = LoraSpec(rank=4, alpha=6.0, target_modules=("q_proj", "down_proj"))
    engine = new_engine(lora=spec)
    record = trained(engine)
    directory = Path(record.manifest).parent
    base = transformers.AutoModelForCausalLM.from_pretrained(
        str(model_path), local_files_only=True, dtype=torch.float32
    )
    untrained = logits(base.eval())
    with _quiet():
        loaded = peft.PeftModel.from_pretrained(base, str(directory))
    assert torch.equal(logits(loaded.eval()), logits(engine.base.model))
    assert not torch.equal(logits(loaded), untrained)
    manifest = read_manifest(record.manifest, record.digest)
    verify_files(manifest, directory)
    assert manifest.format == "lora"
    assert manifest.lora == spec
    assert set(manifest.files) == {"adapter_model.safetensors", "adapter_config.json"}
    assert json.loads((directory / "adapter_config.json").read_bytes())["r"] == 4


@contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reads attributes that transformers deprecates
        yield


def test_versions_count_up_name_their_parent_and_the_oldest_go_R11(new_engine: Engines) -> None:
    engine = new_engine(lora=LoraSpec(rank=2), keep=2)
    records = [trained(engine, seq) for seq in (1, 4, 7)]
    engine.retain()
    assert [(record.version, record.parent) for record in records] == [(1, 0), (2, 1), (3, 2)]
    assert sorted(path.name for path in Path(records[0].manifest).parents[1].iterdir()) == ["v000002", "v000003"]


def test_a_copy_that_somebody_made_beside_the_versions_stays_and_stops_nothing_R11(
    new_engine: Engines, tmp_path: Path
) -> None:
    """Dropping old versions is part of every start: what ends it there would end every start."""
    engine = new_engine(lora=LoraSpec(rank=2), keep=1)
    first = Path(trained(engine, 1).manifest).parent
    shutil.copytree(first, first.with_name(f"{first.name}.bak"))
    trained(engine, 4)
    engine.retain()
    assert sorted(path.name for path in first.parent.iterdir()) == ["v000001.bak", "v000002"]


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Writes beyond ``size_bytes`` fail in this process, as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["fft", "lora"])
def test_a_disk_that_takes_no_more_is_one_clear_error_and_the_version_before_stands_R11(
    new_engine: Engines, lora: LoraSpec | None
) -> None:
    engine = new_engine(lora=lora)
    first = trained(engine)
    with file_size_limit(2000):
        weights = engine.apply(SaveWeights(seq=4, incarnation=7))
        state = engine.apply(SaveState(seq=5, incarnation=7, name="s"))
    for outcome in (weights, state):
        assert outcome.result.error is not None
        assert outcome.result.error.code == "disk-full"
        assert "bytes are free" in outcome.result.error.message
    assert weights.weights is None
    directory = Path(first.manifest).parent
    assert [path.name for path in directory.parent.iterdir()] == ["v000001"]
    verify_files(read_manifest(first.manifest, first.digest), directory)
    assert list((engine._settings.home / "state/default/job").iterdir()) == []
    assert engine.apply(SaveWeights(seq=6, incarnation=7)).result.version == 2


def test_what_a_killed_writer_left_is_cleared_and_a_damaged_version_is_written_again_R11(new_engine: Engines) -> None:
    engine = new_engine(lora=LoraSpec(rank=2))
    record = trained(engine)
    directory = Path(record.manifest).parent
    (directory.parent / ".writing-v000009").mkdir()
    (directory / "adapter_model.safetensors").write_bytes(b"half")
    again = new_engine(lora=LoraSpec(rank=2))
    assert trained(again) == record
    verify_files(read_manifest(record.manifest, record.digest), directory)
    assert [path.name for path in directory.parent.iterdir()] == ["v000001"]


def test_a_version_that_stands_is_not_touched_by_a_second_writing_R5_R11(new_engine: Engines) -> None:
    record = trained(new_engine(lora=LoraSpec(rank=2)))
    file = Path(record.manifest).parent / "adapter_model.safetensors"
    before = file.stat().st_ino
    assert trained(new_engine(lora=LoraSpec(rank=2))) == record
    assert file.stat().st_ino == before


def test_readers_refuse_other_bytes_missing_files_and_names_that_leave_the_directory_V8(new_engine: Engines) -> None:
    record = trained(new_engine(lora=LoraSpec(rank=2)))
    path = Path(record.manifest)
    file = path.parent / "adapter_model.safetensors"
    manifest = read_manifest(path, record.digest)

    def code_of(action: Callable[[], object]) -> str:
        with pytest.raises(Rejected) as caught:
            action()
        assert str(path.parent) in str(caught.value)
        return caught.value.code

    assert code_of(lambda: read_manifest(path, "0" * 64)) == "weights-digest"
    assert code_of(lambda: read_manifest(path.parent / "absent.json")) == "weights-missing"
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)
    assert code_of(lambda: verify_files(manifest, path.parent)) == "weights-digest"
    file.write_bytes(body[:-1])
    assert code_of(lambda: verify_files(manifest, path.parent)) == "weights-digest"
    file.unlink()
    assert code_of(lambda: verify_files(manifest, path.parent)) == "weights-missing"
    path.write_text(path.read_text().replace("adapter_config.json", "../adapter_config.json"))
    assert code_of(lambda: read_manifest(path)) == "weights-manifest"
    path.write_text("{}")
    assert code_of(lambda: read_manifest(path)) == "weights-manifest"
