"""Health and metrics over HTTP (O1), from a thread of their own: ``/livez``, ``/readyz``, ``/healthz``, ``/metrics``.

- ``/livez``: the process turns (its heartbeats are recent). It never looks at a dependency: a bus outage must not get
  every service restarted.
- ``/readyz`` and its alias ``/healthz``: every named check passes (bus connected, consumers bound, not draining).
- ``/metrics``: Prometheus text, OpenMetrics (with exemplars) when the scraper asks for it, from the registry given.

A thread, not the event loop, so that a worker deep in a training step still answers; the heartbeat is what shows a
stuck loop. Loopback by default. It serves no history and takes no commands.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from openrl_common.errors import Rejected

Check = Callable[[], str | None]
"""None when all is well, otherwise one line that says what is not."""

_REQUEST_TIMEOUT_S = 5.0


class Heartbeat:
    """Says when something last turned: an event loop, a training step. ``beat`` is cheap and safe from any thread."""

    def __init__(self, name: str, *, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.limit_s = limit_s
        self._clock = clock
        self._beat_at = clock()

    def beat(self) -> None:
        self._beat_at = self._clock()

    def check(self) -> str | None:
        silent_s = self._clock() - self._beat_at
        return (
            None
            if silent_s <= self.limit_s
            else f"{self.name} last turned {silent_s:.1f} s ago (limit {self.limit_s:g} s)"
        )

    async def follow_loop(self, *, interval_s: float = 1.0) -> None:
        """Beat as long as the running event loop turns. An eternal task: cancel it to stop."""
        while True:
            self.beat()
            await asyncio.sleep(interval_s)


def check(passes: Callable[[], bool], why: str) -> Check:
    """A check from a predicate: fails with ``why``."""
    return lambda: None if passes() else why


class HealthServer:
    """The HTTP server of one process.

    Args:
        registry: the process's own metrics registry (never prometheus_client's global one).
        live, ready: named checks, read anew on every request; the owner may add to the mapping while it serves.
        host: 127.0.0.1 unless something outside this machine probes it.
        port: 0 = the system picks a free one; ``start`` returns it.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        live: Mapping[str, Check],
        ready: Mapping[str, Check],
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._registry = registry
        self._live = live
        self._ready = ready
        self._host = host
        self.port = port
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Serve until ``stop``; returns the port. Raises Rejected when the address cannot be had."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_TIMEOUT_S
            server_version = "openrl"
            sys_version = ""

            def do_GET(self) -> None:
                status, content_type, body = owner.answer(self.path, self.headers.get("Accept", ""))
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Probes come every few seconds: not worth a log line."""

        try:
            self._server = _Server((self._host, self.port), Handler)
        except OSError as error:
            raise Rejected(
                f"health port {self._host}:{self.port} cannot be opened: {error.strerror}; "
                "choose another --health-port or 0",
                code="port-taken",
            ) from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()
        return self.port

    def stop(self) -> None:
        """Close the port. Stopping twice, or before the start, does nothing."""
        server, thread, self._server, self._thread = self._server, self._thread, None, None
        if server is not None and thread is not None:
            server.shutdown()
            thread.join(_REQUEST_TIMEOUT_S)
            server.server_close()

    def answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Status, content type and body of one request."""
        match path.partition("?")[0]:
            case "/livez":
                return _verdict(self._live)
            case "/readyz" | "/healthz":
                return _verdict(self._ready)
            case "/metrics":
                encode, content_type = choose_encoder(accept)
                return 200, content_type, encode(self._registry)
            case _:
                return 404, "text/plain; charset=utf-8", b"not here: /livez /readyz /healthz /metrics\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hangs up early is its own business."""


def _verdict(checks: Mapping[str, Check]) -> tuple[int, str, bytes]:
    failing: dict[str, str] = {}
    names = list(checks)
    for name in names:
        try:
            problem = checks[name]()
        except Exception as error:  # a broken check is a failed check, never a dead server
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            failing[name] = problem
    body = msgspec.json.encode({"ok": not failing, "failing": failing, "checks": names}) + b"\n"
    return (503 if failing else 200), "application/json", body
