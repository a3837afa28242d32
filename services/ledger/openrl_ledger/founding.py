"""The identity of the ledger's bucket: given to one that is new, refused to one that was lost (L7).

A bucket without identity and without seats is new, unless launchers have workers running: then it is what is left of a
bucket that was lost. A ledger that went on with it would give away devices that are in use. It waits, not ready, for
`openrl ledger rebuild`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time

from openrl_common.bus import Bus
from openrl_common.errors import Conflict, Transient
from openrl_common.identity import KEY, LedgerIdentity
from openrl_common.pause import pause
from openrl_common.records import LedgerIdentityRecord, WorkerState

log = logging.getLogger(__name__)

LIVE = (WorkerState.STARTING, WorkerState.RUNNING, WorkerState.BACKING_OFF)
_LOOK_S = 0.5


class Founding:
    """``wait`` until the bucket has an identity; ``problem`` is why it has none yet (readiness)."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.identity = LedgerIdentity(bus)
        self._problem = "the ledger's bucket is not read yet"

    def problem(self) -> str | None:
        return None if self.identity.known else self._problem

    async def wait(self, stopping: asyncio.Event) -> None:
        """Find the identity, or give the bucket one when it is new."""
        while not stopping.is_set():
            try:
                self.identity.known = await self.identity.read()
                if self.identity.known:
                    return
                if await self._is_being_rebuilt():
                    self._say(
                        "the ledger's bucket is being rebuilt: if that was broken off, run `openrl ledger rebuild "
                        "--apply --replace` again"
                    )
                    await pause(stopping, _LOOK_S)
                    continue
                num_running = await self._num_running()
                if not num_running or await self._bus.store.ledger_seats.list():
                    await self._give_identity()
                    continue
                self._say(
                    f"the ledger's bucket is lost and launchers have {num_running} workers running: look at "
                    "`openrl ledger rebuild`, then run it with --apply"
                )
            except Transient as error:
                self._say(str(error))
            await pause(stopping, _LOOK_S)

    async def _is_being_rebuilt(self) -> bool:
        """There is an identity, and it is empty."""
        meta = self._bus.store.ledger_meta
        return await meta.exists() and await meta.get(KEY) is not None

    async def _num_running(self) -> int:
        return sum(entry.value.state in LIVE for entry in (await self._bus.store.workers.list()).values())

    async def _give_identity(self) -> None:
        record = LedgerIdentityRecord(id=secrets.token_hex(8), made_at=time.time())
        with contextlib.suppress(Conflict):
            await self._bus.store.ledger_meta.write(KEY, record, last=0)

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.error("%s", problem)
