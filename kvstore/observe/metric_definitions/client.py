"""Metrics of the client."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metric_definitions.label_values import MISS_REASONS, NONE, PATHS, STORE_OUTCOMES, TIERS
from kvstore.observe.metrics import MetricGroup

group = MetricGroup("Client: mirrors of the index")
EVENTS_RESYNCS: Final = group.counter(
    "client_events_resyncs_total", "restarts of an index mirror from a snapshot, the first start included"
)
EVENTS_FAILURES: Final = group.counter(
    "client_events_failures_total", "failures to open the stream of block events, or to keep it open"
)
EVENTS_IGNORED_BLOCKS: Final = group.counter(
    "client_events_ignored_blocks_total", "stored blocks that an index mirror ignored, since it was full"
)

group = MetricGroup("Client")
ASKED_TOKENS: Final = group.counter("client_asked_tokens_total", "tokens requested; always the sum of hit and missed tokens")
ASKED_BLOCKS: Final = group.counter("client_asked_blocks_total", "blocks requested; always the sum of hit and missed blocks")
CANCELLATIONS_FAILED: Final = group.counter(
    "client_cancellations_failed_total", "requests without engines in time that could not be cancelled at the scheduler either"
)
HIT_TOKENS: Final = group.counter_family(
    "client_hit_tokens_total",
    "tokens whose KV was loaded, by path and source tier",
    {"path": (*PATHS, NONE), "tier": (*TIERS, NONE)},
    "client_hit_{path}_{tier}_tokens_total",
)
HIT_BLOCKS: Final = group.counter_family(
    "client_hit_blocks_total",
    "blocks loaded, by path and source tier",
    {"path": (*PATHS, NONE), "tier": (*TIERS, NONE)},
    "client_hit_{path}_{tier}_blocks_total",
)
MISSED_TOKENS: Final = group.counter_family(
    "client_missed_tokens_total",
    "tokens whose KV was not loaded, by reason",
    {"reason": MISS_REASONS},
    "client_missed_{reason}_tokens_total",
)
MISSED_BLOCKS: Final = group.counter_family(
    "client_missed_blocks_total", "blocks not loaded, by reason", {"reason": MISS_REASONS}, "client_missed_{reason}_blocks_total"
)
LOAD_SECONDS: Final = group.histogram_family(
    "client_load_seconds",
    "duration of a load, by the path and tier of most of its hits",
    {"path": (*PATHS, NONE), "tier": (*TIERS, NONE)},
    "client_load_{path}_{tier}_seconds",
)
LOOKUP_SECONDS: Final = group.histogram("client_lookup_seconds", "duration of a lookup that the metadata server answered")
STORE_SECONDS: Final = group.histogram("client_store_seconds", "duration of a store")
SESSION_OPEN: Final = group.gauge("client_session_open", "1 while the client has a session with the local node, else 0")
LOADS: Final = group.counter("client_loads_total", "loads that the client completed")
SLOW_LOADS: Final = group.counter(
    "client_slow_loads_total", "loads that took longer than slow_load_s; the log has the breakdown of each"
)
LOAD_BLOCKS: Final = group.counter("client_load_blocks_total", "blocks requested by loads")
LOAD_HIT_BLOCKS: Final = group.counter("client_load_hit_blocks_total", "blocks that loads delivered")
LOADED_BYTES: Final = group.counter_family(
    "client_loaded_bytes_total",
    "bytes that loads delivered, by path; prefill: brought by this host from another node's memory or storage, over any network",
    {"path": PATHS},
    "client_{path}_bytes_total",
)
LOOKUPS: Final = group.counter("client_lookups_total", "lookups that the client started")
LOOKUPS_FAILED: Final = group.counter(
    "client_lookups_failed_total", "lookups that the metadata server did not answer; they count as misses"
)
LOOKUP_BLOCKS: Final = group.counter("client_lookup_blocks_total", "blocks requested by answered lookups")
LOOKUP_HIT_BLOCKS: Final = group.counter("client_lookup_hit_blocks_total", "blocks found by answered lookups")
READS_AHEAD: Final = group.counter("client_reads_ahead_total", "reads ahead of loads that the client started")
READS_AHEAD_REFUSED: Final = group.counter(
    "client_reads_ahead_refused_total", "reads ahead refused because too many were in progress, or cut after their last call"
)
PLANS_READ_AHEAD: Final = group.counter(
    "client_plans_read_ahead_total", "loads over storage links that used the plan by which their blocks were read ahead"
)
READS_AHEAD_FAILED: Final = group.counter("client_reads_ahead_failed_total", "reads ahead that failed")
HINTS: Final = group.counter("client_hints_total", "hints about sessions that the client sent to the node of its host")
HINTS_NOT_SENT: Final = group.counter(
    "client_hints_not_sent_total", "hints not sent to the node of this host: no open session, or too many hints were waiting"
)
HINTS_TO_OTHERS: Final = group.counter(
    "client_hints_to_other_nodes_total", "hints that other nodes with blocks of the session applied"
)
HINTS_TO_OTHERS_SKIPPED: Final = group.counter(
    "client_hints_to_other_nodes_skipped_total", "hints not sent to other nodes, because too many were waiting"
)
HINTS_FAILED: Final = group.counter("client_hints_failed_total", "hints that the node rejected or did not answer")
STORE_SKIPPED_DRAINING_BLOCKS: Final = group.counter(
    "client_store_skipped_draining_blocks_total", "blocks not stored because the local node was draining or stopping"
)
STORES: Final = group.counter("client_stores_total", "stores that the client completed")
STORE_BLOCKS: Final = group.counter("client_store_blocks_total", "blocks passed to stores")
STORE_OUTCOME_BLOCKS: Final = group.counter_family(
    "client_store_outcome_blocks_total",
    "blocks passed to stores, by outcome",
    {"outcome": STORE_OUTCOMES},
    "client_store_{outcome}_blocks_total",
)
STORED_BYTES: Final = group.counter("client_stored_bytes_total", "bytes that stores wrote")
STORE_FAILED: Final = group.counter("client_store_failed_total", "stores that a node rejected")
STORES_NOT_DURABLE: Final = group.counter(
    "client_stores_not_durable_total", "stores that requested durability and did not get it"
)
STORES_WITHOUT_SESSION: Final = group.counter(
    "client_stores_without_session_total",
    "stores (demotions included, layer-wise stores excluded) not sent to the local node: no session, or the node hangs",
)
LOADS_WITHOUT_SESSION: Final = group.counter(
    "client_loads_without_session_total", "loads that needed the local node and had no session with it, or found it hung"
)
BUGS: Final = group.counter(
    "client_bugs_total", "unexpected exceptions in calls, which return misses, and in background work: each is a bug"
)
CALLS_REFUSED: Final = group.counter("client_calls_refused_total", "background calls rejected because too many were running")
CONNECT_FAILED: Final = group.counter("client_connect_failed_total", "servers that did not respond when the client connected")
FALLBACK_BLOCKS: Final = group.counter(
    "client_fallback_blocks_total", "blocks requested from a second node after the first one failed"
)
FLUSH_FAILED: Final = group.counter("client_flush_failed_total", "requests to make blocks durable that failed")
HANDOFF_BYTES: Final = group.counter("client_handoff_bytes_total", "bytes of prompts transferred to decode hosts")
HANDOFF_SKIPPED_BLOCKS: Final = group.counter(
    "client_handoff_skipped_blocks_total", "blocks of prompts that a decode host rejected or had no memory for"
)
HANDOFFS_FAILED: Final = group.counter("client_handoffs_failed_total", "failed handoffs of prompts")
ABANDONS_FAILED: Final = group.counter(
    "client_abandons_failed_total",
    "cancelled prompts whose decode node could not be notified; its engine waits until the timeout",
)
LAYERWISE_HELD_UP: Final = group.counter(
    "client_layerwise_held_up_total", "layer-wise loads that waited and were continued block by block to release their memory"
)
LAYERWISE_TOO_LARGE: Final = group.counter(
    "client_layerwise_too_large_total", "layer-wise loads done block by block because of their size"
)
LOCATE_FAILED: Final = group.counter(
    "client_locate_failed_total", "failed requests for the positions of blocks on the node's volumes; the node reads these blocks"
)
LEASE_EXPIRED_BLOCKS: Final = group.counter(
    "client_lease_expired_blocks_total", "blocks discarded because their lease ended before they were copied"
)
LOCAL_LOAD_FAILED: Final = group.counter("client_local_load_failed_total", "loads that the local node rejected")
ORACLE_LOADS: Final = group.counter("client_oracle_loads_total", "loads for which the oracle policy of simulations read nothing")
PARTS_FAILED: Final = group.counter("client_parts_failed_total", "parts of planned loads that failed and needed another path")
PARTS_LATE: Final = group.counter(
    "client_parts_late_total", "planned loads that waited for parts long after their deadline: each is a bug"
)
PARTS_STALLED: Final = group.counter("client_parts_stalled_total", "parts of planned loads that stalled")
PEER_FAILED: Final = group.counter("client_peer_failed_total", "failed reads from other nodes")
PIECES_AHEAD: Final = group.counter(
    "client_pieces_ahead_total",
    "pieces of loads and stores of a device's pages whose copies began while an earlier piece was still copied",
)
PLANS_FAILED: Final = group.counter(
    "client_plans_failed_total", "load plans that could not be obtained; the local host reads the blocks that are still missing"
)
PLAN_PREDICTED_SECONDS: Final = group.histogram(
    "client_plan_predicted_seconds", "predicted duration of planned loads that their first plan completed"
)
PLAN_ERROR_SECONDS: Final = group.histogram(
    "client_plan_error_seconds",
    "difference between predicted and measured duration of planned loads that their first plan completed",
)
PROMPT_BLOCKS: Final = group.counter("client_prompt_blocks_total", "blocks received of awaited prompts")
PROMPT_WAITS_REFUSED: Final = group.counter(
    "client_prompt_waits_refused_total", "waits for prompts that the node refused because it has too many; tried again"
)
PROMPTS: Final = group.counter("client_prompts_total", "prompts that a decode engine awaited")
REPORTS_DROPPED: Final = group.counter(
    "client_reports_dropped_total", "reports of planned loads dropped because too many were queued"
)
REPORTS_FAILED: Final = group.counter(
    "client_reports_failed_total", "reports of planned loads that were not sent, or that the metadata server did not accept"
)
RETURNS_DROPPED: Final = group.counter(
    "client_returns_dropped_total", "leases not released because too many releases were queued; they expire"
)
RETURNS_FAILED: Final = group.counter("client_returns_failed_total", "calls to return leases and slots that failed; repeated")
RETURNS_REFUSED: Final = group.counter(
    "client_returns_refused_total", "calls to return leases and slots that the node refused; they end with the session"
)
STALE_ADDRESSES: Final = group.counter(
    "client_stale_addresses_total", "decode nodes reached at their last known address because the metadata server did not answer"
)
SESSION_LOST: Final = group.counter("client_session_lost_total", "lost sessions with the local node")
SESSION_OPENED: Final = group.counter("client_session_opened_total", "sessions opened again after a loss")
SESSION_REFUSED: Final = group.counter("client_session_refused_total", "failed attempts to open a session again")
