"""``openrl dlq requeue``: what could not be handled is handled again, once, and leaves the list; ``openrl doctor``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from openrl_client.cli.common import Where
from openrl_client.cli.watch import _dead_letters, _requeue
from openrl_client.connection import connect
from openrl_client.doctor import Level, look
from openrl_common.bus import Bus, Delivery
from openrl_common.errors import Poison, Rejected
from openrl_common.events import JobFinished
from support import until


async def test_a_dead_letter_that_is_requeued_is_handled_again_and_gone(
    bus: Bus, nats_url: str, tmp_path: Path
) -> None:
    """E2, E6: the same body on the same subject under a new id, at once, within the duplicate window of the first."""
    where = Where(nats_url, tmp_path, "default")
    broken, handled = True, []

    async def handle(delivery: Delivery) -> None:
        if broken:
            raise Poison("not today")
        handled.append(delivery)

    consuming = asyncio.create_task(
        bus.consume(stream="OPENRL_EVENTS", durable="test", subjects=["openrl.ev.client.>"], handler=handle)
    )
    event = JobFinished(tenant="default", job="j", submission="s")
    await bus.publish(event)
    letters: list[dict[str, object]] = []
    while not letters:
        letters = await _dead_letters(where)
    assert (letters[0]["subject"], letters[0]["consumer"]) == (event.subject, "test")
    broken = False
    with pytest.raises(Rejected, match="dead letter 99 is not known"):
        await _requeue(where, (99,))
    await _requeue(where, (int(str(letters[0]["sequence"])),))
    await until(lambda: bool(handled))
    assert handled[0].event() == event
    assert handled[0].headers["ce-type"] == "job.finished.v1"
    assert handled[0].headers["ce-id"] == handled[0].headers["Nats-Msg-Id"]
    assert await _dead_letters(where) == []
    consuming.cancel()
    await asyncio.gather(consuming, return_exceptions=True)


async def test_the_training_log_is_never_published_again(bus: Bus, nats_url: str, tmp_path: Path) -> None:
    """R4: its order is what is trained."""
    await bus.publish_raw(
        "openrl.dlq.OPENRL_TRAIN.x", b"{}", message_id="dlq:x",
        headers={"openrl-dlq-subject": "openrl.train.default.j", "openrl-dlq-stream": "OPENRL_TRAIN"},
    )  # fmt: skip
    where = Where(nats_url, tmp_path, "default")
    with pytest.raises(Rejected, match="order must stay"):
        await _requeue(where, ())
    assert len(await _dead_letters(where)) == 1


async def test_e18_doctor_finds_what_is_missing_and_who_does_not_answer(
    bus: Bus, nats_url: str, tmp_path: Path
) -> None:
    """E18: against a real server; no service runs beside it."""
    async with connect(nats_url, home=tmp_path) as client:
        found = {each.about: each for each in await look(client, tmp_path / "elsewhere", None)}
        assert found["streams"].level is Level.OK, found["streams"]
        assert found["durability"].level is Level.NOTE, "its configuration is not on this home"
        assert (found["ledger"].level, found["nodes"].level) == (Level.FAILED, Level.WARNING)
        assert found["clock"].level is Level.OK, "the container or this host: one clock"
        if (tmp_path / "nats").is_dir():  # the embedded server
            embedded = {each.about: each for each in await look(client, tmp_path, None)}
            assert embedded["durability"].what == "sync_interval: always"
        await bus.jetstream.delete_stream("KV_openrl_leases")
        findings = await look(client, tmp_path, None)
        (missing,) = [each for each in findings if each.about == "streams"]
        assert "KV_openrl_leases is missing" in missing.what
