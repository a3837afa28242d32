"""Named states: listed, deleted, exported as directories that any other program loads (R5, issue: resume and state)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from openrl_common.errors import Rejected
from openrl_common.records import LoraSpec
from openrl_common.states import list_states, read_info, state_path
from openrl_common.wire import DeleteState, ListStates, LoadState, SaveState
from openrl_trainer.checkpoints import Mark, checkpoint_directory, write_checkpoint
from openrl_trainer.engine import TrainEngine
from openrl_trainer.export import export
from openrl_trainer.fingerprint import fingerprint
from openrl_trainer.model import BaseModel
from unit.trainer.conftest import learn, random_data, step

Engines = Callable[..., TrainEngine]
Bases = Callable[..., BaseModel]
IDS = torch.tensor([[1, 2, 3, 4, 5]])


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits  # type: ignore[operator]
    return result


def trained(engine: TrainEngine, name: str = "s") -> TrainEngine:
    engine.apply(learn(1, random_data(1)))
    engine.apply(step(2))
    assert engine.apply(SaveState(seq=3, incarnation=7, name=name)).result.error is None
    return engine


def load(path: Path) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype=torch.float32)
    return model.eval()  # type: ignore[no-any-return]


def test_states_are_listed_with_what_they_are_and_deleted_by_name(new_engine: Engines, tmp_path: Path) -> None:
    engine = trained(new_engine(lora=LoraSpec(rank=2)), "first")
    engine.apply(SaveState(seq=4, incarnation=7, name="second"))
    trained(new_engine(job="other"), "third")
    (tmp_path / "state/default/job/damaged.safetensors").write_bytes(b"x")
    listed = engine.apply(ListStates(seq=5, incarnation=7)).result.states
    assert listed is not None
    assert [(one.name, one.info.seq, one.info.incarnation) for one in listed] == [("first", 3, 7), ("second", 4, 7)]
    assert listed[0].info.lora == LoraSpec(rank=2)
    assert listed[0].bytes == Path(listed[0].path).stat().st_size
    assert [one.name for one in list_states(tmp_path, "default")] == ["first", "second", "third"]
    assert engine.apply(DeleteState(seq=6, incarnation=7, name="first")).result.error is None
    again = engine.apply(DeleteState(seq=7, incarnation=7, name="first")).result.error
    assert again is not None
    assert again.code == "state-missing"
    assert [one.name for one in list_states(tmp_path, "default", "job")] == ["second"]
    for name in ("../other/third", "a/b", ""):
        refused = engine.apply(DeleteState(seq=8, incarnation=7, name=name)).result.error
        assert refused is not None
        assert refused.code == "bad-name"


def test_a_state_that_cannot_be_removed_is_an_answer_and_not_the_end_of_the_process_R6(
    new_engine: Engines, tmp_path: Path
) -> None:
    """The entry is in the log: a process that it ends would end again at every start."""
    engine = trained(new_engine())
    (tmp_path / "state/default/job/odd.safetensors/inside").mkdir(parents=True)
    refused = engine.apply(DeleteState(seq=4, incarnation=7, name="odd")).result.error
    assert refused is not None
    assert refused.code == "write-failed"
    assert "odd.safetensors" in refused.message


def test_a_state_whose_values_no_training_made_is_refused_whole_R6(new_engine: Engines, tmp_path: Path) -> None:
    """What was loaded broke the update off, in this life and in every later one."""
    engine = trained(new_engine(lora=LoraSpec(rank=2)))
    engine.apply(learn(4, random_data(4)))
    engine.apply(SaveState(seq=5, incarnation=7, name="good"))
    good = load_file(state_path(tmp_path, "default", "job", "good"))
    name = next(key for key in good if key.startswith("parameter/")).removeprefix("parameter/")
    odd = [
        ("step", torch.tensor(-1.0)), ("step", torch.tensor(float("nan"))), ("step", torch.tensor(3)),
        *((section, good[f"{section}/{name}"].to(torch.int32)) for section in ("parameter", "gradient", "exp_avg")),
        ("parameter", good[f"parameter/{name}"].to(torch.complex64)),
    ]  # fmt: skip
    before = engine.copy_state()
    for section, tensor in odd:
        path = state_path(tmp_path, "default", "job", "odd")
        save_file(good | {f"{section}/{name}": tensor}, path, metadata={"format": "pt"})
        refused = engine.apply(LoadState(seq=6, incarnation=7, name="odd")).result.error
        assert refused is not None, (section, tensor.dtype)
        assert refused.code == "bad-state"
    after = engine.copy_state()
    assert all(torch.equal(tensor, after[s][key]) for s, section in before.items() for key, tensor in section.items())
    assert engine.apply(step(7)).result.error is None


@pytest.mark.parametrize("hostile", [b'{"odd":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"\xff":1}', b"[]", b""])
def test_a_hostile_file_among_the_states_is_passed_over_R4(new_engine: Engines, tmp_path: Path, hostile: bytes) -> None:
    engine = trained(new_engine(), "good")
    header = len(hostile).to_bytes(8, "little") + hostile
    state_path(tmp_path, "default", "job", "hostile").write_bytes(header)
    listed = engine.apply(ListStates(seq=4, incarnation=7)).result.states
    assert [one.name for one in listed or ()] == ["good"]
    refused = engine.apply(LoadState(seq=5, incarnation=7, name="hostile")).result.error
    assert refused is not None
    assert refused.code == "bad-state"


def test_gradients_of_another_type_go_on_in_the_type_of_this_job_R6(new_engine: Engines, new_base: Bases) -> None:
    """Sums of a float32 job would be rounded to the bfloat16 of the state."""
    other = new_engine(base=new_base(dtype="bfloat16"))
    other.apply(learn(1, random_data(1)))
    other.apply(SaveState(seq=2, incarnation=7, name="s"))
    engine = new_engine()
    assert engine.apply(LoadState(seq=1, incarnation=7, name="s")).result.error is None
    assert {tensor.dtype for tensor in engine.copy_state()["gradient"].values()} == {torch.float32}


def test_a_later_incarnation_loads_what_an_earlier_one_saved(new_engine: Engines) -> None:
    first = trained(new_engine())
    later = new_engine(incarnation=9)
    assert later.apply(LoadState(seq=1, incarnation=9, name="s")).result.error is None
    assert all(torch.equal(tensor, later.parameters()[name]) for name, tensor in first.parameters().items())


def test_a_load_is_replayed_from_the_very_file_it_read_whatever_became_of_the_name_R5(new_engine: Engines) -> None:
    """The state is replaced, then deleted; the replay of the load finds what it loaded."""
    engine = trained(new_engine())
    engine.apply(learn(4, random_data(4)))
    engine.apply(step(5))
    stored = engine.apply(LoadState(seq=6, incarnation=7, name="s")).result
    wanted = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    engine.apply(learn(7, random_data(7)))
    engine.apply(step(8))
    for ending in (SaveState(seq=9, incarnation=7, name="s"), DeleteState(seq=10, incarnation=7, name="s")):
        assert engine.apply(ending).result.error is None
        again = new_engine()
        again.apply(LoadState(seq=6, incarnation=7, name="s"), stored)
        assert all(torch.equal(tensor, again.parameters()[name]) for name, tensor in wanted.items())


def other_model(path: Path, out: Path, change: Callable[[str, torch.Tensor], torch.Tensor] | None = None) -> Path:
    """A model of the same shapes in another directory, its tensors changed one by one (None: not at all)."""
    shutil.copytree(path, out)
    if change is not None:
        tensors = {name: change(name, tensor) for name, tensor in load_file(out / "model.safetensors").items()}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)])
def test_a_state_of_another_base_model_of_equal_shapes_is_refused_and_both_are_named_R6(
    new_engine: Engines, new_base: Bases, model_path: Path, tmp_path: Path, lora: LoraSpec | None
) -> None:
    """An adapter is nothing without the very weights it was trained on."""
    trained(new_engine(lora=lora))
    other = other_model(model_path, tmp_path / "other", lambda name, tensor: tensor + 0.01 * (".q_proj." in name))
    engine = new_engine(lora=lora, base=new_base(path=other, frozen=lora is not None), incarnation=8)
    before = engine.copy_state()
    refused = engine.apply(LoadState(seq=1, incarnation=8, name="s")).result.error
    assert refused is not None
    assert refused.code == "bad-state"
    assert repr(str(model_path)) in refused.message
    assert repr(str(other)) in refused.message
    after = engine.copy_state()
    assert all(torch.equal(tensor, after[s][key]) for s, section in before.items() for key, tensor in section.items())


def test_a_base_model_that_moved_was_divided_anew_or_takes_longer_contexts_is_the_same(
    new_engine: Engines, new_base: Bases, model_path: Path, tmp_path: Path
) -> None:
    trained(new_engine(lora=LoraSpec(rank=2)))
    moved = other_model(model_path, tmp_path / "moved")
    divided = other_model(model_path, tmp_path / "divided")
    (divided / "model.safetensors").unlink()
    load(model_path).save_pretrained(str(divided), max_shard_size="10KB")  # type: ignore[operator]
    assert len(list(divided.glob("*.safetensors"))) > 1
    longer = other_model(model_path, tmp_path / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    for incarnation, path in enumerate((moved, divided, longer), start=8):
        engine = new_engine(lora=LoraSpec(rank=2), base=new_base(path=path, frozen=True), incarnation=incarnation)
        assert engine.apply(LoadState(seq=1, incarnation=incarnation, name="s")).result.error is None, path


def test_a_state_saved_before_states_named_their_weights_is_loaded(
    new_engine: Engines, new_base: Bases, model_path: Path, tmp_path: Path
) -> None:
    trained(new_engine(lora=LoraSpec(rank=2)))
    path = state_path(tmp_path, "default", "job", "s")
    described = msgspec.to_builtins(read_info(path))
    assert len(described.pop("base_fingerprint")) == 32
    save_file(load_file(path), path, metadata={"format": "pt", "openrl": json.dumps(described)})
    other = other_model(model_path, tmp_path / "other", lambda _, tensor: tensor + 1)
    engine = new_engine(lora=LoraSpec(rank=2), base=new_base(path=other, frozen=True), incarnation=8)
    assert engine.apply(LoadState(seq=1, incarnation=8, name="s")).result.error is None


def test_an_export_onto_another_model_in_the_place_of_its_base_is_refused(
    new_engine: Engines, new_base: Bases, model_path: Path, tmp_path: Path
) -> None:
    base = other_model(model_path, tmp_path / "base")
    trained(new_engine(lora=LoraSpec(rank=2), base=new_base(path=base, frozen=True)))
    shutil.rmtree(base)
    other_model(model_path, base, lambda _, tensor: tensor + 1)
    with pytest.raises(Rejected, match="another base model"):
        export(state_path(tmp_path, "default", "job", "s"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fingerprint_is_of_a_sample_and_of_nothing_where_there_is_no_model(tmp_path: Path) -> None:
    tensors = {f"layer.{n}": torch.full((2048,), float(n)) for n in range(600)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    first = fingerprint(tmp_path)
    save_file(tensors | {"layer.0": torch.ones(2048)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    second = fingerprint(tmp_path)
    assert len({first, second, ""}) == 3
    changed = {f"layer.{n}": torch.cat([torch.full((1024,), float(n)), torch.ones(1024)]) for n in range(600)}
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(tmp_path) == first, "only the first 4 KiB of a tensor count"
    assert fingerprint(tmp_path / "nowhere") == ""


@pytest.mark.parametrize("reason", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_load_is_replayed_from_a_copy_where_there_are_no_hard_links_R5(
    new_engine: Engines, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """What os.link raises on FUSE and some network file systems, on a file of another user, after 65,000 loads."""

    def no_link(source: Path, target: Path) -> None:
        raise OSError(reason, os.strerror(reason), str(source), None, str(target))

    monkeypatch.setattr(os, "link", no_link)
    _load_outlasts_the_state(new_engine)


def test_a_load_is_replayed_from_a_copy_when_states_are_on_another_file_system_R5(
    new_engine: Engines, tmp_path: Path
) -> None:
    """Such as a volume of states that is mounted under the trainers' home."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    with tempfile.TemporaryDirectory(dir=memory) as elsewhere:
        (tmp_path / "state").symlink_to(elsewhere)
        _load_outlasts_the_state(new_engine)


