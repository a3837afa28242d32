"""Which adapters a LoRA engine holds (V9). Pure bookkeeping; loading and dropping are the engine's.

An adapter's name is unique per job, incarnation and version, so a new version is never answered by an old one, nor from
what was cached for it. The newest version of each job is known; the least recently used idle ones are dropped beyond
the bound and loaded again when they are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from openrl_common.records import WeightsRecord
from openrl_common.weights import WeightsManifest


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version as it was announced. ``job``: job key ``<tenant>.<job>.<incarnation>``."""

    job: str
    record: WeightsRecord
    manifest: WeightsManifest
    directory: Path

    @property
    def name(self) -> str:
        """No dots, because torch refuses them in module names."""
        return f"{self.job.replace('.', '_')}_v{self.record.version}"


class AdapterShelf:
    """``bound``: adapters held at most, as long as no more are in use."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._newest: dict[str, Adapter] = {}
        self.loaded: OrderedDict[str, None] = OrderedDict()
        """Names, least recently used first."""

    def newest(self, job: str) -> Adapter | None:
        return self._newest.get(job)

    def version(self, job: str) -> int:
        adapter = self._newest.get(job)
        return adapter.record.version if adapter else 0

    def put(self, adapter: Adapter) -> None:
        """The adapter is loaded and is the newest of its job."""
        self._newest[adapter.job] = adapter
        self.used(adapter.name)

    def used(self, name: str) -> None:
        self.loaded[name] = None
        self.loaded.move_to_end(name)

    def forget(self, job: str) -> None:
        self._newest.pop(job, None)

    def take_surplus(self, in_use: Set[str]) -> list[str]:
        """Names to drop now: idle versions that are not the newest, then the least recently used beyond the bound."""
        newest = {adapter.name for adapter in self._newest.values()}
        surplus = len(self.loaded) - self._bound
        dropped = []
        for name in [name for name in self.loaded if name not in in_use]:
            if name not in newest or surplus > 0:
                dropped.append(name)
                del self.loaded[name]
                surplus -= 1
        return dropped
