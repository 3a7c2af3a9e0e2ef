"""Stores: prefix first, and each block written once.

Through the local node a store has three steps per chunk: ask for slots (``Prepare``), copy into them, make them visible
(``Complete``). Without a local node, blocks go over TCP to another node. In both cases a block is stored only if all blocks
before it in the call are held or being written. A failure of the store skips the rest, and the engine continues.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope, call_within
from kvclient.memory.buffers import pick_blocks
from kvclient.nodes.local_session import Session, is_session_lost, new_operation_id
from kvclient.results import HELD, Outcomes, StoreResult
from kvproto.v1 import common_pb2, node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import Internal, KVStoreError, Unavailable
from kvstore.core.types import BlockRun, StoreOutcome
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.rpc.client import RetryPolicy
from kvstore.rpc.codec import pack_u64, unpack_u64
from kvstore.transport.contract import WriteRequest

_KNOWN = frozenset(StoreOutcome)
RETRY = RetryPolicy(attempts=3)
"""Mutating calls carry an operation id, so that a retry is safe."""
_ARENA_SHARE = 8
_WAIT_SHARE = 0.8
"""Share of the time left that ``Prepare`` may wait for space; the rest is for the copy."""


class StoreGrant:
    """Slots of one ``Prepare``: which blocks of a chain are to be written, and where in the arena. Made by ``prepare``."""

    def __init__(
        self, context: ClientContext, session: Session, chain: ChainSlice, scope: CallScope, operation_id: bytes
    ) -> None:
        self._context = context
        self._session = session
        self._chain = chain
        self._scope = scope
        self.operation_id = operation_id
        self._open = True
        self._surplus = False
        self.outcomes: Outcomes = np.full(len(chain), StoreOutcome.SKIPPED, np.uint8)
        self.positions: npt.NDArray[np.intp] = np.empty(0, np.intp)
        """Blocks to be written, ascending."""
        self.offsets: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        """Where in the arena each of them is written."""
        self.draining = False
        """Whether blocks are SKIPPED because the node drains or shuts down."""

    @classmethod
    def prepare(cls, context: ClientContext, session: Session, chain: ChainSlice, scope: CallScope) -> StoreGrant:
        """Ask the node for slots.

        Args:
            context: the client's parts.
            session: with the local node.
            chain: the blocks.
            scope: deadline and cancellation.

        Raises:
            KVStoreError: the node refused or does not answer.
        """
        grant = cls(context, session, chain, scope, new_operation_id())
        left_s = scope.left_s()
        request = node_pb2.PrepareRequest(
            session_id=session.session_id,
            operation_id=grant.operation_id,
            blocks=common_pb2.BlockRun(
                namespace_id=chain.namespace, parent=chain.parent or b"", depth=chain.depth, keys=chain.packed
            ),
            wait_ms=int(min(context.options.space_wait_s, left_s * _WAIT_SHARE) * 1000),
            heads=chain.heads,
        )
        try:
            answer = call_within(scope, session.server, session.stub.Prepare, request, left_s, RETRY)
            grant.accept(answer)
        except KVStoreError:
            grant.abort()  # the answer may be lost, and slots granted
            raise
        return grant

    def accept(self, answer: node_pb2.PrepareResponse) -> None:
        """Take over the answer of the node, checked: it decides what is written where. For ``prepare``."""
        self.outcomes = np.frombuffer(answer.outcomes, np.uint8).copy()
        if len(self.outcomes) != len(self._chain) or not _KNOWN.issuperset(answer.outcomes):
            raise Internal("the node did not answer one outcome per key", keys=len(self._chain), outcomes=len(self.outcomes))
        granted = np.flatnonzero(self.outcomes == StoreOutcome.STORED)
        offsets = unpack_u64(answer.offsets, "offsets", len(granted))
        if len(offsets) and int(offsets.max()) + self._context.shape.block_bytes > self._session.arena.size:
            raise Internal("the node granted slots outside its arena")
        skip_after_gap(self.outcomes)
        self.draining = answer.draining
        if answer.draining and (skipped := int(np.count_nonzero(self.outcomes == StoreOutcome.SKIPPED))):
            message = "blocks not stored: the local node drains or shuts down"
            self._context.incidents.report(client_metrics.STORE_SKIPPED_DRAINING_BLOCKS, message, amount=skipped)
        self.positions = np.flatnonzero(self.outcomes == StoreOutcome.STORED)
        self.offsets = offsets[: len(self.positions)]  # slots granted after a gap are given back unwritten
        self._surplus = len(self.positions) < len(granted)

    def complete(self, checksums: bytes, timeout_s: float, *, wait_visible: bool) -> None:
        """Make the written blocks visible. Their final outcomes are in ``outcomes``.

        Args:
            checksums: packed, one per layer of each written block.
            timeout_s: bound of the call.
            wait_visible: return only after the metadata server shows the blocks, or after most of the time.

        Raises:
            KVStoreError: it is not known whether they are visible.
        """
        if len(self.positions):
            keys = self._chain.packed
            if len(self.positions) < len(self.outcomes):
                keys = b"".join([self._chain.key(at) for at in self.positions.tolist()])
            request = node_pb2.CompleteRequest(
                session_id=self._session.session_id,
                operation_id=self.operation_id,
                keys=keys,
                checksums=checksums,
                wait_visible_ms=int(timeout_s * _WAIT_SHARE * 1000) if wait_visible else 0,
            )
            answer = call_within(self._scope, self._session.server, self._session.stub.Complete, request, timeout_s, RETRY)
            if len(answer.outcomes) != len(self.positions) or not _KNOWN.issuperset(answer.outcomes):
                raise Internal("the node did not answer one outcome per key", keys=len(self.positions))
            self.outcomes[self.positions] = np.frombuffer(answer.outcomes, np.uint8)
            skip_after_gap(self.outcomes)
        if self._surplus:
            self.abort()
        self._open = False

    def abort(self) -> None:
        """Give back slots that were not completed. Nothing may write to them any more. Never raises, never waits."""
        if not self._open:
            return
        self._open = False
        if self._session.arena.stuck:
            return  # a device may still write to them: the node keeps them until the session ends
        self._session.releaser.abort(self.operation_id)


def skip_after_gap(outcomes: Outcomes) -> None:
    """Make everything SKIPPED after the first block that is not held: a chain is stored prefix first."""
    bad = ~HELD[outcomes]
    if bad.any():
        first = int(bad.argmax())
        outcomes[first + 1 :] = StoreOutcome.SKIPPED


class Store:
    """One store of consecutive blocks of a chain, or of heads of chains; a ``PreparedCall``.

    Args:
        context: the client's parts.
        chain: the blocks.
        buffer: their bytes.
        scope: deadline and cancellation.
        durable: wait until the blocks are on NVMe.
        wait_visible: wait until lookups show the blocks.
        keep_in_pool: leave a copy in the engine's own pool.
    """

    def __init__(
        self,
        context: ClientContext,
        chain: ChainSlice,
        buffer: BlockBuffer,
        scope: CallScope,
        *,
        durable: bool = False,
        wait_visible: bool = False,
        keep_in_pool: bool = False,
    ) -> None:
        self._context = context
        self._chain = chain
        self._buffer = buffer
        self.scope = scope
        self._durable = durable
        self._wait_visible = wait_visible
        self._keep_in_pool = keep_in_pool
        self._result = StoreResult(np.full(len(chain), StoreOutcome.SKIPPED, np.uint8))

    def run(self) -> StoreResult:
        """Store the blocks. Failures of the store end in outcomes and in ``error``."""
        context, result = self._context, self._result
        try:
            if not len(self._chain):
                result.durable = self._durable
            else:
                self._through_local() if context.local is not None else self._through_peer()
        except KVStoreError as error:
            self._fail(error)
        skip_after_gap(result.outcomes)
        result.seconds = self.scope.elapsed_s()
        count_store(context, result)
        if not self._chain.heads:
            context.run_ends.record_stored(self._chain, result.held_blocks)
        if result.error is not None:
            context.store_nodes.forget()
        if self._keep_in_pool and context.pool is not None and not self.scope.ended:  # also blocks that the node rejected
            chain, checksums = self._chain, context.options.verify == "always"
            context.pool.insert(chain.keys, chain.parent, chain.depth, self._buffer, self.scope, checksums=checksums)
        return result

    def refused(self, error: KVStoreError) -> StoreResult:
        """Return the result of a store that was not done."""
        return StoreResult(np.full(len(self._chain), StoreOutcome.SKIPPED, np.uint8), error=error)

    def _fail(self, error: KVStoreError) -> None:
        if self._result.error is None:
            self._result.error = error
        self._context.incidents.report(client_metrics.STORE_FAILED, "store ended early", error)

    # ---- through the local node ----
    def _through_local(self) -> None:
        local = self._context.local
        assert local is not None
        session = local.session()
        if session is None:
            self._result.error = local.unavailable()
            self._context.incidents.counters.add(client_metrics.STORES_WITHOUT_SESSION)
            return
        size = min(self._context.options.store_chunk_bytes, session.arena.size // _ARENA_SHARE)
        try:
            with session.used():
                if self._store_chunks(size, lambda start, stop: self._store_chunk(session, start, stop)) and self._durable:
                    self._flush(session)
        except KVStoreError as error:
            if is_session_lost(error) and not session.server.hung:
                local.lost(session, error)
            raise

    def _store_chunks(self, size: int, store: Callable[[int, int], Outcomes]) -> bool:
        """Store chunk after chunk until one makes no progress. True: all blocks are held.

        A node with little space grants a part of a chunk, prefix first. The rest is requested again after the part is stored.
        """
        count = len(self._chain)
        step = max(1, size // self._context.shape.block_bytes)
        start = 0
        while start < count:
            if self.scope.ended:
                self._fail(self.scope.error())
                return False
            outcomes = store(start, min(count, start + step))
            held = HELD[outcomes]
            through = len(held) if held.all() else int(held.argmin())
            if through == 0 or (through < len(held) and outcomes[through] != StoreOutcome.SKIPPED):
                return False
            start += through
        return True

    def _store_chunk(self, session: Session, start: int, stop: int) -> Outcomes:
        """Prepare, copy, complete. Return one outcome per block; after the first that is not held, none is."""
        outcomes = self._result.outcomes
        grant = StoreGrant.prepare(self._context, session, self._chain.part(start, stop), self.scope)
        try:
            checksums = self._write(session, grant, start)
            if checksums is None:
                outcomes[start:stop] = grant.outcomes
                outcomes[start + grant.positions] = StoreOutcome.SKIPPED
                return outcomes[start:stop]
            outcomes[start + grant.positions] = StoreOutcome.LOST  # until the node has answered
            grant.complete(checksums, max(self.scope.left_s(), _LAST_CALL_S), wait_visible=self._wait_visible)
        finally:
            grant.abort()  # no effect after complete
        outcomes[start:stop] = grant.outcomes
        self._result.draining |= grant.draining
        self._result.bytes_stored += (
            int(np.count_nonzero(grant.outcomes[grant.positions] == StoreOutcome.STORED)) * self._block_bytes
        )
        return grant.outcomes

    def _write(self, session: Session, grant: StoreGrant, start: int) -> bytes | None:
        """Copy granted blocks into their slots in pieces. Return their checksums, or None if the scope ended.

        Checksums are of the *source*. If the copy fails or the caller writes to the buffer during it, bytes and checksum differ.
        Every reader over a wire detects that, as do write-back before the block becomes durable and a load with
        ``verify="always"``. A load from the local node's arena does not verify by default, and does not detect it.
        """
        step = max(1, self._context.options.copy_chunk_bytes // self._block_bytes)
        packed = []
        for at in range(0, len(grant.positions), step):
            if self.scope.ended:
                self._fail(self.scope.error())
                return None
            piece = pick_blocks(self._buffer, grant.positions[at : at + step] + start)
            packed.append(pack_u64(session.arena.copy_in(piece, grant.offsets[at : at + step])))
        return b"".join(packed)

    def _flush(self, session: Session) -> None:
        timeout_s = self.scope.left_s()
        wait_ms = int(timeout_s * 1000 * _WAIT_SHARE)
        request = node_pb2.FlushRequest(timeout_ms=wait_ms, session_id=session.session_id, keys=self._chain.packed)
        answer = call_within(self.scope, session.server, session.stub.Flush, request, timeout_s)
        self._result.durable = answer.complete
        if not answer.complete:
            self._not_durable(int(answer.not_durable_blocks), answer.why)

    def _not_durable(self, blocks: int, why: str = "") -> None:
        """Record that blocks were stored but are not durable, with the known cause."""
        error = Unavailable(
            f"stored, but not durable: {why}"
            if why
            else "stored, but not durable: not written in time, no disk accepts it, or its tenant is at its quota (see the log of"
            " the node, `kvstore status` and `kvstore tenants`)",
            not_durable_blocks=blocks,
        )
        self._context.incidents.report(client_metrics.STORES_NOT_DURABLE, "store did not become durable", error)
        if self._result.error is None:
            self._result.error = error

    # ---- to another node ----
    def _through_peer(self) -> None:
        node = self._context.store_nodes.find(self.scope.left_s())
        peer = self._context.peers.peer(node)

        def store(start: int, stop: int) -> Outcomes:
            part = self._chain.part(start, stop)
            run = BlockRun(part.namespace, part.parent, part.depth, tuple(part.keys))
            request = WriteRequest(run, self._context.shape, self._durable, self.scope.deadline_s)
            piece = pick_blocks(self._buffer, np.arange(start, stop))
            outcomes = np.array(peer.write(request, piece), np.uint8)
            self._result.outcomes[start:stop] = outcomes
            self._result.bytes_stored += int(np.count_nonzero(outcomes == StoreOutcome.STORED)) * self._block_bytes
            return outcomes

        through = self._store_chunks(self._block_bytes if self._chain.heads else self._context.options.copy_chunk_bytes, store)
        self._result.durable = through and self._durable
        if self._durable and not through:
            self._not_durable(int(np.count_nonzero(~HELD[self._result.outcomes])))

    @property
    def _block_bytes(self) -> int:
        return self._context.shape.block_bytes


_LAST_CALL_S = 0.2
"""Blocks that were copied in time are completed even if the deadline has almost passed."""


def count_store(context: ClientContext, result: StoreResult) -> None:
    """Count what a store did."""
    counters = context.incidents.counters
    counters.add(client_metrics.STORES)
    counters.observe(client_metrics.STORE_SECONDS, result.seconds)
    counters.add(client_metrics.STORE_BLOCKS, len(result.outcomes))
    counters.add(client_metrics.STORED_BYTES, result.bytes_stored)
    numbers = np.bincount(result.outcomes, minlength=max(StoreOutcome) + 1).tolist()
    for outcome in StoreOutcome:
        if numbers[outcome]:
            counters.add(client_metrics.STORE_OUTCOME_BLOCKS[outcome.name.lower()], numbers[outcome])
