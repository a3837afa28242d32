"""Where a base model lies. Checked before torch is imported, so that a wrong path is told in a moment."""

from __future__ import annotations

from pathlib import Path

from openrl_common.errors import Rejected


def check_model_path(path: str) -> Path:
    """Refuse what is not a local model directory, before any library goes looking for it elsewhere.

    Raises:
        Rejected: ``model-not-found`` or ``bad-model``, naming the path.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise Rejected(
            f"base model {path!r} is no directory here: give the path of a Hugging Face model directory",
            code="model-not-found",
        )
    if not (directory / "config.json").is_file():
        raise Rejected(f"base model {path!r} has no config.json: it is not a Hugging Face model", code="bad-model")
    return directory
