"""A live copy of one kind of objects that survives whatever a watch may do (K6).

    list ─▶ replace the copy, tell what changed and what vanished ─▶ watch from there, with bookmarks
      ▲                                                                  │
      └──────── 410, silence, or errors that do not end ─────────────────┘

An ordinary end, and an error at first, go on from the last version seen, the latter after a jittered back-off.

Invariants: ``objects`` is never older than the last list; a lost event costs at most one relist, for a silent watch is
ended by the client itself. ``on_change(key, object or None)`` runs on the loop and may not raise. It keeps no history.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from openrl_common.errors import Transient
from openrl_launcher.kubernetes.api import Expired, KubeApi, Silent
from openrl_launcher.kubernetes.objects import Watched

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Watched)

SERVER_TIMEOUT_S = 240
SILENCE_S = 90.0
"""Bookmarks come about once a minute: a watch that says nothing for longer is dead."""
PAGE = 500
_RESUMES_MAX = 8
_BACK_OFF_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Failure(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Bookmark(msgspec.Struct):
    metadata: _ListMeta


class Informer(Generic[T]):
    """Keys are ``<namespace>/<name>``, or the bare name of cluster objects.

    Args:
        path: of the collection, for example ``/api/v1/pods``.
        query: selectors, for the list and the watch.
    """

    def __init__(
        self,
        api: KubeApi,
        path: str,
        kind: type[T],
        *,
        on_change: Callable[[str, T | None], None],
        query: dict[str, str] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._api = api
        self._path = path
        self._query = query or {}
        self._on_change = on_change
        self._silence_s = silence_s
        self._object = msgspec.json.Decoder(kind)
        fields: list[Any] = [("metadata", _ListMeta), ("items", list.__class_getitem__(kind) | None, None)]
        self._list: msgspec.json.Decoder[Any] = msgspec.json.Decoder(msgspec.defstruct("ObjectList", fields))
        self._event = msgspec.json.Decoder(_Event)
        self.objects: dict[str, T] = {}
        self.synced = asyncio.Event()
        self.lists = 0
        self.expirations = 0
        self._version = ""

    async def run(self, version: str = "") -> None:
        """For ever."""
        failures = 0
        while True:
            try:
                version = version or await self._relist()
                version = await self._watch(version)
                failures = 0
                continue
            except Expired as error:
                log.info("%s: listing again", error)
                self.expirations += 1
                version = ""
            except Silent as error:
                log.info("%s: listing again", error)
                version = ""
            except Transient as error:
                log.info("%s", error)
                version = self._version if failures < _RESUMES_MAX else ""
            pause_s = _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]
            failures += 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))

    async def _relist(self) -> str:
        found: dict[str, T] = {}
        query = {**self._query, "limit": str(PAGE)}
        version = ""
        while True:
            page: Any = self._list.decode(await self._api.call("GET", self._path, query=query))
            version = version or page.metadata.resource_version
            for item in page.items or ():
                found[key_of(item)] = item
            if not page.metadata.continue_:
                break
            query["continue"] = page.metadata.continue_
        self.lists += 1
        for key in self.objects.keys() - found.keys():
            self._set(key, None)
        for key, item in found.items():
            known = self.objects.get(key)
            if known is None or known.metadata.resource_version != item.metadata.resource_version:
                self._set(key, item)
        self.synced.set()
        self._version = version
        return version

    async def _watch(self, version: str) -> str:
        """Follow until the server ends it; the version to go on from."""
        self._version = version
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(SERVER_TIMEOUT_S * random.uniform(1.0, 1.5))),
        }
        async for line in self._api.stream(self._path, query=query, silence_s=self._silence_s):
            try:
                event = self._event.decode(line)
                if event.type == "BOOKMARK":
                    self._version = msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
                    continue
                if event.type == "ERROR":
                    failure = msgspec.json.decode(event.object, type=_Failure)
                    raise (Expired if failure.code == 410 else Transient)(f"watch of {self._path}: {failure.message}")
                item = self._object.decode(event.object)
            except msgspec.DecodeError as error:
                raise Transient(f"the watch of {self._path} sent what is no event: {error}") from error
            self._version = item.metadata.resource_version
            self._set(key_of(item), None if event.type == "DELETED" else item)
        return self._version

    def _set(self, key: str, item: T | None) -> None:
        """Told before the copy changes, so that ``objects`` still has what vanished."""
        if item is None and key not in self.objects:
            return
        self._on_change(key, item)
        if item is None:
            del self.objects[key]
        else:
            self.objects[key] = item


def key_of(item: Watched) -> str:
    meta = item.metadata
    return f"{meta.namespace}/{meta.name}" if meta.namespace else meta.name
