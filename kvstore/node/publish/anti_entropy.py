"""Anti-entropy: finds where the index has drifted from the table, range by range of key space, and mends it.

Digests can only be compared while the index shows everything that the log told it, and a store may come in the middle of a
comparison. So a range counts as drifted only if nothing changed in it before the server had looked: a range that is
being written to is left for the next round. Drift is rare (a bug, a damaged index); a round mends a bounded number of
ranges, and what is left waits for the next.
"""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Iterable

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.range_digests import key_range
from kvstore.core.types import BootId, VolumeId
from kvstore.node.state.change_log import ReplicaChangeLog, runs_of
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.client import call
from kvstore.rpc.codec import run_to_proto

log = logging.getLogger(__name__)

RANGES_AT_ONCE = 512
REPAIRS_A_ROUND = 512
REPAIR_TRIES = 3
RPC_TIMEOUT_S = 5.0


def held_by(table: BlockTable, volume: VolumeId) -> list[Block]:
    """All blocks that one volume holds."""
    blocks = table.snapshot()
    if volume == table.dram.volume_id:
        return [block for block in blocks if block.dram is not None]
    return [block for block in blocks if (node_volume := block.nvme_volume) is not None and node_volume.volume_id == volume]


class AntiEntropy:
    """Compares one node's volumes with the index."""

    def __init__(
        self,
        stub: metadata_pb2_grpc.MetadataStub,
        node_id: str,
        table: BlockTable,
        replica_log: ReplicaChangeLog,
        counters: Counters,
    ) -> None:
        self._stub = stub
        self._node_id = node_id
        self._table = table
        self._log = replica_log
        self._counters = counters
        self._volumes = [table.dram.volume_id, *(node_volume.volume_id for node_volume in table.node_volumes)]

    def compare(self, boot_id: BootId) -> int:
        """One round over all volumes. Returns how many ranges were repaired.

        Raises:
            KVStoreError: the server does not answer, or no longer knows this boot.
        """
        repaired = 0
        for volume in self._volumes:
            drifted: list[int] = []
            for first in range(0, DIGEST_RANGES, RANGES_AT_ONCE):
                drifted += self._drifted(boot_id, volume, first)
            self._repair(boot_id, volume, drifted[:REPAIRS_A_ROUND])
            repaired += len(drifted[:REPAIRS_A_ROUND])
            if drifted:
                self._counters.add(node_metrics.INDEX_RANGES_DRIFTED, len(drifted))
                log.warning("the index had drifted from %s in %d of %d ranges", volume, len(drifted), DIGEST_RANGES)
        return repaired

    def _drifted(self, boot_id: BootId, volume: VolumeId, first: int) -> list[int]:
        changes = self._log.changes(volume)
        before = self._log.settled_digests(volume)
        if before is None:
            self._counters.add(node_metrics.ANTI_ENTROPY_RANGES_BUSY, RANGES_AT_ONCE)
            return []
        digests, counts = before
        request = metadata_pb2.CompareDigestsRequest(
            node_id=self._node_id,
            boot_id=boot_id,
            volume_id=volume,
            first_range=first,
            digests=digests[first : first + RANGES_AT_ONCE],
            counts=counts[first : first + RANGES_AT_ONCE],
        )
        differing = call(self._stub.CompareDigests, request, RPC_TIMEOUT_S).differing_ranges
        if not differing:
            return []
        later = self._log.changes(volume)
        return [where for where in differing if changes[where] == later[where]]

    def _repair(self, boot_id: BootId, volume: VolumeId, ranges: Iterable[int]) -> None:
        left = set(ranges)
        for _ in range(REPAIR_TRIES):
            if not left:
                return
            changes = self._log.changes(volume)
            held: dict[int, list[Block]] = defaultdict(list)
            for block in held_by(self._table, volume):
                if (where := key_range(block.key)) in left:
                    held[where].append(block)
            for where in left:
                request = metadata_pb2.RepairRangeRequest(
                    operation_id=secrets.token_bytes(16),
                    node_id=self._node_id,
                    boot_id=boot_id,
                    volume_id=volume,
                    range=where,
                    blocks=[run_to_proto(run) for run in runs_of(held[where])],
                )
                call(self._stub.RepairRange, request, RPC_TIMEOUT_S)
            later = self._log.changes(volume)
            left = {where for where in left if changes[where] != later[where]}  # changed under the repair: once more
