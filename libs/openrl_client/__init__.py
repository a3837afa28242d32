"""The OpenRL client: publish a job, drive its loop from anywhere (C1-C3).

    import asyncio, openrl_client as openrl

    async def main():
        async with openrl.connect() as client:
            job = await client.submit(openrl.JobSpec(name="hello", kind="lora", base_model="/models/qwen3"))
            await job.ready()
            update = job.forward_backward(data, loss="cross_entropy", normalizer=tokens)
            job.optim_step(openrl.AdamParams(learning_rate=1e-4))          # both in flight, applied in order (C2)
            version = await job.publish_weights()
            result = await job.sample(prompts, max_tokens=64, at_least=version)
            await job.finish()

Importing this package loads neither torch nor vllm nor transformers; numpy and nats are imported when first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openrl_client.errors import JobEndedError, OpenRLError, Rejected, TimedOut, Transient, Unreachable, exit_code
from openrl_common.records import JobKind, JobSpec, LoraSpec, Overrides
from openrl_common.wire import AdamParams, Datum, SampleResult, SamplingParams, Sequence, TrainResult

if TYPE_CHECKING:
    from openrl_client.connection import Client, connect
    from openrl_client.job import Job
    from openrl_client.training import Pending

__all__ = [
    "AdamParams",
    "Client",
    "Datum",
    "Job",
    "JobEndedError",
    "JobKind",
    "JobSpec",
    "LoraSpec",
    "OpenRLError",
    "Overrides",
    "Pending",
    "Rejected",
    "SampleResult",
    "SamplingParams",
    "Sequence",
    "TimedOut",
    "TrainResult",
    "Transient",
    "Unreachable",
    "connect",
    "exit_code",
]

_LAZY = {
    "Client": "openrl_client.connection",
    "connect": "openrl_client.connection",
    "Job": "openrl_client.job",
    "Pending": "openrl_client.training",
}


def __getattr__(name: str) -> Any:
    """Load the parts that need the bus when they are first used (PEP 562), so that the import stays light."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
