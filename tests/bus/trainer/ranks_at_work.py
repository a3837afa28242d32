"""A trainer's ranks without a bus: ``python -m bus.trainer.ranks_at_work COUNT KIND MODEL HOME < requests > results``.

One request a line of JSON in, one result a line out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

import openrl_trainer.preload  # noqa: F401
from openrl_common.records import LoraSpec
from openrl_common.wire import TRAIN_DECODER
from openrl_trainer.commands import Begin
from openrl_trainer.engine import EngineSettings, JobSettings, TrainEngine
from openrl_trainer.group import Group
from openrl_trainer.group_engine import GroupEngine
from openrl_trainer.model import BaseModel, prepare_torch

TOKEN_BUDGET = 40


def engine_of_one(kind: str, model: str, home: Path) -> TrainEngine:
    """What a trainer on one device has."""
    job, dtype = job_of(kind)
    base = BaseModel(model, dtype=dtype, device=prepare_torch(1, 0), frozen=job.lora is not None)
    return TrainEngine(base, job, EngineSettings(home=home, token_budget=TOKEN_BUDGET))


def job_of(kind: str) -> tuple[JobSettings, str]:
    """``fft``, ``lora``, or ``masters``: fft in bfloat16 with float32 masters. And the dtype."""
    lora = LoraSpec(rank=4) if kind == "lora" else None
    masters = kind == "masters"
    job = JobSettings(tenant="default", job="job", incarnation=7, seed=3, lora=lora, float32_masters=masters)
    return job, "bfloat16" if masters else "float32"


def main(count: int, kind: str, model: str, home: Path) -> None:
    group = Group(count)
    job, dtype = job_of(kind)
    begin = Begin(base_model=model, dtype=dtype, sharded=job.lora is None, length_max=0, num_threads=1, device_bytes=0)
    base = group.begin(begin)
    engine = GroupEngine(base, job, EngineSettings(home=home, token_budget=TOKEN_BUDGET), group)
    for line in sys.stdin.buffer:
        result = engine.apply(TRAIN_DECODER.decode(line)).result
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    sys.stdout.flush()
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
