"""Fixtures of the client's suite."""

from __future__ import annotations

import pytest

from openrl_common.nats_server import NatsServer


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """The embedded server alone: that a containerised one is no different is shown by the suites of bus and store."""
    return nats_server.url
