"""A store written layer by layer, as an engine computes it.

With a local node the slots are asked for at once and each layer is copied into them as it comes. Without one, layers gather in
memory of the client (bounded by ``store_chunk_bytes``: blocks beyond it are skipped) and travel on ``commit``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvclient.call.context import Core
from kvclient.call.operation import Operation
from kvclient.load.outcomes import spans
from kvclient.memory.buffers import as_block_buffer, pick_blocks
from kvclient.nodes.local_session import Session, means_lost
from kvclient.results import StoreResult
from kvclient.store.store import FindStoreNode, Grant, Store, count_store
from kvstore.core.buffers import BlockBuffer, DenseBlocks
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.types import KEY_BYTES, BlockKey, BlockShape, StoreOutcome
from kvstore.rpc.codec import pack_u64


class LayerwiseStore:
    """A store under way: ``put_layer`` once a layer, in any order, then ``commit``. Thread-safe.

    A context manager: leaving it without a commit aborts. Failures of ours turn it into a store of nothing; only a wrong shape
    or a wrong order of calls raises.
    """

    def __init__(
        self,
        core: Core,
        keys: Sequence[BlockKey],
        packed: bytes,
        parent: BlockKey | None,
        depth: int,
        operation: Operation,
        find_node: FindStoreNode,
    ) -> None:
        self._core = core
        self._keys = keys
        self._packed = packed
        self._parent = parent
        self._depth = depth
        self._operation = operation
        self._find_node = find_node
        self._layer_shape = BlockShape(1, core.shape.layer_block_bytes)
        self._lock = threading.Lock()
        self._result = StoreResult(np.full(len(keys), StoreOutcome.SKIPPED, np.uint8))
        self._put: set[int] = set()
        self._finished = False
        self._grant: Grant | None = None
        self._session: Session | None = None
        self._checksums = np.empty((0, 0), np.uint64)
        self._staging: npt.NDArray[np.uint8] | None = None
        self._give_back: weakref.finalize[..., LayerwiseStore] | None = None
        try:
            if keys:
                self._begin()
        except KVStoreError as error:
            self._give_up(error)

    def _begin(self) -> None:
        core, shape = self._core, self._core.shape
        if core.local is None:
            staged = min(len(self._keys), core.options.store_chunk_bytes // shape.block_bytes)
            self._staging = np.empty((staged, shape.layers, shape.layer_block_bytes), np.uint8)
            return
        session = core.local.session()
        if session is None:
            raise core.local.unavailable()
        session.acquire()
        self._session = session
        grants: list[Grant] = []
        self._give_back = weakref.finalize(self, _give_back, session, grants)  # also where the engine forgets the handle
        self._give_back.atexit = False  # the process's end gives everything back by itself
        self._grant = Grant(core, session, self._packed, self._parent, self._depth, self._operation)
        grants.append(self._grant)
        self._checksums = np.empty((len(self._grant.positions), shape.layers), np.uint64)

    @property
    def blocks_wanted(self) -> npt.NDArray[np.intp]:
        """Positions of the blocks that will be written; the others are held already or skipped, and their bytes are not read."""
        if self._grant is not None:
            return self._grant.positions
        return np.arange(0 if self._staging is None else len(self._staging))

    def put_layer(self, layer: int, data: object) -> None:
        """Hands over one layer of all blocks.

        Args:
            layer: 0-based.
            data: ``[blocks, layer_block_bytes]``: whatever ``as_block_buffer`` takes, one Layer Block a key. Read before the
                call returns; it must not change meanwhile.

        Raises:
            InvalidArgument: wrong size or layer, a layer put twice, or a handle that is finished.
        """
        if not isinstance(layer, int) or not 0 <= layer < self._core.shape.layers:
            raise InvalidArgument("no such layer", layer=layer, layers=self._core.shape.layers)
        rows = as_block_buffer(data, self._layer_shape, len(self._keys), writable=False, spec=self._core.spec)
        with self._lock:
            if self._finished or layer in self._put:
                raise InvalidArgument("the layer was put before, or the store is finished", layer=layer)
            self._put.add(layer)
            if self._operation.over:
                self._give_up(self._operation.error())
            if self._grant is not None and self._session is not None and len(self._grant.positions):
                rows = pick_blocks(rows, self._grant.positions)
                at = np.uint64(layer * self._layer_shape.layer_block_bytes)
                self._checksums[:, layer] = self._session.arena.copy_in(rows, self._grant.offsets + at)[:, 0]
            elif self._staging is not None:
                _gather(rows, self._staging[:, layer])

    def commit(self, *, wait_visible: bool = False) -> StoreResult:
        """Makes the blocks visible. Every layer must have been put.

        Args:
            wait_visible: return only once lookups everywhere show the blocks, or most of the time is up.

        Raises:
            InvalidArgument: a layer is missing, or the handle is finished.
        """
        with self._lock:
            if self._finished:
                raise InvalidArgument("the store is finished")
            if self._keys and len(self._put) != self._core.shape.layers:
                raise InvalidArgument("layers are missing", put=len(self._put), layers=self._core.shape.layers)
            self._finished = True
            try:
                if self._grant is not None:
                    self._commit_slots(self._grant, wait_visible=wait_visible)
                elif self._staging is not None and len(self._staging):
                    return self._commit_staged(self._staging)
            except KVStoreError as error:
                self._give_up(error)
            finally:
                self._let_go()
            self._result.seconds = self._operation.elapsed_s()
            count_store(self._core, self._result)
            return self._result

    def _commit_slots(self, grant: Grant, *, wait_visible: bool) -> None:
        result = self._result
        if self._operation.over:
            raise self._operation.error()
        self._keep_near(grant)  # now: the slots are the node's as soon as it is told
        result.draining = grant.draining
        result.outcomes = grant.outcomes.copy()
        result.outcomes[grant.positions] = StoreOutcome.LOST  # until the answer is here
        grant.complete(pack_u64(self._checksums.reshape(-1)), self._operation.left_s(), wait_visible=wait_visible)
        result.outcomes = grant.outcomes
        stored = int(np.count_nonzero(grant.outcomes[grant.positions] == StoreOutcome.STORED))
        result.bytes_stored = stored * self._core.shape.block_bytes

    def _keep_near(self, grant: Grant) -> None:
        """Leaves a copy of what was written in the engine's own pool, stretch by stretch."""
        near, session = self._core.near, self._session
        if near is None or session is None:
            return
        checksums = self._core.options.verify == "always"
        done = 0
        for start, stop in spans(grant.positions):
            blocks = session.arena.blocks(grant.offsets[done : done + stop - start], self._core.shape)
            parent = self._keys[start - 1] if start else self._parent
            near.keep(self._keys[start:stop], parent, self._depth + start, blocks, self._operation, checksums=checksums)
            done += stop - start

    def _commit_staged(self, staging: npt.NDArray[np.uint8]) -> StoreResult:
        staged = len(staging)
        store = Store(
            self._core,
            self._keys[:staged],
            self._packed[: staged * KEY_BYTES],
            self._parent,
            self._depth,
            DenseBlocks(staging),
            self._operation,
            self._find_node,
            durable=False,
            wait_visible=False,
        )
        result = store.run()
        near, verify = self._core.near, self._core.options.verify
        if near is not None:
            keys, blocks = self._keys[:staged], DenseBlocks(staging)
            near.keep(keys, self._parent, self._depth, blocks, self._operation, checksums=verify == "always")
        skipped = np.full(len(self._keys) - staged, StoreOutcome.SKIPPED, np.uint8)
        result.outcomes = np.concatenate([result.outcomes, skipped])
        return result

    def abort(self) -> None:
        """Stores nothing. No effect on a finished store."""
        self._operation.cancel()  # a commit that waits for the node gives up soon
        with self._lock:
            self._finished = True
            self._let_go()

    def _give_up(self, error: KVStoreError) -> None:
        """A failure of ours: what is still put is dropped."""
        if self._result.error is None:
            self._result.error = error
        self._core.incidents.report("client_store_failed_total", "a store was given up", error)
        if self._session is not None and means_lost(error) and self._core.local is not None:
            self._core.local.lost(self._session, error)
        self._let_go()

    def _let_go(self) -> None:
        """Gives back slots, session and memory. Nobody touches the slots any more: all copies happen under the lock."""
        self._grant = self._session = self._staging = None
        if self._give_back is not None:
            self._give_back()  # once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._finished:
            self.abort()


def _give_back(session: Session, grants: Sequence[Grant]) -> None:
    for grant in grants:
        grant.abort()  # no effect once completed
    session.release()


def _gather(rows: BlockBuffer, destination: npt.NDArray[np.uint8]) -> None:
    """Copies the first rows of a layer into staging memory."""
    if isinstance(rows, DenseBlocks):
        np.copyto(destination, rows.array[: len(destination), 0])
        return
    for position, row in enumerate(destination):
        at = 0
        for piece in rows.segments(position, 0, 1):
            row[at : at + piece.nbytes] = np.frombuffer(piece, np.uint8)
            at += piece.nbytes
