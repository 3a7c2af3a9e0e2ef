"""Every metric of every process.

Units are in names: ``_seconds``, ``_bytes``, ``_blocks``, ``_tokens``. Counters end in ``_total``. ``tests/observe`` compares the
declarations with the code, the dashboard and the alert rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvstore.observe.metric_definitions import (
    admin,
    client,
    common,
    device,
    events,
    hooks,
    metadata,
    node,
    router,
    transport,
    volumes,
)
from kvstore.observe.metrics import DECLARED, Metric

__all__ = [
    "EVENTS",
    "METRICS",
    "SHOWN_AT_ZERO",
    "admin",
    "client",
    "common",
    "device",
    "events",
    "hooks",
    "metadata",
    "node",
    "router",
    "transport",
    "volumes",
]

METRICS: Final[Mapping[str, Metric]] = MappingProxyType(DECLARED)
"""All metrics by exposed name."""
EVENTS: Final[Mapping[str, Metric]] = {event: metric for metric in METRICS.values() for event in metric.events}
"""The metric that shows each event."""
assert len(EVENTS) == sum(len(metric.events) for metric in METRICS.values()), "an event is shown by two metrics"

SHOWN_AT_ZERO: Final = {
    "admin": ("admin_", "failover_"),
    "client": ("client_", "failover_", "transport_peer_"),
    "hbm": ("hbm_",),
    "metadata": ("metadata_", "index_", "rpc_", "tenant_"),
    "node": (
        "adopt", "anti_", "arena_", "cascaded_", "copies_", "copy_", "device_", "drain", "evicted_", "failover_", "fenc",
        "gds_", "heartbeat", "index_ranges_", "inventories_", "lease_expiry_", "leases_", "load_", "located_", "lost_range_",
        "mount_", "node_", "nvme_", "peer_", "prefill_", "decode_", "eviction_", "prompt", "publish_", "quarantined_",
        "read_ahead_", "recovery_",
        "register", "registrations_", "retention_", "rpc_", "sessions_", "slot_manifest_", "staged_", "store", "tenant_",
        "transport_", "unregister_", "volume_check", "volume_stall", "write_back_",
    ),
    "router": ("router_", "client_cancellations_", "failover_"),
    "events": ("events_", "client_events_", "failover_"),
}  # fmt: skip
"""Process -> prefixes of its events. Their totals are exposed from the start, so that a rate covers the first event."""
