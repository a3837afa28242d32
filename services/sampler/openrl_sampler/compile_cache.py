"""Compiled code of the vLLM engine, kept between starts (V1). Files only: no torch, no vllm.

    shared   <shared>/<key>-<sha256>.tar      one file per key and content, complete under its name or absent
    local    <local>/<key>/                   where the engine reads and writes; the same path for one key on every
                                              node, because compiled artifacts name their own path
             <local>/<key>/COMPLETE           written last: which files there were, and how long
             <local>/<key>.lock               held (flock) while an engine starts: alone while there is nothing complete

Invariants:
- the key covers model, device and engine configuration, so a wrong artifact can never be found;
- who starts holds the lock, so of two that start at once one compiles and the other finds it done; a killed process
  gives the lock back by dying, and what it left is without its mark, so it is thrown away;
- warm starts share the lock: they run side by side, and nobody throws away what they read;
- what came from the shared directory is used only if its digest is the one in its name; several nodes never compile
  into one directory: each fills its own and the first one writes back.

A shared directory that cannot be read or written costs a cold start, never a failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)
COMPLETE = "COMPLETE"


def cache_key(facts: Mapping[str, object]) -> str:
    """One name for everything that compiled code depends on."""
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:32]


class CompileCache:
    """``path``: the engine's directory. ``shared`` None = this machine only."""

    def __init__(self, local: Path, shared: Path | None, key: str) -> None:
        self._local = local
        self._shared = shared
        self._key = key
        self.path = local / key

    @contextlib.contextmanager
    def starting(self) -> Iterator[str]:
        """Hold the directory while an engine starts; says ``warm``, ``seeded`` or ``cold``.

        Left normally, what is there is complete and is shared; left by an exception, it is thrown away next time.
        """
        self._local.mkdir(parents=True, exist_ok=True)
        with (self._local / f"{self._key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            state = "warm"
            if not self._is_complete():
                fcntl.flock(lock, fcntl.LOCK_EX)  # the shared one is given back first: somebody may compile meanwhile
                state = self._prepare()
            yield state
            if state == "cold":
                self._complete()
                self._write_back()
            elif state == "seeded":
                self._complete()

    def _prepare(self) -> str:
        if self._is_complete():
            return "warm"
        shutil.rmtree(self.path, ignore_errors=True)
        if self._seed():
            return "seeded"
        self.path.mkdir()
        return "cold"

    def _is_complete(self) -> bool:
        """Every file that was there at the end of its start is there, none has become empty (a power cut does that)."""
        try:
            sizes = msgspec.json.decode((self.path / COMPLETE).read_bytes(), type=dict[str, int])
            return all(size == 0 or (self.path / name).stat().st_size > 0 for name, size in sizes.items())
        except (OSError, msgspec.DecodeError):
            return False

    def _complete(self) -> None:
        sizes = {
            str(path.relative_to(self.path)): path.stat().st_size for path in self.path.rglob("*") if path.is_file()
        }
        temporary = self.path / f".{COMPLETE}"
        temporary.write_bytes(msgspec.json.encode(sizes))
        temporary.rename(self.path / COMPLETE)

    # --- the shared directory ------------------------------------------------------------------------------------

    def _seed(self) -> bool:
        """Unpack the first sound artifact of this key; a torn one is passed over."""
        if self._shared is None:
            return False
        for artifact in sorted(self._shared.glob(f"{self._key}-*.tar")):
            fresh = self._local / f".{self._key}-{uuid.uuid4().hex}"
            try:
                if _digest(artifact) != artifact.stem.rpartition("-")[2]:
                    log.warning("compile cache: %s is torn, it is not used", artifact)
                    continue
                with tarfile.open(artifact) as archive:
                    archive.extractall(fresh, filter="data")
                fresh.rename(self.path)
            except (OSError, tarfile.TarError) as error:
                log.warning("compile cache: %s cannot be used: %s", artifact, error)
                shutil.rmtree(fresh, ignore_errors=True)
                continue
            return True
        return False

    def _write_back(self) -> None:
        """Share what this start compiled, unless somebody did already."""
        if self._shared is None:
            return
        temporary = self._shared / f".{self._key}-{uuid.uuid4().hex}"
        try:
            self._shared.mkdir(parents=True, exist_ok=True)
            if any(_digest(one) == one.stem.rpartition("-")[2] for one in self._shared.glob(f"{self._key}-*.tar")):
                return
            with temporary.open("wb") as file:
                with tarfile.open(fileobj=file, mode="w") as archive:
                    archive.add(self.path, arcname=".", filter=_without_mark)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._shared / f"{self._key}-{_digest(temporary)}.tar")
        except (OSError, tarfile.TarError) as error:
            log.warning("compile cache: not written to %s: %s", self._shared, error)
            with contextlib.suppress(OSError):
                temporary.unlink()


def _without_mark(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(member.name).name == COMPLETE else member


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
