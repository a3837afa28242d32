"""Invariants 1 to 9 on the real thing under a storm of jobs and faults, told afterwards from the stored revisions.

The services, the supervisor, NATS, leases, turns and processes are the real ones; the work of a worker is a wait, so
that there are many. ``make test-chaos``; OPEN_RL_STORM_SEED=N draws the jobs and faults of another storm.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from e2e.revisions import Replay, keep_all, read_lives
from e2e.storm import Storm
from openrl_client import processes
from openrl_client.supervisor import LocalSystem
from openrl_common.bus import Bus

SEED = int(os.environ.get("OPEN_RL_STORM_SEED", "1"))
LIMIT = 3
DISK_MIB = 192
SETTINGS = {
    "OPEN_RL_DEVICES": "4x16GiB",
    "OPEN_RL_HOST_MEMORY": "16GiB",
    "OPEN_RL_MAX_SEATS_PER_CLAIM": str(LIMIT),
    "OPEN_RL_LORA_IDLE": "2s",
    "OPEN_RL_STOP_GRACE": "2s",
    "OPEN_RL_WARM_START": "on",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).parent / "storm_workers"), os.environ.get("PYTHONPATH", "")])
    ),
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A home on a file system of its own that can be filled."""
    home = tmp_path / "home"
    home.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "openrl-chaos", str(home)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here (it takes the right to mount)")
    yield home
    subprocess.run(["cp", "-r", str(home), str(tmp_path / "left")], check=True)  # for who looks for a failure's reason
    subprocess.run(["umount", str(home)], check=True)


@contextlib.asynccontextmanager
async def storm_on(home: Path, model: Path) -> AsyncIterator[Storm]:
    witness = home.parent / "witness"
    witness.mkdir()
    async with LocalSystem(home, environment=SETTINGS | {"STORM_WITNESS": str(witness)}) as system:
        bus = await Bus.connect(system.nats_url, name="storm")
        try:
            await keep_all(bus)
            yield Storm(system, bus, witness, seed=SEED, limit=LIMIT, model=model)
        finally:
            await bus.close()
    assert processes.services_of(home) + processes.workers_of(home) == []


def tampering_is_caught(storm: Storm, witness: Path) -> None:
    """The verdict can be another: the same run with one thing changed is not clean."""
    lives = read_lives(witness)
    ended = next(life for life in lives if not life.runs_on and "touch" in [what for _, what in life.notes])
    ended.notes.append((time.time(), "alive"))
    found = Replay(LIMIT).check(storm.revisions, lives)
    assert any("whose process still runs (invariant 6)" in each for each in found), found
    leases = storm.revisions.of["KV_openrl_leases"]
    storm.revisions.of["KV_openrl_leases"] = [each for each in leases if b"tombstone" not in each.data]
    found = Replay(LIMIT).check(storm.revisions, read_lives(witness))
    assert any("was said without a fence (B7)" in each for each in found), found
    storm.revisions.of["KV_openrl_leases"] = [each for each in leases if b"starting" not in each.data]
    assert any("which is not stored" in each for each in storm.revisions.lost())
    events = storm.revisions.of["OPENRL_EVENTS"]
    storm.revisions.of["OPENRL_EVENTS"] = [each for each in events if ".placement." not in each.subject]
    assert any("was never answered" in each for each in storm.unanswered())


async def weather(storm: Storm, plan: dict[str, int]) -> None:
    await storm.blow(plan)
    await storm.calm()
    found = await storm.verdict()
    print(f"{storm.faults}, {len(storm.acknowledged)} jobs, {storm.revisions.num_stored} stored messages")
    assert not found, f"seed {SEED}, {storm.faults}: {len(found)} violations: " + "\n".join(found[:20])
    assert storm.faults == plan


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_invariants_hold_when_every_process_is_killed_once(tmp_path: Path, model: Path) -> None:
    """Invariants 1 to 9, B1, E6, E13: the short form."""
    async with storm_on(tmp_path / "home", model) as storm:
        await weather(storm, {"kill ledger": 1, "kill placement": 1, "kill launcher": 1, "kill nats": 1})
        tampering_is_caught(storm, tmp_path / "witness")


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.timeout(1200)
async def test_invariants_hold_through_many_kills_restarts_of_nats_and_a_stopped_launcher(
    tmp_path: Path, model: Path
) -> None:
    """Invariants 1 to 9, B1, B5, B7, E6, E13, F3."""
    plan = {"kill ledger": 15, "kill placement": 15, "kill launcher": 15, "kill nats": 10, "pause launcher": 4}
    async with storm_on(tmp_path / "home", model) as storm:
        await weather(storm, plan)


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.timeout(1200)
async def test_invariants_hold_when_the_disk_fills_again_and_again(small_disk: Path, model: Path) -> None:
    """Invariants 1 to 9, E6, E7, E18: nothing acknowledged is lost, and all goes on when there is room."""
    plan = {"fill disk": 5, "kill ledger": 3, "kill placement": 3, "kill launcher": 3, "kill nats": 3}
    async with storm_on(small_disk, model) as storm:
        await weather(storm, plan)
