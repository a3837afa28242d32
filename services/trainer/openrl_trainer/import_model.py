"""Make a Hugging Face directory of one GGUF file: what trainer and sampler read.

    python -m openrl_trainer.import_model FILE.gguf OUT [--dtype bfloat16]

transformers dequantises the file; a model loaded so refuses to be saved, so its weights go into a new model of the same
configuration, tied again. Tokenizer and chat template come along. OUT appears whole or not at all.
Needs the package `gguf`. What was lost when the file was quantised stays lost.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from openrl_trainer.model_directory import save_whole


def convert(source: Path, out: Path, dtype: str) -> int:
    """Returns the number of parameters, tied ones once. Raises what transformers raises on a file it cannot read."""
    import torch
    import transformers

    folder, name = str(source.parent), source.name
    chosen = getattr(torch, dtype)
    quantised: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=chosen)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantised)(config).to(chosen)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.generation_config = quantised.generation_config
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    save_whole(out, model, tokenizer)
    return sum(parameter.numel() for parameter in model.parameters())


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
def main(source: Path, out: Path, dtype: str) -> None:
    """Write the model and the tokenizer of the GGUF file SOURCE to OUT."""
    if out.exists():
        raise click.UsageError(f"{str(out)!r} exists already: choose another directory or remove it")
    try:
        num_parameters = convert(source.absolute(), out.absolute(), dtype)
    except Exception as error:  # whatever transformers and gguf raise on a file that they cannot read
        raise click.ClickException(
            f"{source}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    click.echo(f"model: {out} ({num_parameters / 1e6:.1f} M parameters)")


if __name__ == "__main__":
    sys.exit(main())
