"""Weights as a recipe publishes them: a full disk ends no run.

The trainer has what it trained; only the file of the new version could not be written. So the recipe says what is wrong
and asks again until somebody has made room, or the caller gives up. Whatever else is refused is raised.
"""

from __future__ import annotations

import asyncio
import logging

from openrl_client.errors import Rejected
from openrl_client.job import Job, PendingVersion

log = logging.getLogger(__name__)

DISK_FULL_PAUSE_S = 5.0


async def published(job: Job, publication: PendingVersion | None = None, pause_s: float = DISK_FULL_PAUSE_S) -> int:
    """The version that was published, by ``publication`` or by one asked for now.

    Raises:
        Rejected: what the trainer refused for another reason than a full disk.
    """
    told = False
    while True:
        try:
            version: int = await (publication or job.publish_weights())
            return version
        except Rejected as error:
            if error.code != "disk-full":
                raise
            if not told:
                log.warning("%s (waiting for room, asking again every %g s)", error, pause_s)
            told, publication = True, None
        await asyncio.sleep(pause_s)