def _load_outlasts_the_state(new_engine: Engines) -> None:
    engine = trained(new_engine())
    result = engine.apply(LoadState(seq=4, incarnation=7, name="s")).result
    assert result.error is None
    wanted = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    engine.apply(learn(5, random_data(5)))
    engine.apply(step(6))
    engine.apply(SaveState(seq=7, incarnation=7, name="s"))
    assert engine.apply(DeleteState(seq=8, incarnation=7, name="s")).result.error is None
    again = new_engine()
    again.apply(LoadState(seq=4, incarnation=7, name="s"), result)
    assert all(torch.equal(tensor, again.parameters()[name]) for name, tensor in wanted.items())


def test_what_a_load_and_a_removal_keep_is_dropped_behind_the_checkpoint_that_has_them(
    new_engine: Engines, tmp_path: Path
) -> None:
    engine = trained(new_engine())
    engine.apply(LoadState(seq=4, incarnation=7, name="s"))
    engine.apply(DeleteState(seq=5, incarnation=7, name="s"))
    directory = checkpoint_directory(tmp_path, "default", "job", 7)
    assert sorted(path.name for path in directory.iterdir()) == [
        "delete-000000000005.note",
        "load-000000000004.safetensors",
    ]
    for seq in (4, 6, 7):  # the older of two is of entry 4, then of entry 6
        mark = Mark(seq=seq, position=seq, version=0)
        write_checkpoint(directory, mark, engine.copy_state(), engine.state_info(seq))
        kept = {path.name.partition("-")[0] for path in directory.iterdir()} & {"load", "delete"}
        assert kept == ({"delete"} if seq < 7 else set())


