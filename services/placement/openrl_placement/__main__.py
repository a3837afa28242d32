"""``python -m openrl_placement``: the placement service."""

from __future__ import annotations

import sys

import click

from openrl_common import settings
from openrl_common.service import SERVICE_SETTINGS, ServiceContext, collect_seldom, run
from openrl_placement.service import PlacementSettings, serve

TRAINER_DEVICE_BASE_BYTES = settings.setting(
    "--trainer-device-base",
    name="trainer_device_base_bytes",
    type=settings.BYTES,
    default="4GiB",
    help="Constant of a trainer's device memory in the estimator; lower it for small models on small devices.",
)
SAMPLER_DEVICE_BASE_BYTES = settings.setting(
    "--sampler-device-base",
    name="sampler_device_base_bytes",
    type=settings.BYTES,
    default="512MiB",
    help="Constant of a sampler's device memory in the estimator.",
)
SAMPLER_CACHE_TOKENS = settings.setting(
    "--sampler-cache-tokens",
    type=settings.WholeNumber(minimum=1),
    default="65536",
    help="Tokens that a sampler's key-value cache is sized for.",
)
UPDATE_STAGING_FACTOR = settings.setting(
    "--update-staging-factor",
    type=click.FloatRange(min=0, max=100),
    default="2.5",
    help="With --update-method reload or patch: room that placement counts for a weight update in an FFT sampler, in "
    "sizes of the model's largest tensor (1 GiB comes on top). The sampler itself keeps 2.5 and 1 GiB free, or "
    "--weight-update-headroom-gib.",
)
SCALABLE_SHAPES = settings.setting(
    "--scalable-shapes",
    type=settings.NodeShapes(),
    default="",
    help="Shapes of nodes that could still be added, for example 8x79.65GiB,1x22.5GiB (COUNTxSIZE of a node"
    "'s devices): what only these could hold waits for one, instead of being refused as impossible.",
)
VERDICT_WAIT_S = settings.setting(
    "--verdict-wait",
    name="verdict_wait_s",
    type=settings.SECONDS,
    default="10s",
    help="How long after its submission a workload whose own claim got no word of a launcher tries to share. "
    "A cluster's scheduler takes its time with many of pods, and says so when it finds no device: two minutes there.",
)
PASS_EVERY_S = settings.setting(
    "--pass-every",
    name="pass_every_s",
    type=settings.SECONDS,
    default="10s",
    help="How often placement compares its records with the ledger's and repairs what no event told it.",
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@settings.settings(
    *SERVICE_SETTINGS,
    settings.MAX_SEATS_PER_CLAIM,
    settings.PLACEMENT_STRATEGY,
    settings.OWNER_AFFINITY,
    settings.PLACEMENT_TIMEOUT_S,
    settings.WEDGE_GRACE_S,
    settings.LORA_JOBS_PER_RUNTIME,
    settings.LORA_IDLE_S,
    settings.TRAINER_HOST_BASE_BYTES,
    settings.SAMPLER_HOST_BASE_BYTES,
    TRAINER_DEVICE_BASE_BYTES,
    SAMPLER_DEVICE_BASE_BYTES,
    SAMPLER_CACHE_TOKENS,
    settings.UPDATE_METHOD,
    settings.UPDATE_CHUNK_BYTES,
    UPDATE_STAGING_FACTOR,
    SCALABLE_SHAPES,
    PASS_EVERY_S,
    VERDICT_WAIT_S,
)
def main(**parameters: object) -> None:
    """Placement: turns jobs into workloads, chooses where they may sit, keeps the waiting line, explains every wait."""
    config = settings.from_parameters(PlacementSettings, parameters)

    async def body(context: ServiceContext) -> None:
        await serve(context, config)

    collect_seldom()
    sys.exit(run("placement", config, body))


if __name__ == "__main__":
    main()
