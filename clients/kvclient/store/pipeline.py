"""A store through the local node, chunk after chunk: ask for slots, copy into them, make them visible.

These steps are ``Prepare``, the copies, and ``Complete``. Theory of operation.

1. A chunk is copied in pieces. Host memory is copied piece after piece, and each chunk is complete before the next one begins.
2. Copies of a device run on while this thread works: while a piece is copied, the checksums of the piece before it are computed,
   its chunk is completed, or slots for the next chunk are requested. At most ``pieces_in_flight`` pieces are copied at once.
3. Chunks are completed in order. If one is not held afterwards, the later ones are given up: a chain is stored prefix first.
4. A request for slots does not wait for space that chunks under way hold: it is repeated after they are complete.
5. Slots are given back only after the last copy into them has ended. If copies do not end, the arena is stuck, and the node keeps
   the slots until the session ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope
from kvclient.memory.buffers import pick_blocks
from kvclient.memory.device_buffer import DeviceBuffer
from kvclient.nodes.local_session import Session
from kvclient.results import HELD, StoreResult
from kvclient.store.grant import StoreGrant
from kvstore.core.buffers import BlockBuffer
from kvstore.core.chain import ChainSlice
from kvstore.core.checksum import ChecksumArray
from kvstore.core.errors import KVStoreError
from kvstore.core.types import StoreOutcome
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.rpc.codec import pack_u64

_ARENA_SHARE = 8
"""A chunk is at most this fraction (1/n) of the arena."""
_LAST_CALL_S = 0.2
"""Blocks that were copied in time are completed even if the deadline has almost passed."""


class _Chunk:
    """Blocks ``[start, stop)`` of a store, under one grant.

    Args:
        grant: their slots.
        start: first block.
        pieces: number of pieces to copy.
    """

    def __init__(self, grant: StoreGrant, start: int, pieces: int) -> None:
        self.grant = grant
        self.start = start
        self.stop = start + len(grant.outcomes)
        self.unfinished = pieces
        """Pieces of which the checksums are not known yet."""
        self.checksums: list[bytes] = []

    @property
    def through(self) -> int:
        """Number of leading blocks that are held, or will be when the chunk is complete."""
        held = HELD[self.grant.outcomes]
        return len(held) if held.all() else int(held.argmin())

    @property
    def whole(self) -> bool:
        """Whether all blocks of the chunk are held, or will be when it is complete."""
        return self.through == self.stop - self.start


class StorePipeline:
    """One store through one session. ``run`` once, as a user of the session.

    Args:
        context: the client's parts.
        session: with the local node.
        chain: the blocks.
        buffer: their bytes.
        scope: deadline and cancellation.
        result: filled.
        wait_visible: wait until lookups show the blocks.
    """

    def __init__(
        self,
        context: ClientContext,
        session: Session,
        chain: ChainSlice,
        buffer: BlockBuffer,
        scope: CallScope,
        result: StoreResult,
        *,
        wait_visible: bool,
    ) -> None:
        options, self._block_bytes = context.options, context.shape.block_bytes
        self._context = context
        self._session = session
        self._chain = chain
        self._buffer = buffer
        self._scope = scope
        self._result = result
        self._wait_visible = wait_visible
        size = min(options.store_chunk_bytes, session.arena.size // _ARENA_SHARE)
        self._chunk_blocks = max(1, size // self._block_bytes)
        self._piece_blocks = max(1, options.copy_chunk_bytes // self._block_bytes)
        self._ahead = options.pieces_in_flight - 1 if isinstance(buffer, DeviceBuffer) else 0
        """Pieces that may be under way when this thread waits for an earlier one."""
        self._in_flight: deque[tuple[_Chunk, Callable[[], ChecksumArray]]] = deque()
        """Pieces whose copies have begun, in order, and the function that waits for each."""
        self._open: list[_Chunk] = []
        """Chunks that are not complete."""
        self._broken = False
        """A chunk was not held after it was completed."""

    def run(self) -> bool:
        """Store the blocks. Return whether all of them are held.

        A node with little space grants a part of a chunk, prefix first. The rest is requested again after the part is stored.

        Raises:
            KVStoreError: the store failed or its scope has ended.
        """
        try:
            start = 0
            while start < len(self._chain):
                ahead = bool(self._in_flight)
                chunk = self._prepare(start, min(len(self._chain), start + self._chunk_blocks))
                if not chunk.whole:
                    self._finish(0)  # the rest of this chunk may get the space of earlier ones
                    if ahead and not chunk.through and not chunk.grant.draining and not self._broken:
                        continue  # nothing was granted
                self._write(chunk)
                if not chunk.whole:
                    self._finish(0)
                outcomes, through = chunk.grant.outcomes, chunk.through
                if self._broken or through == 0 or (not chunk.whole and outcomes[through] != StoreOutcome.SKIPPED):
                    return False
                start += through
            self._finish(0)
            return not self._broken
        finally:
            self._give_up()

    def _prepare(self, start: int, stop: int) -> _Chunk:
        """Ask for the slots of a chunk."""
        try:
            if self._scope.ended:
                raise self._scope.error()
            wait = not self._in_flight
            grant = StoreGrant.prepare(self._context, self._session, self._chain.part(start, stop), self._scope, wait=wait)
        except KVStoreError:
            self._finish(0)  # the chunks before it are copied
            raise
        chunk = _Chunk(grant, start, -(-len(grant.positions) // self._piece_blocks))
        self._open.append(chunk)
        return chunk

    def _write(self, chunk: _Chunk) -> None:
        """Copy the blocks of a chunk into their slots. Its last pieces may still be under way afterwards.

        Checksums are of the *source*. If the copy fails or the caller writes to the buffer during it, bytes and checksum differ.
        Every reader over a wire detects that, as do write-back before the block becomes durable and a load with
        ``verify="always"``. A load from the local node's arena does not verify by default, and does not detect it.
        """
        grant = chunk.grant
        for at in range(0, len(grant.positions), self._piece_blocks):
            if self._scope.ended:
                self._end_early(chunk)
            if self._broken:
                return
            some = slice(at, at + self._piece_blocks)
            piece = pick_blocks(self._buffer, grant.positions[some] + chunk.start)
            if self._in_flight:
                self._context.incidents.counters.add(client_metrics.PIECES_AHEAD)
            self._in_flight.append((chunk, self._session.arena.begin_copy_in(piece, grant.offsets[some])))
            self._finish(self._ahead)
        if not len(grant.positions):
            self._complete(chunk)

    def _end_early(self, chunk: _Chunk) -> None:
        """End the store at the end of its scope, within a chunk: those before it were copied in time.

        Raises:
            KVStoreError: the error of the scope.
        """
        while self._in_flight and self._in_flight[0][0] is not chunk:
            self._finish_piece()
        outcomes = self._result.outcomes
        outcomes[chunk.start : chunk.stop] = chunk.grant.outcomes
        outcomes[chunk.start + chunk.grant.positions] = StoreOutcome.SKIPPED
        raise self._scope.error()

    def _finish(self, ahead: int) -> None:
        """Wait for all pieces but the last ``ahead``."""
        while len(self._in_flight) > ahead:
            self._finish_piece()

    def _finish_piece(self) -> None:
        """Wait for the oldest piece. If it is the last of its chunk, complete the chunk."""
        chunk, wait = self._in_flight.popleft()
        chunk.checksums.append(pack_u64(wait()))
        chunk.unfinished -= 1
        if not chunk.unfinished and not self._broken:
            self._complete(chunk)

    def _complete(self, chunk: _Chunk) -> None:
        """Make the blocks of a chunk visible, and record their outcomes."""
        grant, outcomes, whole = chunk.grant, self._result.outcomes, chunk.whole
        outcomes[chunk.start + grant.positions] = StoreOutcome.LOST  # until the node has answered
        grant.complete(b"".join(chunk.checksums), max(self._scope.left_s(), _LAST_CALL_S), wait_visible=self._wait_visible)
        self._open.remove(chunk)
        outcomes[chunk.start : chunk.stop] = grant.outcomes
        self._result.draining |= grant.draining
        stored = int(np.count_nonzero(grant.outcomes[grant.positions] == StoreOutcome.STORED))
        self._result.bytes_stored += stored * self._block_bytes
        self._broken |= whole and not chunk.whole

    def _give_up(self) -> None:
        """Give back the slots of chunks that are not complete, after the last copy into them."""
        if self._open and isinstance(self._buffer, DeviceBuffer) and not self._session.arena.stuck:
            with suppress(KVStoreError):  # the arena is stuck then
                self._session.arena.drain(self._buffer)
        for chunk in self._open:
            chunk.grant.abort()