def test_a_full_state_exports_as_a_model_that_from_pretrained_loads_bit_for_bit(
    new_engine: Engines, model_path: Path, tmp_path: Path
) -> None:
    engine = trained(new_engine())
    (model_path / "tokenizer_config.json").write_text("{}")
    try:
        export(state_path(tmp_path, "default", "job", "s"), tmp_path / "out")
    finally:
        (model_path / "tokenizer_config.json").unlink()
    assert torch.equal(logits(load(tmp_path / "out")), logits(engine.base.model))
    assert (tmp_path / "out/tokenizer_config.json").read_text() == "{}"


def test_a_lora_state_exports_merged_and_as_an_adapter(new_engine: Engines, model_path: Path, tmp_path: Path) -> None:
    engine = trained(new_engine(lora=LoraSpec(rank=4, alpha=9.0)))
    state = state_path(tmp_path, "default", "job", "s")
    export(state, tmp_path / "merged")
    export(state, tmp_path / "adapter", adapter_alone=True)
    own = logits(engine.base.model)
    merged = load(tmp_path / "merged")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logits(merged), own, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(load(model_path)), own, rtol=1e-3, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reads attributes that transformers deprecates
        loaded = peft.PeftModel.from_pretrained(load(model_path), str(tmp_path / "adapter"))
    assert torch.equal(logits(loaded.eval()), own)


