"""What the demo runs: the mix of jobs, their settings, the system they run on. Pure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from openrl_client.recipes import GrpoSettings, RecipeSettings, SftSettings
from openrl_common.quantities import GIB, MIB
from openrl_common.records import JobKind, JobSpec, LoraSpec

MAX_TOKENS = 9
"""Five letters, the end token, and room for a wrong answer."""
GAIN_MIN = 0.1
"""GRPO alone has to raise the held-out reward by more than this in every job."""


class DemoJob(msgspec.Struct, frozen=True):
    """One job of the mix."""

    name: str
    kind: JobKind
    task: str

    def spec(self, model: Path, seed: int, engine: str) -> JobSpec:
        lora = LoraSpec(rank=16, alpha=32.0) if self.kind is JobKind.LORA else None
        return JobSpec(
            name=self.name, kind=self.kind, base_model=str(model), lora=lora, seed=seed, dtype="float32", engine=engine
        )


# The LoRA jobs come first: their runtime's two workers are exclusive and take two of the three devices; the first FFT
# job's workers share the third; the second FFT job waits until seats or devices are free again.
JOBS = (
    DemoJob("lora-sort", JobKind.LORA, "letters:sort"),
    DemoJob("lora-desc", JobKind.LORA, "letters:desc"),
    DemoJob("fft-sort", JobKind.FFT, "letters:sort"),
    DemoJob("fft-desc", JobKind.FFT, "letters:desc"),
)

# vLLM's samplers on a CPU cannot leave a device, so each of the four workers has its own.
JOBS_OF_VLLM = (JOBS[0], JOBS[2])

DEVICES = (6 * GIB,) * 3
DEVICES_OF_VLLM = (6 * GIB,) * 4
MAX_SEATS_PER_CLAIM = 2
LORA_IDLE_S = 1.0
HOST_BASE_BYTES = 256 * MIB


def recipe_settings(
    kind: JobKind, *, seed: int, sft_steps: int, grpo_steps: int, evaluation_samples: int
) -> RecipeSettings:
    """Settings that work for the tiny model (noisy demonstrations, then GRPO 8 x 8 with a weights lag of 1)."""
    lora = kind is JobKind.LORA
    return RecipeSettings(
        sft=SftSettings(steps=sft_steps, batch=64, learning_rate=3e-3 if lora else 1e-3, seed=seed),
        grpo=GrpoSettings(
            steps=grpo_steps,
            prompts=8,
            samples=8,
            learning_rate=2e-3 if lora else 3e-4,
            max_tokens=MAX_TOKENS,
            lag=1,
            seed=seed,
        ),
        evaluation_samples=evaluation_samples,
    )
