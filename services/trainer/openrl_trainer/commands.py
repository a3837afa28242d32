"""What rank 0 of a trainer tells the others (R14): msgpack over a socket pair, answered each by a short text.

The text is what the rank came to; rank 0 compares it with its own. It tells nothing that may differ between ranks
(seconds), and everything that shows that they are no longer the same training.
"""

from __future__ import annotations

import msgspec

from openrl_common.wire import AnyTrainRequest, TrainResult
from openrl_trainer.engine import JobSettings
from openrl_trainer.shortage import Shortage


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first command: join as ``rank`` of ``count`` and load. ``sharded``: full fine-tuning. Answer: ``ready``."""

    base_model: str
    dtype: str
    sharded: bool
    length_max: int
    num_threads: int
    device_bytes: int
    rank: int = 0
    count: int = 1
    port: int = 0


class MakeEngine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``home``, ``token_budget``, ``device_bytes`` as in EngineSettings. Answer: empty, or why it is refused."""

    key: str
    job: JobSettings
    home: str
    token_budget: int
    device_bytes: int
    shortage: Shortage


class Apply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Apply an entry of the log of the engine ``key``. Answer: ``verdict``."""

    key: str
    request: AnyTrainRequest
    stored: TrainResult | None = None


class CopyState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    key: str


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    key: str
    version: int | None
    halved_to: int


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Drop the engine ``key``. Not answered."""

    key: str


Command = Begin | MakeEngine | Apply | CopyState | Restore | Close

_TOLD = ("loss", "tokens", "grad_norm", "token_budget", "halved_to")


def verdict(result: TrainResult) -> str:
    """What a result says of the training: equal on all ranks, to the last bit."""
    code = result.error.code if result.error is not None else "ok"
    return " ".join([code, *(f"{name}={result.metrics[name]!r}" for name in _TOLD if name in result.metrics)])
