"""A model that is loaded while its checkpoint is read is the one that from_pretrained gives, bit for bit (R1)."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from openrl_common import page_cache, prefetch_reading
from openrl_common.arriving import load_arriving
from openrl_common.errors import Rejected
from openrl_common.prefetch import Prefetch, PrefetchMode
from openrl_common.prefetch_blocks import Block
from openrl_trainer.model import BaseModel
from unit.trainer.conftest import VOCABULARY, save_tiny_model
from unit.trainer.test_architectures import CONFIGS, SHAPE

CPU = torch.device("cpu")
MIXTRAL = transformers.MixtralConfig(vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2, **SHAPE)
"""Its experts lie in the checkpoint one by one, and in the model in one tensor."""


@pytest.fixture(autouse=True)
def unknown_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that everything is read, wherever the test's files are."""
    monkeypatch.setattr(page_cache, "_may_ask", lambda _: False)


def arriving(directory: Path, dtype: torch.dtype) -> Any:
    prefetch = Prefetch(directory, mode=PrefetchMode.ALWAYS)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(prefetch.run)
        model = load_arriving(transformers, directory, dtype=dtype, device=CPU, prefetch=prefetch)
        assert done.result().decision.read
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*CONFIGS, "mixtral", "qwen3-tied", "qwen3", "shards"])
def test_R1_every_parameter_and_buffer_is_the_one_of_from_pretrained(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    if name.startswith("qwen3"):
        save_tiny_model(tmp_path, tied=name == "qwen3-tied")
    else:
        config = MIXTRAL if name == "mixtral" else CONFIGS["llama" if name == "shards" else name][0]
        made: Any = transformers.AutoModelForCausalLM.from_config(config)
        made.to(torch.bfloat16).save_pretrained(str(tmp_path), max_shard_size="20KB" if name == "shards" else "1GB")
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=dtype)
    model = arriving(tmp_path, dtype)
    assert type(model) is type(plain)
    assert {key: value.dtype for key, value in model.state_dict().items()} == {
        key: value.dtype for key, value in plain.state_dict().items()
    }
    for ours, theirs in ((model.named_parameters, plain.named_parameters), (model.named_buffers, plain.named_buffers)):
        expected = dict(theirs())
        found = dict(ours())
        assert list(found) == list(expected)  # tied ones once
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()


def test_R1_a_tensor_is_not_taken_out_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read until the first tensor has been asked for."""
    save_tiny_model(tmp_path)
    let_go = threading.Event()
    taken: list[bool] = []
    bring, wait_for = prefetch_reading.Reading._bring, Prefetch.wait_for

    def held(reading: prefetch_reading.Reading, block: Block, buffer: memoryview) -> bool:
        let_go.wait()
        return bring(reading, block, buffer)

    def waiting(prefetch: Prefetch, tensor: str) -> None:
        let_go.set()
        wait_for(prefetch, tensor)
        assert prefetch._reading is not None
        taken.append(prefetch._reading._to_wait_for.isdisjoint(prefetch._reading._blocks.of_tensor[tensor]))

    monkeypatch.setattr(prefetch_reading.Reading, "_bring", held)
    monkeypatch.setattr(Prefetch, "wait_for", waiting)
    model = arriving(tmp_path, torch.float32)
    assert len(taken) == len(list(model.parameters()))
    assert all(taken)


def test_R1_what_cannot_be_read_is_said_by_its_name_and_transformers_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path)
    opener = transformers.modeling_utils.safe_open

    def fails(_reading: prefetch_reading.Reading, block: Block, _buffer: memoryview) -> bool:
        raise prefetch_reading.unreadable(block.path, block.offset, "Input/output error")

    monkeypatch.setattr(prefetch_reading.Reading, "_bring", fails)
    prefetch = Prefetch(tmp_path, mode=PrefetchMode.ALWAYS)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(prefetch.run)
        with pytest.raises(Rejected, match=r"model\.safetensors' cannot be read at byte .*Input/output error"):
            BaseModel(str(tmp_path), dtype="float32", device=CPU, frozen=True, prefetch=prefetch)
        assert isinstance(done.exception(), Rejected)
    assert transformers.modeling_utils.safe_open is opener


def test_R1_a_version_of_transformers_that_opens_files_otherwise_loads_when_all_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path)
    read: list[int] = []

    class Other:
        modeling_utils = object()

        class AutoModelForCausalLM:
            @staticmethod
            def from_pretrained(path: str, **_: Any) -> Any:
                read.append(prefetch._reading.read_bytes if prefetch._reading is not None else 0)
                return json.loads((Path(path) / "config.json").read_text())

    prefetch = Prefetch(tmp_path, mode=PrefetchMode.ALWAYS)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(prefetch.run)
        load_arriving(Other, tmp_path, dtype=None, device=None, prefetch=prefetch)
        assert read == [done.result().read_bytes]
    assert read[0] > 0
