"""Anti-entropy: finds ranges of the key space in which the index differs from the table, and repairs them.

A range can be compared only if the index has applied all its changes, and a store may happen during a comparison. So a range
counts as drifted only if the index had its last change before the comparison, and it did not change until the server had
compared it. A busy node changes only some of its ranges within the time of a comparison; these are left to the next round. Drift
is rare (a bug, a damaged index): a round repairs a limited number of ranges and leaves the others to the next. If the repair of
some ranges fails, for example because their shard is away, the round goes on with the others.

If the index may have lost the last changes of some ranges, the server asks for a comparison of these. A range that changes during
it is compared again, up to ``SUSPECT_ATTEMPTS`` times. The result names the ranges that are left.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.cancel_scope import current
from kvstore.core.checksum import key_range
from kvstore.core.errors import DeadlineExceeded, KVStoreError
from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.types import BootId, VolumeId
from kvstore.node.publish.contract import PublishedBlocks
from kvstore.node.state.change_log import ChainedBlock, ReplicaChangeLog, runs_of
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.client import call
from kvstore.rpc.codec import run_to_proto

log = logging.getLogger(__name__)

RANGES_PER_CALL = 512
RANGES_PER_READ = 128
"""Ranges per call if the server must read the index for it."""
REPAIRS_PER_ROUND = 512
REPAIR_ATTEMPTS = 3
REPAIRS_PER_SCAN = 256
"""Ranges whose blocks are collected in one pass over the table. With more, more of them change before they are repaired."""
REPAIRS_PER_CALL = 16
REPAIRED_BLOCKS = 4_096
"""Blocks in one call, unless one range has more."""
SUSPECT_ATTEMPTS = 8
COMPARE_TIMEOUT_S = 60.0
"""Reading 128 ranges of an index of 100 million blocks takes 6 s. Half of this time is left for another server."""
REPAIR_TIMEOUT_S = 5.0
"""Per range."""
SETTLE_S = 2.0
"""Time that each attempt to compare suspect ranges waits for the publication of changes."""


@dataclass(frozen=True, slots=True)
class _ComparedPart:
    compared: set[int]
    """Ranges that are equal or drifted."""
    drifted: list[int]
    busy: int
    """Number of ranges that could not be compared, because they changed."""


@dataclass(slots=True)
class Repairs:
    """Repairs of one round.

    Attributes:
        repaired: number of repaired ranges.
        left: ranges that were not compared or not repaired, because they changed or their repair failed.
        error: why the last repair that failed did so.
    """

    repaired: int = 0
    left: set[int] = field(default_factory=set)
    error: KVStoreError | None = None

    def raise_failure(self) -> None:
        """Raise the last failure, after the end of the round."""
        if self.error is not None:
            raise self.error


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
            KVStoreError: the server does not answer, or does not know this boot; or the current cancel scope has ended; or some
                repairs failed, after all others were made.
        """
        repairs = Repairs()
        for volume in self._log.volumes:
            drifted: list[int] = []
            for numbers in _parts(RANGES_PER_CALL if max_age_s else RANGES_PER_READ):
                if (scope := current()).ended:
                    raise scope.error()
                part = self._compare_part(boot_id, volume, numbers, max_age_s)
                drifted += part.drifted
                self._counters.add(node_metrics.ANTI_ENTROPY_RANGES_BUSY, part.busy)
            self._repair(boot_id, volume, drifted[:REPAIRS_PER_ROUND], repairs)
            if drifted:
                self._counters.add(node_metrics.INDEX_RANGES_DRIFTED, len(drifted))
                log.warning("index drift found: %s (drifted=%d, ranges=%d)", volume, len(drifted), DIGEST_RANGES)
        repairs.raise_failure()
        return repairs.repaired

    def compare_suspects(self, boot_id: BootId, ranges: Collection[int]) -> Repairs:
        """Compare ranges whose last changes the index may have lost. The result has the error of a failed repair.

        Raises:
            KVStoreError: the server does not answer, or does not know this boot.
        """
        repairs = Repairs()
        for volume in self._log.volumes:
            remaining, drifted = set(ranges), set[int]()
            for _ in range(SUSPECT_ATTEMPTS):
                if not remaining:
                    break
                self._log.wait_published([volume], time.monotonic() + SETTLE_S)
                for numbers in _parts(RANGES_PER_READ):
                    if remaining.isdisjoint(numbers):
                        continue
                    part = self._compare_part(boot_id, volume, numbers, 0.0)
                    drifted |= remaining.intersection(part.drifted)
                    remaining -= part.compared
            self._counters.add(node_metrics.ANTI_ENTROPY_RANGES_BUSY, len(remaining))
            repairs.left |= remaining
            self._repair(boot_id, volume, drifted, repairs)
        return repairs

    def _compare_part(self, boot_id: BootId, volume: VolumeId, numbers: range, max_age_s: float) -> _ComparedPart:
        before = self._log.range_digests(volume)
        settled = {number for number in numbers if before.settled[number]}
        if not settled:
            return _ComparedPart(set(), [], len(numbers))
        request = metadata_pb2.CompareDigestsRequest(
            node_id=self._node_id,
            boot_id=boot_id,
            volume_id=volume,
            first_range=numbers.start,
            digests=before.digests[numbers.start : numbers.stop],
            counts=before.counts[numbers.start : numbers.stop],
            max_age_ms=int(max_age_s * 1000),
        )
        differing = settled.intersection(call(self._stub.CompareDigests, request, COMPARE_TIMEOUT_S).differing_ranges)
        later = self._log.changes(volume) if differing else before.changes
        drifted = [number for number in sorted(differing) if before.changes[number] == later[number]]
        compared = settled - differing | set(drifted)
        return _ComparedPart(compared, drifted, len(numbers) - len(compared))

    def _repair(self, boot_id: BootId, volume: VolumeId, ranges: Iterable[int], repairs: Repairs) -> None:
        """Replace the contents of ranges in the index by the table's, and add the result to ``repairs``.

        Ranges that changed during each attempt, and those whose repair failed, are left to the next round.

        Raises:
            DeadlineExceeded: the server did not answer in time.
        """
        remaining = deque(ranges)
        for _ in range(REPAIR_ATTEMPTS * -(-len(remaining) // REPAIRS_PER_SCAN)):
            if not remaining:
                break
            part = [remaining.popleft() for _ in range(min(REPAIRS_PER_SCAN, len(remaining)))]
            changes = self._log.changes(volume)
            held: dict[int, list[ChainedBlock]] = {number: [] for number in part}
            for block in self._table.held_by(volume):
                if (of := held.get(key_range(block.key))) is not None:
                    of.append(block)
            failed = set[int]()
            for numbers in _groups(held):
                now = self._log.changes(volume)
                if same := [number for number in numbers if now[number] == changes[number]]:  # else it would undo a change
                    try:
                        self._repair_ranges(boot_id, volume, same, [block for number in same for block in held[number]])
                    except DeadlineExceeded:  # further calls would wait as long
                        raise
                    except KVStoreError as error:
                        failed.update(same)
                        repairs.error = error
            repairs.left |= failed
            later = self._log.changes(volume)
            changed = {number for number in part if changes[number] != later[number]} - failed  # before or during its repair
            repairs.repaired += len(part) - len(changed) - len(failed)
            remaining.extend(sorted(changed))
        repairs.left.update(remaining)
        self._counters.add(node_metrics.ANTI_ENTROPY_RANGES_BUSY, len(remaining))

    def _repair_ranges(self, boot_id: BootId, volume: VolumeId, ranges: Sequence[int], blocks: Sequence[ChainedBlock]) -> None:
        request = metadata_pb2.RepairRangesRequest(
            operation_id=secrets.token_bytes(16),
            node_id=self._node_id,
            boot_id=boot_id,
            volume_id=volume,
            ranges=ranges,
            blocks=[run_to_proto(run) for run in runs_of(blocks)],
        )
        call(self._stub.RepairRanges, request, REPAIR_TIMEOUT_S * len(ranges))


def _parts(size: int) -> list[range]:
    """Divide key space into parts of ``size`` ranges."""
    return [range(first, min(first + size, DIGEST_RANGES)) for first in range(0, DIGEST_RANGES, size)]


def _groups(held: Mapping[int, Sequence[object]]) -> Iterator[list[int]]:
    """Divide ranges into groups for one call each: few blocks together, so that publishing goes on between the calls."""
    group: list[int] = []
    blocks = 0
    for number, of in held.items():
        if group and (len(group) == REPAIRS_PER_CALL or blocks + len(of) > REPAIRED_BLOCKS):
            yield group
            group, blocks = [], 0
        group.append(number)
        blocks += len(of)
    if group:
        yield group
