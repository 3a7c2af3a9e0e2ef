"""The prefill side of a handoff: send a prompt to the host of the decode engine.

The prefill side pushes layer blocks into the decode node's arena as layers are computed. Blocks that the node holds already,
because they were read over its storage link, are not sent. The decode side (``receiver``) takes the prompt when it is complete,
and only then needs its own memory for it.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self, cast

import numpy as np
import numpy.typing as npt

from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope
from kvclient.memory.buffers import as_block_buffer
from kvclient.results import HELD, NodeRef, Outcomes, StoreResult
from kvclient.store.store import count_store
from kvstore.core.buffers import BlockBuffer
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import CapacityExceeded, InvalidArgument, KVStoreError, NotFound, Unavailable
from kvstore.core.limits import MAX_TRANSFER_ID_BYTES
from kvstore.core.types import BlockRun, BlockShape, StoreOutcome
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.transport.contract import LayerWrite, WriteRequest


class PromptSender:
    """Sends a prompt: call ``put_layer`` once per layer, in any order, then ``commit``. Thread-safe.

    A context manager that aborts without a commit. Space on the decode host is requested with the first layer, not earlier: by
    then a load over that host has claimed the blocks that it brings, so they need not be sent. Failures of the store end in
    outcomes, and the prefill continues.
    """

    def __init__(
        self,
        context: ClientContext,
        node: NodeRef | None,
        chain: ChainSlice,
        scope: CallScope,
        error: KVStoreError | None,
        *,
        tail: bool,
    ) -> None:
        self._context = context
        self._node = node
        self._chain = chain
        self._scope = scope
        self._tail = tail
        self._lock = threading.Lock()
        self._write: LayerWrite | None = None
        self._left = np.ones(context.shape.layers, bool)
        self._finished = False
        self._result = StoreResult(np.full(len(chain), StoreOutcome.SKIPPED, np.uint8), error=error)

    @property
    def bytes_sent_a_layer(self) -> int:
        """Bytes of each layer that go over the compute network; 0 until the first layer was put."""
        return 0 if self._write is None else len(self._write.granted) * self._context.shape.layer_block_bytes

    def put_layer(self, layer: int, data: object) -> None:
        """Hand over one layer of all blocks.

            handoff.put_layer(layer, rows)

        Args:
            layer: 0-based.
            data: ``[blocks, layer_block_bytes]``: anything that ``as_block_buffer`` accepts, one layer block per key, including a
                partial last block, whose unused part may hold anything. Only blocks that the decode host lacks are read, before
                the call returns.

        Raises:
            InvalidArgument: wrong size or layer, a layer put twice, or a handoff that has ended.
        """
        shape = self._context.shape
        if not isinstance(layer, int) or not 0 <= layer < shape.layers:
            raise InvalidArgument("no such layer", layer=layer, layers=shape.layers)
        rows = as_block_buffer(
            data, BlockShape(1, shape.layer_block_bytes), len(self._chain), writable=False, spec=self._context.spec
        )
        with self._lock:
            if self._finished or not self._left[layer]:
                raise InvalidArgument("the layer was put before, or the handoff has ended", layer=layer)
            self._left[layer] = False
            if self._result.error is not None or not len(self._chain):
                return
            try:
                self._put(layer, rows)
            except KVStoreError as error:
                self._give_up(error)

    def _put(self, layer: int, rows: BlockBuffer) -> None:
        if self._scope.ended:
            raise self._scope.error()
        if self._write is None:
            if self._node is None:
                raise Unavailable("no node to hand over to")
            self._write = self._context.peers.peer(self._node).begin_write(self._request())
        self._write.put(layer, rows)

    def _request(self) -> WriteRequest:
        run = BlockRun(self._chain.namespace, self._chain.parent, self._chain.depth, tuple(self._chain.keys))
        return WriteRequest(run, self._context.shape, False, self._scope.deadline_s, self._tail)

    def commit(self) -> StoreResult:
        """Complete the prompt on the decode host. Every layer must have been put.

            result = handoff.commit()

        Returns:
            The outcome of each block, also of blocks after one that is missing. If the host did not accept all of them, or a load
            over that host did not bring its blocks, ``skipped_blocks`` is their number, and ``error`` (``CapacityExceeded``,
            ``Unavailable``) says that the prompt is incomplete: hand it over again, and only the missing blocks are sent.
            ``IN_PROGRESS``: still being sent or, with an ``error``, unknown.

        Raises:
            InvalidArgument: a layer is missing, or the handoff has ended.
        """
        with self._lock:
            if self._finished:
                raise InvalidArgument("the handoff has ended")
            if len(self._chain) and self._left.any():
                raise InvalidArgument("layers are missing", missing=int(self._left.sum()))
            self._finished = True
            result = self._result
            if self._write is not None and result.error is None:
                coming = np.array(self._write.outcomes, np.uint8) == StoreOutcome.IN_PROGRESS
                found = self._probe(coming)
                try:
                    outcomes: Outcomes = np.array(self._write.commit(), np.uint8)
                except KVStoreError as error:
                    self._give_up(error)
                else:
                    stored = int(np.count_nonzero(outcomes[self._write.granted] == StoreOutcome.STORED))
                    result.bytes_stored = stored * self._context.shape.block_bytes
                    outcomes[coming] = found[coming]
                    result.outcomes = outcomes
                    self._record_missing(result, int(np.count_nonzero(found[coming] == StoreOutcome.SKIPPED)))
            result.seconds = self._scope.elapsed_s()
            count_store(self._context, result)
            self._context.run_ends.record_stored(self._chain, result.held_blocks)
            self._context.incidents.counters.add(client_metrics.HANDOFF_BYTES, result.bytes_stored)
            return result

    def _probe(self, coming: npt.NDArray[np.bool_]) -> Outcomes:
        """Return the outcomes of blocks that were left to a load over that host: EXISTS, IN_PROGRESS, or SKIPPED if it ended.

        A stalled or failed part of such a load is planned again over other hosts, which bring nothing to the decode host. The
        probe comes before the commit: afterwards the decode engine may have taken the prompt, and its blocks may be gone.
        """
        found: Outcomes = np.full(len(self._chain), StoreOutcome.IN_PROGRESS, np.uint8)
        if not coming.any() or self._node is None or self._scope.ended:
            return found
        try:
            probe = self._context.peers.peer(self._node).begin_write(self._request())
        except KVStoreError as error:  # the node still has the blocks that were sent
            self._result.error = error
            why = "handoff not verified: the decode node did not answer"
            self._context.incidents.report(client_metrics.HANDOFFS_FAILED, why, error)
            return found
        now: Outcomes = np.array(probe.outcomes, np.uint8)
        probe.abort()
        found[now == StoreOutcome.EXISTS] = StoreOutcome.EXISTS
        found[(now != StoreOutcome.EXISTS) & (now != StoreOutcome.IN_PROGRESS)] = StoreOutcome.SKIPPED
        return found

    def _record_missing(self, result: StoreResult, lost: int) -> None:
        """Record blocks that the decode host does not have: the wait for the prompt there ends without it."""
        if skipped := int(np.count_nonzero(~HELD[result.outcomes])):
            facts = {"skipped": skipped, "blocks": len(self._chain)}
            if lost:
                result.error = Unavailable("a load over the decode host did not bring its blocks", lost=lost, **facts)
            else:
                why = "the decode host did not accept the whole prompt: it has no space, or drains"
                result.error = CapacityExceeded(why, **facts)
            self._context.incidents.report(
                client_metrics.HANDOFF_SKIPPED_BLOCKS, "handoff incomplete", result.error, amount=skipped
            )

    def abort(self) -> None:
        """Hand nothing over. No effect on a handoff that has ended.

        Example: ``handoff.abort()``
        """
        self._scope.cancel()
        with self._lock:
            self._finished = True
            if self._write is not None:
                self._write.abort()

    def _give_up(self, error: KVStoreError) -> None:
        self._result.error = error
        self._context.incidents.report(client_metrics.HANDOFFS_FAILED, "handoff incomplete", error)
        if self._write is not None:
            self._write.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._finished:
            self.abort()


def find_decode_node(context: ClientContext, name: str, scope: CallScope) -> NodeRef:
    """Return the node that a prompt is sent to.

    Raises:
        KVStoreError: it is not found.
    """
    if context.metadata is None:
        raise Unavailable("the decode node cannot be found without a metadata server")
    return context.metadata.node(name, min(scope.left_s(), context.options.lookup_deadline_s))


def abandon_prompt(context: ClientContext, transfer_id: str, decode_node: str, scope: CallScope) -> bool:
    """See ``KVClient.abandon_prompt``."""
    gone_s = context.clock.now_s() + _GONE_S
    while True:
        try:
            node = find_decode_node(context, decode_node, scope)
            context.peers.abandon_prompt(node, transfer_id, max(0.001, scope.left_s()))
        except KVStoreError as error:
            # The prompt often failed because its decode node was unavailable for a moment; that node now waits for it.
            if isinstance(error, (NotFound, Unavailable)) and context.clock.now_s() < gone_s and scope.left_s() > _LOOK_S:
                time.sleep(_LOOK_S)
                continue
            said = "decode node not told to stop waiting for a prompt"
            context.incidents.report(client_metrics.ABANDONS_FAILED, said, error)
            return False
        return True


def check_transfer_id(transfer_id: object, *, needed: bool = False) -> str:
    """Return the name of a handoff, checked. It may be empty unless it is ``needed``.

    Raises:
        InvalidArgument: not a string of at most 64 bytes.
    """
    size = len(transfer_id.encode(errors="replace")) if isinstance(transfer_id, str) else -1
    if not needed <= size <= MAX_TRANSFER_ID_BYTES:
        raise InvalidArgument(
            "transfer_id must be a string within the limit", max_bytes=MAX_TRANSFER_ID_BYTES, got=type(transfer_id).__name__
        )
    return cast("str", transfer_id)


_GONE_S = 3.0
"""A node that was unavailable for a moment is listed as alive again within this time, which is some heartbeats."""
_LOOK_S = 0.25
