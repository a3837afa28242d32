"""Sizes of models, kept in memory while the files that they are read from do not change (M1)."""

from __future__ import annotations

import asyncio
import os

from openrl_common.errors import Rejected
from openrl_common.tensors import INDEX_NAME, SINGLE_NAME
from openrl_placement.estimator import Model, read_model

_MODELS_MAX = 256
_FILES = ("config.json", INDEX_NAME, SINGLE_NAME)

Stamp = tuple[tuple[int, int] | None, ...]
"""Of each file: when it was written (ns) and its size; None = it cannot be seen."""


class Models:
    """Sizes of models, read once per version of their files (M1), off the event loop."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamp, Model]] = {}

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

    def _at(self, directory: str, stamp: Stamp) -> Model | None:
        known = self._known.get(directory)
        return known[1] if known is not None and known[0] == stamp else None


def _stamp(directory: str) -> Stamp:
    return tuple(_version(os.path.join(directory, name)) for name in _FILES)


def _version(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_mtime_ns, stat.st_size
