"""Stores: prefix first, and each block written once.

Through the local node a store has three steps per chunk, see ``pipeline``. Without a local node, blocks go over TCP to another
node. In both cases a block is stored only if all blocks before it in the call are held or being written. A failure of the store
skips the rest, and the engine continues.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope, call_within
from kvclient.memory.buffers import pick_blocks
from kvclient.nodes.local_session import Session, is_session_lost
from kvclient.results import HELD, Outcomes, StoreResult
from kvclient.store.grant import WAIT_SHARE, skip_after_gap
from kvclient.store.pipeline import StorePipeline
from kvproto.v1 import node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import BlockRun, StoreOutcome
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.transport.contract import WriteRequest


class Store:
    """One store of consecutive blocks of a chain, or of heads of chains; a ``PreparedCall``.

    Args:
        context: the client's parts.
        chain: the blocks.
        buffer: their bytes.
        scope: deadline and cancellation.
        durable: wait until the blocks are durable: on a volume of a node, or on its storage node.
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
                if context.local is not None:
                    self._through_local()
                else:
                    self._through_peer()
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
        pipeline = StorePipeline(
            self._context, session, self._chain, self._buffer, self.scope, self._result, wait_visible=self._wait_visible
        )
        try:
            with session.used():
                if pipeline.run() and self._durable:
                    self._flush(session)
        except KVStoreError as error:
            if is_session_lost(error) and not session.server.hung:
                local.lost(session, error)
            raise

    def _flush(self, session: Session) -> None:
        timeout_s = self.scope.left_s()
        wait_ms = int(timeout_s * 1000 * WAIT_SHARE)
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

        size = self._block_bytes if self._chain.heads else self._context.options.copy_chunk_bytes
        through = self._store_chunks(max(1, size // self._block_bytes), store)
        self._result.durable = through and self._durable
        if self._durable and not through:
            self._not_durable(int(np.count_nonzero(~HELD[self._result.outcomes])))

    def _store_chunks(self, step: int, store: Callable[[int, int], Outcomes]) -> bool:
        """Store chunks of ``step`` blocks until one makes no progress. True: all blocks are held."""
        count = len(self._chain)
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

    @property
    def _block_bytes(self) -> int:
        return self._context.shape.block_bytes


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
