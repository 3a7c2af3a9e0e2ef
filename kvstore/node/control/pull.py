"""Pull of blocks from another node: this node reads them, verifies them, and reports which are durable here.

A pull is a store whose bytes this node reads itself. It uses only free space, of a volume and of the tenant's quota share, unless
the other node says that the blocks were used lately: then the coldest blocks are evicted for them, as for a store. A draining
node retries blocks that the share refused, and the share follows the blocks that this node holds.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore.core.buffers import ScatteredBlocks
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockRun, Outcome, StoreOutcome
from kvstore.node.control.admission_gate import AdmissionGate
from kvstore.node.control.migration_plan import free_space, slot_space
from kvstore.node.eviction.quotas import free_durable
from kvstore.node.loads.peers import PeerAddress, Peers
from kvstore.node.loads.provider import NodeProvider
from kvstore.node.state.namespaces import NodeNamespace, TenantAccount
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.transport.contract import LateBytes, ReadRequest, WriteRequest

log = logging.getLogger(__name__)
_limited = LimitedLog(log)


class FreeShares:
    """Free shares of tenants, less what concurrent pulls will take. Thread-safe.

    Args:
        table: the blocks of this node.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._pulling: Counter[TenantAccount | None] = Counter()
        """Bytes of pulls in progress per tenant with a quota."""

    @contextmanager
    def reserve(self, namespace: NodeNamespace, run: BlockRun) -> Iterator[bool]:
        """Yield whether a run fits in its tenant's free share, and keep its bytes reserved until the end of the context."""
        size = (
            sum(block is None or block.nvme_volume is None for block in self._table.find(namespace, run.keys))
            * namespace.shape.block_bytes
        )
        account = namespace.account
        with self._lock:
            free = free_durable(self._table.residency, namespace)
            fits = not size or free is None or self._pulling[account] + size <= free
            if fits:
                self._pulling[account] += size
        try:
            yield fits
        finally:
            if fits:
                with self._lock:
                    self._pulling[account] -= size


class Puller:
    """Pulls blocks from other nodes. Thread-safe."""

    def __init__(self, table: BlockTable, provider: NodeProvider, peers: Peers, gate: AdmissionGate, counters: Counters) -> None:
        self._table = table
        self._provider = provider
        self._peers = peers
        self._gate = gate
        self._counters = counters
        self._free_shares = FreeShares(table)

    def pull(
        self,
        namespace: NodeNamespace,
        runs: Sequence[BlockRun],
        source: PeerAddress,
        deadline_s: float,
        *,
        second_copy: bool = False,
        may_evict: bool = False,
    ) -> tuple[list[StoreOutcome], str]:
        """Pull runs in order, and wait until they are durable, or the deadline.

        Args:
            namespace: of all runs.
            runs: the blocks.
            source: the node that holds them.
            deadline_s: when the call ends.
            second_copy: whether the source keeps its blocks. Their copies then leave DRAM at once, as engines read the source.
            may_evict: whether the coldest blocks are evicted if there is no free space.

        Returns:
            One outcome per key (STORED and EXISTS are durable here), and why some are not durable; empty if all are.
        """
        outcomes: list[StoreOutcome] = []
        why = ""
        for run in runs:
            refusal = self._refusal(namespace, run, may_evict=may_evict)
            with self._free_shares.reserve(namespace, run) as fits:
                if refusal or not (fits or may_evict):
                    pulled, reason = [StoreOutcome.SKIPPED] * len(run.keys), refusal or "no free space in the tenant's quota here"
                else:
                    pulled, reason = self._pull(namespace, run, source, deadline_s)
            outcomes += pulled
            why = why or reason
        good = sum(outcome in (StoreOutcome.STORED, StoreOutcome.EXISTS) for outcome in outcomes)
        if second_copy:
            keys = [key for run in runs for key in run.keys]
            stored = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is StoreOutcome.STORED]
            self._table.drop_staged(filter(None, self._table.find(namespace, stored)))
        self._counters.add(node_metrics.COPIES_TAKEN_BLOCKS if second_copy else node_metrics.DRAIN_PULLED_BLOCKS, good)
        self._counters.add(
            node_metrics.COPIES_NOT_TAKEN_BLOCKS if second_copy else node_metrics.DRAIN_NOT_PULLED_BLOCKS, len(outcomes) - good
        )
        if why:
            _limited.warning("blocks not pulled: from node %s (second_copy=%s, reason=%s)", source.node_id, second_copy, why)
        return outcomes, why

    def _refusal(self, namespace: NodeNamespace, run: BlockRun, *, may_evict: bool) -> str:
        """Return why the volumes of this node cannot store a run; empty: they can."""
        if self._gate.closed:
            return "this node drains or stops too"
        volumes = [node_volume.volume for node_volume in self._table.node_volumes if node_volume.volume.read_only is None]
        if not volumes:
            return "no volume of this node accepts blocks"
        usages = [volume.usage() for volume in volumes]
        if not may_evict and max(free_space(one.capacity_bytes, one.used_bytes) for one in usages) < len(run.keys) * slot_space(
            namespace.shape.block_bytes
        ):
            return "no free space on a volume of this node"
        return ""

    def _pull(
        self, namespace: NodeNamespace, run: BlockRun, source: PeerAddress, deadline_s: float
    ) -> tuple[list[StoreOutcome], str]:
        shape = namespace.shape
        try:
            grant = self._provider.write(WriteRequest(run, shape, durable=True, deadline_s=deadline_s))
        except KVStoreError as error:  # a key is held with another parent
            return [StoreOutcome.SKIPPED] * len(run.keys), str(error)
        outcomes = list(grant.outcomes)
        granted = [at for at, outcome in enumerate(outcomes) if outcome is StoreOutcome.STORED]
        if not granted:
            grant.abort()
            return outcomes, _reason(outcomes)
        request = ReadRequest(namespace.namespace_id, [run.keys[at] for at in granted], 0, shape.layers, 0, deadline_s)
        try:
            answer = self._peers.peer(source, namespace).read(request, ScatteredBlocks(list(grant.views), shape))
        except KVStoreError as error:
            if isinstance(error, LateBytes):  # the slots stay reserved until this process ends
                grant.revoke()
                self._counters.add(node_metrics.ARENA_SLOTS_LOST, len(granted))
            else:
                grant.abort()
            for at in granted:
                outcomes[at] = StoreOutcome.LOST
            return outcomes, str(error)
        except BaseException:
            grant.abort()
            raise
        if answer.checksums is None:
            grant.abort()
            stored: Sequence[StoreOutcome] = [StoreOutcome.LOST] * len(granted)
        else:
            stored = grant.commit(answer.checksums, [outcome is Outcome.HIT for outcome in answer.outcomes])
        for at, outcome, read in zip(granted, stored, answer.outcomes, strict=True):
            missed = read not in (Outcome.HIT, Outcome.CORRUPT)
            outcomes[at] = StoreOutcome.LOST if missed else outcome
        return outcomes, _reason(outcomes)


def _reason(outcomes: Sequence[StoreOutcome]) -> str:
    """Return why some blocks are not durable on this node."""
    reasons = {
        StoreOutcome.SKIPPED: "no free space, or not durable in time",
        StoreOutcome.IN_PROGRESS: "another store writes them",
        StoreOutcome.LOST: "the other node did not deliver",
        StoreOutcome.CORRUPT: "corrupt at the other node",
    }
    return next((reason for outcome, reason in reasons.items() if outcome in outcomes), "")
