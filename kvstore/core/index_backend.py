"""The servers of a Valkey Cluster that hold a prefix index, and the metadata servers that share it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexServer:
    """One server of the cluster, as last observed. None and empty texts: not known.

    Attributes:
        address: ``host:port``.
        primary: whether it serves the slots of its shard; False: it is a replica, or it serves nothing.
        shard: number of its shard, from 0; None: it belongs to no shard that serves slots.
        slots: hash slots that it serves.
        replicas: replicas of its shard that answer; 0 for a replica.
        lag_bytes: bytes of changes that a replica has not confirmed.
        away_s: time without an answer; None: it answers.
        version: product and version, for example ``valkey 9.1.2``.
        compare_and_set: whether it replaces a record by one command instead of a script.
        keys: keys that it holds.
        used_bytes: memory that it uses.
        limit_bytes: its limit of memory (``maxmemory``); 0: none.
        eviction_policy: its behaviour at that limit (``maxmemory-policy``).
        snapshots: whether it writes snapshots to disk at intervals (``save``).
        append_only: whether it writes an append-only file (``appendonly``).
        node_timeout_ms: silence after which the cluster replaces a primary (``cluster-node-timeout``).
    """

    address: str
    primary: bool
    shard: int | None = None
    slots: int = 0
    replicas: int = 0
    lag_bytes: int | None = None
    away_s: float | None = None
    version: str = ""
    compare_and_set: bool | None = None
    keys: int | None = None
    used_bytes: int | None = None
    limit_bytes: int | None = None
    eviction_policy: str = ""
    snapshots: bool | None = None
    append_only: bool | None = None
    node_timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class IndexBackend:
    """The servers that hold an index.

    Attributes:
        servers: servers of the cluster, by shard, primaries first; empty: the index is a file of the metadata server's host.
        unserved_slots: hash slots that no server serves.
        lost_ranges: key ranges whose records are unknown until nodes have sent their blocks again.
        suspect_ranges: key ranges whose last changes may be lost, so that nodes compare them first.
    """

    servers: tuple[IndexServer, ...] = ()
    unserved_slots: int = 0
    lost_ranges: int = 0
    suspect_ranges: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether several metadata servers can serve the index."""
        return bool(self.servers)


@dataclass(frozen=True, slots=True)
class MetadataServerRecord:
    """Record of a metadata server in a shared index.

    Attributes:
        server_id: random, of one run of one process.
        address: where nodes and clients reach it.
        version: version of the program.
        started_s: when it started, Unix time of its host; for display.
        counter: grows with every write. A server whose counter stays the same has ended.
    """

    server_id: str
    address: str
    version: str
    started_s: float
    counter: int = 0
