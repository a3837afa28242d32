"""``python -m openrl_trainer``: one trainer worker. The launcher starts it and sets the variables of its seat."""

from __future__ import annotations

from functools import partial

import click

from openrl_common import settings
from openrl_common.prefetch import PREFETCH
from openrl_common.worker import WORKER_SETTINGS, run_worker
from openrl_trainer.cadence import CadenceType
from openrl_trainer.service import TrainerSettings, serve

TRAINER_SETTINGS = (
    settings.setting(
        "--train-token-budget",
        type=settings.WholeNumber(minimum=0),
        default="0",
        help="Tokens of one forward pass at most; 0: from the model's shape and the memory that the seat declares.",
    ),
    settings.setting(
        "--keep-weights",
        type=settings.WholeNumber(minimum=1),
        default="4",
        help="Weights versions of each job kept on disk; older ones are removed.",
    ),
    PREFETCH,
    settings.setting(
        "--torch-threads",
        type=settings.WholeNumber(minimum=0),
        default="0",
        help="Threads of torch on a CPU; 0: OMP_NUM_THREADS, else 1.",
    ),
    settings.setting(
        "--checkpoint-every",
        type=CadenceType(),
        default="60s",
        help="How often a job's training is checkpointed: a duration, or optimizer steps such as 20steps, or off.",
    ),
    settings.setting(
        "--weights-delta",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        help="Full fine-tuning: publish what changed where that is smaller; auto: when the job's sampler takes it.",
    ),
    settings.setting(
        "--baseline-every",
        type=settings.WholeNumber(minimum=1),
        default="10",
        help="Deltas between two whole weights versions.",
    ),
)


@click.command(help=__doc__)
@settings.settings(*WORKER_SETTINGS, *TRAINER_SETTINGS)
def main(**parameters: object) -> None:
    config = settings.from_parameters(TrainerSettings, parameters)
    run_worker("trainer", config, partial(serve, config=config))


if __name__ == "__main__":
    main()
