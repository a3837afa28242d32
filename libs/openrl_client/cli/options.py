"""The options that describe a job and a recipe, and the structs they become."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from openrl_client.errors import Rejected
from openrl_common.names import check_job
from openrl_common.records import DEVICES_MAX, ENGINES, JobKind, JobSpec, LoraSpec

if TYPE_CHECKING:
    from openrl_client.recipes import RecipeSettings

Command = TypeVar("Command", bound=Callable[..., Any])


def _stack(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            return msgspec.json.decode(str(value), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            self.fail(f"{str(value)[:60]!r} is not a JSON object ({error})", param, ctx)


class FinitePositive(click.ParamType[float]):
    """A finite number above 0 (click's own ranges let nan and inf pass)."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            self.fail(f"{str(value)[:60]!r} is not a finite number above 0", param, ctx)
        return number


_RANK = click.option("--rank", type=click.IntRange(1, 512), help="LoRA rank. [default: 16]")
_DTYPE = click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), help="Of the weights. [default: auto]"
)
_EXCLUSIVE = click.option(
    "--exclusive/--shared", default=None, help="May it share its device? [default: fft shares, lora does not]"
)
_PRIORITY = click.option(
    "--priority", type=click.IntRange(-1000, 1000), help="Higher goes first in the waiting line. [default: 0]"
)
_ENGINE = click.option("--engine", type=click.Choice(ENGINES), help="Sampling engine. [default: auto]")
_TRAINER_DEVICES = click.option(
    "--trainer-devices",
    type=click.IntRange(1, DEVICES_MAX),
    help="Devices of one node for the trainer: fft shards the model, lora divides the data. [default: 1]",
)
_SAMPLER_DEVICES = click.option(
    "--sampler-devices", type=click.IntRange(1, DEVICES_MAX), help="The same for the sampler, with vllm. [default: 1]"
)

runtime_options = _stack(_RANK, _DTYPE, _EXCLUSIVE, _PRIORITY, _ENGINE, _TRAINER_DEVICES, _SAMPLER_DEVICES)

job_options = _stack(
    click.option("--name", help="The job's name; `run` makes one up."),
    click.option("--model", "base_model", help="Directory of a Hugging Face model that the workers can read."),
    click.option(
        "--kind", type=click.Choice([kind.value for kind in JobKind]), help="lora: adapters; fft: all weights."
    ),
    _RANK,
    click.option("--alpha", type=FinitePositive(), help="LoRA alpha. [default: 32]"),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Of the job's random numbers. [default: 0]"),
    _DTYPE,
    click.option(
        "--float32-masters", is_flag=True, default=None, help="fft in bfloat16: float32 copies of the weights beside."
    ),
    _EXCLUSIVE,
    _PRIORITY,
    _ENGINE,
    _TRAINER_DEVICES,
    _SAMPLER_DEVICES,
)

recipe_options = _stack(
    click.option("--task", required=True, help="letters:sort, a reasoning-gym dataset, or FILE.py:FUNCTION."),
    click.option("--task-config", type=JsonObject(), help="Settings of a reasoning-gym dataset, as JSON."),
    click.option(
        "--task-size", type=click.IntRange(2, 1_000_000), default=1000, show_default=True, help="Its entries."
    ),
    click.option(
        "--prompts",
        "prompts_file",
        type=click.Path(path_type=Path),
        help="JSON lines with `prompt` (and `answer`), for a reward function.",
    ),
    click.option(
        "--steps",
        type=click.IntRange(1, 10_000_000),
        default=100,
        show_default=True,
        help="GRPO steps (sft: SFT steps).",
    ),
    click.option("--sft-steps", type=click.IntRange(1, 10_000_000), help="SFT steps. [default: --steps]"),
    click.option("--batch", type=click.IntRange(1, 65_536), default=64, show_default=True, help="SFT examples a step."),
    click.option(
        "--prompts-per-step", type=click.IntRange(1, 65_536), default=8, show_default=True, help="GRPO prompts."
    ),
    click.option(
        "--samples", type=click.IntRange(2, 4_096), default=8, show_default=True, help="GRPO samples a prompt."
    ),
    click.option(
        "--max-tokens", type=click.IntRange(1, 10_000_000), default=64, show_default=True, help="Longest completion."
    ),
    click.option("--learning-rate", type=FinitePositive(), help="GRPO. [default: lora 1e-4, fft 1e-6]"),
    click.option("--sft-learning-rate", type=FinitePositive(), help="SFT. [default: lora 2e-4, fft 1e-5]"),
    click.option(
        "--lag", type=click.IntRange(0, 1), default=1, show_default=True, help="Weights lag of the samples (GRPO)."
    ),
    click.option(
        "--evaluate",
        type=click.IntRange(0, 1_000_000),
        default=200,
        show_default=True,
        help="Held-out samples; 0: none.",
    ),
    click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Where metrics.jsonl goes."),
)

