"""Reads of peers from a pool: blocks of a GPU are copied through host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvclient.hbm.pool_state import PoolState
from kvclient.hbm.volume import HbmVolume
from kvstore.core.buffers import DenseBlocks
from kvstore.core.checksum import layer_checksums
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome, StoreOutcome, Tier
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.transport.contract import BlockProvider, Checksums, ReadPart, ReadRequest, WriteGrant, WriteRequest

PART_BYTES = 16 << 20
"""Bytes read from the device at a time, per peer: bounds the memory that a peer can occupy in an engine's process."""


class PoolProvider(BlockProvider):
    """Blocks of a pool for peers. Rejects writes: only the engine fills its device memory."""

    def __init__(self, namespaces: NamespaceRegistry, parts: PoolState) -> None:
        self._namespaces = namespaces
        self._parts = parts

    def shape(self, namespace_id: NamespaceId) -> BlockShape | None:
        namespace = self._namespaces.find(namespace_id)
        return None if namespace is None else namespace.shape

    def read(self, request: ReadRequest) -> Iterator[ReadPart]:
        namespace = self._namespaces.get(request.namespace)
        step = max(1, PART_BYTES // namespace.shape.block_bytes)
        for first in range(0, len(request.keys), step):
            yield self._part(namespace, first, request.keys[first : first + step])

    def _part(self, namespace: NodeNamespace, first: int, keys: Sequence[BlockKey]) -> ReadPart:
        parts, shape = self._parts, namespace.shape
        # a pool that is being resized accepts no reads, or readers could prevent the release of memory
        found = parts.table.pin_resident(namespace, keys) if parts.open else [None] * len(keys)
        here = [block for block in found if block is not None]
        views: list[memoryview] = []
        sums: list[bytes] = []
        try:
            with parts.guarded("read from"), parts.disabled_if_hung("read from"):
                views = host_views(parts.volume, here, shape) if here else []
                sums = [block.checksums or layer_checksums(view, shape) for block, view in zip(here, views, strict=True)]
        except BaseException:
            parts.table.unpin(here)
            raise
        if len(sums) < len(here):  # the device failed
            parts.table.unpin(here)
            found, here, views, sums = [None] * len(keys), [], [], []
        return ReadPart(
            first,
            [Outcome.MISS if block is None else Outcome.HIT for block in found],
            views,
            np.frombuffer(b"".join(sums), "<u8").astype(np.uint64).reshape(len(here), shape.layers),
            Tier.HBM,
            self._releaser(here),
        )

    def _releaser(self, pinned: Sequence[Block]) -> Callable[[], None]:
        return lambda: self._parts.table.unpin(pinned)

    def write(self, request: WriteRequest) -> WriteGrant:
        return _NothingGranted(len(request.run.keys))


class _NothingGranted(WriteGrant):
    def __init__(self, keys: int) -> None:
        self.outcomes = [StoreOutcome.SKIPPED] * keys
        self.views = []

    def commit(self, checksums: Checksums, good: Sequence[bool]) -> Sequence[StoreOutcome]:  # noqa: ARG002  # nothing to commit
        return []

    def abort(self) -> None:
        pass


def host_views(volume: HbmVolume, blocks: Sequence[Block], shape: BlockShape) -> list[memoryview]:
    """Full blocks in host memory: views of a CPU pool, or copies. The caller has pinned the blocks."""
    size = shape.block_bytes
    offsets = np.array([block.dram.offset for block in blocks if block.dram is not None], np.int64)
    memory = volume.host_view
    if memory is None:
        copies = np.empty((len(offsets), shape.layers, shape.layer_block_bytes), np.uint8)
        volume.copy_out(offsets, DenseBlocks(copies), 0)
        memory, offsets = copies.reshape(-1).data, np.arange(len(offsets), dtype=np.int64) * size
    return [memory[at : at + size] for at in offsets.tolist()]
