"""Metrics of the metadata server."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metric_definitions.label_values import MOST_NODES, SHARD
from kvstore.observe.metrics import Limit, MetricGroup

group = MetricGroup("Metadata server")
INDEX_BLOCKS: Final = group.gauge("index_blocks", "blocks in the index, with those in published caches of engines")
INDEX_SIZE_BYTES: Final = group.gauge("index_size_bytes", "size of the index in use")
INDEX_DISK_BYTES: Final = group.gauge("index_disk_bytes", "size of the file system of metadata.index_path")
INDEX_DISK_FREE_BYTES: Final = group.gauge(
    "index_disk_free_bytes", "free bytes of that file system, which also holds settings and cluster events"
)
INDEX_CHANGES_FAILING_SECONDS: Final = group.gauge(
    "index_changes_failing_seconds", "time since changes of the index began to fail; 0 while they succeed"
)
NODES: Final = group.gauge("metadata_nodes", "registered nodes, by state", {"state": ("alive", "silent", "refused")})
NODE_REFUSED: Final = group.gauge(
    "metadata_node_refused",
    "1 while a node is silent and calls with its id are rejected for their token, else 0",
    {"node": Limit(MOST_NODES)},
)
NODES_DRAINING: Final = group.gauge("metadata_nodes_draining", "draining and drained nodes")
NODE_HEARTBEAT_AGE_SECONDS: Final = group.gauge(
    "metadata_node_heartbeat_age_seconds", "time since a node's last heartbeat", {"node": Limit(MOST_NODES)}
)
ROLE_HELD: Final = group.gauge(
    "metadata_role_held", "1 while the server does this work for all servers, else 0", {"role": ("sweep", "quota", "plan")}
)
ROLES_TAKEN: Final = group.counter_family(
    "metadata_roles_taken_total",
    "roles that the server took, because no other server held them",
    {"role": ("sweep", "quota", "plan")},
    "metadata_roles_taken_{role}_total",
)
ROLES_LOST: Final = group.counter_family(
    "metadata_roles_lost_total",
    "roles that the server gave up or did not renew in time",
    {"role": ("sweep", "quota", "plan")},
    "metadata_roles_lost_{role}_total",
)
LEASE_FAILURES: Final = group.counter("metadata_lease_failures_total", "renewals of roles that the index did not answer")
CALLS_FORWARDED: Final = group.counter(
    "metadata_forwarded_calls_total", "planning and scheduling calls sent on to the server that plans"
)
CALLS_UNOWNED: Final = group.counter(
    "metadata_unowned_calls_total", "planning and scheduling calls rejected because no server plans or the one that did is lost"
)
CALLS_ANSWERED_UNOWNED: Final = group.counter(
    "metadata_unowned_answers_total",
    "questions about plans answered without the planning server",
)
SERVERS_UNANSWERED: Final = group.counter(
    "metadata_servers_unanswered_total", "questions about figures that another metadata server did not answer in time"
)
LIVE_PLANS: Final = group.gauge("metadata_live_plans", "load plans in progress")
SCHEDULER_ENGINES: Final = group.gauge("metadata_scheduler_engines", "engines that report to the scheduler")
SCHEDULER_REQUESTS: Final = group.gauge("metadata_scheduler_requests", "requests queued or in progress")
SCHEDULER_BYTES: Final = group.gauge("metadata_scheduler_bytes", "estimated memory of these requests and of the calls that wait")
SCHEDULER_WAITING: Final = group.gauge(
    "metadata_scheduler_waiting", "requests queued for an engine", {"role": ("prefill", "decode")}
)
WATCH_SUBSCRIBERS: Final = group.gauge("metadata_watch_subscribers", "subscribers to block events")
FEED_BYTES: Final = group.gauge("metadata_feed_bytes", "size of the event log that is kept for subscribers")
WATCHES: Final = group.counter("metadata_watches_total", "opened subscriptions to block events")
WATCH_EVENTS: Final = group.counter("metadata_watch_events_total", "block events sent to subscribers")
WATCH_KEYS_WITHHELD: Final = group.counter(
    "metadata_watch_keys_withheld_total", "removed keys not sent to tenants' subscribers because their namespace is unknown"
)
WATCH_SNAPSHOT_BLOCKS: Final = group.counter("metadata_watch_snapshot_blocks_total", "replicas sent to subscribers in snapshots")
WATCH_RESYNCS: Final = group.counter_family(
    "metadata_watch_resyncs_total",
    "snapshots sent to subscribers, by reason",
    {"reason": ("asked", "restarted", "gone", "slow")},
    "metadata_watch_resyncs_{reason}_total",
)
LOOKUPS: Final = group.counter("metadata_lookups_total", "lookups that the server answered")
LOOKUP_KEYS: Final = group.counter("metadata_lookup_keys_total", "block keys that lookups in registered namespaces asked for")
LOOKUP_HIT_BLOCKS: Final = group.counter("metadata_lookup_hit_blocks_total", "blocks found by lookups in registered namespaces")
LOOKUPS_UNCOUNTED: Final = group.counter(
    "metadata_lookups_uncounted_total", "lookups not counted per namespace because there are too many namespaces"
)
LOOKUPS_OVERTAKEN: Final = group.counter(
    "metadata_lookups_overtaken_total", "lookups answered with a miss because nodes registered again and again meanwhile"
)
BLOCKS_PUBLISHED: Final = group.counter("metadata_blocks_published_total", "replicas added to the index")
BLOCKS_UNPUBLISHED: Final = group.counter("metadata_blocks_unpublished_total", "replicas removed from the index")
PUBLISH_BATCHES: Final = group.counter("metadata_publish_batches_total", "batches published by nodes")
PUBLISH_GROUPS: Final = group.counter("metadata_publish_groups_total", "transactions that applied published batches")
PUBLISH_GAPS: Final = group.counter("metadata_publish_gaps_total", "publish streams rejected because a batch was missing")
PUBLISH_STREAMS_REPLACED: Final = group.counter(
    "metadata_publish_streams_replaced_total", "publish streams rejected because their node had registered again"
)
REGISTRATIONS: Final = group.counter("metadata_registrations_total", "registrations of nodes, restarts included")
HEARTBEATS: Final = group.counter("metadata_heartbeats_total", "heartbeats received from all nodes")
NODES_SENT_ELSEWHERE: Final = group.counter(
    "metadata_nodes_sent_elsewhere_total", "heartbeats and registrations refused because this server cannot reach the index"
)
NODES_APPEARED: Final = group.counter("metadata_nodes_appeared_total", "nodes that became alive, again or for the first time")
NODES_EXPIRED: Final = group.counter("metadata_nodes_expired_total", "nodes hidden because their heartbeats stopped")
NODES_LEFT: Final = group.counter("metadata_nodes_left_total", "nodes that reported their stop")
NODES_REMOVED: Final = group.counter("metadata_nodes_removed_total", "nodes removed by an operator")
DRAINS_ORDERED: Final = group.counter("metadata_drains_ordered_total", "drains that an operator requested")
DRAINS_LIFTED: Final = group.counter("metadata_drains_lifted_total", "drains that an operator cancelled")
NODES_FORGOTTEN: Final = group.counter("metadata_nodes_forgotten_total", "nodes deleted after a long time without heartbeats")
NODE_IDS_REFUSED: Final = group.counter("metadata_node_ids_refused_total", "nodes rejected because a live node has their id")
RANGES_COMPARED: Final = group.counter("metadata_ranges_compared_total", "key ranges compared with nodes")
RANGES_DIFFERING: Final = group.counter("metadata_ranges_differing_total", "compared key ranges that differed")
REPLICAS_REPAIRED: Final = group.counter("metadata_replicas_repaired_total", "replicas added or removed by anti-entropy")
INDEX_RESTARTS: Final = group.counter(
    "metadata_index_restarts_total", "times that the index was replaced while the server ran, after damage or on request"
)
PAUSES: Final = group.counter(
    "metadata_pauses_total", "pauses of the process or its host, after which silence is counted from zero"
)
MAINTENANCE_FAILURES: Final = group.counter("metadata_maintenance_failures_total", "failed rounds of maintenance")
SWEEPS: Final = group.counter("metadata_sweeps_total", "sweeps of records of ended volume epochs")
PLANS: Final = group.counter("metadata_plans_total", "load plans that the server made")
PRICES: Final = group.counter(
    "metadata_prices_total", "predictions of load times that engines requested to decide between loading and computing"
)
PLANNED_BYTES: Final = group.counter_family(
    "metadata_planned_bytes_total",
    "bytes of first plans, by the node whose storage link reads them: prefill host, decode host or an idle third host",
    {"side": ("prefill", "decode", "relay")},
    "metadata_planned_{side}_bytes_total",
)
PLANS_STALLED: Final = group.counter(
    "metadata_plans_stalled_total", "plans no longer counted as queued work because their loads stalled"
)
PLANS_REFUSED: Final = group.counter(
    "metadata_plans_refused_total", "plans rejected because too many parts of loads are in progress"
)
REPLANS: Final = group.counter("metadata_replans_total", "parts of loads planned again after a failure")
PLAN_REPORTS: Final = group.counter("metadata_plan_reports_total", "reports on planned loads")
PLANS_EXPIRED: Final = group.counter("metadata_plans_expired_total", "plans dropped because their clients stopped reporting")
ENGINE_REPORTS: Final = group.counter("metadata_engine_reports_total", "reports of engine groups")
ENGINES_RESIZED: Final = group.counter("metadata_engines_resized_total", "changes of the KV capacity that an engine reported")
ENGINES_LOST: Final = group.counter("metadata_engines_lost_total", "engines lost with their groups")
FETCHES_SKIPPED: Final = group.counter("metadata_fetches_skipped_total", "reports that requested work before it was due")
GROUPS_JOINED: Final = group.counter("metadata_groups_joined_total", "engine groups that joined")
GROUPS_LOST: Final = group.counter("metadata_groups_lost_total", "engine groups dropped because they stopped reporting")
REQUESTS_SUBMITTED: Final = group.counter("metadata_requests_submitted_total", "requests submitted to the scheduler")
REQUESTS_ASSIGNED: Final = group.counter("metadata_requests_assigned_total", "requests assigned to prefill engines")
REQUESTS_PAIRED: Final = group.counter("metadata_requests_paired_total", "requests assigned to decode engines")
REQUESTS_FINISHED: Final = group.counter("metadata_requests_finished_total", "requests that engines finished")
REQUESTS_CANCELLED: Final = group.counter("metadata_requests_cancelled_total", "scheduled requests that their caller cancelled")
REQUESTS_REFUSED: Final = group.counter(
    "metadata_requests_refused_total", "requests rejected because the queue is full or they need too much memory"
)
REQUESTS_REQUEUED: Final = group.counter("metadata_requests_requeued_total", "requests of lost engines assigned again")
REQUESTS_GIVEN_BACK: Final = group.counter(
    "metadata_requests_given_back_total", "requests that engine groups returned after they had been lost"
)
REQUESTS_EXPIRED: Final = group.counter("metadata_requests_expired_total", "requests that timed out before an engine was free")
REQUESTS_FORGOTTEN: Final = group.counter(
    "metadata_requests_forgotten_total", "requests dropped because their engines never reported an end"
)
SCHEDULER_VOID_REPORTS: Final = group.counter("metadata_scheduler_void_reports_total", "reports on unknown requests")
SETTINGS_CHANGED: Final = group.counter(
    "metadata_settings_changed_total", "changes of quotas, times to live, kept namespaces and the path policy"
)
SETTINGS_RESTORED: Final = group.counter(
    "metadata_settings_restored_total", "times that this server's copy of the settings replaced missing or older shared ones"
)
SETTINGS_LOST: Final = group.counter(
    "metadata_settings_lost_total",
    "settings of a server dropped because others were made at the same time, in a split network",
)
QUOTA_ANSWERS_LATE: Final = group.counter(
    "metadata_quota_answers_late_total", "heartbeats answered with earlier shares of quotas, because the index was slow"
)
QUOTA_SHARE_FAILURES: Final = group.counter(
    "metadata_quota_share_failures_total", "divisions of quotas that failed with an unexpected exception: a bug"
)
CLUSTER_EVENTS_DROPPED: Final = group.counter(
    "metadata_cluster_events_dropped_total", "cluster events dropped because their file could not be written for long"
)
CLUSTER_EVENT_FILE_FAILURES: Final = group.counter(
    "metadata_cluster_event_file_failures_total", "failed reads and writes of the file of cluster events"
)
BACKGROUND_BUGS: Final = group.counter(
    "metadata_background_bugs_total", "rounds of a background task that failed with an unexpected exception: a bug"
)
HEALTH_FAILURES: Final = group.counter(
    "metadata_health_failures_total", "rounds in which the index did not answer, so that the cluster's health is not known"
)
ORDERS_UNREADABLE: Final = group.counter(
    "metadata_orders_unreadable_total", "failed reads of the settings file; nodes get no settings meanwhile"
)
INDEX_DAMAGED: Final = group.counter("index_damaged_total", "times that the index was found damaged")
INDEX_REBUILDS_ASKED: Final = group.counter("index_rebuilds_asked_total", "requests to rebuild the index")
INDEX_DROPPED: Final = group.counter("index_dropped_total", "indexes dropped and created again")
INDEX_ERRORS: Final = group.counter("index_errors_total", "failures of the index")
INDEX_GROWN: Final = group.counter("index_grown_total", "times that the index's memory map was enlarged")
INDEX_KEY_CONFLICTS: Final = group.counter(
    "index_key_conflicts_total", "published blocks ignored because their key is at another position in a chain"
)
INDEX_KEY_FOREIGN: Final = group.counter(
    "index_key_foreign_total", "published blocks ignored because their key belongs to another namespace"
)
INDEX_KEY_UNNAMED: Final = group.counter(
    "index_key_unnamed_total", "published blocks ignored because the number of namespaces is at its limit"
)
INDEX_KEY_REPLACED: Final = group.counter(
    "index_key_replaced_total", "records replaced because their block was published again with its parent"
)
INDEX_READ_ONLY: Final = group.counter("index_read_only_total", "times that the index became read-only, e.g. on a full disk")
INDEX_UNCLEAN_CLOSE: Final = group.counter("index_unclean_close_total", "indexes that could not be closed properly")
INDEX_WRITABLE_AGAIN: Final = group.counter("index_writable_again_total", "times that a read-only index became writable again")
INDEX_RACES: Final = group.counter("index_races_total", "records read again because another server changed them meanwhile")
INDEX_RACES_LOST: Final = group.counter(
    "index_races_lost_total", "records not published because other servers kept changing them; anti-entropy repairs them"
)
INDEX_CHANGES_MISSED: Final = group.counter(
    "index_changes_missed_total", "records not published because their shard was away; nodes compare their ranges afterwards"
)
INDEX_UNREPLICATED: Final = group.counter(
    "index_unreplicated_total", "publishes whose shard has replicas that did not confirm them in time"
)
SHARD_UNANSWERED: Final = group.counter("index_shard_unanswered_total", "commands without an answer of their index shard in time")
SHARD_REDIRECTIONS: Final = group.counter("index_shard_redirections_total", "commands that an index shard redirected to another")
SHARDS_AWAY: Final = group.counter("index_shards_away_total", "times that a shard of the index stopped answering")
TOPOLOGY_CHANGES: Final = group.counter("index_topology_changes_total", "times that hash slots of the index moved")
FEED_APPENDS_MISSED: Final = group.counter(
    "index_feed_appends_missed_total", "block events not recorded because the shard of their stream is away"
)
FEED_WATCHES_FAILED: Final = group.counter(
    "index_feed_watches_failed_total", "failures to watch a stream of block events, which subscribers read by the clock instead"
)
RANGES_LOST: Final = group.counter(
    "index_ranges_lost_total", "key ranges that the index lost with a shard, so that nodes sent their blocks again"
)
INDEX_FULL: Final = group.counter("index_full_total", "changes rejected because a shard of the index has no memory left")
LOOKUPS_WITH_UNKNOWN: Final = group.counter(
    "metadata_lookups_with_unknown_records_total", "lookups that may be too short because an index shard did not answer"
)
LOOKUP_ROUNDS: Final = group.counter(
    "index_lookup_rounds_total",
    "batches of commands that lookups sent to the shards of the index; divide by metadata_lookups_total",
)
LOOKUP_COMMANDS: Final = group.counter("index_lookup_commands_total", "commands in these batches: records that lookups read")
INDEX_BATCH_SECONDS: Final = group.histogram_family(
    "index_batch_seconds",
    "time from sending a batch of commands to the shards of the index until the last reply",
    {"lane": ("reads", "writes")},
    "index_batch_{lane}_seconds",
)
INDEX_CHANGES_REFUSED: Final = group.counter_family(
    "index_changes_refused_total",
    "batches of changes that a shard of the index rejected: at its limit of memory (full), or for another reason",
    {"reason": ("full", "other")},
    "index_changes_refused_{reason}_total",
)
SHARD_UP: Final = group.gauge("index_shard_up", "1 while the primary of a shard of the index answers, else 0", SHARD)
SHARD_REPLICAS: Final = group.gauge("index_shard_replicas", "replicas of a shard of the index that answer", SHARD)
SHARD_KEYS: Final = group.gauge("index_shard_keys", "keys of a shard of the index", SHARD)
SHARD_MEMORY_BYTES: Final = group.gauge("index_shard_memory_bytes", "memory that the primary of a shard uses", SHARD)
SHARD_MEMORY_LIMIT_BYTES: Final = group.gauge(
    "index_shard_memory_limit_bytes", "limit of that memory (maxmemory); absent if there is none", SHARD
)
UNSERVED_SLOTS: Final = group.gauge("index_unserved_slots", "hash slots of the index that no server serves")
METADATA_SERVERS: Final = group.gauge("metadata_servers", "metadata servers that serve this index")
SERVER_TABLE_FAILURES: Final = group.counter(
    "metadata_server_table_failures_total", "failed rounds of telling other metadata servers that this one runs"
)
