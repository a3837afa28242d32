"""Makes streams and buckets as ``streams`` describes them, and brings existing ones up to date."""

from __future__ import annotations

import asyncio
import time

import openrl_common.without_websockets  # noqa: F401

import nats.js.errors
from nats.js import JetStreamContext, api

from openrl_common import streams
from openrl_common.errors import Rejected, Unreachable
from openrl_common.pull import NETWORK_ERRORS

_NAME_IN_USE = 10058
_DEADLINE_S = 20.0
_RETRY_S = 0.2


async def ensure(
    jetstream: JetStreamContext,
    stream_configs: tuple[streams.StreamConfig, ...],
    bucket_configs: tuple[streams.BucketConfig, ...],
    *,
    replicas: int,
) -> None:
    """Running it again changes nothing.

    Raises:
        Unreachable: JetStream does not answer. Rejected: the server does not make one of them.
    """
    for config in stream_configs:
        await _ensure_stream(
            jetstream,
            api.StreamConfig(
                name=config.name,
                subjects=list(config.subjects),
                retention=api.RetentionPolicy.WORK_QUEUE if config.work_queue else api.RetentionPolicy.LIMITS,
                discard=api.DiscardPolicy.OLD,
                max_age=config.max_age_s,
                max_bytes=config.max_bytes,
                duplicate_window=config.duplicate_window_s,
                num_replicas=replicas,
                allow_direct=True,
                allow_msg_ttl=config.message_ttl or None,
                allow_atomic=not config.work_queue or None,  # for group_commit
                first_seq=await _first_sequence(jetstream) if config is streams.EVENTS else None,
            ),
        )
    for bucket in bucket_configs:
        await _ensure_stream(
            jetstream,
            api.StreamConfig(
                name=f"KV_{bucket.name}",
                subjects=[f"$KV.{bucket.name}.>"],
                max_msgs_per_subject=1,
                max_age=bucket.max_age_s,
                discard=api.DiscardPolicy.NEW,
                deny_delete=True,
                allow_rollup_hdrs=True,
                allow_direct=True,
                allow_atomic=True,
                num_replicas=replicas,
            ),
        )
    try:
        await jetstream.object_store(streams.PAYLOADS)
    except nats.js.errors.NotFoundError:
        await jetstream.create_object_store(
            streams.PAYLOADS,
            config=api.ObjectStoreConfig(
                bucket=streams.PAYLOADS, ttl=int(streams.PAYLOADS_MAX_AGE_S), replicas=replicas
            ),
        )


async def _first_sequence(jetstream: JetStreamContext) -> int | None:
    """Where the events go on when their stream was lost and the buckets were not; None: it is there, or all is new.

    A job's incarnation is the place of its submission in this stream. From 1 on again, every name that was used before
    would be refused as older than what stands in the buckets: so the milliseconds since 1970, more than there can be.
    """
    try:
        await jetstream.stream_info(streams.EVENTS.name)
    except nats.js.errors.NotFoundError:
        try:
            jobs = await jetstream.stream_info("KV_openrl_jobs")
        except nats.js.errors.NotFoundError:
            return None
        return int(time.time() * 1_000) if jobs.state.messages else None
    except NETWORK_ERRORS:
        pass  # what comes next says so, and tries again
    return None


async def _ensure_stream(jetstream: JetStreamContext, config: api.StreamConfig) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        try:
            try:
                await jetstream.add_stream(config)
            except nats.js.errors.BadRequestError as error:
                if error.err_code != _NAME_IN_USE:
                    raise
                await jetstream.update_stream(config)
            return
        except NETWORK_ERRORS as error:
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"JetStream does not answer (stream {config.name}): is it enabled on the NATS server?"
                ) from error
            await asyncio.sleep(_RETRY_S)
        except nats.js.errors.APIError as error:
            raise Rejected(
                f"NATS does not make stream {config.name} ({error.description}): look at its disk and at its "
                "JetStream limits",
                code="no-stream",
            ) from error
