"""Logs carry trace ids, messages carry the trace (O2, O3)."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from openrl_common import telemetry
from openrl_common.errors import Rejected


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    import structlog

    stream = io.StringIO()
    root = logging.getLogger()
    level = root.level
    telemetry.configure_logging("ledger", log_format="json", stream=stream, node="n1")
    yield stream
    for handler in [handler for handler in root.handlers if getattr(handler, "openrl", False)]:
        root.removeHandler(handler)
    root.setLevel(level)
    structlog.reset_defaults()


def test_O3_structlog_and_standard_logging_come_out_alike_with_trace_ids(lines: io.StringIO) -> None:
    import structlog

    with TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span("handle") as span:
        structlog.get_logger("one").info("seat booked", claim="c1", num=2)
        logging.getLogger("two").warning("slow %s", "bus", extra={"subject": "openrl.ev"})
    structlog.get_logger("one").debug("below the level")
    first, second = [json.loads(line) for line in lines.getvalue().splitlines()]
    trace_id = f"{span.get_span_context().trace_id:032x}"
    assert (first["event"], first["claim"], first["num"], first["level"]) == ("seat booked", "c1", 2, "info")
    assert (second["event"], second["subject"], second["level"]) == ("slow bus", "openrl.ev", "warning")
    for line in (first, second):
        assert (line["service"], line["node"], line["trace_id"]) == ("ledger", "n1", trace_id)
        assert line["timestamp"].endswith("Z")


def test_O3_an_error_is_one_json_line_whatever_it_carries(lines: io.StringIO) -> None:
    import structlog

    try:
        raise ValueError("no such claim")
    except ValueError:
        structlog.get_logger().exception("handler failed", odd=object())
    (line,) = lines.getvalue().splitlines()
    assert json.loads(line)["exception"][0]["exc_value"] == "no such claim"


def test_O3_configuring_twice_does_not_log_twice(lines: io.StringIO) -> None:
    telemetry.configure_logging("ledger", log_format="console", stream=lines)
    logging.getLogger("x").warning("once")
    assert lines.getvalue().count("once") == 1


def test_O2_the_trace_travels_in_headers() -> None:
    headers: dict[str, str] = {}
    telemetry.inject_context(headers)
    assert headers == {}
    with TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span("send") as span:
        telemetry.inject_context(headers)
    received = trace.get_current_span(telemetry.extract_context(headers)).get_span_context()
    assert received.trace_id == span.get_span_context().trace_id
    assert received.is_remote


@pytest.mark.parametrize(
    "headers", [None, {}, {"traceparent": "garbage"}, {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"}]
)
def test_O2_a_broken_traceparent_is_no_trace(headers: dict[str, str] | None) -> None:
    context = telemetry.extract_context(headers)
    assert not trace.get_current_span(context).get_span_context().is_valid


def test_O2_no_endpoint_means_no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    before = trace.get_tracer_provider()
    telemetry.configure_tracing("ledger")()
    assert trace.get_tracer_provider() is before


@pytest.mark.parametrize(
    "value", ["garbage", "127.0.0.1:4318", "grpc://collector:4317", "http://", "http://a:b", "http://h:0"]
)
@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_O2_an_endpoint_that_is_no_address_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """C5: what, which value, what to do; the exporter would lose every span and say so nowhere."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        Rejected, match=rf"{variable} is '{value}', .*: write for example http://127.0.0.1:4318"
    ) as raised:
        telemetry.configure_tracing("ledger")
    assert raised.value.code == "usage"


def test_O2_an_endpoint_without_exporter_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(Rejected, match=r"http://127.0.0.1:4318.*pip install opentelemetry-exporter-otlp-proto-http"):
        telemetry.configure_tracing("ledger")
