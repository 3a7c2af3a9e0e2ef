"""Metrics of a node."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metric_definitions.label_values import BUFFERS, NONE, OUTCOMES, VOLUME
from kvstore.observe.metrics import MetricGroup

group = MetricGroup("Node: state")
VOLUME_CAPACITY_BYTES: Final = group.gauge("volume_capacity_bytes", "capacity of a volume", VOLUME)
VOLUME_USED_BYTES: Final = group.gauge("volume_used_bytes", "bytes of a volume in use by blocks", VOLUME)
VOLUME_BLOCKS: Final = group.gauge("volume_blocks", "blocks on a volume", VOLUME)
VOLUME_DISK_BYTES: Final = group.gauge("volume_disk_bytes", "size of the file system of a volume's folder", VOLUME)
VOLUME_DISK_FREE_BYTES: Final = group.gauge(
    "volume_disk_free_bytes", "free bytes of that file system; slots are reserved, but the catalog grows", VOLUME
)
VOLUME_READ_ONLY: Final = group.gauge(
    "volume_read_only", "1 while a volume rejects blocks or its last writes failed, else 0", VOLUME
)
VOLUME_STALLED: Final = group.gauge(
    "node_volume_stalled", "1 while I/O on a volume stalls and its blocks are misses, else 0", VOLUME
)
SESSIONS: Final = group.gauge("node_sessions", "sessions of engines that are open")
BLOCKS: Final = group.gauge("node_blocks", "blocks on the node, in any tier")
WRITE_BACK_WAITING_BLOCKS: Final = group.gauge("node_write_back_waiting_blocks", "blocks in DRAM that wait for write-back")
PUBLISH_WAITING_EVENTS: Final = group.gauge("node_publish_waiting_events", "changes not yet published to the metadata server")
PUBLISH_FAILING_SECONDS: Final = group.gauge(
    "node_publish_failing_seconds", "time since the metadata server stopped accepting changes; 0 while it accepts them"
)
REGISTERED: Final = group.gauge(
    "node_registered",
    "1 while the node is registered and the metadata server answers its heartbeats, or none is configured, else 0",
)
DRAINING: Final = group.gauge("node_draining", "1 while the node drains or is drained, else 0")
DRAIN_BLOCKED: Final = group.gauge(
    "node_drain_blocked", "1 while a drain cannot proceed and stopping the node would lose blocks, else 0"
)
DRAIN_LEFT_BLOCKS: Final = group.gauge("node_drain_left_blocks", "blocks that a drain still has to move to other nodes")
DRAIN_NOT_DURABLE_BLOCKS: Final = group.gauge(
    "node_drain_not_durable_blocks", "blocks that would be lost if the draining node stopped now"
)
COPIES_WAITING_BLOCKS: Final = group.gauge(
    "node_copies_waiting_blocks", "durable blocks that wait for a second copy, or for the check whether they have one"
)
HINTED_SESSIONS: Final = group.gauge("node_hinted_sessions", "sessions whose blocks hints protect now")
HINTED_BYTES: Final = group.gauge("node_hinted_bytes", "bytes that hints protect now")
STAGING_USED_BYTES: Final = group.gauge("node_staging_used_bytes", "bytes reserved in a staging buffer", {"buffer": BUFFERS})
STAGING_WAITING_LOADS: Final = group.gauge(
    "node_staging_waiting_loads", "loads that wait for memory in a staging buffer", {"buffer": BUFFERS}
)
NETWORK_BYTES: Final = group.sampled_counter(
    "network_bytes_total",
    "bytes of the NIC that has the data plane's address; all its traffic, as the kernel counts it",
    {"network": ("compute", "storage"), "direction": ("received", "sent")},
)

PROCESS_STALLED_SECONDS: Final = group.sampled_counter(
    "node_process_stalled_seconds_total", "time that the process did not run: stopped, out of CPU, or on a suspended host"
)

group = MetricGroup("Node: loads, stores and write-back")
LOAD_SECONDS: Final = group.histogram_family(
    "node_load_seconds",
    "duration of a load, by the farthest source: DRAM, this node's volumes, another node",
    {"reach": ("dram", "nvme", "peer", NONE)},
    "node_load_{reach}_seconds",
)
LOADED_BYTES: Final = group.counter_family(
    "node_loaded_bytes_total",
    "bytes that loads delivered, by source: DRAM, this node's volumes, another node",
    {"reach": ("dram", "nvme", "peer")},
    "node_loaded_{reach}_bytes_total",
)
LOAD_BLOCKS: Final = group.counter("node_load_blocks_total", "blocks requested from the node by loads")
LOAD_MISSED_BLOCKS: Final = group.counter_family(
    "node_load_missed_blocks_total",
    "blocks that loads did not deliver, by reason; abandoned: the load was cancelled",
    {"reason": (*OUTCOMES, "abandoned", "draining")},
    "node_load_missed_{reason}_blocks_total",
)
SLOW_LOADS: Final = group.counter(
    "node_slow_loads_total", "loads that took longer than observe.slow_load; the log has the breakdown of each"
)
LOADS_NOT_RESIDENT: Final = group.counter(
    "node_loads_not_resident_total", "loads that expected all blocks in DRAM, where one was missing, and continued as a stream"
)
LOCATED_BLOCKS: Final = group.counter(
    "located_blocks_total", "blocks whose position on a volume was sent to an engine of this host for direct reads"
)
LOAD_NO_SPACE_BLOCKS: Final = group.counter(
    "load_no_space_blocks_total", "blocks not loaded because DRAM for them was not available in time"
)
NVME_READ_FAILED_BLOCKS: Final = group.counter_family(
    "nvme_read_failed_blocks_total",
    "blocks that a volume failed to deliver, by outcome",
    {"outcome": OUTCOMES},
    "nvme_read_{outcome}_blocks_total",
)
QUARANTINED_BLOCKS: Final = group.counter(
    "quarantined_blocks_total", "corrupt replicas; their slots are not used until the next start"
)
VOLUME_CHECKS_BEGUN: Final = group.counter("volume_checks_begun_total", "checks of volumes started while the node serves")
VOLUME_CHECK_BYTES: Final = group.counter("volume_check_bytes_total", "bytes of blocks read by checks of volumes")
READ_RATE_FAILED: Final = group.counter(
    "node_read_rate_failed_total", "measurements of the volumes' read rate in which a volume did not answer"
)
READ_RATE_BUGS: Final = group.counter(
    "node_read_rate_bugs_total", "measurements of the volumes' read rate that failed with an unexpected exception: a bug"
)
VOLUME_CHECK_BUGS: Final = group.counter(
    "volume_check_bugs_total", "checks of volumes that failed with an unexpected exception: a bug"
)
PEER_FETCH_FAILED: Final = group.counter("peer_fetch_failed_total", "failed fetches from other nodes")
ARENA_SLOTS_LOST: Final = group.counter(
    "arena_slots_lost_total",
    "slots of the arena unused until a restart because late bytes of a failed NIXL read may arrive in them",
)
PEER_FETCHED_BLOCKS: Final = group.counter("peer_fetched_blocks_total", "blocks fetched from other nodes")
PROMPT_NVME_BLOCKS: Final = group.counter("prompt_nvme_blocks_total", "blocks of awaited prompts read from volumes")
PROMPTS_COMPLETE: Final = group.counter("prompts_complete_total", "awaited prompts that arrived completely")
PROMPTS_INCOMPLETE: Final = group.counter("prompts_incomplete_total", "awaited prompts that timed out")
PROMPTS_ABANDONED: Final = group.counter("prompts_abandoned_total", "awaited prompts that their prefill engines cancelled")
PROMPTS_LEFT: Final = group.counter("prompts_left_total", "awaited prompts whose decode engines stopped waiting")
STAGED_BLOCKS_FROM_SECOND_SOURCE: Final = group.counter(
    "staged_blocks_from_second_source_total", "blocks of layer-wise loads read from a second source"
)
STAGED_BYTES: Final = group.counter("staged_bytes_total", "bytes of layer-wise loads")
STAGED_LOADS_TOO_LARGE: Final = group.counter(
    "staged_loads_too_large_total", "layer-wise loads read in whole blocks because of their size"
)
STAGED_READS_FAILED: Final = group.counter("staged_reads_failed_total", "failed reads of layer-wise loads")
STAGING_REFUSED: Final = group.counter_family(
    "node_staging_refused_total",
    "loads rejected because they exceed a staging buffer",
    {"buffer": BUFFERS},
    "{buffer}_refused_total",
)
STAGING_TIMEOUTS: Final = group.counter_family(
    "node_staging_timeouts_total",
    "loads that timed out waiting for memory in a staging buffer",
    {"buffer": BUFFERS},
    "{buffer}_timeouts_total",
)
READ_AHEAD_BYTES: Final = group.counter(
    "node_read_ahead_bytes_total", "bytes read from volumes and peers for requests that waited in the queue of their engine"
)
READ_AHEAD_UNUSED_BYTES: Final = group.counter(
    "node_read_ahead_unused_bytes_total", "of these, bytes that no load asked for before the reading call ended"
)
READ_AHEAD_REFUSED: Final = group.counter(
    "node_read_ahead_refused_total", "calls that read nothing ahead, because the budget was full or is smaller than a block"
)
HINTS: Final = group.counter_family(
    "node_hints_total",
    "hints about sessions; keep: protect until the next turn, end: the session has ended, off: ignored by node.hint_share = 0",
    {"kind": ("keep", "end", "off")},
    "node_hints_{kind}_total",
)
HINTED_BLOCKS: Final = group.counter_family(
    "node_hinted_blocks_total",
    "blocks named by hints: protected, not protected because of the tenant's limit, or dropped (evicted first)",
    {"result": ("protected", "beyond_limit", "dropped")},
    "node_hinted_{result}_blocks_total",
)
HINTS_DISPLACED: Final = group.counter(
    "node_hints_displaced_total", "sessions that lost their protection to another session of their tenant, or to a smaller limit"
)
HINTS_EXPIRED: Final = group.counter("node_hints_expired_total", "sessions whose protection ended by its time to live")
HINTS_REJECTED: Final = group.counter(
    "node_hints_rejected_total", "hints rejected: invalid, of too many sessions, or too many calls at once"
)
HINTED_READS_AHEAD: Final = group.counter("node_hinted_reads_ahead_total", "reads into DRAM shortly before an expected turn")
HINTED_READS_FAILED: Final = group.counter("node_hinted_reads_failed_total", "failed reads into DRAM before an expected turn")
WAITS_CANCELLED: Final = group.counter(
    "node_waits_cancelled_total", "waits for memory or blocks that ended because the caller disconnected"
)
STORE_CONFLICTS: Final = group.counter(
    "store_conflicts_total", "stores rejected because a key is held with another parent, depth or namespace"
)
STORE_ABANDONED_BLOCKS: Final = group.counter("store_abandoned_blocks_total", "slots granted to stores that were never completed")
STORE_LOST_BLOCKS: Final = group.counter("store_lost_blocks_total", "blocks completed after their grant had expired")
STORE_WITHOUT_ARENA: Final = group.counter(
    "store_without_arena_total", "stores rejected because the session has not mapped the arena"
)
STORE_NOT_YET_VISIBLE: Final = group.counter(
    "store_not_yet_visible_total", "stores whose blocks were not in the index within the requested time"
)
STORE_SKIPPED_NO_SPACE_BLOCKS: Final = group.counter(
    "store_skipped_no_space_blocks_total", "blocks not stored because DRAM was full"
)
STORE_SKIPPED_QUOTA_BLOCKS: Final = group.counter(
    "store_skipped_quota_blocks_total", "blocks not stored because their tenant's quota is full of blocks that are kept or in use"
)
LOAD_BEYOND_QUOTA_BLOCKS: Final = group.counter(
    "load_beyond_quota_blocks_total", "blocks loaded in excess of their tenant's DRAM quota; they are evicted soon after"
)
EVICTED_UNUSED_BLOCKS: Final = group.counter(
    "evicted_unused_blocks_total", "blocks evicted by the time to live of their namespace"
)
EVICTED_HINTED_BLOCKS: Final = group.counter(
    "evicted_hinted_blocks_total",
    "blocks evicted although a hint protected them: every span had such blocks, and another block size had no slot",
)
EVICTED_KEPT_BLOCKS: Final = group.counter(
    "evicted_kept_blocks_total",
    "blocks of kept namespaces evicted: more than half of a tier was kept, or no other block was evictable; see how-to/operate",
)
EVICTED_QUOTA_BLOCKS: Final = group.counter(
    "evicted_quota_blocks_total", "blocks evicted because their tenant exceeded its quota"
)
WRITE_BACK_BEYOND_QUOTA_BLOCKS: Final = group.counter(
    "write_back_beyond_quota_blocks_total", "blocks kept in DRAM only because their tenant's volume quota is full"
)
RETENTION_BUGS: Final = group.counter(
    "retention_bugs_total", "rounds of retention that failed with an unexpected exception: a bug"
)
RETENTION_RULES_UNREADABLE: Final = group.counter(
    "retention_rules_unreadable_total", "starts without the saved retention rules because the file could not be read"
)
RETENTION_RULES_UNWRITTEN: Final = group.counter(
    "retention_rules_unwritten_total", "failed attempts to save the retention rules for the next start"
)
RETENTION_FAILED: Final = group.counter(
    "retention_failed_total", "rounds of retention cut short by a failure of a volume or the metadata server"
)
STORE_SKIPPED_CLOSED_BLOCKS: Final = group.counter(
    "store_skipped_closed_blocks_total", "blocks not stored because the node was draining or stopping"
)
LOAD_DEFERRED_TO_PEERS_BLOCKS: Final = group.counter(
    "load_deferred_to_peers_blocks_total",
    "blocks not fetched because the node was draining or stopping; the client reads them elsewhere",
)
DRAINS_BEGUN: Final = group.counter("drains_begun_total", "drains that the node started")
DRAIN_BUGS: Final = group.counter("drain_bugs_total", "rounds of a drain that failed with an unexpected exception: a bug")
DRAIN_MOVED_BLOCKS: Final = group.counter("drain_moved_blocks_total", "blocks that a drain moved to other nodes")
DRAIN_MOVED_BYTES: Final = group.counter("drain_moved_bytes_total", "bytes that a drain moved to other nodes")
DRAIN_MOVES_FAILED: Final = group.counter("drain_moves_failed_total", "batches of a drain that the target node did not confirm")
DRAIN_PULLED_BLOCKS: Final = group.counter("drain_pulled_blocks_total", "blocks taken over from draining nodes")
DRAIN_NOT_PULLED_BLOCKS: Final = group.counter(
    "drain_not_pulled_blocks_total", "blocks of draining nodes that could not be taken over"
)
COPIES_CHECKED_BLOCKS: Final = group.counter("copies_checked_blocks_total", "blocks checked for a second copy on another node")
COPIES_MADE_BLOCKS: Final = group.counter("copies_made_blocks_total", "blocks of which another node made a second copy")
COPIES_MADE_BYTES: Final = group.counter("copies_made_bytes_total", "bytes of these blocks")
COPIES_REFUSED_BLOCKS: Final = group.counter(
    "copies_refused_blocks_total", "blocks of which another node did not make a second copy, e.g. for lack of space; tried again"
)
COPIES_FAILED: Final = group.counter(
    "copies_failed_total", "calls for second copies that another node or the metadata server did not answer"
)
COPIES_TAKEN_BLOCKS: Final = group.counter("copies_taken_blocks_total", "second copies of other nodes' blocks on this node")
COPIES_NOT_TAKEN_BLOCKS: Final = group.counter(
    "copies_not_taken_blocks_total", "blocks of other nodes of which this node did not make a second copy"
)
COPY_PASSES: Final = group.counter("copy_passes_total", "passes over all durable blocks that look for missing second copies")
COPY_BUGS: Final = group.counter("copy_bugs_total", "rounds of second copies that failed with an unexpected exception: a bug")
STOPPED_NOT_DURABLE_BLOCKS: Final = group.counter(
    "node_stopped_not_durable_blocks_total", "blocks that were not durable when the node stopped"
)
STOPPED_SAVED_BLOCKS: Final = group.counter("node_stopped_saved_blocks_total", "blocks written back while the node stopped")
STORES_EXPIRED: Final = group.counter("stores_expired_total", "stores that exceeded their time limit")
LEASES_EXPIRED: Final = group.counter("leases_expired_total", "leases that engines did not release")
SESSIONS_ENDED: Final = group.counter("sessions_ended_total", "sessions of engines that ended")
CASCADED_BLOCKS: Final = group.counter(
    "cascaded_blocks_total", "blocks queued for write-back again before their eviction from DRAM"
)
EVICTED_DRAM_BLOCKS: Final = group.counter("evicted_dram_blocks_total", "blocks evicted from DRAM")
EVICTED_NVME_BLOCKS: Final = group.counter("evicted_nvme_blocks_total", "blocks evicted from volumes")
WRITE_BACK_BLOCKS: Final = group.counter("write_back_blocks_total", "blocks made durable by write-back")
EVICTION_BUGS: Final = group.counter(
    "eviction_bugs_total", "blocks that could not be evicted because of an unexpected exception, and stay until a restart: a bug"
)
QUARANTINES_UNCOMMITTED: Final = group.counter(
    "quarantined_uncommitted_blocks_total", "corrupt replicas that the catalog of their volume did not give up at once; repeated"
)
LOAD_SOURCES_IGNORED: Final = group.counter(
    "load_sources_ignored_total", "sources of blocks that loads did not use, since others were named before them"
)
LOAD_WINDOW_BUGS: Final = group.counter(
    "load_window_bugs_total", "windows of loads that failed with an unexpected exception: a bug"
)
WRITE_BACK_BUGS: Final = group.counter(
    "write_back_bugs_total", "rounds of write-back that failed with an unexpected exception: a bug"
)
WRITE_BACK_CONFLICTS: Final = group.counter(
    "write_back_conflicts_total", "batches that the storage node rejected because a key is in another chain there"
)
WRITE_BACK_CORRUPT_BLOCKS: Final = group.counter(
    "write_back_corrupt_blocks_total", "blocks dropped because their bytes in DRAM do not match their checksums"
)
WRITE_BACK_DROPPED_BLOCKS: Final = group.counter(
    "write_back_dropped_blocks_total", "blocks that could not be made durable and exist in DRAM only"
)
WRITE_BACK_ERRORS: Final = group.counter(
    "write_back_errors_total", "failed rounds of write-back: a full or failing disk, or an unreachable storage node"
)
WRITE_BACK_UNFIT_BLOCKS: Final = group.counter(
    "write_back_unfit_blocks_total", "blocks kept in DRAM only because they are larger than every volume of the node"
)
WRITE_BACK_STALLS: Final = group.counter("write_back_stalls_total", "waits of more than 10 s for an earlier batch of write-back")
NVME_WATCH_BUGS: Final = group.counter(
    "nvme_watch_bugs_total", "health checks of volumes that failed with an unexpected exception: a bug"
)
LEASE_EXPIRY_BUGS: Final = group.counter(
    "lease_expiry_bugs_total", "rounds of the expiry of leases and hints that failed with an unexpected exception: a bug"
)
RECOVERY_DUPLICATES_KEPT: Final = group.counter(
    "recovery_duplicates_kept_total", "blocks found on two volumes at start and kept on both"
)

group = MetricGroup("Node: its entries in the index")
ANTI_ENTROPY_BUGS: Final = group.counter(
    "anti_entropy_bugs_total", "comparisons with the index that failed with an unexpected exception: a bug"
)
METADATA_SERVERS_DIFFER: Final = group.counter(
    "metadata_servers_differ_total", "checks that found metadata servers of one list with different indexes"
)
ANTI_ENTROPY_FAILED: Final = group.counter("anti_entropy_failed_total", "interrupted comparisons with the index")
ANTI_ENTROPY_RANGES_BUSY: Final = group.counter(
    "anti_entropy_ranges_busy_total", "key ranges not compared or not repaired because they were changing"
)
INDEX_RANGES_DRIFTED: Final = group.counter(
    "index_ranges_drifted_total", "key ranges in which the index differed from this node; repaired"
)
HEARTBEAT_BUGS: Final = group.counter("heartbeat_bugs_total", "heartbeats that failed with an unexpected exception: a bug")
HEARTBEATS_FAILED: Final = group.counter(
    "heartbeats_failed_total", "heartbeats that the metadata server did not answer or rejected"
)
INVENTORIES_SENT: Final = group.counter("inventories_sent_total", "inventories of all blocks sent to the metadata server")
LOST_RANGE_BLOCKS_SENT: Final = group.counter(
    "lost_range_blocks_sent_total", "blocks published again because the index lost their key ranges"
)
PUBLISH_BUGS: Final = group.counter("publish_bugs_total", "failures of publishing by an unexpected exception: a bug")
PUBLISH_INTERRUPTED: Final = group.counter("publish_interrupted_total", "interruptions of the publish stream")
PUBLISH_LOG_OVERFLOW: Final = group.counter(
    "publish_log_overflow_total", "change logs that grew too long and were replaced by an inventory"
)
UNREGISTER_FAILED: Final = group.counter(
    "unregister_failed_total", "stops that could not be reported to the metadata server, which detects them by missing heartbeats"
)
REGISTERED_AGAIN: Final = group.counter("registered_again_total", "registrations after the index was replaced or lost the node")
REGISTRATIONS_REFUSED: Final = group.counter(
    "registrations_refused_total", "registrations rejected because another node has this id or one of the volumes"
)
