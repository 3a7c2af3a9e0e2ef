"""The blocks of this node for its data plane.

Reads of layers that arrive right now go to the layered loader, all other reads to the loader. Writes go through the table, or are
rejected by a closed admission gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np

from kvstore.core.chain import ChainSlice
from kvstore.core.clock import Clock
from kvstore.core.types import BlockShape, NamespaceId, Outcome, StoreOutcome, Tier
from kvstore.node.control.admission_gate import AdmissionGate
from kvstore.node.loads.layered import LayeredLoader
from kvstore.node.loads.loader import Loader
from kvstore.node.loads.runs import BlockRequest, LoadedRun
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.transport.contract import BlockProvider, Checksums, ReadPart, ReadRequest, WriteGrant, WriteRequest

MAX_WRITE_WAIT_S = 2.0
"""A remote store waits at most this long for slots."""


class NodeProvider(BlockProvider):
    """The blocks of one node. Thread-safe."""

    def __init__(
        self,
        namespaces: NamespaceRegistry,
        table: BlockTable,
        gate: AdmissionGate,
        loader: Loader,
        layered: LayeredLoader,
        clock: Clock,
    ) -> None:
        self._namespaces = namespaces
        self._table = table
        self._gate = gate
        self._loader = loader
        self._layered = layered
        self._clock = clock

    def shape(self, namespace_id: NamespaceId) -> BlockShape | None:
        namespace = self._namespaces.find(namespace_id)
        return None if namespace is None else namespace.shape

    def read(self, request: ReadRequest) -> Iterator[ReadPart]:
        namespace = self._namespaces.get(request.namespace)
        filling = self._layered.read_ready(namespace, request.keys, request.first_layer, request.layer_count)
        if filling is not None:
            blocks, checksums = filling
            yield ReadPart(
                0, [Outcome.HIT] * len(blocks), self._views(blocks, namespace.shape), checksums, Tier.NVME, self._releaser(blocks)
            )
            return
        chain = ChainSlice(request.namespace, request.keys)
        with closing(self._loader.load(BlockRequest(namespace, chain, request.deadline_s))) as runs:
            for run in runs:
                yield self._read_part(run, namespace.shape)

    def _read_part(self, run: LoadedRun, shape: BlockShape) -> ReadPart:
        blocks = run.pinned()
        checksums = checksums_of(blocks, shape)
        return ReadPart(run.first, run.outcomes, self._views(blocks, shape), checksums, run.tier, self._releaser(blocks))

    def _views(self, blocks: Sequence[Block], shape: BlockShape) -> list[memoryview]:
        view = self._table.dram.view
        return [view(block.dram, shape.block_bytes) for block in blocks if block.dram is not None]

    def _releaser(self, pinned: Sequence[Block]) -> Callable[[], None]:
        return lambda: self._table.unpin(pinned)

    def write(self, request: WriteRequest) -> NodeGrant:
        namespace = self._namespaces.of_shape(request.run.namespace, request.shape)
        if self._gate.closed and not self._gate.awaits(request.run.keys):
            grant = self._gate.reject(namespace, request.run)
        else:
            until_s = min(request.deadline_s, self._clock.now_s() + MAX_WRITE_WAIT_S)
            grant = self._table.prepare(namespace, request.run, until_s)
        try:
            if request.tail:
                grant.tail = request.run.keys[-1]
            if request.durable:
                self._await_durability(namespace, grant, request)
            return NodeGrant(self._table, grant, request)
        except BaseException:  # no writer has the slots yet
            self._table.abandon(grant)
            raise

    def _await_durability(self, namespace: NodeNamespace, grant: SlotGrant, request: WriteRequest) -> None:
        """Wait until blocks that the node holds are durable. Those that are not in time are SKIPPED, not EXISTS."""
        held = [at for at, outcome in enumerate(grant.outcomes) if outcome is StoreOutcome.EXISTS]
        keys = [request.run.keys[at] for at in held]
        if all(self._table.are_durable(keys)):
            return
        self._table.requeue_writeback(filter(None, self._table.find(namespace, keys)))
        self._table.wait_written(request.deadline_s)
        for at, durable in zip(held, self._table.are_durable(keys), strict=True):
            if not durable:
                grant.outcomes[at] = StoreOutcome.SKIPPED


class NodeGrant(WriteGrant):
    """Slots of this node's arena, granted for a write."""

    def __init__(self, table: BlockTable, grant: SlotGrant, request: WriteRequest) -> None:
        self._table = table
        self._grant = grant
        self._request = request
        self._keys = list(grant.slots)
        self.outcomes = grant.outcomes
        self.views = [table.dram.view(slot, request.shape.block_bytes) for slot in grant.slots.values()]

    def commit(self, checksums: Checksums, good: Sequence[bool]) -> Sequence[StoreOutcome]:
        leading = next((position for position, is_good in enumerate(good) if not is_good), len(good))
        keys = self._keys[:leading]
        rows = [checksums[position].astype("<u8", copy=False).tobytes() for position in range(leading)]
        outcomes = self._table.complete(self._grant, keys, rows)
        self._table.abandon(self._grant)
        if self._request.durable and keys:
            self._table.wait_written(self._request.deadline_s)
            durable = self._table.are_durable(keys)
            outcomes = [outcome if kept else StoreOutcome.SKIPPED for outcome, kept in zip(outcomes, durable, strict=True)]
        # a chain is stored prefix first: blocks after a corrupt one are not stored
        rest = [StoreOutcome.SKIPPED if is_good else StoreOutcome.CORRUPT for is_good in good[leading:]]
        return [*outcomes, *rest]

    def abort(self) -> None:
        self._table.abandon(self._grant)

    def revoke(self) -> None:
        """Free the keys, but not the slots. Call it instead of ``abort`` if bytes may still arrive in them."""
        self._table.revoke(self._grant)


def checksums_of(blocks: Sequence[Block], shape: BlockShape) -> Checksums:
    """Return the checksums of blocks, ``[blocks, layers]``."""
    joined = b"".join([block.checksums for block in blocks])
    return np.frombuffer(joined, dtype="<u8").reshape(len(blocks), shape.layers)
