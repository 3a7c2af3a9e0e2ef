"""Metrics of the router."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metric_definitions.label_values import MOST_ENGINES
from kvstore.observe.metrics import Limit, MetricGroup

group = MetricGroup("Router")
HINTS: Final = group.counter("router_hints_total", "requests with a hint about their session")
REQUESTS: Final = group.counter("router_requests_total", "requests that the router received")
REQUESTS_INFLIGHT: Final = group.gauge("router_requests_inflight", "requests that the router serves now")
ENGINE_UP: Final = group.gauge(
    "router_engine_up", "1 while an engine is healthy", {"engine": Limit(MOST_ENGINES), "role": Limit(3)}
)
ENGINE_SEQUENCES: Final = group.gauge(
    "router_engine_sequences", "requests on an engine", {"engine": Limit(MOST_ENGINES), "role": Limit(3)}
)
ENGINE_TOKENS: Final = group.gauge(
    "router_engine_tokens", "work of an engine in tokens", {"engine": Limit(MOST_ENGINES), "role": Limit(3)}
)
ANSWERS: Final = group.counter("router_answers_total", "responses that an engine started")
ANSWERS_BROKEN: Final = group.counter("router_answers_broken_total", "responses that were incomplete or invalid")
ASSIGNMENTS_EJECTED: Final = group.counter(
    "router_assignments_ejected_total", "assignments to an engine that was ejected in the meantime"
)
ASSIGNMENTS_FAILED: Final = group.counter("router_assignments_failed_total", "requests that the scheduler could not assign")
ATTEMPTS: Final = group.counter("router_attempts_total", "attempts to serve a request on an engine")
ATTEMPTS_FAILED: Final = group.counter_family(
    "router_attempts_failed_total",
    "failed attempts, by kind of failure",
    {"kind": ("connect", "reset", "timeout", "gateway", "server_error", "rate_limited", "rejected")},
    "router_attempts_{kind}_total",
)
CANCELS_FAILED: Final = group.counter("router_cancels_failed_total", "ended requests that could not be reported to the scheduler")
CHECKS_FAILED: Final = group.counter("router_checks_failed_total", "health checks of engines that failed")
CLIENTS_GONE: Final = group.counter("router_clients_gone_total", "clients that disconnected before the end of their response")
CLIENTS_STUCK: Final = group.counter("router_clients_stuck_total", "clients disconnected because they stopped reading")
EJECTIONS: Final = group.counter_family(
    "router_ejections_total",
    "ejections of engines, by cause",
    {"cause": ("failed_checks", "gateway_failures", "server_errors")},
    "router_ejections_{cause}_total",
)
EJECTIONS_SKIPPED: Final = group.counter(
    "router_ejections_skipped_total", "ejections skipped because too few other engines are healthy"
)
ERRORS: Final = group.counter("router_errors_total", "requests answered with an error of the router")
FIRST_BYTE_SECONDS: Final = group.counter(
    "router_first_byte_seconds_total",
    "time to the first byte, summed over responses",
    event="router_first_byte_ms_total",
    scale=0.001,
)
INTERNAL_ERRORS: Final = group.counter("router_internal_errors_total", "unexpected exceptions in the router: a bug")
KNOWN_REQUESTS_EXPIRED: Final = group.counter(
    "router_known_requests_expired_total", "requests of other routers dropped because no end was reported"
)
LOOKUP_HIT_TOKENS: Final = group.counter("router_lookup_hit_tokens_total", "looked-up prompt tokens that the store holds")
LOOKUP_TOKENS: Final = group.counter("router_lookup_tokens_total", "prompt tokens that the router looked up in the store")
LOOKUP_CACHE_TOKENS: Final = group.counter(
    "router_lookup_cache_tokens_total", "looked-up prompt tokens that the published cache of an engine holds"
)
CACHE_LOOKUPS_FAILED: Final = group.counter(
    "router_cache_lookups_failed_total", "lookups in the published caches of engines that failed or timed out"
)
LOOKUPS_FAILED: Final = group.counter("router_lookups_failed_total", "lookups that the metadata server did not answer")
LOOKUPS_LATE: Final = group.counter("router_lookups_late_total", "lookups that timed out")
LOOKUPS: Final = group.counter("router_lookups_total", "lookups that the router completed")
METRICS_UNKNOWN: Final = group.counter("router_metrics_unknown_total", "failed reads of an engine's metrics")
MODELS_UNKNOWN: Final = group.counter("router_models_unknown_total", "failed reads of an engine's models")
NAMESPACES_LEFT_OUT: Final = group.counter(
    "router_namespaces_left_out_total", "namespaces that lookups leave out, counted at each list: a model has many newer ones"
)
NAMESPACES_UNKNOWN: Final = group.counter("router_namespaces_unknown_total", "failed reads of the store's namespaces")
PANIC_REQUESTS: Final = group.counter("router_panic_requests_total", "requests placed while no engine was healthy")
PREFILLS_FAILED: Final = group.counter("router_prefills_failed_total", "failed calls of prefill engines")
REFUSED_FULL: Final = group.counter("router_refused_full_total", "requests rejected because too many were in flight")
REFUSED_LONG: Final = group.counter("router_refused_long_total", "requests rejected because of their size")
REPORTS_FAILED: Final = group.counter("router_reports_failed_total", "failed reports to the scheduler")
REPORTS_RESUMED: Final = group.counter(
    "router_reports_resumed_total", "times that this router reports again because the router that took over is gone"
)
REPORTS_TAKEN_OVER: Final = group.counter("router_reports_taken_over_total", "times that another router took over reporting")
REPORTS: Final = group.counter("router_reports_total", "reports to the scheduler")
RETRIES: Final = group.counter("router_retries_total", "further attempts of requests")
SCHEDULED: Final = group.counter("router_scheduled_total", "requests placed by the scheduler")
UNSCHEDULED: Final = group.counter("router_unscheduled_total", "requests placed without the scheduler")
WAITS_ABANDONED: Final = group.counter(
    "router_waits_abandoned_total", "waits for an assignment abandoned because engines were ejected"
)
BACKGROUND_BUGS: Final = group.counter("router_background_bugs_total", "unexpected errors of tasks in the background; a bug")
WITHOUT_PREFILL: Final = group.counter("router_without_prefill_total", "requests placed without a prefill engine")
