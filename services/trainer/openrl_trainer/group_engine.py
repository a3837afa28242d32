"""Rank 0's engine of one job of a trainer on several devices (R14): the engine, with every rank beside it.

Whatever touches the job's state is told to all ranks first (commands.py) and believed when all came to the same
(group.py). Files, versions and answers are this engine's alone.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from openrl_common.wire import AnyTrainRequest, DeleteState, ListStates, TrainResult
from openrl_trainer.checkpoints import checkpoint_directory
from openrl_trainer.commands import Apply, Close, CopyState, MakeEngine, Restore, verdict
from openrl_trainer.engine import EngineSettings, JobSettings, Outcome, TrainEngine
from openrl_trainer.group import Group
from openrl_trainer.model import BaseModel
from openrl_trainer.shortage import found
from openrl_trainer.state_file import State


class GroupEngine(TrainEngine):
    """As TrainEngine. ``group`` has begun."""

    def __init__(self, base: BaseModel, job: JobSettings, settings: EngineSettings, group: Group) -> None:
        self._group = group
        self._key = f"{job.tenant}.{job.job}.{job.incarnation}"
        directory = checkpoint_directory(settings.home, job.tenant, job.job, job.incarnation)
        make = MakeEngine(
            key=self._key,
            job=job,
            home=str(settings.home),
            token_budget=settings.token_budget,
            device_bytes=settings.device_bytes,
            shortage=found(directory),
        )

        def begin() -> None:
            super(GroupEngine, self).__init__(base, job, settings, group.ranks)
            self.recall(make.shortage)

        group.together(make, begin)

    def steps(self, request: AnyTrainRequest, stored: TrainResult | None = None) -> Generator[None, None, Outcome]:
        own = super().steps(request, stored)
        if isinstance(request, ListStates | DeleteState):
            return (yield from own)
        if stored is not None:
            stored = msgspec.structs.replace(stored, logprobs=None)
        command = Apply(key=self._key, request=request, stored=stored)
        return (yield from self._group.apply(command, own, lambda outcome: verdict(outcome.result)))

    def copy_state(self) -> State:
        return self._group.together(CopyState(key=self._key), super().copy_state)

    def restore(self, state: State | None, version: int | None = None, halved_to: int = 0) -> None:
        restore = super().restore
        self._group.together(
            Restore(key=self._key, version=version, halved_to=halved_to), lambda: restore(state, version, halved_to)
        )

    def close(self) -> None:
        self._group.send(Close(key=self._key))  # not waited for: another job's entry may be in the middle
        super().close()
