"""The hand-over of a prompt from the prefill engine to the decode engine's host, and the decode engine's wait for it.

The prefill side pushes Layer Blocks into the decode node's arena as layers are computed. What that node holds already, because it
was read over its storage link, is not sent: only the rest goes over the compute network. The decode side takes the prompt when it
is complete, and only then needs memory of its own for it.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self, cast

import numpy as np
import numpy.typing as npt

from kvclient.call.context import ClientContext
from kvclient.call.scope import CallScope
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
    """The prefill side: ``put_layer`` once a layer, in any order, then ``commit``. Thread-safe; a context manager that aborts.

    Room on the decode host is asked for with the first layer, not before: by then a load over that host has claimed the blocks
    that it brings, and they need not be sent. Failures of ours end in outcomes; the prefill goes on.
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
        """How much of each layer goes over the compute network; 0 until the first was put."""
        return 0 if self._write is None else len(self._write.granted) * self._context.shape.layer_block_bytes

    def put_layer(self, layer: int, data: object) -> None:
        """Hands over one layer of all blocks.

        Args:
            layer: 0-based.
            data: ``[blocks, layer_block_bytes]``: whatever ``as_block_buffer`` takes, one Layer Block a key, a partial last block
                included (its unused part may hold anything). Only what the decode host lacks is read, before the call returns.

        Raises:
            InvalidArgument: wrong size or layer, a layer put twice, or a hand-over that is finished.
        """
        shape = self._context.shape
        if not isinstance(layer, int) or not 0 <= layer < shape.layers:
            raise InvalidArgument("no such layer", layer=layer, layers=shape.layers)
        rows = as_block_buffer(
            data, BlockShape(1, shape.layer_block_bytes), len(self._chain), writable=False, spec=self._context.spec
        )
        with self._lock:
            if self._finished or not self._left[layer]:
                raise InvalidArgument("the layer was put before, or the hand-over is finished", layer=layer)
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
        """Makes the prompt whole on the decode host. Every layer must have been put.

        Returns:
            What became of each block, also of those behind one that is not there. Where that host did not take all of them, or a
            load over that host was to bring some and did not, ``skipped_blocks`` says how many, and ``error``
            (``CapacityExceeded``, ``Unavailable``) that the prompt is not whole there: hand it over again, of which only what is
            lacking travels. ``IN_PROGRESS``: still on their way, or, with an ``error``, not known.

        Raises:
            InvalidArgument: a layer is missing, or the hand-over is finished.
        """
        with self._lock:
            if self._finished:
                raise InvalidArgument("the hand-over is finished")
            if len(self._chain) and self._left.any():
                raise InvalidArgument("layers are missing", missing=int(self._left.sum()))
            self._finished = True
            result = self._result
            if self._write is not None and result.error is None:
                coming = np.array(self._write.outcomes, np.uint8) == StoreOutcome.IN_PROGRESS
                there = self._look(coming)
                try:
                    outcomes: Outcomes = np.array(self._write.commit(), np.uint8)
                except KVStoreError as error:
                    self._give_up(error)
                else:
                    stored = int(np.count_nonzero(outcomes[self._write.granted] == StoreOutcome.STORED))
                    result.bytes_stored = stored * self._context.shape.block_bytes
                    outcomes[coming] = there[coming]
                    result.outcomes = outcomes
                    self._note_lacking(result, int(np.count_nonzero(there[coming] == StoreOutcome.SKIPPED)))
            result.seconds = self._scope.elapsed_s()
            count_store(self._context, result)
            self._context.incidents.counters.add(client_metrics.HANDOFF_BYTES, result.bytes_stored)
            return result

    def _look(self, coming: npt.NDArray[np.bool_]) -> Outcomes:
        """What became of blocks that were left to a load over that host: there, on their way, or not, if it ended without them.

        Such a load is planned again over other hosts when its part stalls or fails, and these bring nothing to the decode host.
        This is asked before the prompt is whole: afterwards whoever waits for it may have taken it, and its blocks may be gone.
        """
        there: Outcomes = np.full(len(self._chain), StoreOutcome.IN_PROGRESS, np.uint8)
        if not coming.any() or self._node is None or self._scope.ended:
            return there
        try:
            probe = self._context.peers.peer(self._node).begin_write(self._request())
        except KVStoreError as error:  # what is handed over is there all the same
            self._result.error = error
            why = "it is not known whether a prompt that is handed over is whole"
            self._context.incidents.report(client_metrics.HANDOFFS_FAILED, why, error)
            return there
        now: Outcomes = np.array(probe.outcomes, np.uint8)
        probe.abort()
        there[now == StoreOutcome.EXISTS] = StoreOutcome.EXISTS
        there[(now != StoreOutcome.EXISTS) & (now != StoreOutcome.IN_PROGRESS)] = StoreOutcome.SKIPPED
        return there

    def _note_lacking(self, result: StoreResult, lost: int) -> None:
        """Blocks that the decode host does not have: whoever waits for the prompt there waits in vain."""
        if skipped := int(np.count_nonzero(~HELD[result.outcomes])):
            facts = {"skipped": skipped, "blocks": len(self._chain)}
            if lost:
                result.error = Unavailable("a load over the decode host did not bring what it was to bring", lost=lost, **facts)
            else:
                why = "the decode host did not take all of the prompt: it has no room, or drains"
                result.error = CapacityExceeded(why, **facts)
            self._context.incidents.report(
                client_metrics.HANDOFF_SKIPPED_BLOCKS, "a prompt is not handed over whole", result.error, amount=skipped
            )

    def abort(self) -> None:
        """Hands nothing over. No effect on a finished hand-over."""
        self._scope.cancel()
        with self._lock:
            self._finished = True
            if self._write is not None:
                self._write.abort()

    def _give_up(self, error: KVStoreError) -> None:
        self._result.error = error
        self._context.incidents.report(client_metrics.HANDOFFS_FAILED, "a prompt is not handed over whole", error)
        if self._write is not None:
            self._write.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._finished:
            self.abort()


def find_decode_node(context: ClientContext, name: str, scope: CallScope) -> NodeRef:
    """Where a prompt goes.

    Raises:
        KVStoreError: not found.
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
            # A prompt often does not come because its decode node was not there for a moment, which then waits for it.
            if isinstance(error, (NotFound, Unavailable)) and context.clock.now_s() < gone_s and scope.left_s() > _LOOK_S:
                time.sleep(_LOOK_S)
                continue
            said = "a decode node is not told of a prompt that will not come"
            context.incidents.report(client_metrics.ABANDONS_FAILED, said, error)
            return False
        return True


def check_transfer_id(transfer_id: object, *, needed: bool = False) -> str:
    """The name of a hand-over; empty, where it is not ``needed``: none.

    Raises:
        InvalidArgument: something else than a string of at most 64 bytes.
    """
    size = len(transfer_id.encode(errors="replace")) if isinstance(transfer_id, str) else -1
    if not needed <= size <= MAX_TRANSFER_ID_BYTES:
        raise InvalidArgument("a transfer_id takes a string", most_bytes=MAX_TRANSFER_ID_BYTES, got=type(transfer_id).__name__)
    return cast("str", transfer_id)


_GONE_S = 3.0
"""A node that was gone for a moment is known as living again within this time, which is some heartbeats."""
_LOOK_S = 0.25
