"""Measurements of the vLLM engine, each in a process of its own: ``python -m openrl_sampler.benchmark``.

The client never imports torch or vllm; the interpreter that runs ``openrl bench`` must have them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from typing import TypeVar

import msgspec

from openrl_common.errors import Rejected

T = TypeVar("T")
_LIMIT_S = 1800.0


async def run(*arguments: str) -> bytes:
    """The last line that one measurement prints.

    Raises:
        Rejected: vllm is not installed here (``no-vllm``), or the measurement failed (``bench-failed``, its last line).
    """
    if find_spec("vllm") is None:
        raise Rejected(f"{sys.executable} has no vllm: run .venv-vllm/bin/openrl (make setup-vllm)", code="no-vllm")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "openrl_sampler.benchmark", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )  # fmt: skip
    try:
        async with asyncio.timeout(_LIMIT_S):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise Rejected(f"openrl_sampler.benchmark {' '.join(arguments)}: {last[0]}", code="bench-failed")
    return out.strip().rpartition(b"\n")[2]


async def measure(kind: type[T], *arguments: str) -> T:
    """One measurement's figures. Raises Rejected, see ``run``."""
    return msgspec.json.decode(await run(*arguments), type=kind)
