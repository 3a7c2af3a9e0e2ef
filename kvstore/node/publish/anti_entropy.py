"""Anti-entropy: finds ranges of the key space in which the index differs from the table, and repairs them.

Digests can be compared only if the index has applied all published changes, and a store may happen during a comparison. So a
range counts as drifted only if it did not change until the server had compared it. A range with writes is left to the next round.
Drift is rare (a bug, a damaged index): a round repairs a limited number of ranges and leaves the others to the next.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Container, Iterable

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.checksum import key_range
from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.types import BootId, VolumeId
from kvstore.node.publish.contract import PublishedBlocks
from kvstore.node.state.change_log import Described, ReplicaChangeLog, runs_of
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.client import call
from kvstore.rpc.codec import run_to_proto

log = logging.getLogger(__name__)

RANGES_PER_CALL = 512
REPAIRS_PER_ROUND = 512
REPAIR_ATTEMPTS = 3
RPC_TIMEOUT_S = 5.0
SETTLE_S = 2.0
"""Time that the comparison of suspect ranges waits for the publication of changes, per part."""


class AntiEntropy:
    """Compares one node's volumes with the index."""

    def __init__(
        self,
        stub: metadata_pb2_grpc.MetadataStub,
        node_id: str,
        table: PublishedBlocks,
        replica_log: ReplicaChangeLog,
        counters: Counters,
    ) -> None:
        self._stub = stub
        self._node_id = node_id
        self._table = table
        self._log = replica_log
        self._counters = counters

    def compare(self, boot_id: BootId, max_age_s: float = 0.0) -> int:
        """Compare all volumes with the index. Returns the number of repaired ranges.

        Args:
            boot_id: this boot.
            max_age_s: age up to which the server may compare digests of an earlier pass; 0: it reads the index.

        Raises:
            KVStoreError: the server does not answer, or does not know this boot.
        """
        repaired = 0
        for volume in self._log.volumes:
            drifted: list[int] = []
            for first in range(0, DIGEST_RANGES, RANGES_PER_CALL):
                drifted += self._drifted(boot_id, volume, first, max_age_s)
            self._repair(boot_id, volume, drifted[:REPAIRS_PER_ROUND])
            repaired += len(drifted[:REPAIRS_PER_ROUND])
            if drifted:
                self._counters.add(node_metrics.INDEX_RANGES_DRIFTED, len(drifted))
                log.warning("index drift found: %s (drifted=%d, ranges=%d)", volume, len(drifted), DIGEST_RANGES)
        return repaired

    def compare_suspects(self, boot_id: BootId, ranges: Container[int]) -> int:
        """Compare ranges that may have lost changes. Returns the number of repaired ranges. The same errors as ``compare``.

        Digests can be compared only while no change waits for its acknowledgement, so a busy node waits for such a moment.
        """
        repaired = 0
        for volume in self._log.volumes:
            drifted: list[int] = []
            for first in range(0, DIGEST_RANGES, RANGES_PER_CALL):
                if any(number in ranges for number in range(first, first + RANGES_PER_CALL)):
                    self._wait_settled(volume)
                    drifted += [number for number in self._drifted(boot_id, volume, first, 0.0) if number in ranges]
            self._repair(boot_id, volume, drifted)
            repaired += len(drifted)
        return repaired

    def _wait_settled(self, volume: VolumeId) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        while self._log.settled_digests(volume) is None and time.monotonic() < deadline_s:
            self._log.wait_published([volume], deadline_s)

    def _drifted(self, boot_id: BootId, volume: VolumeId, first: int, max_age_s: float) -> list[int]:
        changes = self._log.changes(volume)
        before = self._log.settled_digests(volume)
        if before is None:
            self._counters.add(node_metrics.ANTI_ENTROPY_RANGES_BUSY, RANGES_PER_CALL)
            return []
        digests, counts = before
        request = metadata_pb2.CompareDigestsRequest(
            node_id=self._node_id,
            boot_id=boot_id,
            volume_id=volume,
            first_range=first,
            digests=digests[first : first + RANGES_PER_CALL],
            counts=counts[first : first + RANGES_PER_CALL],
            max_age_ms=int(max_age_s * 1000),
        )
        differing = call(self._stub.CompareDigests, request, RPC_TIMEOUT_S).differing_ranges
        if not differing:
            return []
        later = self._log.changes(volume)
        return [number for number in differing if changes[number] == later[number]]

    def _repair(self, boot_id: BootId, volume: VolumeId, ranges: Iterable[int]) -> None:
        remaining = set(ranges)
        for _ in range(REPAIR_ATTEMPTS):
            if not remaining:
                return
            changes = self._log.changes(volume)
            held: dict[int, list[Described]] = defaultdict(list)
            for block in self._table.held_by(volume):
                if (number := key_range(block.key)) in remaining:
                    held[number].append(block)
            for number in remaining:
                request = metadata_pb2.RepairRangeRequest(
                    operation_id=secrets.token_bytes(16),
                    node_id=self._node_id,
                    boot_id=boot_id,
                    volume_id=volume,
                    range=number,
                    blocks=[run_to_proto(run) for run in runs_of(held[number])],
                )
                call(self._stub.RepairRange, request, RPC_TIMEOUT_S)
            later = self._log.changes(volume)
            remaining = {number for number in remaining if changes[number] != later[number]}  # changed during the repair
