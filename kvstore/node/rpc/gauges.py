"""Gauges of a node: fill of volumes, queues, and traffic of its links."""

from __future__ import annotations

from collections.abc import Iterator

import kvstore
from kvproto.v1.common_pb2 import NODE_STATE_DRAIN_BLOCKED
from kvstore import native
from kvstore.node.rpc.parts import NodeParts
from kvstore.observe.exposition import Sample
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metric_definitions import node as node_metrics


class NodeGauges:
    """The gauges, read at each scrape."""

    def __init__(self, parts: NodeParts) -> None:
        self._parts = parts
        self._table = parts.table

    def __call__(self) -> Iterator[Sample]:
        yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})
        yield Sample(common_metrics.COPY_KERNEL, 1, {"kernel": native.kernel_name()})
        yield Sample(common_metrics.PYTHON_COPIES, native.fallback_calls())
        read_only = {
            node_volume.volume_id for node_volume in self._table.node_volumes if self._parts.health.why_not_writable(node_volume)
        }
        stalled = {node_volume.volume_id for node_volume in self._table.node_volumes if node_volume.guard.stalled}
        for volume in (self._table.dram, *(node_volume.volume for node_volume in self._table.node_volumes)):
            labels = {"volume": str(volume.volume_id), "tier": volume.tier.name.lower()}
            usage = volume.usage()
            yield Sample(node_metrics.VOLUME_CAPACITY_BYTES, usage.capacity_bytes, labels)
            yield Sample(node_metrics.VOLUME_USED_BYTES, usage.used_bytes, labels)
            yield Sample(node_metrics.VOLUME_BLOCKS, usage.blocks, labels)
            yield Sample(node_metrics.VOLUME_READ_ONLY, int(volume.volume_id in read_only), labels)
            yield Sample(node_metrics.VOLUME_STALLED, int(volume.volume_id in stalled), labels)
        yield from self._disks()
        blocks, waiting = self._table.counts()
        yield Sample(node_metrics.SESSIONS, self._parts.sessions.count())
        yield Sample(node_metrics.BLOCKS, blocks)
        yield Sample(node_metrics.WRITE_BACK_WAITING_BLOCKS, waiting)
        yield Sample(node_metrics.PUBLISH_WAITING_EVENTS, self._parts.replica_log.waiting())
        yield Sample(node_metrics.PUBLISH_FAILING_SECONDS, self._parts.health.publish_failing_s())
        publisher = self._parts.publisher
        yield Sample(node_metrics.REGISTERED, int(publisher is None or publisher.connected))
        yield Sample(node_metrics.PROCESS_STALLED_SECONDS, self._parts.stall_detector.stalled_s)
        drain = self._parts.drainer.progress()
        yield Sample(node_metrics.DRAINING, int(drain is not None))
        yield Sample(node_metrics.DRAIN_BLOCKED, int(drain is not None and drain.state == NODE_STATE_DRAIN_BLOCKED))
        yield Sample(node_metrics.DRAIN_LEFT_BLOCKS, drain.left_blocks if drain is not None else 0)
        yield Sample(node_metrics.DRAIN_NOT_DURABLE_BLOCKS, drain.not_durable_blocks if drain is not None else 0)
        copier = self._parts.copier
        yield Sample(node_metrics.COPIES_WAITING_BLOCKS, copier.waiting_blocks if copier is not None else 0)
        for name, buffer in self._parts.buffers.items():
            yield Sample(node_metrics.STAGING_USED_BYTES, buffer.used_bytes, {"buffer": name})
            yield Sample(node_metrics.STAGING_WAITING_LOADS, buffer.waiting, {"buffer": name})
        hints = self._parts.hints
        yield Sample(node_metrics.HINTED_SESSIONS, sum(hints.sessions().values()))
        yield Sample(node_metrics.HINTED_BYTES, sum(hints.protected_bytes().values()))
        yield from self._networks()

    def _disks(self) -> Iterator[Sample]:
        """Yield the space on the file systems of volumes, as the volume watch measured it last."""
        for node_volume in self._table.node_volumes:
            if (disk := node_volume.disk) is not None:
                labels = {"volume": str(node_volume.volume_id), "tier": node_volume.volume.tier.name.lower()}
                yield Sample(node_metrics.VOLUME_DISK_BYTES, disk.total_bytes, labels)
                yield Sample(node_metrics.VOLUME_DISK_FREE_BYTES, disk.free_bytes, labels)

    def _networks(self) -> Iterator[Sample]:
        for network, (received, sent) in self._parts.links.traffic().items():
            yield Sample(node_metrics.NETWORK_BYTES, received, {"network": network, "direction": "received"})
            yield Sample(node_metrics.NETWORK_BYTES, sent, {"network": network, "direction": "sent"})
