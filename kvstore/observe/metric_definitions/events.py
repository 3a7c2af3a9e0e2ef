"""Metrics of the publisher of KV events."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metrics import MetricGroup

group = MetricGroup("Publisher of KV events")
TOLD_BLOCKS: Final = group.gauge("events_told_blocks", "blocks that subscribers hold according to the published events")
BATCHES: Final = group.counter("events_batches_total", "batches of block events that were published")
STORED_BLOCKS: Final = group.counter("events_stored_blocks_total", "blocks published as stored")
REMOVED_BLOCKS: Final = group.counter("events_removed_blocks_total", "blocks published as removed")
UNLABELLED_BLOCKS: Final = group.gauge(
    "events_unlabelled_blocks", "blocks of the model that are stored but not published, since their labels are not known"
)
IGNORED_NAMESPACES: Final = group.gauge(
    "events_ignored_namespaces", "label namespaces of the model that are not published: other engine hashes, or too many"
)
LABELS_READ: Final = group.counter("events_labels_read_total", "labels of blocks that were read from the store")
LABELS_FAILED: Final = group.counter("events_labels_failed_total", "labels of blocks that could not be read")
LABELS_MALFORMED: Final = group.counter("events_labels_malformed_total", "labels among these that are malformed")
LABELS_DROPPED: Final = group.counter(
    "events_labels_dropped_total", "labels not kept because events.labels_memory is used up: their blocks are not published"
)
LABELS_FORGOTTEN: Final = group.counter(
    "events_labels_forgotten_total", "failed labels beyond the bound on remembered failures: read again with a scan of all blocks"
)
CLEARED: Final = group.counter("events_cleared_total", "replays that told a subscriber to drop its state")
REPLAYS: Final = group.counter("events_replays_total", "replays that subscribers requested")
REPLAY_SNAPSHOTS: Final = group.counter("events_replay_snapshots_total", "replays that began with a snapshot of all blocks")
REPLAYS_FAILED: Final = group.counter(
    "events_replays_failed_total", "replays stopped because the subscriber was gone or too slow"
)
REPLAYS_REFUSED: Final = group.counter("events_replays_refused_total", "invalid requests for replays")
