"""What `openrl up` does about a disk that was full."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrl_client import home


async def test_a_full_disk_is_said_once_and_the_server_is_started_anew_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes, now, lines = [0], [0.0], list[str]()
    server: Any = SimpleNamespace(failed=False, write_failed=lambda: server.failed)
    monkeypatch.setattr(home.shutil, "disk_usage", lambda _path: SimpleNamespace(free=free_bytes[0]))
    monkeypatch.setattr(home.time, "monotonic", lambda: now[0])
    watch = home.RoomWatch(server, tmp_path, lines.append)

    async def look() -> bool:
        now[0] += 10
        return await watch.is_back()

    assert not await look()
    server.failed = True
    assert not await look()
    assert not await look()
    assert len(lines) == 1
    assert "is full" in lines[0]
    free_bytes[0] = 1 << 30
    assert await look()
    assert "there is room now" in lines[1]
