"""K5: what the mirror for kubectl costs an API server."""

from __future__ import annotations

from openrl_launcher.kubernetes.mirror import pause_s


def test_K5_a_busy_api_server_is_left_alone_but_no_write_waits_for_longer_than_a_second() -> None:
    assert pause_s(0.005) == 0.045
    assert pause_s(0.2) == pause_s(20.0) == 1.0
