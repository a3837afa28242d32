"""Per-step metrics of a recipe, one JSON object a line (C4).

Fields of a step: ``recipe``, ``step``, ``at`` (Unix seconds), ``loss``, ``reward``, ``kl``, ``tokens``, ``seconds`` (by
phase) and ``versions`` (those that made the samples, and the one the step published), as the recipe has them.
A line is written whole and flushed, so that a reader may follow the file while it grows. What a full disk does not take
is kept and written with a later line: it ends no run.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from openrl_client.errors import Rejected

log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Metrics:
    """Appends to ``path`` (None: keeps nothing). A context manager."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.first_step_at: float | None = None
        self._file: int | None = None
        self._unwritten = b""
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            except OSError as error:
                raise Rejected(
                    f"metrics file {str(path)!r} cannot be written: {error.strerror}", code="usage"
                ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(Rejected):
                self._flush(self._file)
            if self._unwritten:
                log.warning("the last %d bytes of metrics file %s were not written", len(self._unwritten), self.path)
            os.close(self._file)
            self._file = None

    def write(self, **fields: Any) -> dict[str, Any]:
        """Append one line; return it as written. The first one marks the end of the first step."""
        line = {"at": round(time.time(), 3), **fields}
        if self.first_step_at is None and "step" in fields:
            self.first_step_at = time.time()
        if self._file is not None:
            self._unwritten += msgspec.json.encode(line) + b"\n"
            self._flush(self._file)
        return line

    def _flush(self, file: int) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(file, self._unwritten) :]
        except OSError as error:
            if error.errno not in _FULL:
                raise Rejected(f"metrics file {str(self.path)!r}: {error.strerror}", code="disk") from None


class Stopwatch:
    """Seconds by phase: ``with watch("sample"): …``; phases add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str) -> _Lap:
        return _Lap(self, phase)

    def rounded(self) -> dict[str, float]:
        return {phase: round(seconds, 4) for phase, seconds in self.seconds.items()}


class _Lap:
    def __init__(self, watch: Stopwatch, phase: str) -> None:
        self._watch = watch
        self._phase = phase
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spent = time.perf_counter() - self._started
        self._watch.seconds[self._phase] = self._watch.seconds.get(self._phase, 0.0) + spent
