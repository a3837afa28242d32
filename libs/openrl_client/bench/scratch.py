"""A directory of a benchmark's own on the store, with a model to run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from openrl_client.bench.machine import StorePlace
from openrl_client.home import Progress
from openrl_client.tiny import make_tiny_model


@contextlib.asynccontextmanager
async def scratch_with_model(
    place: StorePlace, model: Path | None, progress: Progress
) -> AsyncIterator[tuple[Path, Path]]:
    """The directory, removed afterwards, and ``model`` or a tiny one made there."""
    Path(place.path).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="openrl-bench-", dir=place.path) as name:
        scratch = Path(name)
        if model is None:
            progress("making the tiny model")
            model = scratch / "tiny"
            await make_tiny_model(model, steps=1, environment=dict(os.environ))
        yield scratch, model
