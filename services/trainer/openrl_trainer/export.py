"""A saved training state as a plain Hugging Face directory (what ``openrl state export`` runs).

    python -m openrl_trainer.export STATE.safetensors OUT [--adapter]

OUT loads with ``from_pretrained``: the trained model, or the base with the adapter merged into it; tokenizer and
generation files come from the base model's directory. ``--adapter`` writes a LoRA job's adapter alone, in PEFT's
layout; the base's weights are then not loaded. OUT appears whole or not at all. Runs on the CPU, needs no system and
no trainer.
"""

from __future__ import annotations

import copy
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from openrl_common.errors import Rejected
from openrl_common.records import StateInfo
from openrl_common.states import read_info

if TYPE_CHECKING:
    import torch

    from openrl_trainer.model import BaseModel

_ADAPTER = "exported"
_PEFT_PREFIX = "base_model.model."
"""What PEFT's layout puts before a parameter's name in the model."""
_WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def export(state: Path, out: Path, *, adapter_alone: bool = False) -> None:
    """Write the directory.

    Raises:
        Rejected: ``exists``, ``no-adapter``, ``model-not-found`` (the base model has moved), ``bad-state``
            (another is in its place), ``disk-full``, ``write-failed``.
    """
    info = read_info(state)
    if out.exists():
        raise Rejected(f"{str(out)!r} exists already: choose another directory or remove it", code="exists")
    if adapter_alone and info.lora is None:
        raise Rejected(f"{state} is of full fine-tuning: it has no adapter", code="no-adapter")

    from openrl_trainer import preload

    preload.set_variables()
    import torch

    from openrl_trainer.files import disk_errors, publish_directory, temporary_directory
    from openrl_trainer.state_file import read_state

    base = _load(info, torch.device("meta" if adapter_alone else "cpu"))
    adapter = _ADAPTER if info.lora is not None else ""
    parameters = dict[str, torch.Tensor](base.trainable(adapter))
    kept, _ = read_state(state, parameters, base)
    with disk_errors(out), temporary_directory(out.absolute()) as temporary:
        if adapter_alone:
            import safetensors.torch

            weights = {
                name: kept["parameter"][name.removeprefix(_PEFT_PREFIX)].to(like.dtype)
                for name, like in base.adapter_tensors(adapter).items()
            }
            safetensors.torch.save_file(weights, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
            config = copy.deepcopy(base.adapter_config(adapter))
            config.inference_mode = True
            config.save_pretrained(str(temporary))
        else:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(kept["parameter"][name])
            base.merged().save_pretrained(str(temporary))
            _copy_rest(Path(base.path), temporary)
        publish_directory(temporary, out.absolute())


def _load(info: StateInfo, device: torch.device) -> BaseModel:
    from openrl_trainer.model import BaseModel

    base = BaseModel(info.base_model, dtype=info.dtype or "float32", device=device, frozen=bool(info.lora))
    if info.lora is not None:
        base.add_adapter(_ADAPTER, info.lora, seed=0)
    return base


def _copy_rest(base: Path, out: Path) -> None:
    """Tokenizer, chat template and the like: what is beside the weights and was not written."""
    for path in sorted(base.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS_SUFFIXES) and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)


@click.command(help=__doc__)
@click.argument("state", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--adapter", "adapter_alone", is_flag=True, help="The adapter alone, in PEFT's layout.")
def main(state: Path, out: Path, adapter_alone: bool) -> None:
    warnings.simplefilter("ignore")  # peft warns about deprecations inside transformers
    try:
        export(state, out, adapter_alone=adapter_alone)
    except Rejected as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"model: {out}")


if __name__ == "__main__":
    sys.exit(main())
