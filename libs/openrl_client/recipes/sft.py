"""Supervised fine-tuning on a task's demonstrations.

    for each step:  forward_backward(cross_entropy, loss summed over completion tokens ÷ their number) · optim_step

Two steps are in flight (C2): while the trainer works on one, the next is on its way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from openrl_client.errors import Rejected
from openrl_client.job import Job
from openrl_client.metrics import Metrics, Stopwatch
from openrl_client.recipes.data import batches, supervised_datum, warmed_up
from openrl_client.tasks import Task
from openrl_client.tokenizer import Tokenizer
from openrl_client.training import Pending
from openrl_common.wire import AdamParams

IN_FLIGHT = 2


class SftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``learning_rate`` 1e-3 (FFT) and 3e-3 (LoRA) suit the demo's tiny model; real models want 1e-5 and 2e-4."""

    steps: int = 80
    batch: int = 64
    learning_rate: float = 1e-4
    num_warmup_steps: int = 5
    beta2: float = 0.98
    seed: int = 0


async def sft(
    job: Job,
    task: Task,
    tokenizer: Tokenizer,
    settings: SftSettings,
    metrics: Metrics,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Run the recipe; the job's weights are not published.

    Raises:
        Rejected: ``bad-task``, the task has no demonstrations; or what the trainer refused.
    """
    randomness = random.Random(settings.seed)
    examples = batches(task.examples("train"), settings.batch, randomness)
    flying: list[tuple[int, int, Pending, Pending]] = []
    for step in range(settings.steps):
        data = []
        for example in next(examples):
            demonstration = task.demonstration(example, randomness)
            if demonstration is not None:
                completion = tokenizer.encode_completion(demonstration)
                data.append(supervised_datum(tokenizer.encode_prompt(example.prompt), completion))
        if not data:
            raise Rejected(f"task {task.name} has no demonstrations: run grpo without sft", code="bad-task")
        num_tokens = sum(int(sum(datum.weights)) for datum in data)
        learning_rate = warmed_up(settings.learning_rate, step, settings.num_warmup_steps)
        backward = job.forward_backward(data, loss="cross_entropy", normalizer=float(num_tokens))
        update = job.optim_step(AdamParams(learning_rate=learning_rate, beta2=settings.beta2))
        flying.append((step, num_tokens, backward, update))
        if len(flying) >= IN_FLIGHT:
            await _land(flying.pop(0), metrics, on_step)
    for one in flying:
        await _land(one, metrics, on_step)


async def _land(
    flying: tuple[int, int, Pending, Pending], metrics: Metrics, on_step: Callable[[dict[str, Any]], None] | None
) -> None:
    step, num_tokens, backward, update = flying
    watch = Stopwatch()
    with watch("train"):
        loss = (await backward).metrics
        grad_norm = (await update).metrics.get("grad_norm")
    line = metrics.write(
        recipe="sft",
        step=step,
        loss=loss.get("loss"),
        grad_norm=grad_norm,
        tokens=num_tokens,
        seconds=watch.rounded(),
    )
    if on_step is not None:
        on_step(line)
