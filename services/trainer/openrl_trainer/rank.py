"""``python -m openrl_trainer.rank``: a rank but the first of a trainer on several devices (group.py starts it).

It does what it is told, on its own device, and ends with rank 0. Whatever it cannot do ends it, and so the group.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec

import openrl_trainer.preload  # noqa: F401
from openrl_common.errors import Bug, Rejected
from openrl_common.telemetry import configure_logging
from openrl_trainer.commands import Apply, Begin, Close, Command, CopyState, MakeEngine, Restore, verdict
from openrl_trainer.engine import EngineSettings, TrainEngine
from openrl_trainer.ranks import join_and_load


class Rank:
    """Carries out commands; ``answer`` raises whatever else than a refusal stands in the way."""

    def __init__(self, begin: Begin) -> None:
        self._ranks, self._base = join_and_load(begin)
        self._engines: dict[str, TrainEngine] = {}

    def answer(self, command: Command) -> str | None:
        """What came of it; None where nobody waits for that."""
        try:
            match command:
                case MakeEngine():
                    settings = EngineSettings(
                        home=Path(command.home),
                        token_budget=command.token_budget,
                        device_bytes=command.device_bytes,
                    )
                    engine = TrainEngine(self._base, command.job, settings, self._ranks)
                    engine.recall(command.shortage)
                    self._engines[command.key] = engine
                case Apply():
                    return self._apply(command)
                case CopyState():
                    self._engines[command.key].copy_state()
                case Restore():
                    self._engines[command.key].restore(None, command.version, command.halved_to)
                case Close():
                    if command.key in self._engines:
                        self._engines.pop(command.key).close()
                    return None
                case _:
                    raise Bug(f"{type(command).__name__} is no command for a rank that has begun")
        except Rejected as error:
            return error.code
        return ""

    def _apply(self, command: Apply) -> str:
        """What an entry writes is rank 0's to write."""
        steps = self._engines[command.key].steps(command.request, command.stored)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                return verdict(ended.value.result)


def serve(connection: Connection) -> None:
    decoder = msgspec.msgpack.Decoder(Command)
    begin = decoder.decode(connection.recv_bytes())
    assert isinstance(begin, Begin)
    try:
        rank = Rank(begin)
    except Rejected as error:  # rank 0 says why, to whom it matters
        connection.send_bytes(error.code.encode())
        connection.recv_bytes()
        raise
    connection.send_bytes(b"ready")
    while True:
        said = rank.answer(decoder.decode(connection.recv_bytes()))
        if said is not None:
            connection.send_bytes(said.encode())


def _end_with(descriptor: int) -> None:
    """The kernel says so when the other end of the socket is closed: rank 0 has ended, whatever ended it."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always told
    poll.poll()
    os._exit(0)


def main() -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when it is over
    descriptor = int(sys.argv[2])
    configure_logging("trainer", rank=sys.argv[1])
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    code = 1
    try:
        serve(Connection(descriptor))
    except EOFError:
        code = 0
    except Rejected as error:
        print(f"error: {error}", file=sys.stderr)
    except Exception:
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(code)  # torch's threads are not waited for


if __name__ == "__main__":
    main()
