"""Sizes of models, kept in memory while their ``config.json`` does not change (M1)."""

from __future__ import annotations

import asyncio
import os

from openrl_common.errors import Rejected
from openrl_placement.estimator import Model, read_model

_MODELS_MAX = 256


class Models:
    """Sizes of models, read once per version of ``config.json`` (M1), off the event loop."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Model]] = {}

    async def read(self, directory: str) -> Model | Rejected:
        """The sizes, or why they cannot be had. Waits for nothing when the model is known and unchanged."""
        stamp = _stamp(directory)
        if model := self._at(directory, stamp):
            return model
        try:
            model = await asyncio.to_thread(read_model, directory)
        except Rejected as error:
            return error
        if len(self._known) >= _MODELS_MAX:
            self._known.pop(next(iter(self._known)))
        self._known[directory] = (stamp, model)
        return model

    def known(self, directory: str) -> Model | None:
        """The sizes, if they need not be read."""
        return self._at(directory, _stamp(directory))

    def _at(self, directory: str, stamp: float) -> Model | None:
        known = self._known.get(directory)
        return known[1] if known is not None and known[0] == stamp else None


def _stamp(directory: str) -> float:
    try:
        return os.stat(os.path.join(directory, "config.json")).st_mtime
    except (OSError, ValueError):
        return -1.0