def test_an_adapter_is_exported_without_the_weights_of_its_base(
    new_engine: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base of many gigabytes would be read for nothing, and need that much memory."""
    trained(new_engine(lora=LoraSpec(rank=4)))
    made: list[BaseModel] = []
    make = BaseModel.__init__

    def noted(base: BaseModel, *arguments: Any, **named: Any) -> None:
        make(base, *arguments, **named)
        made.append(base)

    monkeypatch.setattr(BaseModel, "__init__", noted)
    export(state_path(tmp_path, "default", "job", "s"), tmp_path / "adapter", adapter_alone=True)
    (base,) = made
    assert all(parameter.is_meta for parameter in base.model.parameters())


def test_exports_refuse_in_one_line_and_leave_nothing(new_engine: Engines, tmp_path: Path) -> None:
    trained(new_engine())
    state = state_path(tmp_path, "default", "job", "s")
    (tmp_path / "taken").mkdir()
    (tmp_path / "damaged.safetensors").write_bytes(b"x")
    for source, out, adapter, code in (
        (state, "taken", False, "exists"),
        (state, "out", True, "no-adapter"),
        (tmp_path / "damaged.safetensors", "out", False, "bad-checkpoint"),
    ):
        with pytest.raises(Rejected) as caught:
            export(source, tmp_path / out, adapter_alone=adapter)
        assert caught.value.code == code
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "taken").iterdir()) == []
