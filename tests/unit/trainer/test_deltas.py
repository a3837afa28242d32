"""Delta versions: what changed since the parent, and chains of them down to a whole version (R11, V8)."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from openrl_common.deltas import Change, apply_change, materialize, read_chain, read_changes
from openrl_common.errors import Rejected
from openrl_common.records import LoraSpec, WeightsRecord
from openrl_common.weights import read_manifest, verify_files
from openrl_common.wire import SaveWeights
from openrl_trainer.deltas_out import changed
from openrl_trainer.engine import TrainEngine
from openrl_trainer.model import BaseModel
from unit.trainer.conftest import learn, random_data, save_tiny_model, step

Engines = Callable[..., TrainEngine]
RATE = 1e-6  # with masters: a small share of bfloat16 weights changes in a step


@pytest.fixture
def engine(new_base: Callable[..., BaseModel], new_engine: Engines) -> TrainEngine:
    engine = new_engine(base=new_base(dtype="bfloat16"), float32_masters=True, keep=3)
    engine.deltas = True
    return engine


def trained(engine: TrainEngine, seq: int, steps: int = 1, rate: float = RATE) -> tuple[WeightsRecord, int]:
    """Some optimizer steps, then a version; returns the next sequence number too."""
    for _ in range(steps):
        engine.apply(learn(seq, random_data(seq)))
        engine.apply(step(seq + 1, rate))
        seq += 2
    outcome = engine.apply(SaveWeights(seq=seq, incarnation=7))
    assert outcome.result.error is None
    assert outcome.weights is not None
    return outcome.weights, seq + 1


def bits_of(engine: TrainEngine) -> dict[str, np.ndarray]:
    return {
        name: tensor.detach().reshape(-1).view(torch.int16).numpy().view(np.uint16)
        for name, tensor in engine.base.model.state_dict().items()
    }


def test_a_chain_of_deltas_gives_the_trainers_own_bits_R11_V8(engine: TrainEngine) -> None:
    """Several optimizer steps between versions, each delta against the very parent."""
    seq, records = 1, []
    for steps in (1, 1, 3, 2):
        record, seq = trained(engine, seq, steps)
        records.append(record)
        chain = read_chain(record.manifest, record.digest)
        for link in chain:
            verify_files(link.manifest, link.directory)
        rebuilt, own = materialize(chain), bits_of(engine)
        assert rebuilt.keys() <= own.keys()
        assert all(np.array_equal(rebuilt[name], own[name]) for name in rebuilt)
    assert [record.format for record in records] == ["full", "delta", "delta", "delta"]
    assert [record.parent for record in records] == [0, 1, 2, 3]
    manifest = read_manifest(records[-1].manifest)
    assert manifest.baseline == 1
    assert manifest.parent_digest == records[-2].digest
    assert manifest.total_bytes < 0.8 * records[0].total_bytes
    shares = [change.value.size for change in read_changes(Path(records[1].manifest).parent)]
    assert 0 < sum(shares) < sum(bits.size for bits in bits_of(engine).values())


def test_a_version_that_changes_much_is_whole_and_begins_a_new_chain_R11(engine: TrainEngine) -> None:
    _, seq = trained(engine, 1)
    record, seq = trained(engine, seq, rate=1e-1)
    assert record.format == "full"
    record, _ = trained(engine, seq)
    assert (record.format, read_manifest(record.manifest).baseline) == ("delta", 2)


def test_after_some_deltas_comes_a_baseline_R11(new_base: Callable[..., BaseModel], new_engine: Engines) -> None:
    engine = new_engine(base=new_base(dtype="bfloat16"), float32_masters=True, baseline_every=2, keep=9)
    engine.deltas = True
    seq, formats = 1, []
    for _ in range(7):
        record, seq = trained(engine, seq)
        formats.append(record.format)
    assert formats == ["full", "delta", "delta", "full", "delta", "delta", "full"]


def test_retention_keeps_what_kept_versions_build_on_R11(engine: TrainEngine) -> None:
    """Three are kept; deltas keep their chain, a served version stays, what nobody needs goes."""
    seq = 1
    for rate in (RATE, RATE, 1e-1, RATE, RATE, RATE, RATE):
        record, seq = trained(engine, seq, rate=rate)
        engine.retain()
    directory = Path(record.manifest).parents[1]

    def standing() -> list[int]:
        return sorted(int(path.name[1:]) for path in directory.iterdir())

    assert standing() == [3, 4, 5, 6, 7], "1 and 2 went, 3 is the baseline of those kept"
    _, seq = trained(engine, seq, rate=1e-1)
    engine.retain([4])
    assert standing() == [3, 4, 5, 6, 7, 8]
    for _ in range(2):
        record, seq = trained(engine, seq)
    engine.retain([4])
    assert standing() == [3, 4, 8, 9, 10], "4 is served and builds on 3; 5, 6 and 7 are nobody's"


def test_a_restarted_trainer_begins_with_a_whole_version_R11(
    engine: TrainEngine, new_base: Callable[..., BaseModel], new_engine: Engines
) -> None:
    first, seq = trained(engine, 1)
    again = new_engine(base=new_base(dtype="bfloat16"), float32_masters=True)
    again.deltas = True
    again.restore(engine.copy_state(), engine.version)
    record, _ = trained(again, seq)
    assert (record.format, record.version, record.parent) == ("full", 2, first.version)


def test_without_deltas_and_for_adapters_versions_are_whole_and_no_copy_is_kept_R11(
    engine: TrainEngine, new_engine: Engines
) -> None:
    engine.deltas = False
    lora = new_engine(lora=LoraSpec(rank=2), job="lora")
    lora.deltas = True
    for each, wanted in ((engine, "full"), (lora, "lora")):
        seq = 1
        for _ in range(2):
            record, seq = trained(each, seq)
            assert record.format == wanted
        assert each._versions._parent is None


def test_another_parent_than_the_one_named_is_refused_V8(engine: TrainEngine) -> None:
    _, seq = trained(engine, 1)
    record, seq = trained(engine, seq)
    record, _ = trained(engine, seq)
    path = Path(record.manifest)
    parent = path.parent.with_name("v000002") / "manifest.json"
    body = parent.read_bytes()
    parent.write_bytes(body.replace(b'"seq"', b' "seq"', 1))
    with pytest.raises(Rejected, match="need their parent") as caught:
        read_chain(path, record.digest)
    assert caught.value.code == "weights-parent"
    parent.unlink()
    with pytest.raises(Rejected) as caught:
        read_chain(path, record.digest)
    assert caught.value.code == "weights-parent"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(read_manifest(path), parent_digest="")))
    with pytest.raises(Rejected) as caught:
        read_manifest(path)
    assert caught.value.code == "weights-manifest"


def test_an_untied_head_is_part_of_the_delta_R11(
    new_base: Callable[..., BaseModel], new_engine: Engines, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path / "untied", tied=False)
    engine = new_engine(base=new_base(path=path, dtype="bfloat16"), float32_masters=True)
    engine.deltas = True
    _, seq = trained(engine, 1)
    record, _ = trained(engine, seq)
    assert record.format == "delta"
    assert "lm_head.weight" in {change.name for change in read_changes(Path(record.manifest).parent)}
    rebuilt, own = materialize(read_chain(record.manifest)), bits_of(engine)
    assert all(np.array_equal(rebuilt[name], own[name]) for name in own)


def test_bits_are_compared_not_values_R11() -> None:
    seed = secrets.randbits(32)
    random = torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        old = {name: torch.randn(7, 11, generator=random).to(dtype) for name in ("same", "sparse", "dense", "signs")}
        new = {name: tensor.clone() for name, tensor in old.items()}
        new["sparse"].view(-1)[torch.randperm(77, generator=random)[:5]] += 1
        new["dense"] += 1
        old["signs"][0, 0], new["signs"][0, 0] = 0.0, -0.0
        old["signs"][1, 1] = new["signs"][1, 1] = float("nan")
        delta = changed(old, new, 10_000)
        assert delta is not None
        assert set(delta) == {"sparse:index", "sparse:value", "dense", "signs:index", "signs:value"}, f"seed {seed}"
        assert delta["signs:index"].tolist() == [0]
        assert delta["sparse:index"].numel() == 5
        assert changed(old, new, 77 * old["dense"].element_size()) is None, "too large: a whole version is better"


@pytest.mark.parametrize(
    ("index", "value"), [([0, 9], [1, 2]), ([3, 2], [1, 2]), ([2, 2], [1, 2]), (None, [1, 2])],
    ids=["outside", "falling", "twice", "another-size"],
)  # fmt: skip
def test_positions_that_make_no_sense_change_nothing_V8(index: list[int] | None, value: list[int]) -> None:
    target = np.zeros(9, dtype=np.uint16)
    change = Change(
        "t", "BF16", None if index is None else np.array(index, dtype=np.uint32), np.array(value, dtype=np.uint16)
    )
    with pytest.raises(Rejected):
        apply_change(change, target)
    assert not target.any()
