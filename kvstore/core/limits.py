"""Every bound that input from outside meets, in one place. Checked before anything is allocated."""

from __future__ import annotations

MAX_KEYS_PER_CALL = 65_536
"""Keys in one lookup, load, store or publish: 4 M tokens of context at 64 tokens per block."""
MAX_LOOKUP_ENDS = 8
"""Guesses in one lookup where replicas of its chain end. With more, probing all of them costs more than a search without any."""
MAX_LAYERS = 1_024
MAX_LAYER_BLOCK_BYTES = 64 << 20
MAX_BLOCK_BYTES = 256 << 20
MIN_LAYER_BLOCK_BYTES = 1
MAX_BLOCK_TOKENS = 65_536
MAX_SHARDS = 4_096
MAX_NAME_BYTES = 512
"""Model names, tenants, layouts, node and volume ids."""
MAX_REASON = 512
"""Maximum length, in characters, of the reason why a volume stores no blocks."""
MAX_NODE_FINDINGS = 16
"""Health findings in one heartbeat."""
MAX_RANGE_CHECKS = 16
"""Checks of key ranges in one heartbeat."""
MAX_REPAIRED_RANGES = 64
"""Key ranges in one call that repairs them."""
MAX_CODE_BYTES = 64
"""Name of a health code."""
MAX_SOURCES = 4_096
"""Source ranges of one load. A node rejects a load with more, so a client leaves the rest out."""
MAX_SOURCES_PER_BLOCK = 8
"""Sources of one block that a load tries, best first. More are ignored."""
MAX_SALT_BYTES = 256
MAX_DEPTH = 1 << 24
"""Position of a block in its chain."""
MAX_TICKET_BYTES = 256
MAX_CONTROL_MESSAGE_BYTES = 64 << 20
"""gRPC messages; 65,536 keys with 1,024 checksums each do not fit and are refused: split the call."""
MAX_FRAME_HEADER_BYTES = 8 << 20
"""Data-plane frame headers."""
MAX_AGENT_BYTES = 256 << 10
"""Metadata of a NIXL agent: addresses and keys of its registered memory."""
MAX_TRANSFER_ID_BYTES = 64
"""The name of one handoff of a prompt."""
MAX_KEEP_MS = 3_600_000
"""Longest time for which a hint may protect a session's blocks, and longest time until its next turn."""
MAX_HINT_PRIORITY = 9
MAX_HINTED_SESSIONS = 4_096
"""Sessions of applications that hints protect on one node."""
MAX_HINTED_SESSIONS_OF_TENANT = 1_024
MAX_HINTED_KEYS_OF_TENANT = 1 << 20
"""Keys that a tenant's sessions protect; a key that several sessions share counts for each."""
MAX_DATA_CONNECTIONS = 256
MAX_HELD_CONNECTIONS = 64
"""Of one client to one node: handoffs under way. Each has a connection while its prompt is computed."""
MAX_SESSIONS = 256
"""Maximum number of sessions of one node."""
MAX_SESSIONS_OVER_TCP = MAX_SESSIONS // 2
"""Maximum number of sessions of one node over TCP. The others are left to the engines of its host, which use the unix socket."""
TENANT_SHARE = 4
"""A tenant that is confined by its token may use at most this fraction (1/n) of each shared resource: waiting calls, sessions
over TCP, subscriptions, staging buffers."""
MAX_WATCH_FILTER = 1_024
"""Namespaces, and nodes, that a subscriber to block events may name."""
MAX_VOLUMES_PER_NODE = 64
MAX_TENANTS_TOLD = 1_024
"""Maximum number of tenants whose usage a node reports; the largest come first."""
MAX_QUOTAS = 256
"""Tenants with a quota."""
MAX_RULES = 1_024
"""Namespaces that an operator keeps, or that have a time to live or two copies."""
MAX_COPIES = 2
"""Nodes whose volumes may hold each durable block of a namespace, if an operator asks for it."""
MAX_NODES = 10_000
MAX_NOTE_BYTES = 1 << 20
"""Maximum size of a note in the index. The largest, a node's report with usages of 1,024 tenants, has about half of it."""
MAX_NOTE_NAME_BYTES = 2_048
MAX_NAMESPACES = 100_000
MAX_NAMESPACES_OF_TENANT = 1_024
"""Of one named tenant, in an index and at a node: a salt is enough to make another. Those of no tenant have no such bound."""
MAX_SCHEDULED_BYTES = 512 << 20
"""Limit for the requests in a metadata server that wait for engines or have them, together with the waiting calls."""
MAX_CACHED_PREFIX_NAMES = 64 << 10
"""Characters of all names of engines that one request says to have a part of its prompt at hand."""
MAX_REPLAN_RANGES = 1_024
"""Maximum number of ranges in which a client reports the arrived bytes of a failed part. With more gaps it reports fewer bytes;
unreported bytes are charged again but not read again."""
MAX_PLAN_PARTS = 4_096
"""Parts of one load plan, over all its attempts."""
MAX_PARTS_UNDER_WAY = 262_144
"""Parts of all load plans under way, a plan itself counted as one."""
DIGEST_RANGES = 4_096
"""Ranges of key space in anti-entropy: by the first 12 bits of the key."""
