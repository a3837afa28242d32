"""Prefetch (R1) on a real FUSE mount whose reads take time. Skipped with a reason where FUSE cannot be mounted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from openrl_client.bench.mounts import slow_mount, why_no_fuse
from openrl_common.errors import Rejected
from openrl_common.page_cache import file_system_of
from openrl_common.prefetch import Prefetch, PrefetchMode
from openrl_common.prefetch_blocks import BLOCK_BYTES

SIZE = 2 * BLOCK_BYTES + 4321


pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse() or "FUSE is there")]

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a checkpoint with the options of the slow mount."""
    source, point = tmp_path / "source", tmp_path / "mount"
    source.mkdir()
    point.mkdir()
    save_file({"weight": np.frombuffer(os.urandom(SIZE), np.uint8)}, source / "model.safetensors")
    with ExitStack() as mounts:

        def start(*options: str) -> Path:
            try:
                return mounts.enter_context(slow_mount(source, point, *options))
            except Rejected as error:
                pytest.skip(str(error))

        yield start


def test_R1_a_fuse_mount_is_read_once_and_found_in_the_page_cache_afterwards(mount: Mount) -> None:
    point = mount("--latency-ms", "5")
    assert file_system_of(point) == "fuse.openrl-slow"
    first = Prefetch(point, mode=PrefetchMode.AUTO).run()
    assert (first.read_bytes, first.cancelled) == (SIZE, False)
    assert "fuse.openrl-slow" in first.decision.reason
    again = Prefetch(point, mode=PrefetchMode.AUTO).run()
    assert not again.decision.read
    assert "page cache already" in again.decision.reason


def test_R1_a_mount_that_drops_its_cache_on_open_is_told_apart_and_not_read(mount: Mount) -> None:
    done = Prefetch(mount("--latency-ms", "1", "--forgetful"), mode=PrefetchMode.AUTO).run()
    assert done.read_bytes == 0
    assert "forgets" in done.decision.reason


def test_R1_a_read_that_fails_names_the_file_and_a_byte_of_the_failing_piece(mount: Mount) -> None:
    point = mount("--latency-ms", "1", "--fail-at", str(BLOCK_BYTES))
    with pytest.raises(Rejected) as caught:
        Prefetch(point, mode=PrefetchMode.AUTO).run()
    assert caught.value.code == "checkpoint-unreadable"
    assert str(point / "model.safetensors") in str(caught.value)
    assert "Input/output error" in str(caught.value)
    offset = int(str(caught.value).partition("at byte ")[2].partition(":")[0].replace(",", ""))
    assert offset >= BLOCK_BYTES - (1 << 20)


def test_R1_the_mount_answers_a_read_no_sooner_than_its_latency(mount: Mount) -> None:
    """What the benchmark rests on; the file system may take longer, never less."""
    point = mount("--latency-ms", "50")
    fd = os.open(point / "model.safetensors", os.O_RDONLY)
    started = time.monotonic()
    os.pread(fd, 1, 0)
    elapsed = time.monotonic() - started
    os.close(fd)
    assert elapsed >= 0.05
