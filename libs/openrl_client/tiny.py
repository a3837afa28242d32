"""Models to try things with: a tiny one, trained on demonstrations of the built-in task, and one out of a GGUF file.

Both need torch, so they are made by subprocesses (``python -m openrl_trainer.tiny_model``, ``….import_model``); this
module does not import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from openrl_client.errors import Rejected
from openrl_client.tasks import LetterTask

BATCH = 64
STEPS = 400


def write_pairs(path: Path, *, steps: int, seed: int = 0) -> None:
    """Demonstrations of both variants of the task, in turn by batch; the held-out prompts are not among them."""
    randomness = random.Random(seed)
    tasks = (LetterTask("sort"), LetterTask("desc"))
    with path.open("wb") as lines:
        for step in range(steps):
            task = tasks[step % len(tasks)]
            for example in randomness.choices(task.examples("train"), k=BATCH):
                pair = {"prompt": example.prompt, "completion": task.demonstration(example, randomness)}
                lines.write(msgspec.json.encode(pair) + b"\n")


async def make_tiny_model(
    out: Path, *, steps: int = STEPS, on_line: Callable[[str], None] | None = None, environment: dict[str, str]
) -> None:
    """Make the model at ``out``. Ends its subprocess when cancelled.

    Raises:
        Rejected: ``model-failed`` with the subprocess's last line.
    """
    with tempfile.TemporaryDirectory(prefix="openrl-pairs-") as scratch:
        pairs = Path(scratch) / "pairs.jsonl"
        write_pairs(pairs, steps=steps)
        arguments = ("openrl_trainer.tiny_model", str(out), "--pairs", str(pairs), "--steps", str(steps))
        await _run(out, arguments, on_line, environment)


async def import_model(
    source: Path, out: Path, *, on_line: Callable[[str], None] | None = None, environment: dict[str, str]
) -> None:
    """Make a Hugging Face directory of a GGUF file at ``out``. Ends its subprocess when cancelled.

    Raises:
        Rejected: ``model-failed`` with the subprocess's last line.
    """
    await _run(out, ("openrl_trainer.import_model", str(source), str(out)), on_line, environment)


async def _run(
    out: Path, arguments: tuple[str, ...], on_line: Callable[[str], None] | None, environment: dict[str, str]
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={"TQDM_DISABLE": "1", **environment}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    last = ""
    try:
        async for raw in process.stdout:
            last = raw.decode(errors="replace").rstrip().rsplit("\r", 1)[-1] or last
            if on_line is not None:
                on_line(last)
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    if code != 0:
        raise Rejected(f"making the model {str(out)!r} failed with exit code {code}: {last}", code="model-failed")
