"""The held-out reward of a job: the mean over sampled completions of prompts that were never trained on."""

from __future__ import annotations

import asyncio

from openrl_client.job import Job
from openrl_client.tasks import Example, Task, reward_of
from openrl_client.tokenizer import Tokenizer
from openrl_common.wire import SamplingParams

CHUNK_SEQUENCES = 128
CHUNKS_IN_FLIGHT = 2


async def evaluate(
    job: Job,
    task: Task,
    tokenizer: Tokenizer,
    *,
    samples: int = 800,
    max_tokens: int = 64,
    temperature: float = 1.0,
    at_least: int | None = None,
) -> float:
    """Mean reward over at least ``samples`` completions (standard error about ``0.5 / sqrt(samples)`` for 0/1 rewards).

    Args:
        at_least: the weights version to wait for; None takes what serves.
    """
    held_out = list(task.examples("held-out"))[:samples]
    num_each = max(1, -(-samples // len(held_out)))
    size = max(1, CHUNK_SEQUENCES // num_each)
    chunks = [held_out[start : start + size] for start in range(0, len(held_out), size)]
    params = SamplingParams(
        n=num_each, max_tokens=max_tokens, temperature=temperature, stop_token_ids=tokenizer.eos_ids
    )
    slots = asyncio.Semaphore(CHUNKS_IN_FLIGHT)

    async def rewards_of(chunk: list[Example]) -> list[float]:
        async with slots:
            prompts = [tokenizer.encode_prompt(example.prompt) for example in chunk]
            result = await job.sample(prompts, params, at_least=at_least)
        return [
            reward_of(task, example, tokenizer.decode(one.tokens), one.finish_reason == "stop")
            for example, sequences in zip(chunk, result.sequences, strict=True)
            for one in sequences
        ]

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(rewards_of(chunk)) for chunk in chunks]
    rewards = [reward for task_ in running for reward in task_.result()]
    return sum(rewards) / len(rewards)
