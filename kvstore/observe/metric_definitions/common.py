"""Metrics of every process and every gRPC server."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metric_definitions.label_values import ERRORS, KERNELS, METHODS
from kvstore.observe.metrics import Limit, MetricGroup

group = MetricGroup("Every process")
BUILD_INFO: Final = group.gauge("build_info", "always 1; the label has the version of kvstore", {"version": Limit(1)})
COPY_KERNEL: Final = group.gauge(
    "copy_kernel",
    "always 1; the label is the kernel of copies and checksums: python is the slow one",
    {"kernel": KERNELS},
)
PYTHON_COPIES: Final = group.sampled_counter("python_copies_total", "batches of copies and checksums by the kernel in Python")
UNDECLARED_EVENTS: Final = group.sampled_counter("undeclared_events_total", "events counted under an undeclared name: a bug")
METRICS_SCRAPES_REFUSED: Final = group.counter("metrics_scrapes_refused_total", "scrapes refused because too many were running")

group = MetricGroup("gRPC servers")
RPC_SECONDS: Final = group.histogram_family(
    "rpc_seconds",
    "duration of a call in its handler; for a stream, until the stream ends",
    {"method": METHODS},
    "rpc_{method}_seconds",
)
RPC_ERRORS: Final = group.counter_family(
    "rpc_errors_total", "calls that failed, by kind of error", {"kind": ERRORS}, "rpc_errors_{kind}_total"
)
RPC_CALLERS_GONE: Final = group.counter("rpc_callers_gone_total", "calls whose client disconnected before the response was sent")
RPC_TLS_CONNECTIONS_WITHOUT_CALL: Final = group.counter(
    "rpc_tls_connections_without_call_total", "TLS connections that never made a call: failed handshakes and probes"
)
RPC_UNREADABLE_REQUESTS: Final = group.counter(
    "rpc_unreadable_requests_total", "requests rejected because their bytes are not a valid message of the method"
)
RPC_UNEXPECTED_ERRORS: Final = group.counter(
    "rpc_unexpected_errors_total", "handlers that failed with an unexpected exception: a bug; the log has the traceback"
)
TENANT_SHARE_REFUSED: Final = group.counter(
    "tenant_share_refused_total", "calls rejected because the tenant reached its limit on a shared resource"
)

group = MetricGroup("Failover between metadata servers")
FAILOVER_SERVERS_LOST: Final = group.counter(
    "failover_servers_lost_total", "times that a metadata server refused connections, lost them or stopped answering"
)
FAILOVER_CHANGES: Final = group.counter("failover_changes_total", "times that calls were sent to another metadata server")
FAILOVER_CALLS_REPEATED: Final = group.counter(
    "failover_calls_repeated_total", "calls repeated on another metadata server after one failed"
)
FAILOVER_CALLS_REFUSED: Final = group.counter(
    "failover_calls_refused_total", "calls that failed because no metadata server answers"
)
