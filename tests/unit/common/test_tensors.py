"""Safetensors headers are read exactly, and nothing in a broken file is believed (M1, R11, V6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openrl_common.errors import Rejected
from openrl_common.tensors import INDEX_NAME, SINGLE_NAME, checkpoint_files, read_checkpoint, read_header


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_headers_agree_with_the_reference_writer(tmp_path: Path) -> None:
    arrays = {
        "embed": np.arange(12, dtype=np.float32).reshape(4, 3),
        "norm": np.ones(5, dtype=np.float16),
        "step": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    path = tmp_path / SINGLE_NAME
    save_file(arrays, path, metadata={"format": "pt"})
    header = read_header(path)
    raw = path.read_bytes()
    assert set(header) == set(arrays)
    for name, array in arrays.items():
        assert header[name].shape == array.shape
        assert raw[header[name].begin : header[name].end] == array.tobytes()
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.total_bytes, checkpoint.num_elements, checkpoint.largest.name) == (
        48 + 10 + 8,
        12 + 5 + 1,
        "embed",
    )


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    save_file({"a": np.ones(4, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": np.ones(8, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"stray": np.ones(8, np.float32)}, tmp_path / "other.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map}))
    assert [path.name for path in checkpoint_files(tmp_path)] == sorted(weight_map.values())
    assert read_checkpoint(tmp_path).total_bytes == 48
    assert read_checkpoint(tmp_path).files["b"].name == weight_map["b"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-00002.safetensors"}, "missing: model-00002.safetensors"),
        ({"a": "../model.safetensors"}, "not a safetensors file beside it"),
        ({}, "missing: every file"),
        ({"b": SINGLE_NAME}, "'b' is not in model.safetensors"),
    ],
)
def test_an_index_that_disagrees_with_its_files_is_refused(
    tmp_path: Path, weight_map: dict[str, str], message: str
) -> None:
    save_file({"a": np.ones(4, np.float32)}, tmp_path / SINGLE_NAME)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Rejected, match=message):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("index", [b"{", b"[]", b'{"weight_map": {"a": 1}}', b"\xff"])
def test_an_unreadable_index_is_refused(tmp_path: Path, index: bytes) -> None:
    (tmp_path / INDEX_NAME).write_bytes(index)
    with pytest.raises(Rejected, match=INDEX_NAME):
        checkpoint_files(tmp_path)


def test_M1_a_directory_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"neither model.safetensors.index.json nor model.safetensors"):
        checkpoint_files(tmp_path)
    with pytest.raises(Rejected, match="No such file"):
        read_header(tmp_path / SINGLE_NAME)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry("F32", [2], 0, 8)}, b"\0" * 7, "tensors end at byte"),
        ({"a": entry("F32", [2], 0, 8)}, b"\0" * 9, "tensors end at byte"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, b"\0" * 12, "a hole or an overlap"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 16, 24)}, b"\0" * 24, "a hole or an overlap"),
        ({"a": entry("F32", [3], 0, 8)}, b"\0" * 8, "does not take 8 bytes"),
        ({"a": entry("F32", [-2], 0, 8)}, b"\0" * 8, "has shape"),
        ({"a": entry("F32", [2], 8, 0)}, b"\0" * 8, "offsets 8..0"),
        ({"a": entry("Q99", [2], 0, 8)}, b"\0" * 8, "unknown dtype 'Q99'"),
        ({"a": {"dtype": "F32"}}, b"", "header is not valid"),
        (b"not json", b"", "header is not valid"),
        (b"[1, 2]", b"", "header is not valid"),
        (b"\xff\xfe", b"", "header is not valid"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write(tmp_path / "torn.safetensors", header, data)
    with pytest.raises(Rejected, match=rf"torn\.safetensors: .*{message}"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\x05", (2**63).to_bytes(8, "little"), (50).to_bytes(8, "little") + b"{}"])
def test_a_header_length_past_the_file_is_refused_before_it_is_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(Rejected, match="incomplete or not safetensors"):
        read_header(path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": np.ones(4, np.float32)}, tmp_path / name)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    with pytest.raises(Rejected, match=r"'a' is in x.safetensors too"):
        read_checkpoint(tmp_path)
