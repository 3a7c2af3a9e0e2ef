"""Ids of requests, and traces with OpenTelemetry. If tracing is off, a span costs one test of a variable.

A client creates an id for each load and sends it in gRPC metadata (``kv-request-id``); log lines and traces have it. Lookups have
none, because they are many and short. Threads that work for a request run in a copy of its context.

Spans: a client's loads, the calls that servers handle, a node's reads from its volumes and from other nodes. gRPC metadata
carries their context (W3C ``traceparent``). Frames of the data plane carry none: a read from another node over it is only a
span of the reading node.

The extra ``observe`` installs the library, which is not imported before ``set_up``.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Literal

log = logging.getLogger(__name__)

REQUEST_ID_KEY: Final = "kv-request-id"
_PLAUSIBLE = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Other ids are ignored: the id is written to logs."""

request_id: Final[ContextVar[str]] = ContextVar("kvstore_request_id", default="")
"""Id of the current request; empty: none."""
plan_id: Final[ContextVar[str]] = ContextVar("kvstore_plan_id", default="")
"""Id of the current load plan; empty: none."""


class _RequestIds:
    """Request ids of this process. Without a new prefix after a fork, parent and child would give the same ids."""

    def __init__(self) -> None:
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def next(self) -> str:
        return f"{self._prefix}-{next(self._numbers):x}"


_ids = _RequestIds()


def new_request_id() -> str:
    """A unique request id."""
    return _ids.next()


@contextmanager
def named_request() -> Iterator[str]:
    """Work for the current request, or for a new one if there is none."""
    name = request_id.get()
    if name:
        yield name
        return
    token = request_id.set(name := new_request_id())
    try:
        yield name
    finally:
        request_id.reset(token)


def inject() -> list[tuple[str, str]] | None:
    """Metadata with the request id and the trace for an outgoing call; None: neither is set."""
    name = request_id.get()
    metadata = [(REQUEST_ID_KEY, name)] if name else []
    if _tracer is not None:
        from opentelemetry import propagate

        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        metadata.extend(carrier.items())
    return metadata or None


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Set the current request id from the metadata of an incoming call."""
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _PLAUSIBLE.fullmatch(value):
            request_id.set(value)


# ---- traces
Exporter = Literal["off", "otlp", "file"]

_tracer: Any = None  # opentelemetry.trace.Tracer; None: off
_provider: Any = None
_NOTHING: Final[AbstractContextManager[Any]] = nullcontext()


def on() -> bool:
    """Whether spans are made."""
    return _tracer is not None


def span(name: str, attributes: Mapping[str, str | int | float] | None = None) -> AbstractContextManager[Any]:
    """A span around a piece of work; the work's calls take its context along.

    Costs next to nothing while traces are off: attributes that cost something belong behind ``on()``.
    """
    if _tracer is None:
        return _NOTHING
    found: AbstractContextManager[Any] = _tracer.start_as_current_span(name, attributes=attributes)
    return found


def note(**attributes: str | float) -> None:
    """Add attributes to the present span."""
    if _tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(attributes)


def server_span(name: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> AbstractContextManager[Any]:
    """A span of a call that came in, below the one it was made in."""
    if _tracer is None:
        return _NOTHING
    from opentelemetry import propagate, trace

    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    parent = propagate.extract(carrier)
    found: AbstractContextManager[Any] = _tracer.start_as_current_span(name, context=parent, kind=trace.SpanKind.SERVER)
    return found


def set_up(
    exporter: Exporter,
    service: str,
    *,
    endpoint: str | None = None,
    file: Path | None = None,
    share: float = 1.0,
    attributes: Mapping[str, str] | None = None,
) -> None:
    """Switches traces on in this process.

    Args:
        exporter: ``otlp``: to a collector, over HTTP; ``file``: JSON lines; ``off``: nothing is imported.
        service: how the process is called, e.g. ``kvstore-node``.
        endpoint: of the collector; None: as OpenTelemetry's own variables say, or this host.
        file: appended to.
        share: of traces that begin here, 0 to 1; those that others began follow their choice.
        attributes: of all spans, e.g. the node's id.

    Raises:
        ModuleNotFoundError: the extra ``observe`` is not installed.
        OSError: the file cannot be written.
        ValueError: ``file`` without a file.
    """
    if exporter == "off":
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = TracerProvider(
        resource=Resource.create({"service.name": service, **(attributes or {})}),
        sampler=ParentBasedTraceIdRatio(share),
        shutdown_on_exit=False,
    )
    made: Any
    if exporter == "file":
        if file is None:
            raise ValueError("observe.traces = file requires observe.traces_file")
        made = _file_exporter(file)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        made = OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(BatchSpanProcessor(made))
    use(provider)


def use(provider: Any) -> None:  # noqa: ANN401  # opentelemetry.trace.TracerProvider
    """Make spans with the caller's provider, such as that of an engine; None: switch traces off."""
    global _tracer, _provider
    _provider = provider
    _tracer = provider.get_tracer("kvstore") if provider is not None else None


def shut_down() -> None:
    """Write the remaining spans, and switch traces off."""
    provider = _provider
    use(None)
    if provider is not None and hasattr(provider, "shutdown"):
        provider.shutdown()


def _file_exporter(path: Path) -> Any:  # noqa: ANN401
    """One JSON object a span and line; several processes may append to one file."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Lines(SpanExporter):
        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._file = path.open("ab", buffering=0)

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            lines = b"".join(json.dumps(json.loads(span.to_json(indent=None))).encode() + b"\n" for span in spans)
            try:
                with self._lock:
                    self._file.write(lines)
            except OSError as error:  # a full disk must not stop who is traced
                log.warning("spans not written: %s (spans=%d, error=%s)", path, len(spans), error)
                return SpanExportResult.FAILURE
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            self._file.close()

    return Lines()
