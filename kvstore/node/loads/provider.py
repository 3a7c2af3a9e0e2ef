"""What this node gives to its data plane: reads through the loader, writes through the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvstore.core.clock import Clock
from kvstore.core.types import BlockShape, NamespaceId, Outcome, StoreOutcome, Tier
from kvstore.node.base.admission_gate import Gate
from kvstore.node.loads.layered import Stager
from kvstore.node.loads.loader import Loader, Part
from kvstore.node.state.grants import StoreGrant
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.transport.contract import BlockProvider, Checksums, ReadPart, ReadRequest, WriteGrant, WriteRequest

WRITE_ROOM_WAIT_S = 2.0
"""A remote store waits at most so long for room."""


class NodeProvider(BlockProvider):
    """One node's blocks. Thread-safe."""

    def __init__(
        self, namespaces: NamespaceRegistry, table: BlockTable, gate: Gate, loader: Loader, stager: Stager, clock: Clock
    ) -> None:
        self._namespaces = namespaces
        self._table = table
        self._gate = gate
        self._loader = loader
        self._stager = stager
        self._clock = clock

    def shape(self, namespace_id: NamespaceId) -> BlockShape | None:
        namespace = self._namespaces.find(namespace_id)
        return None if namespace is None else namespace.shape

    def read(self, request: ReadRequest) -> Iterator[ReadPart]:
        namespace = self._namespaces.get(request.namespace)
        staged = self._stager.ready(namespace, request.keys, request.first_layer, request.layer_count)
        if staged is not None:
            blocks, checksums = staged
            views = [self._table.dram.view(block.dram, namespace.shape.block_bytes) for block in blocks if block.dram is not None]
            yield ReadPart(0, [Outcome.HIT] * len(blocks), views, checksums, Tier.NVME, self._releaser(blocks))
            return
        parts = self._loader.load(namespace, request.keys, request.deadline_s)
        try:
            for part in parts:
                yield self._read_part(part, namespace.shape)
        finally:
            parts.close()  # type: ignore[attr-defined]  # a generator, by construction

    def _read_part(self, part: Part, shape: BlockShape) -> ReadPart:
        pinned = part.pinned()
        view = self._table.dram.view
        views = [view(block.dram, shape.block_bytes) for block in pinned if block.dram is not None]
        return ReadPart(part.first, part.outcomes, views, checksums_of(pinned, shape), part.tier, self._releaser(pinned))

    def _releaser(self, pinned: Sequence[Block]) -> Callable[[], None]:
        return lambda: self._table.unpin(pinned)

    def write(self, request: WriteRequest) -> WriteGrant:
        namespace = self._namespaces.of_shape(request.run.namespace, request.shape)
        if self._gate.shut and not self._gate.awaits(request.run.keys):
            prepared = self._gate.refuse(namespace, request.run)
        else:
            until_s = min(request.deadline_s, self._clock.now_s() + WRITE_ROOM_WAIT_S)
            prepared = self._table.prepare(namespace, request.run, until_s)
        if request.tail:
            prepared.tail = request.run.keys[-1]
        if request.durable:
            self._hold_to_durability(namespace, prepared, request)
        return _Grant(self._table, prepared, request)

    def _hold_to_durability(self, namespace: NodeNamespace, prepared: StoreGrant, request: WriteRequest) -> None:
        """A block that is held, but not durable, does not count as existing for a durable write."""
        held = [at for at, outcome in enumerate(prepared.outcomes) if outcome is StoreOutcome.EXISTS]
        keys = [request.run.keys[at] for at in held]
        if all(self._table.are_durable(keys)):
            return
        self._table.requeue_writeback(namespace, keys)
        self._table.wait_written(request.deadline_s)
        for at, durable in zip(held, self._table.are_durable(keys), strict=True):
            if not durable:
                prepared.outcomes[at] = StoreOutcome.SKIPPED


class _Grant(WriteGrant):
    def __init__(self, table: BlockTable, prepared: StoreGrant, request: WriteRequest) -> None:
        self._table = table
        self._prepared = prepared
        self._request = request
        self._keys = list(prepared.slots)
        self.outcomes = prepared.outcomes
        self.views = [table.dram.view(slot, request.shape.block_bytes) for slot in prepared.slots.values()]

    def commit(self, checksums: Checksums, good: Sequence[bool]) -> Sequence[StoreOutcome]:
        sound = next((position for position, fine in enumerate(good) if not fine), len(good))
        keys = self._keys[:sound]
        rows = [checksums[position].astype("<u8", copy=False).tobytes() for position in range(sound)]
        outcomes = self._table.complete(self._prepared, keys, rows)
        self._table.abandon(self._prepared)
        if self._request.durable and keys:
            self._table.wait_written(self._request.deadline_s)
            durable = self._table.are_durable(keys)
            outcomes = [outcome if kept else StoreOutcome.SKIPPED for outcome, kept in zip(outcomes, durable, strict=True)]
        # a chain is stored prefix first: what follows a bad block is not stored either
        rest = [StoreOutcome.SKIPPED if fine else StoreOutcome.CORRUPT for fine in good[sound:]]
        return [*outcomes, *rest]

    def abort(self) -> None:
        self._table.abandon(self._prepared)


def checksums_of(blocks: Sequence[Block], shape: BlockShape) -> Checksums:
    """Checksums of blocks, ``[blocks, layers]``."""
    joined = b"".join([block.checksums for block in blocks])
    return np.frombuffer(joined, dtype="<u8").reshape(len(blocks), shape.layers)


def runs_of_equal(values: Sequence[object]) -> Iterator[tuple[int, int]]:
    """(start, end) of stretches of the same value."""
    start = 0
    for at in range(1, len(values) + 1):
        if at == len(values) or values[at] is not values[start]:
            yield start, at
            start = at
