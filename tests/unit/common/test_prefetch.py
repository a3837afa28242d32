"""Prefetch (R1): what is decided and why, what is read, what an error says. On any disk; FUSE is in tests/e2e."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from openrl_common import page_cache
from openrl_common import prefetch as module
from openrl_common.errors import Rejected
from openrl_common.host_memory import room
from openrl_common.prefetch import BLOCK_BYTES, Facts, PrefetchMode, decide, prefetch

GIB = 1 << 30


def facts(
    file_system: str = "nfs4", *, total: int = 16 * GIB, missing: int | None = None, available: int = 64 * GIB
) -> Facts:
    return Facts(file_system=file_system, total_bytes=total, missing_bytes=missing, available_bytes=available)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three blocks and a bit. Prefetch never looks into a file, so it need not be one that loads."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * (3 * BLOCK_BYTES + 17))
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


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def unknown_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a file that another user owns: the kernel does not tell, so that everything is read."""
    monkeypatch.setattr(page_cache, "_may_ask", lambda _: False)


@pytest.mark.usefixtures("unknown_cache")
def test_R1_every_byte_is_read_once_and_reported(checkpoint: Path) -> None:
    reports: list[tuple[int, int]] = []
    done = prefetch(checkpoint, mode=PrefetchMode.ALWAYS, report=lambda *counts: reports.append(counts))
    size = 3 * BLOCK_BYTES + 17
    assert (done.read_bytes, done.cancelled) == (size, False)
    assert sorted(reports) == reports
    assert reports[-1] == (size, size)
    assert str(done).startswith("prefetched 12 MiB in ")


def test_R1_a_checkpoint_just_written_is_in_memory_and_not_read(checkpoint: Path) -> None:
    done = prefetch(checkpoint, mode=PrefetchMode.ALWAYS)
    if "to read from" in done.decision.reason:
        pytest.skip("this file system or kernel does not keep or tell what was just written")
    assert done.read_bytes == 0
    assert str(done) == "not prefetched: all of its 12 MiB are in the page cache already"


def test_R1_off_reads_nothing_not_even_the_index(tmp_path: Path) -> None:
    assert str(prefetch(tmp_path / "nowhere", mode=PrefetchMode.OFF)) == "not prefetched: --prefetch is off"


def test_R1_a_directory_without_safetensors_is_left_to_the_loader(tmp_path: Path) -> None:
    done = prefetch(tmp_path, mode=PrefetchMode.ALWAYS)
    assert not done.decision.read
    assert "model.safetensors" in done.decision.reason


@pytest.mark.usefixtures("unknown_cache")
def test_R1_told_to_stop_it_reads_no_further(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "THREADS", 1)
    cancel = threading.Event()
    done = prefetch(checkpoint, mode=PrefetchMode.ALWAYS, report=lambda *_: cancel.set(), cancel=cancel)
    assert done.cancelled
    assert done.read_bytes == BLOCK_BYTES
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

    monkeypatch.setattr(module, "THREADS", 1)
    monkeypatch.setattr(module, "_announce_reading", shorten)
    with pytest.raises(Rejected) as caught:
        prefetch(checkpoint, mode=PrefetchMode.ALWAYS)
    assert caught.value.code == "checkpoint-unreadable"
    assert str(path) in str(caught.value)
    assert f"byte {BLOCK_BYTES + 5:,}" in str(caught.value)


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
