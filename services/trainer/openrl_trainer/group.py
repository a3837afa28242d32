"""A trainer on several devices, from rank 0: the worker process, which alone has the training log and the bus (R14).

    start     a process a further device ─▶ imports beside ours ─▶ Begin ─▶ they join, load, shard ─▶ all ready
    entry     rank 0 tells every rank ─▶ all apply it together (passes.py, sharded.py) ─▶ each says what came of it
    end       rank 0's end is everybody's: the socket to it closes, by whatever ended it

Every rank applies the same request or none does: rank 0 believes a result once every rank has told the same one. A rank
that dies, raises, or differs ends rank 0, and with it the group; the launcher starts the worker again, and the log
brings every rank back to where it was (R5). What a request is refused for, all ranks refuse together.

The worker starts them before it imports torch itself, so this module imports none.

Invariants: one command at a time is applied, by the thread that runs torch; ranks never write files and never
speak to anybody but rank 0 and each other.

Not here: what a rank does with a command (rank.py), what is told when (group_engine.py).
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

import msgspec

from openrl_common.errors import Bug, Rejected

if TYPE_CHECKING:
    from openrl_trainer.commands import Apply, Begin, Command
    from openrl_trainer.engine import Outcome
    from openrl_trainer.model import BaseModel
    from openrl_trainer.ranks import Ranks

log = logging.getLogger(__name__)
T = TypeVar("T")

_ENCODER = msgspec.msgpack.Encoder()


class Group:
    """The ranks but the first: started at once, told what to do by ``begin`` and by the engines. ``close`` in any case.

    Args:
        count: ranks, this one included.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._closing = False
        self._others: list[tuple[Connection, subprocess.Popen[bytes]]] = []
        self.ranks: Ranks
        for rank in range(1, count):
            ours, theirs = Pipe()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "openrl_trainer.rank", str(rank), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            self._others.append((ours, process))
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """End with the first rank that ends: this process may be waiting for it inside torch, for ever."""
        code = process.wait()
        if not self._closing:
            log.error("rank %d of %d ended with code %d: the group ends with it", rank, self.count, code)
            os._exit(1)

    def begin(self, begin: Begin) -> BaseModel:
        """Load the base model on every rank, this one included.

        Raises:
            Rejected: what BaseModel and prepare_torch refuse.
        """
        from openrl_trainer.ranks import join_and_load

        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            for rank, (connection, _) in enumerate(self._others, start=1):
                told = msgspec.structs.replace(begin, rank=rank, count=self.count, port=port)
                connection.send_bytes(_ENCODER.encode(told))
            mine = msgspec.structs.replace(begin, rank=0, count=self.count, port=port)
            self.ranks, base = join_and_load(mine, listening=listening.detach())
        self._settle("ready")
        return base

    def send(self, command: Command) -> None:
        """Raises Rejected (``bad-request``) when it cannot be told: nobody has heard of it then."""
        try:
            body = _ENCODER.encode(command)
        except OverflowError as error:
            raise Rejected(
                f"the request is not usable: a number in it is too large ({error})", code="bad-request"
            ) from error
        for connection, _ in self._others:
            connection.send_bytes(body)

    def together(self, command: Command, work: Callable[[], T]) -> T:
        """Have every rank carry out ``command``, of which ``work`` is this one's part. Its Rejected is everybody's."""
        self.send(command)
        try:
            done = work()
        except Rejected as error:
            self._settle(error.code)
            raise
        except Exception as error:
            raise self._broken(command, error) from error
        self._settle("")
        return done

    def apply(
        self, command: Apply, steps: Generator[None, None, Outcome], verdict: Callable[[Outcome], str]
    ) -> Generator[None, None, Outcome]:
        """``together`` for one entry of a log, in pieces; ``verdict``: what the others must have come to as well."""
        self.send(command)
        try:
            outcome = yield from steps
        except Rejected as error:  # a replay that cannot go on
            self._settle(error.code)
            raise
        except Exception as error:
            raise self._broken(command, error) from error
        self._settle(verdict(outcome))
        return outcome

    def _settle(self, mine: str) -> None:
        for rank, (connection, _) in enumerate(self._others, start=1):
            try:
                theirs = connection.recv_bytes().decode()
            except (EOFError, OSError) as error:
                raise Bug(f"rank {rank} of {self.count} is gone: the group ends with it") from error
            if theirs != mine:
                raise Bug(f"rank {rank} of {self.count} came to {theirs!r}, rank 0 to {mine!r}: the group ends")

    def _broken(self, command: Command, error: Exception) -> Bug:
        return Bug(f"{type(command).__name__} failed on rank 0: the group of {self.count} ends: {error}")

    def close(self) -> None:
        """End the other ranks: nothing that they have is worth keeping."""
        self._closing = True
        for _, process in self._others:
            process.kill()
