"""Logs and traces of one process (O2, O3). structlog and the SDK are imported by the set-up functions only.

``inject_context`` and ``extract_context`` need the OpenTelemetry API alone (0.07 s), so that a client that imports the
bus pays for neither structlog (0.24 s) nor the SDK. Modules that both use log through the standard ``logging``: its
records come out in the same form, with the same trace ids. Spans are exported only when ``OTEL_EXPORTER_OTLP_ENDPOINT``
is set, in batches by a thread: a slow collector drops spans, it never blocks a service.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

import msgspec
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from openrl_common import __version__, attributes
from openrl_common.errors import Rejected

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from structlog.typing import Processor

_PROPAGATOR = TraceContextTextMapPropagator()
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_FLUSH_MS = 2_000


def inject_context(headers: MutableMapping[str, str]) -> None:
    """Write the current span as W3C ``traceparent`` into message headers; nothing is written outside a span."""
    _PROPAGATOR.inject(headers)


def extract_context(headers: Mapping[str, str] | None) -> Context:
    """The context that a message carries; an empty one when it carries none or a broken one."""
    return _PROPAGATOR.extract(dict(headers or {}))


def tracer(name: str) -> trace.Tracer:
    """The tracer of a module; does nothing until :func:`configure_tracing` has set a provider."""
    return trace.get_tracer(name, __version__)


def configure_logging(
    service: str, *, level: str = "info", log_format: str = "auto", stream: TextIO | None = None, **fields: str
) -> None:
    """Send structlog and standard logging to ``stream`` (stderr), one line per event.

    Args:
        level: debug, info, warning or error.
        log_format: ``json``, ``console``, or ``auto``: console on a terminal, json elsewhere.
        fields: bound to every line (for example ``node=…``).
    """
    import structlog

    target = stream if stream is not None else sys.stderr
    console = log_format == "console" or (log_format == "auto" and target.isatty())
    constant = {"service": service, **fields}

    def add_constant(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in constant.items():
            event.setdefault(key, value)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        _drop_formatted_message,
        add_constant,
        _add_trace_ids,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=target.isatty())]
        if console
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer(serializer=_to_json)]
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    for old in list(root.handlers):
        if getattr(old, "openrl", False):
            root.removeHandler(old)
    handler.openrl = True  # type: ignore[attr-defined]  # marks ours, so that a second call replaces it
    root.addHandler(handler)
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def otlp_endpoint(environment: Mapping[str, str] = os.environ) -> str:
    """Where spans are to go by OTLP; empty when no variable says so.

    Raises:
        Rejected: ``usage``: what a variable says is no http address. The exporter itself would only lose every span.
    """
    found = [(name, environment[name]) for name in _ENDPOINT_VARIABLES if environment.get(name)]
    for name, endpoint in found:
        try:
            parts = urlsplit(endpoint)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise Rejected(
                f"{name} is {endpoint[:80]!r}, which is no http address of an OpenTelemetry collector",
                remedy="write for example http://127.0.0.1:4318, or unset it",
                code="usage",
            )
    return found[0][1] if found else ""


def configure_tracing(service: str, *, instance: str = "") -> Callable[[], None]:
    """Export spans when an OTLP endpoint is set in the environment; returns what flushes and stops it.

    Raises:
        Rejected: ``usage``: the endpoint is no address, or the exporter is not installed.
    """
    endpoint = otlp_endpoint()
    if not endpoint:
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise Rejected(
            f"OTEL_EXPORTER_OTLP_ENDPOINT is {endpoint!r} but no exporter is installed",
            remedy="pip install opentelemetry-exporter-otlp-proto-http",
            code="usage",
        ) from error
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(
        {
            attributes.SERVICE_NAME: f"openrl-{service}",
            attributes.SERVICE_VERSION: __version__,
            attributes.SERVICE_INSTANCE_ID: instance or f"{service}-{os.getpid()}",
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

    def stop() -> None:
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()

    return stop


def _drop_formatted_message(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Another handler's formatter leaves ``message`` and ``asctime`` on the record: they repeat ``event``."""
    if "_record" in event and not event.get("_from_structlog"):
        event.pop("message", None)
        event.pop("asctime", None)
    return event


def _add_trace_ids(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event


def _to_json(event: MutableMapping[str, Any], **_unused: object) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
