"""Any causal language model of transformers: heads that cap or scale logits, Conv1D layers, base-model dropout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from openrl_common.records import LoraSpec
from openrl_common.wire import Forward, SaveWeights
from openrl_trainer.engine import TrainEngine
from openrl_trainer.model import BaseModel
from unit.trainer.conftest import LENGTH_MAX, VOCABULARY, learn, random_data, step

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LENGTH_MAX}  # fmt: skip
CONFIGS = {
    "gemma2-capped-logits": (
        transformers.Gemma2Config(vocab_size=VOCABULARY, final_logit_softcapping=2.0, **SHAPE), True
    ),
    "granite-scaled-logits": (transformers.GraniteConfig(vocab_size=VOCABULARY, logits_scaling=4.0, **SHAPE), True),
    "cohere-scaled-logits": (transformers.CohereConfig(vocab_size=VOCABULARY, logit_scale=0.25, **SHAPE), True),
    "hyperclovax-scaled-otherwise": (
        transformers.HyperCLOVAXConfig(vocab_size=VOCABULARY, logits_scaling=4.0, **SHAPE), False
    ),
    "gpt2-conv1d-dropout": (
        transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH_MAX, n_embd=32, n_layer=2, n_head=4), True
    ),
    "llama": (transformers.LlamaConfig(vocab_size=VOCABULARY, **SHAPE), True),
}  # fmt: skip


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["fft", "lora"])
@pytest.mark.parametrize("name", CONFIGS)
def test_forward_is_the_models_own_and_training_moves_it_R3(
    new_base: Callable[..., BaseModel], new_engine: Callable[..., TrainEngine], tmp_path: Path, name: str,
    lora: LoraSpec | None,
) -> None:  # fmt: skip
    config, split_head = CONFIGS[name]
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path / "base"))
    base = new_base(path=tmp_path / "base", frozen=lora is not None)
    assert base.split_head is split_head
    engine = new_engine(base=base, lora=lora)
    data = random_data(1)
    for seq in (1, 4):
        logprobs = engine.apply(Forward(seq=seq, incarnation=7, data=data)).result.logprobs
        assert logprobs is not None
        for datum, row in zip(data, logprobs, strict=True):
            tokens = torch.tensor([datum.tokens], device=base.device)
            with torch.no_grad():
                plain = base.model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(row[1:]), plain.cpu(), rtol=1e-4, atol=1e-4)
        loss = engine.apply(learn(seq + 1, data)).result.metrics["loss"]
        assert loss == pytest.approx(-sum(sum(row[2:]) for row in logprobs), rel=1e-3)
        assert engine.apply(step(seq + 2, 3e-3)).result.error is None
    assert engine.apply(learn(7, data)).result.metrics["loss"] < loss
    assert engine.apply(SaveWeights(seq=8, incarnation=7)).result.version == 1
