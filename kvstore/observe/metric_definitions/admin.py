"""Metrics of the admin server."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metric_definitions.label_values import ERRORS
from kvstore.observe.metrics import MetricGroup

group = MetricGroup("Admin server")
REQUESTS: Final = group.counter("admin_requests_total", "requests to the admin REST")
REQUESTS_SHARED: Final = group.counter("admin_requests_shared_total", "queries answered together with an equal concurrent query")
ANSWERS_UNTAKEN: Final = group.counter(
    "admin_answers_untaken_total", "connections closed because the client did not read the response in time"
)
CHANGES: Final = group.counter(
    "admin_changes_total", "changes requested through the admin REST; the audit log has a line for each"
)
REQUEST_ERRORS: Final = group.counter_family(
    "admin_request_errors_total", "requests answered with an error, by kind", {"kind": ERRORS}, "admin_errors_{kind}_total"
)
UPSTREAM_ERRORS: Final = group.counter("admin_upstream_errors_total", "failed calls to the metadata server or a node")
NODES_UNREACHED: Final = group.counter("admin_nodes_unreached_total", "nodes missing from a response because they did not answer")
