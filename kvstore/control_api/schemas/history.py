"""JSON schemas of the figures of the last hour."""

from __future__ import annotations

from pydantic import Field

from kvstore.control_api.schemas.base import ResponseModel
from kvstore.control_api.schemas.store import Bytes, Count, NodeName, UnreachableNode


class LatencyPercentiles(ResponseModel):
    """Durations of one interval, interpolated within the buckets of a histogram."""

    count: Count = Field(description="number of durations", examples=[120])
    p50_s: float = Field(ge=0, description="median", examples=[0.004])
    p95_s: float = Field(ge=0, description="95th percentile", examples=[0.011])
    p99_s: float = Field(ge=0, description="99th percentile", examples=[0.019])


class Throughput(ResponseModel):
    """Bytes per interval, by path."""

    dram: Bytes = Field(description="loaded from DRAM of the engine's host")
    nvme: Bytes = Field(description="loaded from NVMe volumes of the engine's host")
    peer: Bytes = Field(description="loaded from other nodes by the node of the engine's host")
    data_plane: Bytes = Field(description="sent over the data plane, to engines and nodes of other hosts")
    planned_prefill: Bytes = Field(description="planned to be read over the storage links of prefill hosts")
    planned_decode: Bytes = Field(description="planned to be read over the storage links of decode hosts")
    planned_relay: Bytes = Field(description="planned to be read over the storage links of other hosts")


class TierFill(ResponseModel):
    """Fill of one tier at the end of an interval."""

    used_bytes: Bytes = Field(description="bytes in slots that hold a block, over all recorded nodes")
    capacity_bytes: Bytes = Field(description="capacity for blocks, over all recorded nodes")


class HistoryEntry(ResponseModel):
    """Figures of one interval."""

    at_s: int = Field(description="end of the interval, Unix time", examples=[1_764_000_000])
    seconds: Count = Field(description="recorded time within the interval", examples=[10])
    lookups: Count = Field(description="lookups that the metadata server answered", examples=[40])
    hit_ratio: float | None = Field(
        ge=0, le=1, description="share of looked up blocks that were found; null: none was looked up", examples=[0.95]
    )
    lookup: LatencyPercentiles | None = Field(description="durations of lookups; null: no lookup")
    load: LatencyPercentiles | None = Field(description="durations of loads at the nodes; null: no load")
    throughput: Throughput = Field(description="bytes of the interval, by path")
    evicted_dram_blocks: Count = Field(description="blocks evicted from DRAM")
    evicted_nvme_blocks: Count = Field(description="blocks evicted from volumes")
    faults: Count = Field(description="failures that were counted", examples=[0])
    dram: TierFill | None = Field(description="fill of DRAM; null: no node was recorded")
    nvme: TierFill | None = Field(description="fill of the NVMe volumes; null: no node with volumes was recorded")
    nodes: Count = Field(description="nodes whose figures are included", examples=[3])


class FaultEntry(ResponseModel):
    """Failures of one kind that one process counted within one interval."""

    at_s: int = Field(description="end of the interval, Unix time", examples=[1_764_000_000])
    node_id: NodeName | None = Field(description="null: the metadata server")
    metric: str = Field(description="name of the counter in /metrics", examples=["kvstore_peer_fetch_failed_total"])
    what: str = Field(description="meaning of the metric", examples=["failed fetches from other nodes"])
    count: Count = Field(description="failures within the interval", examples=[3])


class HistoryOfLastHour(ResponseModel):
    """Time series of the last hour, oldest first."""

    step_s: Count = Field(description="length of an interval", examples=[10])
    now_s: float = Field(description="present time of this server, Unix time", examples=[1_764_000_004.2])
    points: list[HistoryEntry] = Field(description="one entry per recorded interval, oldest first")
    faults: list[FaultEntry] = Field(description="newest first, at most 500")
    load_by_node: dict[str, LatencyPercentiles] = Field(
        description="durations of loads in the last minute of these figures, by node; a node without loads is left out"
    )
    unreached: list[UnreachableNode] = Field(description="nodes that did not answer and are not included")
