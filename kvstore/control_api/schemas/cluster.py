"""Schema of the summary of a store."""

from __future__ import annotations

from pydantic import Field

from kvstore.control_api.schemas.base import ResponseModel
from kvstore.control_api.schemas.health import ClusterHealth
from kvstore.control_api.schemas.store import Bytes, Count, HexId, Seconds
from kvstore.rpc.failover.selection import Condition


class MetadataServerEntry(ResponseModel):
    """One of the metadata servers."""

    address: str = Field(description="its address", examples=["10.0.0.1:7400"])
    state: Condition = Field(
        description="usable; on_trial: it answers again, and is used again after some seconds; away: it does not answer"
    )
    used: bool = Field(description="calls of the admin server go to it", examples=[True])


class Cluster(ClusterHealth):
    """Summary of the store."""

    admin_version: str = Field(description="version of the admin server", examples=["0.2.0"])
    metadata_version: str = Field(description="version of the metadata server", examples=["0.2.0"])
    metadata_address: str = Field(description="address of the metadata server, or of several", examples=["127.0.0.1:7400"])
    metadata_servers: list[MetadataServerEntry] = Field(description="all metadata servers, by address")
    metadata_uptime_s: Seconds = Field(description="time since it began to serve this index", examples=[86400.0])
    index_epoch: HexId = Field(description="epoch of the index; a new value means that the index was rebuilt")
    index_blocks: Count = Field(description="keys in the index, with those in published caches of engines", examples=[1000000])
    index_bytes: Bytes = Field(description="size of the index on disk", examples=[104857600])
    namespaces: Count = Field(description="registered namespaces", examples=[3])
    nodes_alive: Count = Field(description="nodes whose heartbeats arrive", examples=[3])
    nodes_silent: Count = Field(description="known nodes without heartbeats that are not rejected", examples=[1])
    nodes_refused: Count = Field(description="nodes whose calls are rejected because of their tokens", examples=[0])
    live_plans: Count = Field(description="planned loads in progress", examples=[12])
    path_policy: str = Field(description="path policy of requests that name none", examples=["split"])
