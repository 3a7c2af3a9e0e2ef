"""Schemas of the servers that hold a shared index, and of the metadata servers that serve it."""

from __future__ import annotations

from pydantic import Field

from kvstore.control_api.schemas.base import ResponseModel
from kvstore.control_api.schemas.store import Bytes, Count, Seconds


class IndexServerEntry(ResponseModel):
    """A server of the Valkey Cluster that holds the index."""

    address: str = Field(description="host and port", examples=["10.0.0.11:6379"])
    primary: bool = Field(description="it serves the slots of its shard; false: a replica, or it serves nothing", examples=[True])
    shard: Count | None = Field(description="number of its shard; null: it belongs to none that serves slots", examples=[0])
    slots: Count = Field(description="hash slots that it serves", examples=[5461])
    replicas: Count = Field(description="of a primary: replicas of its shard that answer", examples=[1])
    lag_bytes: Bytes | None = Field(
        description="of a replica: bytes of changes that it has not confirmed; null: unknown", examples=[1024]
    )
    away_s: Seconds | None = Field(description="time without an answer; null: it answers", examples=[3.5])
    version: str | None = Field(description="product and version; null: unknown", examples=["valkey 9.1.2"])
    compare_and_set: bool | None = Field(
        description="it replaces a record by one command instead of a script; null: unknown", examples=[True]
    )
    keys: Count | None = Field(description="keys that it holds; null: unknown", examples=[3000000])
    used_bytes: Bytes | None = Field(description="memory that it uses; null: unknown", examples=[268435456])
    limit_bytes: Bytes | None = Field(description="limit of memory (maxmemory); 0: none; null: unknown", examples=[8589934592])
    eviction_policy: str | None = Field(
        description="behaviour at that limit (maxmemory-policy); null: unknown", examples=["noeviction"]
    )
    snapshots: bool | None = Field(description="it writes snapshots at intervals (save); null: unknown", examples=[False])
    append_only: bool | None = Field(description="it writes an append-only file (appendonly); null: unknown", examples=[False])
    node_timeout_ms: Count | None = Field(
        description="silence after which a primary is replaced (cluster-node-timeout); null: unknown", examples=[1000]
    )


class ServingMetadataServer(ResponseModel):
    """A metadata server that serves the index."""

    server_id: str = Field(description="random, of one run of one process", examples=["8c2f0d6e1b7a4c93"])
    address: str = Field(description="where nodes and clients reach it", examples=["10.0.0.1:7400"])
    version: str = Field(description="version of the program", examples=["0.2.0"])
    started_s: float = Field(description="when it started, Unix time of its host", examples=[1767225600.0])
    answers_here: bool = Field(description="it is the server that was asked", examples=[True])
    roles: list[str] = Field(
        description="work that it does for all servers: sweep, quota or plan; empty if the index is not shared",
        examples=[["plan"]],
    )


class Shards(ResponseModel):
    """The servers that hold the index, as a metadata server observed them some seconds ago, and the metadata servers."""

    servers: list[IndexServerEntry] = Field(
        description="by shard, primaries first; empty: the index is a file of the metadata server's host"
    )
    unserved_slots: Count = Field(description="hash slots that no server serves", examples=[0])
    lost_ranges: Count = Field(
        description="of 4,096 key ranges: records are unknown until nodes have sent their blocks again", examples=[0]
    )
    suspect_ranges: Count = Field(
        description="of 4,096 key ranges: the last changes may be lost, so nodes compare them first", examples=[0]
    )
    metadata_servers: list[ServingMetadataServer] = Field(description="metadata servers that serve this index, by address")
