"""Values of metric labels."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metrics import Labels, Limit

NONE: Final = "none"
"""Label of a load without hits, or of a source that reported no path or tier."""
PATHS: Final = ("hbm", "local", "prefill", "decode", "relay")
"""Paths of hits; see ``LoadResult.bytes_by_path``."""
TIERS: Final = ("hbm", "dram", "nvme")
MISS_REASONS: Final = ("unknown", "evicted", "index_down", "node_lost", "corrupt", "deadline", "capacity", "other")
"""Why a requested block was not loaded:

* ``unknown``: the index lists none: the block was never stored, or every replica was evicted;
* ``evicted``: the index has a replica, but its node does not;
* ``index_down``: the metadata server did not answer, and the local node does not hold the block;
* ``node_lost``: the node with the replica did not answer, or rejected the request;
* ``corrupt``: the checksum of the bytes was wrong;
* ``deadline``: the load timed out or was cancelled;
* ``capacity``: the node's DRAM was full, or too many background calls were running;
* ``other``: the client was closed, or a bug.
"""
BUFFERS: Final = ("prefill_buffer", "decode_buffer", "read_ahead")
OUTCOMES: Final = ("miss", "corrupt", "unavailable", "timeout", "no_space")
STORE_OUTCOMES: Final = ("stored", "exists", "in_progress", "skipped", "corrupt", "lost")
KERNELS: Final = ("avx512", "avx2", "neon", "portable", "python")
ERRORS: Final = (
    "invalid_argument", "unsupported", "not_found", "conflict", "permission_denied", "unauthenticated", "lease_lost",
    "capacity_exceeded", "unavailable", "deadline_exceeded", "corrupt_block", "internal",
)  # fmt: skip
METHODS: Final = (
    "RegisterNode", "Heartbeat", "CompareDigests", "RepairRanges", "RegisterNamespace", "ListNamespaces", "ListNodes", "Lookup",
    "PlanLoad", "PriceLoad", "ReportLoads", "ReplanLoad", "ReportEngines", "AssignRequest", "CancelRequest", "GetStats",
    "UnregisterNode", "DrainNode", "UndrainNode", "RemoveNode", "LocateBlocks", "LookupHeads",
    "PullBlocks",
    "GetNode", "IssueTicket", "OpenSession", "Prepare", "Complete", "Abort", "Load", "LoadResident", "ReadAhead", "Locate",
    "Hint", "AwaitPrompt", "AbandonPrompt", "Release", "Flush", "Evict", "GetNodeStats",
    "DescribeServer", "DescribeNamespaces", "DescribeBlocks", "DescribePlanning", "SetPathPolicy", "RebuildIndex",
    "DescribeTenants", "ListNamespaceRules", "SetTenantQuota", "SetNamespaceRule",
    "DescribeNode", "DescribeUsage", "ListSlowLoads", "EvictBlocks", "InvalidateNamespace", "SetTrafficCap", "CompareIndex",
    "HintSession", "CheckVolume", "DescribeCheck", "CancelCheck", "DescribeHistory", "ListClusterEvents", "DescribeShards",
)  # fmt: skip
"""Timed methods. ``Publish`` and ``WatchBlocks`` are streams that stay open as long as a node or a subscriber runs."""
MOST_NODES: Final = 4_096
MOST_ENGINES: Final = 4_096
VOLUME: Final[Labels] = {"volume": Limit(64), "tier": TIERS}
MOST_SHARDS: Final = 64
SHARD: Final[Labels] = {"shard": Limit(MOST_SHARDS)}
"""Number of a shard, in the order of the hash slots."""
