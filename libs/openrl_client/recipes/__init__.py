"""Plain, readable training loops over the client (C4): supervised fine-tuning, GRPO, and one after the other."""

from openrl_client.recipes.evaluation import evaluate
from openrl_client.recipes.grpo import GrpoSettings, grpo
from openrl_client.recipes.runner import Outcome, RecipeSettings, run_recipe
from openrl_client.recipes.sft import SftSettings, sft

__all__ = ["GrpoSettings", "Outcome", "RecipeSettings", "SftSettings", "evaluate", "grpo", "run_recipe", "sft"]
