"""Spans reach a collector, and one that does not answer stops nobody (O2). Imports stay light (C3)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

_SCRIPT = """
import time
from openrl_common import telemetry
stop = telemetry.configure_tracing("ledger")
for _ in range(3):
    with telemetry.tracer("test").start_as_current_span("book a seat"):
        pass
began = time.monotonic()
stop()
print(time.monotonic() - began)
"""


def run_exporting_to(port: int) -> subprocess.CompletedProcess[str]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, timeout=30, check=True
    )


def test_O2_a_service_refuses_an_endpoint_that_is_no_address_as_it_refuses_any_setting() -> None:
    """C5: exit code 2, so that nobody starts it again; its last line says what to do."""
    done = subprocess.run(
        [sys.executable, "-m", "openrl_ledger"], env={"OTEL_EXPORTER_OTLP_ENDPOINT": "garbage"}, capture_output=True,
        text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is 'garbage'" in done.stderr.splitlines()[-1]


def test_O2_spans_are_exported_in_one_batch() -> None:
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        run_exporting_to(server.server_address[1])
        server.shutdown()
        thread.join()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    assert body.count(b"book a seat") == 3
    assert b"openrl-ledger" in body


def test_O2_a_collector_that_is_not_there_delays_the_end_by_seconds_at_most() -> None:
    began = time.monotonic()
    run_exporting_to(1)
    assert time.monotonic() - began < 12


def test_C3_what_the_client_imports_of_common_needs_no_structlog_sdk_or_torch() -> None:
    script = (
        "import sys, openrl_common.bus, openrl_common.store, openrl_common.telemetry, openrl_common.events, "
        "openrl_common.wire, openrl_common.tensors\n"
        "heavy = {'structlog', 'torch', 'vllm', 'transformers', 'opentelemetry.sdk', 'prometheus_client', 'click'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert answer.stdout.strip() == "[]"
