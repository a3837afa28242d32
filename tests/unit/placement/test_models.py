"""M1: sizes of models are read once per version of the model's files."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from openrl_common.errors import Rejected
from openrl_common.tensors import INDEX_NAME
from openrl_placement import models
from openrl_placement.estimator import Model
from openrl_placement.models import Models
from unit.placement.test_estimator import QWEN3_06B


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    return tmp_path


async def parameters(kept: Models, directory: Path) -> int:
    model = await kept.read(str(directory))
    assert isinstance(model, Model)
    assert kept.known(str(directory)) == model
    return model.parameters


def write_weights(path: Path, rows: int) -> None:
    tensors = {"w": {"dtype": "F32", "shape": [rows, 3], "data_offsets": [0, rows * 12]}}
    header = json.dumps(tensors).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(rows * 12))


async def test_M1_weights_that_arrive_or_change_after_the_config_was_read_are_counted(directory: Path) -> None:
    kept = Models()
    from_config = await parameters(kept, directory)
    write_weights(directory / "model.safetensors", 10)
    assert kept.known(str(directory)) is None
    assert await parameters(kept, directory) == 30
    write_weights(directory / "model.safetensors", 11)
    assert await parameters(kept, directory) == 33
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    assert await parameters(kept, directory) == from_config
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    assert await parameters(kept, directory) == 33


async def test_M1_what_has_not_changed_is_not_read_again_and_a_touched_config_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Models()
    before = await parameters(kept, directory)
    monkeypatch.setattr(models, "read_model", lambda directory: pytest.fail("read again"))
    assert await parameters(kept, directory) == before
    os.utime(directory / "config.json", ns=(1, 1))
    assert kept.known(str(directory)) is None


async def test_M1_a_model_that_cannot_be_read_is_not_kept(tmp_path: Path) -> None:
    kept = Models()
    assert isinstance(await kept.read(str(tmp_path)), Rejected)
    assert kept.known(str(tmp_path)) is None
    assert kept.known("/m/\0") is None, "a path that no system takes"
