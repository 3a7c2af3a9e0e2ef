"""A store that is written layer by layer, as an engine computes the layers.

With a local node, slots are requested at once, and each layer is copied into them as it arrives. Without one, layers are
collected in memory of the client and sent on ``commit``; blocks beyond ``store_chunk_bytes`` are skipped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope
from kvclient.load.sink import spans
from kvclient.memory.buffers import as_block_buffer, pick_blocks
from kvclient.nodes.local_session import Session, is_session_lost
from kvclient.results import StoreResult
from kvclient.store.grant import StoreGrant
from kvclient.store.store import Store, count_store
from kvstore.core.buffers import BlockBuffer, DenseBlocks
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import Internal, InvalidArgument, KVStoreError
from kvstore.core.types import BlockShape, StoreOutcome
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.rpc.codec import pack_u64


class LayerwiseStore:
    """A store written layer by layer: call ``put_layer`` once per layer, in any order, then ``commit``. Thread-safe.

    A context manager that aborts without a commit. Failures of the store skip all blocks; only a wrong shape or a wrong order of
    calls raises.
    """

    def __init__(self, context: ClientContext, chain: ChainSlice, scope: CallScope) -> None:
        self._context = context
        self._chain = chain
        self._scope = scope
        self._layer_shape = BlockShape(1, context.shape.layer_block_bytes)
        self._lock = threading.Lock()
        self._result = StoreResult(np.full(len(chain), StoreOutcome.SKIPPED, np.uint8))
        self._put: set[int] = set()
        self._finished = False
        self._grant: StoreGrant | None = None
        self._session: Session | None = None
        self._checksums = np.empty((0, 0), np.uint64)
        self._staging: npt.NDArray[np.uint8] | None = None
        self._release: weakref.finalize[..., LayerwiseStore] | None = None

    def begin(self) -> None:
        """Ask the local node for slots, or allocate staging memory. For ``KVClient.begin_store``; called once."""
        if len(self._chain):
            try:
                self._begin()
            except KVStoreError as error:
                self._give_up(error)

    def _begin(self) -> None:
        context, shape = self._context, self._context.shape
        if context.local is None:
            staged = min(len(self._chain), context.options.store_chunk_bytes // shape.block_bytes)
            self._staging = np.empty((staged, shape.layers, shape.layer_block_bytes), np.uint8)
            return
        session = context.local.session()
        if session is None:
            raise context.local.unavailable()
        session.acquire()
        self._session = session
        grants: list[StoreGrant] = []
        self._release = weakref.finalize(self, _release, session, grants)  # also if the engine drops the handle
        self._release.atexit = False  # at exit the operating system releases everything
        self._grant = StoreGrant.prepare(context, session, self._chain, self._scope)
        grants.append(self._grant)
        self._checksums = np.empty((len(self._grant.positions), shape.layers), np.uint64)

    @property
    def blocks_wanted(self) -> npt.NDArray[np.intp]:
        """Positions of the blocks that are written. The bytes of others, which are held already or skipped, are not read."""
        if self._grant is not None:
            return self._grant.positions
        return np.arange(0 if self._staging is None else len(self._staging))

    def put_layer(self, layer: int, data: object) -> None:
        """Write one layer of all blocks.

            store.put_layer(layer, rows)

        Args:
            layer: 0-based.
            data: ``[blocks, layer_block_bytes]``: anything that ``as_block_buffer`` accepts, one layer block per key. It must not
                change until the call returns.

        Raises:
            InvalidArgument: wrong size or layer, a layer put twice, or a store that has ended.
            BaseException: an error of ``data``, an interrupt or a lack of memory. Nothing is stored.
        """
        if not isinstance(layer, int) or not 0 <= layer < self._context.shape.layers:
            raise InvalidArgument("no such layer", layer=layer, layers=self._context.shape.layers)
        rows = as_block_buffer(data, self._layer_shape, len(self._chain), writable=False, spec=self._context.spec)
        with self._lock:
            if self._finished or layer in self._put:
                raise InvalidArgument("the layer was put before, or the store has ended", layer=layer)
            if self._scope.ended:
                self._give_up(self._scope.error())
            try:
                self._copy(layer, rows)
            except KVStoreError as error:  # the session was lost: these blocks are not stored
                self._give_up(error)
            except BaseException as error:  # the slots may lack bytes of this layer
                self._give_up(Internal("a layer could not be copied", layer=layer, error=repr(error)))
                raise
            self._put.add(layer)

    def _copy(self, layer: int, rows: BlockBuffer) -> None:
        if self._grant is not None and self._session is not None and len(self._grant.positions):
            rows = pick_blocks(rows, self._grant.positions)
            at = np.uint64(layer * self._layer_shape.layer_block_bytes)
            self._checksums[:, layer] = self._session.arena.copy_in(rows, self._grant.offsets + at)[:, 0]
        elif self._staging is not None:
            _gather(rows, self._staging[:, layer])

    def commit(self, *, wait_visible: bool = False) -> StoreResult:
        """Make the blocks visible. Every layer must have been put.

            result = store.commit()

        Args:
            wait_visible: wait until lookups everywhere show the blocks, for 0.8 of the time left at most. After that the blocks
                are stored, but may not be visible yet.

        Raises:
            InvalidArgument: a layer is missing, or the store has ended.
        """
        with self._lock:
            if self._finished:
                raise InvalidArgument("the store has ended")
            if len(self._chain) and len(self._put) != self._context.shape.layers:
                raise InvalidArgument("layers are missing", put=len(self._put), layers=self._context.shape.layers)
            self._finished = True
            try:
                if self._grant is not None:
                    self._commit_slots(self._grant, wait_visible=wait_visible)
                elif self._staging is not None and len(self._staging):
                    return self._commit_staged(self._staging)
            except KVStoreError as error:
                self._give_up(error)
            finally:
                self._clean_up()
            self._result.seconds = self._scope.elapsed_s()
            count_store(self._context, self._result)
            self._context.run_ends.record_stored(self._chain, self._result.held_blocks)
            return self._result

    def _commit_slots(self, grant: StoreGrant, *, wait_visible: bool) -> None:
        result = self._result
        if self._scope.ended:
            raise self._scope.error()
        self._keep_in_pool(grant)  # collected now: after ``complete`` the slots belong to the node
        result.draining = grant.draining
        result.outcomes = grant.outcomes.copy()
        result.outcomes[grant.positions] = StoreOutcome.LOST  # until the node has answered
        grant.complete(pack_u64(self._checksums.reshape(-1)), self._scope.left_s(), wait_visible=wait_visible)
        result.outcomes = grant.outcomes
        stored = int(np.count_nonzero(grant.outcomes[grant.positions] == StoreOutcome.STORED))
        result.bytes_stored = stored * self._context.shape.block_bytes

    def _keep_in_pool(self, grant: StoreGrant) -> None:
        """Leave a copy of the written blocks in the engine's own pool, run by run."""
        pool, session = self._context.pool, self._session
        if pool is None or session is None:
            return
        checksums = self._context.options.verify == "always"
        done = 0
        for start, stop in spans(grant.positions):
            blocks = session.arena.blocks(grant.offsets[done : done + stop - start], self._context.shape)
            part = self._chain.part(start, stop)
            pool.insert(part.keys, part.parent, part.depth, blocks, self._scope, checksums=checksums)
            done += stop - start

    def _commit_staged(self, staging: npt.NDArray[np.uint8]) -> StoreResult:
        staged = len(staging)
        store = Store(self._context, self._chain.part(0, staged), DenseBlocks(staging), self._scope, keep_in_pool=True)
        result = store.run()
        skipped = np.full(len(self._chain) - staged, StoreOutcome.SKIPPED, np.uint8)
        result.outcomes = np.concatenate([result.outcomes, skipped])
        return result

    def abort(self) -> None:
        """Store nothing. No effect on a store that has ended."""
        self._scope.cancel()  # a commit that waits for the node ends soon
        with self._lock:
            self._finished = True
            self._clean_up()

    def _give_up(self, error: KVStoreError) -> None:
        """End the store after a failure; later layers are dropped."""
        if self._result.error is None:
            self._result.error = error
        self._context.incidents.report(client_metrics.STORE_FAILED, "store ended early", error)
        if self._session is not None and is_session_lost(error) and self._context.local is not None:
            self._context.local.lost(self._session, error)
        self._clean_up()

    def _clean_up(self) -> None:
        """Give back slots, session and memory. All copies are made under the lock, so none is under way."""
        self._grant = self._session = self._staging = None
        if self._release is not None:
            self._release()  # once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._finished:
            self.abort()


def _release(session: Session, grants: Sequence[StoreGrant]) -> None:
    for grant in grants:
        grant.abort()  # no effect after complete
    session.release()


def _gather(rows: BlockBuffer, destination: npt.NDArray[np.uint8]) -> None:
    """Copy the first rows of a layer into staging memory."""
    if isinstance(rows, DenseBlocks):
        np.copyto(destination, rows.array[: len(destination), 0])
        return
    for position, row in enumerate(destination):
        at = 0
        for piece in rows.segments(position, 0, 1):
            row[at : at + piece.nbytes] = np.frombuffer(piece, np.uint8)
            at += piece.nbytes
