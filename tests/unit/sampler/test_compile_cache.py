"""Compiled code between starts (V1): found again, shared once, never half-written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from openrl_sampler.compile_cache import COMPLETE, CompileCache, cache_key


def start(cache: CompileCache, content: bytes = b"code") -> str:
    """What an engine does: compile when there is nothing."""
    with cache.starting() as state:
        artifact = cache.path / "deep" / "artifact"
        if not artifact.exists():
            artifact.parent.mkdir()
            artifact.write_bytes(content)
        return state


def test_v1_a_second_start_is_warm_and_another_configuration_is_not(tmp_path: Path) -> None:
    facts = {"model": "m", "kind": "lora", "max_num_seqs": 8}
    assert start(CompileCache(tmp_path, None, cache_key(facts))) == "cold"
    assert start(CompileCache(tmp_path, None, cache_key(dict(reversed(facts.items()))))) == "warm"
    assert start(CompileCache(tmp_path, None, cache_key(facts | {"kind": "fft"}))) == "cold"


def test_v1_what_a_killed_start_left_is_thrown_away(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "l", tmp_path / "s", "k")

    def die() -> None:
        with cache.starting():
            (cache.path / "half").write_bytes(b"ha")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        die()
    assert not list((tmp_path).glob("s/*.tar")), "nothing half-written is shared"
    assert start(cache) == "cold"
    assert not (cache.path / "half").exists()


def test_v1_a_file_that_became_empty_or_vanished_means_cold(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, None, "k")
    for damage in (
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.parent.rename(tmp_path / "x"),
    ):
        start(cache)
        assert start(cache) == "warm"
        damage(cache.path / "deep" / "artifact")
        assert start(cache) == "cold"
        assert (cache.path / "deep" / "artifact").read_bytes() == b"code"


def test_v1_another_node_is_seeded_from_the_shared_directory_and_one_writes_back(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    first, second = CompileCache(tmp_path / "a", shared, "k"), CompileCache(tmp_path / "b", shared, "k")
    assert start(first) == "cold"
    assert start(second) == "seeded"
    assert (second.path / "deep" / "artifact").read_bytes() == b"code"
    assert start(second) == "warm"
    assert len(list(shared.iterdir())) == 1
    third = CompileCache(tmp_path / "c", shared, "k")
    third.path.mkdir(parents=True)  # killed before: compiled meanwhile elsewhere
    assert start(third) == "seeded"
    assert len(list(shared.iterdir())) == 1


def test_v1_a_torn_shared_artifact_is_never_used_and_is_replaced(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    start(CompileCache(tmp_path / "a", shared, "k"))
    (artifact,) = shared.glob("*.tar")
    artifact.write_bytes(artifact.read_bytes()[:-700])
    assert start(CompileCache(tmp_path / "b", shared, "k"), b"other") == "cold"
    assert start(CompileCache(tmp_path / "c", shared, "k")) == "seeded"
    assert (tmp_path / "c" / "k" / "deep" / "artifact").read_bytes() == b"other"
    (shared / "k-0000.tar").write_bytes(b"no archive")
    assert start(CompileCache(tmp_path / "d", shared, "k")) == "seeded"


def test_v1_of_two_that_start_at_once_one_compiles(tmp_path: Path) -> None:
    cache, inside, states = CompileCache(tmp_path, None, "k"), threading.Event(), []
    may_end = threading.Event()

    def compile_slowly() -> None:
        with cache.starting() as state:
            inside.set()
            may_end.wait()
            (cache.path / "artifact").write_bytes(b"code")
            states.append(state)

    def come_second() -> None:
        with CompileCache(tmp_path, None, "k").starting() as state:
            states.append(state)

    threads = [threading.Thread(target=compile_slowly), threading.Thread(target=come_second)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join()
    assert states == ["cold", "warm"]


def test_v1_warm_starts_run_side_by_side_and_a_cold_one_waits_for_them(tmp_path: Path) -> None:
    """V1: what a start reads is not thrown away under it, although a file of it has vanished meanwhile."""
    cache, states = CompileCache(tmp_path, None, "k"), []
    start(cache)

    def come_cold() -> None:
        states.append(start(CompileCache(tmp_path, None, "k")))

    with cache.starting() as first, CompileCache(tmp_path, None, "k").starting() as second:
        assert (first, second) == ("warm", "warm")
        (cache.path / "deep" / "artifact").unlink()
        thread = threading.Thread(target=come_cold)
        thread.start()
        thread.join(0.2)
        assert states == []
        assert (cache.path / "deep").is_dir()
    thread.join()
    assert states == ["cold"]


def test_v1_a_shared_directory_that_cannot_be_used_costs_a_cold_start_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = CompileCache(tmp_path / "l", tmp_path / "file" / "below", "k")
    assert start(cache) == "cold"
    assert (cache.path / COMPLETE).is_file()
    assert start(cache) == "warm"
