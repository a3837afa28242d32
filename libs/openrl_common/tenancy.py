"""What a tenant's own NATS account may do (E1, scripts/nats_accounts.py), and a client therefore keeps to.

In one account with the services, permissions hold nobody back: the reply subject of a request is not checked, and
JetStream answers to it, so that whoever may read one stored message can have it written into another tenant's training
log. In an account of its own the server sends answers back to where the request came from.

Invariants of a connection made here: it listens on inboxes that begin with its tenant's name alone; every call of
JetStream's API says in its subject what is read, so that an account can be limited to it; it reads no payloads.

Without accounts all of it works as well.
"""

from __future__ import annotations

import re
from typing import Any

import openrl_common.without_websockets  # noqa: F401

import nats.js.errors
from nats.js import api
from nats.js.object_store import OBJ_STREAM_TEMPLATE, ObjectStore

from openrl_common.connection import Connection, JetStream


def inbox_prefix(tenant: str) -> str:
    return f"_INBOX_{tenant}"


def without_password(url: str) -> str:
    """A server's address (or several, with commas) as it may be shown: ``nats://team-a@host:4222``."""
    return re.sub(r"(//[^/@:]*):[^@]*@", r"\1@", url)


class TenantConnection(Connection):
    """A client's connection, of one tenant."""

    def __init__(self, tenant: str) -> None:
        super().__init__()
        self._tenant = tenant

    async def connect(self, *arguments: Any, **options: Any) -> None:
        options["inbox_prefix"] = inbox_prefix(self._tenant).encode()
        await super().connect(*arguments, **options)

    def jetstream(self, **options: Any) -> JetStream:
        return _TenantJetStream(self, **options)


class _TenantJetStream(JetStream):
    async def add_consumer(
        self, stream: str, config: api.ConsumerConfig | None = None, timeout: float | None = None, **params: Any
    ) -> api.ConsumerInfo:
        """With a name: then the filter is in the subject as well."""
        config = (config or api.ConsumerConfig()).evolve(**params)
        if not config.name and not config.durable_name:
            config = config.evolve(name=self._nc._nuid.next().decode())
        return await super().add_consumer(stream, config=config, timeout=timeout)

    async def get_msg(
        self,
        stream_name: str,
        seq: int | None = None,
        subject: str | None = None,
        direct: bool | None = False,
        next: bool | None = False,
    ) -> api.RawStreamMsg:
        """The last message of a subject, which the request's own subject names; of payloads there is never one."""
        if stream_name.startswith("OBJ_"):
            raise nats.js.errors.NotFoundError
        return await super().get_msg(stream_name, seq, subject, direct=True, next=next)

    async def object_store(self, bucket: str) -> ObjectStore:
        """Without a look whether it is there."""
        return ObjectStore(name=bucket, stream=OBJ_STREAM_TEMPLATE.format(bucket=bucket), js=self)
