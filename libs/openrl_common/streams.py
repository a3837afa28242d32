"""The streams and buckets: names, retention, limits. ``ensure`` makes them; running it again changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openrl_common.bus import Bus

_DAY_S = 86_400.0
_GIB = 1 << 30


@dataclass(frozen=True)
class StreamConfig:
    """One stream. ``work_queue`` deletes on ack; ``message_ttl`` allows a TTL per message (request deadlines)."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: float = 0.0
    max_bytes: int = -1
    work_queue: bool = False
    message_ttl: bool = False
    duplicate_window_s: float = 120.0


EVENTS = StreamConfig("OPENRL_EVENTS", ("openrl.ev.>",), max_age_s=7 * _DAY_S, max_bytes=4 * _GIB)
TRAIN = StreamConfig("OPENRL_TRAIN", ("openrl.train.>",), max_age_s=7 * _DAY_S, max_bytes=16 * _GIB)
SAMPLE = StreamConfig(
    "OPENRL_SAMPLE", ("openrl.sample.>",), max_age_s=_DAY_S, max_bytes=2 * _GIB, work_queue=True, message_ttl=True
)
DEAD_LETTERS = StreamConfig("OPENRL_DLQ", ("openrl.dlq.>",), max_age_s=30 * _DAY_S, max_bytes=_GIB)
STREAMS = (EVENTS, TRAIN, SAMPLE, DEAD_LETTERS)

PAYLOADS = "openrl_payloads"
"""Object store for request bodies above ``PAYLOAD_INLINE_BYTES_MAX`` (R7)."""
PAYLOAD_INLINE_BYTES_MAX = 256 * 1024
PAYLOADS_MAX_AGE_S = 7 * _DAY_S


@dataclass(frozen=True)
class BucketConfig:
    """One KV bucket; history is 1 everywhere: the truth is the last value, the past is in the events."""

    name: str
    max_age_s: float = 0.0


BUCKETS = tuple(
    BucketConfig(name)
    for name in (
        "openrl_jobs",
        "openrl_workloads",
        "openrl_ledger",
        "openrl_turns",
        "openrl_nodes",
        "openrl_claims",
        "openrl_workers",
        "openrl_ready",
        "openrl_leases",
        "openrl_weights",
        "openrl_checkpoints",
    )
) + (BucketConfig("openrl_results", max_age_s=7 * _DAY_S),)


async def ensure(bus: Bus, *, replicas: int = 1) -> None:
    """Create or update every stream, bucket and the payload store.

    Raises:
        Unreachable: JetStream did not answer before the deadline.
    """
    await bus.ensure_topology(STREAMS, BUCKETS, replicas=replicas)
