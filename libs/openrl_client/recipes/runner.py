"""SFT, GRPO, or one after the other, with the held-out reward measured before, between and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from openrl_client.errors import Rejected
from openrl_client.job import Job
from openrl_client.metrics import Metrics
from openrl_client.recipes.evaluation import evaluate
from openrl_client.recipes.grpo import GrpoSettings, grpo
from openrl_client.recipes.publishing import published
from openrl_client.recipes.sft import SftSettings, sft
from openrl_client.tasks import Task
from openrl_client.tokenizer import Tokenizer

RECIPES = ("sft", "grpo", "sft+grpo")


class RecipeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``evaluation_samples`` 0 measures nothing."""

    sft: SftSettings = SftSettings()
    grpo: GrpoSettings = GrpoSettings()
    evaluation_samples: int = 800


class Outcome(msgspec.Struct, kw_only=True):
    """Held-out rewards (None: not measured) and when the first step had ended (Unix seconds)."""

    reward_before: float | None = None
    reward_after_sft: float | None = None
    reward_after: float | None = None
    first_step_at: float | None = None


async def run_recipe(
    job: Job,
    recipe: str,
    task: Task,
    tokenizer: Tokenizer,
    settings: RecipeSettings,
    metrics: Metrics,
    *,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_phase: Callable[[str, float | None], None] | None = None,
) -> Outcome:
    """Run ``recipe`` (one of RECIPES) on a ready job.

    Args:
        on_phase: told what begins (``evaluate``, ``sft``, ``grpo``, ``done``) and the last held-out reward.
    """
    if recipe not in RECIPES:
        raise Rejected(f"recipe {recipe!r} is not known: use one of {', '.join(RECIPES)}", code="usage")
    outcome = Outcome()
    reward: float | None = None

    def begin(phase: str) -> None:
        if on_phase is not None:
            on_phase(phase, reward)

    async def measure(when: str, version: int | None) -> float | None:
        if settings.evaluation_samples == 0:
            return None
        begin("evaluate")
        measured = await evaluate(
            job,
            task,
            tokenizer,
            samples=settings.evaluation_samples,
            max_tokens=settings.grpo.max_tokens,
            at_least=version,
        )
        metrics.write(recipe="evaluate", when=when, reward=measured)
        return measured

    reward = outcome.reward_before = await measure("before", None)
    if "sft" in recipe:
        begin("sft")
        await sft(job, task, tokenizer, settings.sft, metrics, on_step)
        version = await published(job)
        reward = outcome.reward_after_sft = outcome.reward_after = await measure("after sft", version)
    if "grpo" in recipe:
        begin("grpo")
        version = await grpo(job, task, tokenizer, settings.grpo, metrics, on_step)
        reward = outcome.reward_after = await measure("after grpo", version)
    outcome.first_step_at = metrics.first_step_at
    begin("done")
    return outcome