_SPEC_FIELDS = (
    "name", "base_model", "kind", "seed", "dtype", "float32_masters", "exclusive", "priority", "engine",
    "trainer_devices", "sampler_devices",
)  # fmt: skip


def spec_of(parameters: dict[str, Any], file: Path | None = None) -> JobSpec:
    """The JobSpec of a file and of options, which win.

    Raises:
        Rejected: ``bad-spec``, naming the field; unknown fields are refused.
        click.UsageError: a required option is missing.
    """
    fields: dict[str, Any] = {} if file is None else _read_spec(file)
    fields |= {name: parameters[name] for name in _SPEC_FIELDS if parameters.get(name) is not None}
    lora = {name: parameters[name] for name in ("rank", "alpha") if parameters.get(name) is not None}
    for field, flag in (("name", "--name"), ("kind", "--kind"), ("base_model", "--model")):
        if not fields.get(field):
            raise click.UsageError(f"{flag} is missing")
    if fields["kind"] == JobKind.LORA:
        fields["lora"] = {"rank": LoraSpec().rank, **(fields.get("lora") or {}), **lora}
    elif lora:
        raise click.UsageError("--rank and --alpha are for --kind lora")
    check_job(fields["name"])
    if file is None or parameters.get("base_model"):
        fields["base_model"] = str(Path(fields["base_model"]).expanduser().absolute())
    try:
        return msgspec.convert(fields, JobSpec)
    except msgspec.ValidationError as error:
        raise Rejected(f"job {fields['name']}: {error}", code="bad-spec") from None


def _read_spec(file: Path) -> dict[str, Any]:
    try:
        body = file.read_bytes()
        if file.suffix in (".yaml", ".yml"):
            return msgspec.yaml.decode(body, type=dict[str, Any])
        return msgspec.json.decode(body, type=dict[str, Any])
    except OSError as error:
        raise Rejected(f"job file {str(file)!r} cannot be read: {error.strerror}", code="bad-spec") from None
    except ImportError:
        raise Rejected("a YAML job file needs PyYAML: pip install pyyaml, or write JSON", code="bad-spec") from None
    except msgspec.MsgspecError as error:
        raise Rejected(f"job file {str(file)!r}: {error}", code="bad-spec") from None


def recipe_of(parameters: dict[str, Any]) -> RecipeSettings:
    """The recipe's settings. Learning rates by kind, as usual for models of some billion parameters."""
    from openrl_client.recipes import GrpoSettings, RecipeSettings, SftSettings

    lora = parameters["kind"] == JobKind.LORA
    seed = parameters["seed"] or 0
    return RecipeSettings(
        sft=SftSettings(
            steps=parameters["sft_steps"] or parameters["steps"],
            batch=parameters["batch"],
            learning_rate=parameters["sft_learning_rate"] or (2e-4 if lora else 1e-5),
            seed=seed,
        ),
        grpo=GrpoSettings(
            steps=parameters["steps"],
            prompts=parameters["prompts_per_step"],
            samples=parameters["samples"],
            learning_rate=parameters["learning_rate"] or (1e-4 if lora else 1e-6),
            max_tokens=parameters["max_tokens"],
            lag=parameters["lag"],
            seed=seed,
        ),
        evaluation_samples=parameters["evaluate"],
    )
