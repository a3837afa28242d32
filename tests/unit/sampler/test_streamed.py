"""Slices into resident parameters (V7): whatever a loader narrows, transposes or fuses, at most a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from openrl_common.deltas import DELTA_FILE, INDEX, VALUE
from openrl_common.tensors import read_header
from openrl_sampler.streamed import DTYPES, NotStreamable, make_plan, write
from openrl_sampler.weights_layers import Layer

WORDS = {dtype: word for word, dtype in DTYPES.items()}


def layer_of(directory: Path, tensors: dict[str, Tensor]) -> Layer:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    shapes = {name: (WORDS[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    return Layer(str(directory), False, dict.fromkeys(tensors, "model.safetensors"), shapes)


class Model:
    """Parameters as a fused, tensor-parallel model keeps them, and the loader that fills them."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self.rank = rank
        self.fused = torch.zeros(12, 6, dtype=dtype)  # q (8 of 16 rows), k (4 of 8 rows)
        self.rows = torch.zeros(5, 4, dtype=dtype)  # half of the columns
        self.turned = torch.zeros(7, 3, dtype=dtype)  # stored the other way round
        self.padded = torch.zeros(8, 6, dtype=dtype)  # six rows and padding
        self.scale = torch.zeros((), dtype=dtype)
        self.parameters = [self.fused, self.rows, self.turned, self.padded, self.scale]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        rank = self.rank
        for name, tensor in weights:
            if name == "q":
                self.fused.narrow(0, 0, 8).copy_(tensor.narrow(0, 8 * rank, 8))
            elif name == "k":
                self.fused[8:].copy_(tensor[4 * rank : 4 * rank + 4])
            elif name == "rows":
                self.rows.copy_(tensor.narrow(1, 4 * rank, 4))
            elif name == "turned":
                self.turned.copy_(tensor.t())
            elif name == "padded":
                self.padded[:6].copy_(tensor)
                self.padded[6:].fill_(0)
            else:
                self.scale.copy_(tensor)


def checkpoint(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (16, 6), "k": (8, 6), "rows": (5, 8), "turned": (3, 7), "padded": (6, 6), "scale": (),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@settings(max_examples=40, deadline=None)
@given(
    rank=st.integers(0, 1),
    chunk=st.integers(1, 200),
    held=st.sampled_from([torch.float32, torch.bfloat16]),
    stored=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_v7_any_chunk_gives_what_the_loader_gives(
    tmp_path_factory: pytest.TempPathFactory, rank: int, chunk: int, held: torch.dtype, stored: torch.dtype, seed: int
) -> None:
    tensors = checkpoint(seed, stored)
    layer = layer_of(tmp_path_factory.mktemp("v"), tensors)
    expected, resident = Model(rank, held), Model(rank, held)
    expected.load_weights(tensors.items())
    plan = make_plan(resident.load_weights, layer.shapes)
    assert all(not parameter.any() for parameter in resident.parameters), "planning writes nothing"
    assert write(plan, [layer], chunk_bytes=chunk, look=lambda: None) == plan.num_elements
    for left, right in zip(resident.parameters, expected.parameters, strict=True):
        assert torch.equal(left, right)


@settings(max_examples=40, deadline=None)
@given(rank=st.integers(0, 1), chunk=st.sampled_from([64, 640, 1 << 20]), seed=st.integers(0, 1000), data=st.data())
def test_v7_a_delta_gives_what_the_whole_version_gives(
    tmp_path_factory: pytest.TempPathFactory, rank: int, chunk: int, seed: int, data: st.DataObject
) -> None:
    """Positions land in whatever slices of the tensor this rank holds."""
    root = tmp_path_factory.mktemp("d")
    before = checkpoint(seed, torch.float32)
    baseline = layer_of(root / "full", before)
    resident, expected = Model(rank, torch.float32), Model(rank, torch.float32)
    plan = make_plan(resident.load_weights, baseline.shapes)
    changed: dict[str, Tensor] = {}
    for name, tensor in before.items():
        positions = data.draw(st.sets(st.integers(0, tensor.numel() - 1)), label=name)
        if name in ("scale", "padded"):
            tensor.add_(1)
            changed[name] = tensor.clone()
        elif positions:
            index = torch.tensor(sorted(positions), dtype=torch.int32)
            tensor.view(-1)[index.long()] += 1
            changed |= {name + INDEX: index, name + VALUE: tensor.view(-1)[index.long()].clone()}
    (root / "delta").mkdir()
    save_file(changed, root / "delta" / DELTA_FILE)
    delta = Layer(str(root / "delta"), True, {}, baseline.shapes)
    expected.load_weights(before.items())
    write(plan, [baseline, delta], chunk_bytes=chunk, look=lambda: None)
    for left, right in zip(resident.parameters, expected.parameters, strict=True):
        assert torch.equal(left, right)


def test_v7_a_loader_that_computes_is_not_streamed() -> None:
    target = torch.zeros(4)

    def plan(load: Any) -> None:
        make_plan(lambda weights: load(dict(weights)["x"]), {"x": ("F32", (4,))})

    with pytest.raises(NotStreamable, match="computed"):
        plan(lambda x: target.copy_(x * 2))
    with pytest.raises(NotStreamable, match="looks at values"):
        plan(lambda x: target.fill_(x[0].item()))
    with pytest.raises(NotStreamable, match="dtype"):
        make_plan(lambda weights: None, {"x": ("F8_E4M3", (4,))})
    assert not target.any()


def test_v7_a_file_that_ends_early_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    layer = layer_of(tmp_path, checkpoint(1, torch.float32))
    model = Model(0, torch.float32)
    plan = make_plan(model.load_weights, layer.shapes)
    headers = read_header(tmp_path / "model.safetensors")
    last = max(headers.values(), key=lambda header: header.end)
    body = (tmp_path / "model.safetensors").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openrl_sampler.streamed.read_header", lambda path: headers)
        (tmp_path / "model.safetensors").write_bytes(body[:-2])
        with pytest.raises(OSError, match=last.name):
            write(plan, [layer], chunk_bytes=1 << 20, look=lambda: None)
