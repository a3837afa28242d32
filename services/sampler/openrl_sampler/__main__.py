"""``python -m openrl_sampler``: one sampler worker. The launcher starts it and sets the variables of its seat."""

from __future__ import annotations

from functools import partial

import click

from openrl_common import settings
from openrl_common.prefetch import PREFETCH
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
    settings.setting(
        "--adapter-slots",
        type=settings.WholeNumber(minimum=1),
        default="8",
        help="vLLM: LoRA adapters that one batch may mix; device memory is taken for each.",
    ),
    settings.setting(
        "--weight-update-headroom-gib",
        name="update_headroom_gib",
        type=click.FloatRange(min=0.0),
        default="0",
        help="Device memory kept free for a weight update; 0 = by the formula of its method.",
    ),
    settings.setting(
        "--running-at-update",
        type=click.Choice(["keep", "abort"]),
        default="keep",
        help="What becomes of generation that runs when new full weights come: keep = it goes on with them,"
        " abort = it is answered `superseded`. LoRA generation always ends on the adapter it began with.",
    ),
    settings.setting(
        "--vllm-memory-share",
        type=click.FloatRange(0.0, 1.0),
        default="0",
        help="vLLM: share of the device (its gpu-memory-utilization); 0 = what the seat declares.",
    ),
    settings.setting(
        "--vllm-cudagraph-capture-sizes",
        name="vllm_capture_sizes",
        default="",
        help="vLLM: batch sizes to capture device graphs for: a list, or `default` for vLLM's own;"
        " empty = powers of two up to --max-num-seqs.",
    ),
    settings.setting(
        "--vllm-compile",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        help="vLLM: torch.compile and device graphs; auto = on GPUs.",
    ),
    settings.setting(
        "--vllm-cache-dir",
        name="vllm_cache_directory",
        type=settings.Directory(),
        help="vLLM: directory on a shared volume that keeps compiled code for every node.",
    ),
    settings.setting(
        "--vllm-cache-hostpath",
        type=settings.Directory(),
        help="vLLM: directory of this node that compiled code is written to; the same path on every node."
        " Default: <home>/cache/vllm; with --vllm-cache-dir a folder in the temporary directory.",
    ),
    settings.setting(
        "--engine-stuck-after",
        name="engine_stuck_after_s",
        type=settings.SECONDS,
        default="5m",
        help="An engine that takes longer over one step is dead: its requests go elsewhere, the process ends."
        " 0 = never.",
    ),
    settings.setting(
        "--agreement-limit",
        type=click.FloatRange(min=0.0),
        default="0.1",
        help="Mean difference of a token's log-probability, sampler against trainer, above which it is said; 0 = never."
        " bfloat16 explains 0.07 (its logits of 16 to 32 are 0.125 apart), float32 0.0001.",
    ),
    PREFETCH,
)


@click.command(help=__doc__)
@settings.settings(*WORKER_SETTINGS, *SAMPLER_SETTINGS)
def main(**parameters: object) -> None:
    config = settings.from_parameters(SamplerSettings, parameters)
    run_worker("sampler", config, partial(serve, config=config))


if __name__ == "__main__":
    main()
