"""The limit of a local hit: the same blocks copied out of shared memory by as many threads, and one gRPC call.

A client must get the positions of the blocks from the node, and copy the blocks; nothing else is needed. The call sends the
keys, and its handler returns a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import grpc
import numpy as np

from kvclient.memory.arena import copy_from_arena
from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.buffers import DenseBlocks
from kvstore.core.types import BlockShape
from peers.bare_grpc import BareGrpc
from peers.memory import ArenaMemory


class BareLoad:
    """Blocks in shared memory and a gRPC server; a context manager that ends it.

    Args:
        shape: shape of the blocks.
        keys: one key per block.
    """

    def __init__(self, shape: BlockShape, keys: Sequence[bytes]) -> None:
        self.shape = shape
        self._stack = ExitStack()
        self._arena = ArenaMemory(len(keys) * shape.block_bytes)
        self._offsets = np.random.default_rng(0).permutation(len(keys)) * shape.block_bytes
        self._checksums = np.zeros((len(keys), shape.layers), np.uint64)
        server = self._stack.enter_context(BareGrpc(metadata_pb2.LookupResponse(hit_blocks=len(keys))))
        self._lookup = metadata_pb2_grpc.MetadataStub(self._stack.enter_context(grpc.insecure_channel(server.address))).Lookup
        self._request = metadata_pb2.LookupRequest(keys=b"".join(keys))

    def load(self, buffer: DenseBlocks, *, verify: bool) -> None:
        """Make the call and copy all blocks, with or without checksums."""
        self._lookup(self._request, timeout=10)
        sums = self._checksums if verify else None
        copy_from_arena(self._arena.view, self._offsets, buffer, checksums=sums)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
