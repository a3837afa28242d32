"""Make a tiny Qwen3-architecture model and a byte-level tokenizer locally: what the demo and the tests train.

    python -m openrl_trainer.tiny_model OUT [--pairs FILE.jsonl] [--steps 400]

328,704 parameters, 1.3 MB of safetensors. With ``--pairs`` (one JSON object a line with ``prompt`` and ``completion``,
in training order) the model is trained on them first. OUT appears whole or not at all (written beside it, renamed).
It is no benchmark: it exists so that a whole reinforcement-learning loop runs in a minute on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from openrl_trainer.model_directory import save_whole

PAD, END = 0, 1
"""Token ids of ``<pad>`` and ``<eos>``; the 256 bytes follow."""

BATCH = 64
LEARNING_RATE = 2e-3
NUM_WARMUP_STEPS = 20
CHECKPOINT_TOKENS_MAX = 256


def make_tokenizer() -> Any:
    """258 tokens, one per byte, left padding: any text can be encoded, nothing has to be learned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_model(seed: int, num_tokens: int) -> Any:
    """A Qwen3 model with random weights, float32, tied embeddings."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=num_tokens,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CHECKPOINT_TOKENS_MAX,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def read_pairs(path: Path, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompt and completion (with its end token) of every line."""
    pairs = []
    for line in path.read_bytes().splitlines():
        pair = msgspec.json.decode(line, type=dict[str, str])
        pairs.append((tokenizer.encode(pair["prompt"]), [*tokenizer.encode(pair["completion"]), END]))
    return pairs


def _batches(pairs: list[tuple[list[int], list[int]]], steps: int) -> Iterator[tuple[Any, Any]]:
    """Right-padded ids and labels (-100 on prompt and padding) of ``steps`` batches, in the order of the pairs."""
    import torch

    for step in range(steps):
        chosen = [pairs[(step * BATCH + index) % len(pairs)] for index in range(BATCH)]
        width = max(len(prompt) + len(completion) for prompt, completion in chosen)
        ids = torch.full((BATCH, width), PAD)
        labels = torch.full((BATCH, width), -100)
        for row, (prompt, completion) in enumerate(chosen):
            end = len(prompt) + len(completion)
            ids[row, :end] = torch.tensor(prompt + completion)
            labels[row, len(prompt) : end] = torch.tensor(completion)
        yield ids, labels


def train(model: Any, pairs: list[tuple[list[int], list[int]]], steps: int) -> float:
    """Next-token training on the completions; returns the last loss. Says where it is every 50 steps."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    loss = torch.zeros(())
    for step, (ids, labels) in enumerate(_batches(pairs, steps)):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / NUM_WARMUP_STEPS)
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            click.echo(f"step {step + 1}/{steps} loss {loss.item():.3f}")
    return loss.item()


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--pairs", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Train on these first.")
@click.option("--steps", type=click.IntRange(1, 100_000), default=400, show_default=True, help="Steps of 64 pairs.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the initial weights.")
def main(out: Path, pairs: Path | None, steps: int, seed: int) -> None:
    """Write a tiny model and its tokenizer to OUT."""
    if out.exists():
        raise click.UsageError(f"{str(out)!r} exists already: choose another directory or remove it")
    import torch

    torch.set_num_threads(1)  # nothing here is large enough for two, and on busy cores they wait for each other
    tokenizer = make_tokenizer()
    model = make_model(seed, len(tokenizer))
    if pairs is not None:
        train(model, read_pairs(pairs, tokenizer), steps)
    save_whole(out, model, tokenizer)
    click.echo(f"model: {out}")


if __name__ == "__main__":
    sys.exit(main())
