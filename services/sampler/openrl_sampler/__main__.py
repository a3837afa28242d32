"""``python -m openrl_sampler``: one sampler worker. The launcher starts it and sets the variables of its seat."""

from __future__ import annotations

from functools import partial

import click

from openrl_common import settings
from openrl_common.worker import WORKER_SETTINGS, run_worker
from openrl_sampler.service import SamplerSettings, serve

SAMPLER_SETTINGS = (
    settings.setting(
        "--max-num-seqs",
        type=settings.WholeNumber(minimum=1),
        default="256",
        help="Sequences generated at the same time at most.",
    ),
    settings.setting(
        "--max-waiting-requests",
        type=settings.WholeNumber(minimum=1),
        default="256",
        help="Requests held in line at most; more are answered `busy`.",
    ),
    settings.setting(
        "--max-sequences-per-request",
        type=settings.WholeNumber(minimum=1),
        default="4096",
        help="Prompts × n of one request at most.",
    ),
    settings.setting(
        "--prefill-tokens",
        type=settings.WholeNumber(minimum=1),
        default="8192",
        help="Prompt tokens that go through the model at once.",
    ),
    settings.setting(
        "--max-adapters",
        type=settings.WholeNumber(minimum=1),
        default="32",
        help="LoRA adapters kept loaded at most; an evicted one is loaded again when it is asked for.",
    ),
)


@click.command(help=__doc__)
@settings.settings(*WORKER_SETTINGS, *SAMPLER_SETTINGS)
def main(**parameters: object) -> None:
    config = settings.from_parameters(SamplerSettings, parameters)
    run_worker("sampler", config, partial(serve, config=config))


if __name__ == "__main__":
    main()
