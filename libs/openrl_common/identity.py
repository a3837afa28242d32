"""Is the ledger's bucket still the one that this process began with? (L7)

The ledger writes an identity into a bucket it finds new. A bucket that was lost, and made again empty, has none: then
"no seat backs it" means nothing, and nobody may stop a worker or free a device for it. Services wait for an identity
before they act, and end when it is another one, or none, later: started again, they read everything anew. The command
`openrl ledger rebuild` writes it last, when the bucket is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time

from openrl_common.bus import Bus
from openrl_common.errors import Rejected, Transient
from openrl_common.pause import pause

log = logging.getLogger(__name__)

KEY = "identity"
LOOK_S = 3.0
_WAIT_LOOK_S = 0.25
_SAY_AFTER_S = 5.0


class LedgerIdentity:
    """``wait`` first, then ``check`` where it matters and ``watch`` beside the rest."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.known = ""
        self._seen_at = -math.inf
        """When the reading began that last found the known one."""

    async def read(self) -> str:
        """The identity that stands in the bucket; empty when there is none, or no bucket. Raises Transient."""
        # A missing stream answers a read with silence, as a server does that is away.
        if not await self._bus.store.ledger_meta.exists():
            return ""
        entry = await self._bus.store.ledger_meta.get(KEY)
        return "" if entry is None else entry.value.id

    async def wait(self, stopping: asyncio.Event) -> None:
        """Return once there is one; it is the one that ``check`` compares with."""
        said, started_at = False, time.monotonic()
        while not stopping.is_set():
            began_at = time.monotonic()
            with contextlib.suppress(Transient):
                self.known = await self.read()
            if self.known:
                self._seen_at = began_at
                return
            if not said and time.monotonic() - started_at > _SAY_AFTER_S:  # a system that starts has none for a moment
                said = True
                log.warning("the ledger's bucket has no identity: waiting for the ledger (`openrl ledger rebuild`?)")
            await pause(stopping, _WAIT_LOOK_S)

    async def check(self, *, within_s: float = 0.0) -> None:
        """Raises Rejected (``ledger-replaced``): the bucket is not the known one; Transient when nobody can tell.

        ``within_s``: it is not read again when it was the known one so short a time ago.
        """
        began_at = time.monotonic()
        if began_at - self._seen_at < within_s:
            return
        found = await self.read()
        if found != self.known:
            what = "is another one now" if found else "is lost"
            raise Rejected(f"the ledger's bucket {what}: starting again from what is stored", code="ledger-replaced")
        self._seen_at = began_at

    async def watch(self, stopping: asyncio.Event) -> None:
        """Check now and then; raises as ``check`` does."""
        while not stopping.is_set():
            await pause(stopping, LOOK_S)
            with contextlib.suppress(Transient):
                await self.check()
