"""Prefetch (R1): what is decided and why, what is read, what an error says. On any disk; FUSE is in tests/e2e."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from openrl_common import page_cache
from openrl_common import prefetch_reading as module
from openrl_common.errors import Rejected
from openrl_common.host_memory import room
from openrl_common.page_cache import is_resident
from openrl_common.prefetch import Facts, Prefetch, PrefetchMode, decide
from openrl_common.prefetch_blocks import BLOCK_BYTES, Block, Blocks, blocks_of, loading_order

GIB = 1 << 30


def facts(
    file_system: str = "nfs4", *, total: int = 16 * GIB, missing: int | None = None, available: int = 64 * GIB
) -> Facts:
    return Facts(file_system=file_system, total_bytes=total, missing_bytes=missing, available_bytes=available)


SIZE = 3 * BLOCK_BYTES + 17


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three blocks and a bit: one large tensor, and a small one whose name comes first."""
    tensors = {"layers.10": np.ones(SIZE - 1000, np.uint8), "layers.9": np.ones(1000, np.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


# --- decisions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_system", ["nfs", "nfs4", "lustre", "fuse.gcsfuse", "fuse", "virtiofs", "9p", "cifs"])
def test_R1_auto_reads_from_network_and_fuse_file_systems_and_says_how_much(file_system: str) -> None:
    decision = decide(PrefetchMode.AUTO, facts(file_system, missing=12 * GIB))
    assert decision.read
    assert all(words in decision.reason for words in ("12 GiB of 16 GiB", file_system, "64 GiB"))


@pytest.mark.parametrize("file_system", ["ext4", "xfs", "overlay", "tmpfs", "fuseblk", "unknown"])
def test_R1_auto_leaves_local_file_systems_alone_and_always_does_not(file_system: str) -> None:
    assert not decide(PrefetchMode.AUTO, facts(file_system)).read
    assert file_system in decide(PrefetchMode.AUTO, facts(file_system)).reason
    assert decide(PrefetchMode.ALWAYS, facts(file_system)).read


@pytest.mark.parametrize("mode", [PrefetchMode.AUTO, PrefetchMode.ALWAYS])
def test_R1_what_is_in_the_page_cache_already_is_not_read_again(mode: PrefetchMode) -> None:
    decision = decide(mode, facts(missing=0))
    assert not decision.read
    assert "page cache already" in decision.reason


def test_R1_what_does_not_fit_in_memory_is_not_read_unless_told_to_and_both_numbers_are_named() -> None:
    tight = facts(missing=15 * GIB, available=16 * GIB)
    assert not decide(PrefetchMode.AUTO, tight).read
    assert decide(PrefetchMode.ALWAYS, tight).read
    for mode in (PrefetchMode.AUTO, PrefetchMode.ALWAYS):
        assert all(words in decide(mode, tight).reason for words in ("15 GiB", "16 GiB", "does not fit"))
    assert decide(PrefetchMode.AUTO, facts(missing=14 * GIB, available=16 * GIB)).read


def test_R1_when_the_kernel_does_not_tell_what_is_in_memory_all_of_it_is_to_be_read() -> None:
    decision = decide(PrefetchMode.AUTO, facts(missing=None))
    assert decision.read
    assert "16 GiB of 16 GiB" in decision.reason


# --- blocks -------------------------------------------------------------------------------------------------------


def test_R1_blocks_go_by_the_loaders_order_of_tensors_and_hold_every_byte_once(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    layers = {f"model.layers.{n}.weight": np.full(1000 * (n + 1), n, np.uint8) for n in range(12)}
    save_file(layers, first)
    save_file({"model.embed": np.ones(2 * BLOCK_BYTES + 5, np.uint8), "model.none": np.ones(0, np.uint8)}, second)
    blocks = blocks_of((first, second))
    assert [block.path for block in blocks.blocks[:3]] == [second] * 3
    assert blocks.num_bytes == sum(each.nbytes for each in layers.values()) + 2 * BLOCK_BYTES + 5
    assert blocks.of_tensor["model.embed"] == range(3)
    assert not blocks.of_tensor["model.none"]
    starts = [blocks.of_tensor[f"model.layers.{n}.weight"].start for n in range(12)]
    assert starts == sorted(starts)
    for name, array in layers.items():
        data = b"".join(first.read_bytes()[each.offset : each.end] for each in _of(blocks, name))
        assert array.tobytes() in data
    assert all(block.num_bytes <= BLOCK_BYTES for block in blocks.blocks)


def _of(blocks: Blocks, name: str) -> list[Block]:
    return [blocks.blocks[index] for index in blocks.of_tensor[name]]


def test_R1_numbers_in_names_are_ordered_by_value_and_any_two_names_compare() -> None:
    names = ["h.10.w", "h.9.w", "h.9.a", "10", "h", "h.9", "9"]
    assert sorted(names, key=loading_order) == ["9", "10", "h", "h.9", "h.9.a", "h.9.w", "h.10.w"]


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def unknown_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a file that another user owns: the kernel does not tell, so that everything is read."""
    monkeypatch.setattr(page_cache, "_may_ask", lambda _: False)


@pytest.mark.usefixtures("unknown_cache")
def test_R1_every_byte_is_read_once_and_reported(checkpoint: Path) -> None:
    reports: list[tuple[int, int]] = []
    done = Prefetch(checkpoint, mode=PrefetchMode.ALWAYS, report=lambda *counts: reports.append(counts)).run()
    assert (done.read_bytes, done.cancelled) == (SIZE, False)
    assert sorted(reports) == reports
    assert reports[-1] == (SIZE, SIZE)
    assert str(done).startswith("prefetched 12 MiB in ")


def test_R1_a_checkpoint_just_written_is_in_memory_and_not_read(checkpoint: Path) -> None:
    done = Prefetch(checkpoint, mode=PrefetchMode.ALWAYS).run()
    if "to read from" in done.decision.reason:
        pytest.skip("this file system or kernel does not keep or tell what was just written")
    assert done.read_bytes == 0
    assert str(done) == "not prefetched: all of its 12 MiB are in the page cache already"


def test_R1_what_is_missing_is_there_afterwards_without_being_copied(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint / "model.safetensors"
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_resident(file.fileno(), 0, path.stat().st_size) is not False:
            pytest.skip("this file system or kernel does not drop or tell what is in memory")
        monkeypatch.setattr(module.Reading, "_read_through", lambda *_: pytest.fail("it was read through"))
        done = Prefetch(checkpoint, mode=PrefetchMode.ALWAYS).run()
        assert 0 < done.read_bytes <= SIZE
        assert is_resident(file.fileno(), 0, path.stat().st_size)


def test_R1_off_reads_nothing_not_even_the_index(tmp_path: Path) -> None:
    done = Prefetch(tmp_path / "nowhere", mode=PrefetchMode.OFF).run()
    assert str(done) == "not prefetched: --prefetch is off"


def test_R1_a_directory_without_safetensors_is_left_to_the_loader(tmp_path: Path) -> None:
    done = Prefetch(tmp_path, mode=PrefetchMode.ALWAYS).run()
    assert not done.decision.read
    assert "model.safetensors" in done.decision.reason


@pytest.mark.usefixtures("unknown_cache")
def test_R1_told_to_stop_it_reads_no_further(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    prefetch = Prefetch(checkpoint, mode=PrefetchMode.ALWAYS, report=lambda *_: prefetch.end())
    done = prefetch.run()
    assert done.cancelled
    assert done.read_bytes == 1000
    assert "told to stop" in str(done)


@pytest.mark.usefixtures("unknown_cache")
def test_R1_a_file_that_became_shorter_is_refused_with_its_name_and_the_byte(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint / "model.safetensors"

    def shorten(*_: object) -> int:
        with path.open("r+b") as file:
            file.truncate(BLOCK_BYTES + 5)
        return 0

    monkeypatch.setattr(module, "announce_reading", shorten)
    prefetch = Prefetch(checkpoint, mode=PrefetchMode.ALWAYS)
    for attempt in (prefetch.run, prefetch.check, lambda: prefetch.wait_for("layers.10"), prefetch.wait_for_all):
        with pytest.raises(Rejected) as caught:
            attempt()
        assert caught.value.code == "checkpoint-unreadable"
        assert str(path) in str(caught.value)
    assert "it ends there" in str(caught.value)


# --- waiting ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unknown_cache")
def test_R1_who_waits_for_a_tensor_goes_on_when_it_is_there_and_not_before(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large tensor's reading is held until the small one, which comes first, has been waited for."""
    let_go, order = threading.Event(), []
    bring = module.Reading._bring

    def held(reading: module.Reading, block: Block, buffer: memoryview) -> bool:
        if block.num_bytes > 1000:
            let_go.wait()
        return bring(reading, block, buffer)

    monkeypatch.setattr(module.Reading, "_bring", held)
    prefetch = Prefetch(checkpoint, mode=PrefetchMode.ALWAYS)
    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(prefetch.run)
        prefetch.wait_for("layers.9")
        prefetch.wait_for("no tensor of it")
        waiting = [threads.submit(prefetch.wait_for, "layers.10"), threads.submit(prefetch.wait_for_all)]
        order.append([each.done() for each in waiting])
        let_go.set()
        for each in waiting:
            each.result()
        assert running.result().read_bytes == SIZE
    assert order == [[False, False]]


@pytest.mark.parametrize("mode", list(PrefetchMode))
def test_R1_nobody_waits_for_what_will_not_be_read(checkpoint: Path, mode: PrefetchMode) -> None:
    prefetch = Prefetch(checkpoint, mode=mode)
    prefetch.run()
    prefetch.wait_for("layers.10")
    prefetch.wait_for_all()
    given_up = Prefetch(checkpoint, mode=mode)
    given_up.end()
    given_up.wait_for("layers.10")


# --- memory -------------------------------------------------------------------------------------------------------


def group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text + "\n")


def test_R1_the_tightest_control_group_on_the_way_to_the_root_bounds_the_memory(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    group(proc / "self", cgroup="0::/pods/worker")
    group(root, cgroup__controllers="memory")
    group(root / "pods", memory__max="1000000", memory__current="600000", memory__stat="anon 1\ninactive_file 100000")
    group(root / "pods" / "worker", memory__max="max", memory__current="500000", memory__stat="")
    found = room(proc, root)
    assert found.num_bytes == 500_000
    assert "control group's limit of 976.56 KiB" in found.bound


def test_R1_the_limit_of_an_old_control_group_is_read_too_also_where_the_container_sees_a_path_of_its_host(
    tmp_path: Path,
) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    group(proc / "self", cgroup="4:memory:/kubepods/of/the/host\n3:cpu:/")
    usage = {"memory__limit_in_bytes": "4096000", "memory__usage_in_bytes": "4000000"}
    group(root / "memory", **usage, memory__stat="cache 5\ntotal_inactive_file 1000")
    assert room(proc, root).num_bytes == 97_000


def test_R1_no_limit_means_the_memory_of_the_machine(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    group(proc / "self", cgroup="4:memory:/a")
    group(root / "memory" / "a", memory__limit_in_bytes=str((1 << 63) - 4096), memory__usage_in_bytes="5")
    assert room(proc, root).bound == room(tmp_path / "none", root).bound == "available on this machine"
