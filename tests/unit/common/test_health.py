"""What the health server answers (O1)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter

from openrl_common.errors import Rejected
from openrl_common.health import Check, HealthServer, Heartbeat, check


def fails_with_an_error() -> str | None:
    raise ZeroDivisionError("broken check")


class Served:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.connected = False
        self.heartbeat = Heartbeat("event loop", limit_s=5.0, clock=lambda: self.now_s)
        self.ready: dict[str, Check] = {"bus": check(lambda: self.connected, "not connected")}
        self.registry = CollectorRegistry()
        self.server = HealthServer(self.registry, live={"loop": self.heartbeat.check}, ready=self.ready)
        self.port = self.server.start()

    def get(self, path: str, accept: str = "") -> tuple[int, str, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers={"Accept": accept})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.server.stop()
    one.server.stop()


def test_O1_livez_follows_the_heartbeat_and_no_dependency(served: Served) -> None:
    assert served.get("/livez")[0] == 200
    served.now_s += 5.1
    status, _, body = served.get("/livez")
    assert status == 503
    assert json.loads(body)["failing"] == {"loop": "event loop last turned 5.1 s ago (limit 5 s)"}
    served.heartbeat.beat()
    assert served.get("/livez")[0] == 200


def test_O1_readyz_names_the_checks_that_fail(served: Served) -> None:
    served.ready["cache"] = lambda: None
    served.ready["odd"] = fails_with_an_error
    for path in ("/readyz", "/healthz", "/readyz?verbose"):
        status, _, body = served.get(path)
        assert status == 503
        assert json.loads(body)["failing"] == {"bus": "not connected", "odd": "ZeroDivisionError: broken check"}
    served.connected = True
    del served.ready["odd"]
    status, _, body = served.get("/readyz")
    assert status == 200
    assert json.loads(body) == {"ok": True, "failing": {}, "checks": ["bus", "cache"]}


def test_O1_metrics_are_prometheus_or_open_metrics_as_asked(served: Served) -> None:
    seats = Counter("openrl_seats", "Seats booked.", registry=served.registry)
    seats.inc(exemplar={"trace_id": "4bf92f35"})
    status, content_type, body = served.get("/metrics")
    assert (status, "openrl_seats_total 1.0" in body, "# EOF" in body) == (200, True, False)
    assert content_type.startswith("text/plain")
    _, content_type, body = served.get("/metrics", "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert 'trace_id="4bf92f35"' in body
    assert body.endswith("# EOF\n")


def test_other_paths_say_what_is_here(served: Served) -> None:
    assert served.get("/")[0] == 404


def test_a_taken_port_is_one_clear_line(served: Served) -> None:
    with pytest.raises(Rejected, match=rf"127\.0\.0\.1:{served.port} cannot be opened.*--health-port"):
        HealthServer(CollectorRegistry(), live={}, ready={}, port=served.port).start()
