"""GRPO (arXiv:2402.03300) with asynchronous sampling: the samples of the next step are made while this step trains.

    for each step:  samples, rewards → advantages over each prompt's group → forward_backward(ppo, ratio against the
                    sampler's own log-probabilities) · optim_step · publish_weights

Every ``agreement_every`` steps sampler and trainer are compared on the weights just published (V12; 0: never).
``lag`` 1: a step trains on samples of the weights one update older (the ratio corrects for it); 0: strictly on-policy.
No KL penalty, one update a batch. Groups without signal are left out of the pass but count in the normalizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from openrl_client.agreement import measure
from openrl_client.errors import Rejected
from openrl_client.job import Job
from openrl_client.metrics import Metrics, Stopwatch
from openrl_client.recipes.data import batches, group_advantages, policy_datum, warmed_up
from openrl_client.recipes.publishing import published
from openrl_client.tasks import Example, Task, reward_of
from openrl_client.tokenizer import Tokenizer
from openrl_common.wire import AdamParams, Datum, SamplingParams

AGREEMENT_PROMPTS = 4


class GrpoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``learning_rate`` 3e-4 (FFT) and 2e-3 (LoRA) suit the demo's tiny model; real models want 1e-6 and 1e-4."""

    steps: int = 120
    prompts: int = 8
    samples: int = 8
    learning_rate: float = 1e-5
    num_warmup_steps: int = 5
    beta2: float = 0.95
    clip: float = 0.2
    temperature: float = 1.0
    max_tokens: int = 64
    lag: int = 1
    agreement_every: int = 25
    seed: int = 0


class Batch(msgspec.Struct):
    """The samples of one step, scored."""

    prompts: list[list[int]]
    data: list[Datum]
    rewards: list[float]
    num_tokens: int
    versions: list[int]
    seconds: dict[str, float]


async def grpo(
    job: Job,
    task: Task,
    tokenizer: Tokenizer,
    settings: GrpoSettings,
    metrics: Metrics,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Run the recipe. Returns the last weights version published.

    Raises:
        Rejected: what trainer or sampler refused; ``bad-settings``.
    """
    if settings.lag not in (0, 1) or settings.samples < 2:
        raise Rejected("grpo needs lag 0 or 1 and at least 2 samples a prompt", code="bad-settings")
    prompts = batches(task.examples("train"), settings.prompts, random.Random(settings.seed))
    version = await published(job)
    sampling = asyncio.create_task(_collect(job, task, tokenizer, settings, prompts, version))
    try:
        for step in range(settings.steps):
            watch = Stopwatch()
            with watch("wait"):
                batch = await sampling
            last = step + 1 == settings.steps
            if settings.lag and not last:
                sampling = asyncio.create_task(_collect(job, task, tokenizer, settings, prompts, version))
            with watch("train"):
                trained, version = await _update(job, settings, step, batch, version)
            if not settings.lag and not last:
                sampling = asyncio.create_task(_collect(job, task, tokenizer, settings, prompts, version))
            agreement = None
            if settings.agreement_every and step % settings.agreement_every == 0:
                with watch("agreement"):
                    agreement = await _agreement(job, tokenizer, settings, batch, version)
            line = metrics.write(
                recipe="grpo",
                step=step,
                reward=sum(batch.rewards) / len(batch.rewards),
                loss=trained.get("loss"),
                kl=trained.get("kl"),
                clip_fraction=trained.get("clip_fraction"),
                ratio_max=trained.get("ratio_max"),
                grad_norm=trained.get("grad_norm"),
                tokens=batch.num_tokens,
                agreement=agreement,
                seconds={**batch.seconds, **watch.rounded()},
                versions={"sampled": batch.versions, "published": version},
            )
            if on_step is not None:
                on_step(line)
    finally:
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await sampling
    return version


async def _update(
    job: Job, settings: GrpoSettings, step: int, batch: Batch, version: int
) -> tuple[dict[str, float], int]:
    """One update and the weights it made. A batch without any signal changes nothing."""
    if not batch.data:
        return {}, version
    backward = job.forward_backward(
        batch.data,
        loss="ppo",
        loss_config={"clip_low": settings.clip, "clip_high": settings.clip},
        normalizer=float(batch.num_tokens),
    )
    learning_rate = warmed_up(settings.learning_rate, step, settings.num_warmup_steps)
    update = job.optim_step(AdamParams(learning_rate=learning_rate, beta2=settings.beta2))
    publication = job.publish_weights()
    trained = dict((await backward).metrics)
    trained |= {name: value for name, value in (await update).metrics.items() if name == "grad_norm"}
    return trained, await published(job, publication)


async def _agreement(
    job: Job, tokenizer: Tokenizer, settings: GrpoSettings, batch: Batch, version: int
) -> dict[str, float]:
    """Nothing has been trained since ``version``: the next update is asked for after this."""
    found = await measure(
        job, batch.prompts[:AGREEMENT_PROMPTS], version=version, max_tokens=settings.max_tokens,
        stop_token_ids=tokenizer.eos_ids,
    )  # fmt: skip
    return {"mean": found.mean, "max": found.max, "kl": found.kl, "tokens": found.num_tokens}


async def _collect(
    job: Job, task: Task, tokenizer: Tokenizer, settings: GrpoSettings, prompts: Iterator[list[Example]], version: int
) -> Batch:
    """Sample one group per prompt with weights of at least ``version``, and score it."""
    watch = Stopwatch()
    examples = next(prompts)
    encoded = [tokenizer.encode_prompt(example.prompt) for example in examples]
    params = SamplingParams(
        n=settings.samples,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        stop_token_ids=tokenizer.eos_ids,
    )
    with watch("sample"):
        result = await job.sample(encoded, params, at_least=version)
    batch = Batch(prompts=encoded, data=[], rewards=[], num_tokens=0, versions=[], seconds={})
    versions: set[int] = set()
    with watch("reward"):
        for example, prompt, sequences in zip(examples, encoded, result.sequences, strict=True):
            rewards = [
                reward_of(task, example, tokenizer.decode(one.tokens), one.finish_reason == "stop") for one in sequences
            ]
            batch.rewards += rewards
            for sequence, advantage in zip(sequences, group_advantages(rewards), strict=True):
                batch.num_tokens += len(sequence.tokens)
                versions.update(sequence.versions)
                if advantage:
                    batch.data.append(policy_datum(prompt, sequence.tokens, sequence.logprobs, advantage))
    batch.versions = sorted(versions)
    batch.seconds = watch.rounded()
    return batch
