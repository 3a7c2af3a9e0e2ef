"""Gauges of a node: fill of volumes, queues, and traffic of its links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import kvstore
from kvproto.v1.common_pb2 import NODE_STATE_DRAIN_BLOCKED
from kvstore import native
from kvstore.core.errors import Unsupported
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.base.process_stall import ProcessStallDetector
from kvstore.node.control.drain import Drainer
from kvstore.node.publish.health import HealthReporter
from kvstore.node.rpc.sessions import Sessions
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.table import BlockTable
from kvstore.observe.exposition import Sample
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.transport.addresses import interface_of

_RECEIVED, _SENT = 0, 8
"""Columns of /proc/net/dev."""
_NET_DEV: Final = Path("/proc/self/net/dev")


class Links:
    """The NICs with the addresses of a node's data planes.

    Args:
        networks: address of the data plane per network. Wildcard addresses, and those without a known interface, are left out.
    """

    def __init__(self, networks: Mapping[str, str]) -> None:
        self._interfaces: dict[str, str] = {}
        for network, address in networks.items():
            with suppress(Unsupported, ValueError):
                self._interfaces[network] = interface_of(address.rpartition(":")[0].strip("[]"))

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Return bytes received and sent per network since the host booted, of all traffic."""
        known = _interface_bytes() if self._interfaces else {}
        return {network: known[interface] for network, interface in self._interfaces.items() if interface in known}


class NodeGauges:
    """The gauges, read at each scrape.

    Args:
        table: the blocks and volumes.
        sessions: sessions of engines.
        replica_log: changes that wait to be published.
        buffers: staging budgets by name.
        registered: whether the metadata server accepts heartbeats.
        links: the NICs of the data planes.
        drainer: progress of a drain.
        health: findings about the node.
        process_stall: how long the process did not run.
    """

    def __init__(
        self,
        table: BlockTable,
        sessions: Sessions,
        replica_log: ReplicaChangeLog,
        buffers: Mapping[str, BufferBudget],
        registered: Callable[[], bool],
        links: Links,
        drainer: Drainer,
        health: HealthReporter,
        process_stall: ProcessStallDetector,
    ) -> None:
        self._process_stall = process_stall
        self._health = health
        self._drainer = drainer
        self._table = table
        self._sessions = sessions
        self._log = replica_log
        self._buffers = buffers
        self._registered = registered
        self._links = links

    def __call__(self) -> Iterator[Sample]:
        yield Sample(common_metrics.BUILD_INFO, 1, {"version": kvstore.__version__})
        yield Sample(common_metrics.COPY_KERNEL, 1, {"kernel": native.kernel_name()})
        yield Sample(common_metrics.PYTHON_COPIES, native.fallback_calls())
        read_only = {
            node_volume.volume_id for node_volume in self._table.node_volumes if self._health.why_not_writable(node_volume)
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
        yield Sample(node_metrics.SESSIONS, self._sessions.count())
        yield Sample(node_metrics.BLOCKS, blocks)
        yield Sample(node_metrics.WRITE_BACK_WAITING_BLOCKS, waiting)
        yield Sample(node_metrics.PUBLISH_WAITING_EVENTS, self._log.waiting())
        yield Sample(node_metrics.PUBLISH_FAILING_SECONDS, self._health.publish_failing_s())
        yield Sample(node_metrics.REGISTERED, int(self._registered()))
        yield Sample(node_metrics.PROCESS_STALLED_SECONDS, self._process_stall.stalled_s)
        drain = self._drainer.progress()
        yield Sample(node_metrics.DRAINING, int(drain is not None))
        yield Sample(node_metrics.DRAIN_BLOCKED, int(drain is not None and drain.state == NODE_STATE_DRAIN_BLOCKED))
        yield Sample(node_metrics.DRAIN_LEFT_BLOCKS, drain.left_blocks if drain is not None else 0)
        yield Sample(node_metrics.DRAIN_NOT_DURABLE_BLOCKS, drain.not_durable_blocks if drain is not None else 0)
        for name, buffer in self._buffers.items():
            yield Sample(node_metrics.STAGING_USED_BYTES, buffer.used_bytes, {"buffer": name})
            yield Sample(node_metrics.STAGING_WAITING_LOADS, buffer.waiting, {"buffer": name})
        yield from self._networks()

    def _disks(self) -> Iterator[Sample]:
        """Yield the space on the file systems of volumes, as the volume watch measured it last."""
        for node_volume in self._table.node_volumes:
            if (disk := node_volume.disk) is not None:
                labels = {"volume": str(node_volume.volume_id), "tier": node_volume.volume.tier.name.lower()}
                yield Sample(node_metrics.VOLUME_DISK_BYTES, disk.total_bytes, labels)
                yield Sample(node_metrics.VOLUME_DISK_FREE_BYTES, disk.free_bytes, labels)

    def _networks(self) -> Iterator[Sample]:
        for network, (received, sent) in self._links.traffic().items():
            yield Sample(node_metrics.NETWORK_BYTES, received, {"network": network, "direction": "received"})
            yield Sample(node_metrics.NETWORK_BYTES, sent, {"network": network, "direction": "sent"})


def _interface_bytes() -> dict[str, tuple[int, int]]:
    """Return bytes received and sent per interface of this network namespace."""
    found = {}
    for line in _NET_DEV.read_text().splitlines():
        name, colon, fields = line.partition(":")
        if colon:
            numbers = fields.split()
            found[name.strip()] = int(numbers[_RECEIVED]), int(numbers[_SENT])
    return found
