"""A model directory that is there whole, or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any


def save_whole(out: Path, model: Any, tokenizer: Any) -> None:
    """Save both as a Hugging Face directory beside ``out`` and rename it; an interrupted one leaves nothing."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
