"""Loads directly from the data planes of other nodes: without a local node, or for blocks that the local node lacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvclient.load.sink import BlockSink, LoadRequest, Mask, Positions
from kvclient.load.sources.local_node import LocalNodeSource
from kvclient.memory.buffers import pick_blocks
from kvclient.results import PATH_PREFILL, NodeRef, outcome_table
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.core.types import Outcome
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.transport.contract import LayerProgress, ReadControl, ReadRequest

_FIRST_TRY_SHARE = 0.6
"""Share of the time left that a node may take if another one could be asked after it."""
_RETRIED = outcome_table(Outcome.UNAVAILABLE, Outcome.NO_SPACE, Outcome.MISS, Outcome.CORRUPT)
"""Outcomes after which a second node is asked."""


class PeerSource:
    """All other nodes that hold some of the blocks, according to the lookup.

    Args:
        local: the source that was asked before, if there is a local node: its node is not asked again.
    """

    def __init__(self, local: LocalNodeSource | None) -> None:
        self._local = local

    def fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        """See ``LoadSource``."""
        if request.runs:
            with request.trace.phase("other nodes"):
                asked = None if self._local is None else self._local.asked_node
                hung = None if self._local is None else self._local.hung_node
                _PeerLoad(request, sink, asked, hung).run(missing)


class _PeerLoad:
    """One load from other nodes: two rounds at most, each from several nodes at once. ``run`` once."""

    def __init__(self, request: LoadRequest, sink: BlockSink, asked_node: str | None, hung_node: str | None) -> None:
        self._request = request
        self._context = request.context
        self._scope = request.scope
        self._sink = sink
        self._after_local = asked_node is not None
        self._nodes: list[NodeRef] = []  # numbered by position
        self._runs: list[tuple[int, slice]] = []  # node number, blocks
        for run in request.runs:
            if run.node_id in (asked_node, hung_node):
                continue
            numbers = [number for number, node in enumerate(self._nodes) if node.node_id == run.node_id]
            if not numbers:
                self._nodes.append(run.node)
            self._runs.append((numbers[0] if numbers else len(self._nodes) - 1, slice(run.start, run.end)))

    def run(self, missing: Positions) -> None:
        """Read the missing blocks, and those that failed once more from another node."""
        sink, scope = self._sink, self._scope
        pending = np.zeros(len(sink.outcomes), bool)
        pending[missing] = True
        last_asked = np.full(len(pending), -1, np.int16)
        for attempt in range(2):
            if scope.ended or not pending.any() or not sink.restart(np.flatnonzero(pending)):
                break
            choice, has_other = self._choose(pending, last_asked)
            chosen = choice >= 0
            if not chosen.any():
                break
            may_retry = has_other if attempt == 0 else np.zeros_like(has_other)
            sink.give_up(missing[~chosen[missing] & (sink.outcomes[missing] != Outcome.HIT)])
            if attempt or self._after_local:
                self._context.incidents.counters.add(client_metrics.FALLBACK_BLOCKS, int(np.count_nonzero(chosen)))
            self._read_round(choice, may_retry)
            last_asked = np.where(chosen, choice, last_asked)
            pending = chosen & _RETRIED[sink.outcomes]
        if scope.ended and pending.any():
            sink.outcomes[pending & (sink.outcomes != Outcome.CORRUPT)] = Outcome.TIMEOUT
            sink.record_error(scope.error())

    def _choose(self, pending: Mask, last_asked: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.int16], Mask]:
        """Return the number of the best node per pending block, or -1, and which blocks have a second node.

        A node that was asked for a block in the last round is not asked again for it.
        """
        choice = np.full(len(pending), -1, np.int16)
        has_other = np.zeros(len(pending), bool)
        hung = [self._context.peers.hung(node) for node in self._nodes]
        for number, blocks in self._runs:
            if hung[number]:
                continue
            open_ = pending[blocks] & (last_asked[blocks] != number)
            has_other[blocks] |= open_ & (choice[blocks] >= 0) & (choice[blocks] != number)
            choice[blocks] = np.where(open_ & (choice[blocks] < 0), np.int16(number), choice[blocks])
        return choice, has_other

    def _read_round(self, choice: npt.NDArray[np.int16], may_retry: Mask) -> None:
        """Read from all chosen nodes at once. When this returns, none of the reads writes to the buffer."""
        deadline_s = self._scope.deadline_s
        if may_retry.any():
            deadline_s -= self._scope.left_s() * (1 - _FIRST_TRY_SHARE)
        scope = self._scope.nested(deadline_s)
        reads = [(self._nodes[number], np.flatnonzero(choice == number)) for number in np.unique(choice[choice >= 0]).tolist()]
        futures = []
        try:
            for node, positions in reads[1:]:
                futures.append(self._context.peers.submit(self._read, node, positions, deadline_s, may_retry))
            self._read(*reads[0], deadline_s, may_retry)
        except Unavailable as error:  # the client is being closed
            self._sink.record_error(error)
        finally:
            scope.join(*futures)
        for (node, positions), future in zip(reads[1:], futures, strict=False):  # the pool may have refused the last ones
            if future.cancelled():
                self._record_failure(node, positions, DeadlineExceeded("no thread became free for the read (read_streams)"))
                self._sink.give_up(positions[~may_retry[positions]])
            else:
                future.result()

    def _read(self, node: NodeRef, positions: Positions, deadline_s: float, may_retry: Mask) -> None:
        """Read some blocks from one node in one request: between two requests the wire would be idle."""
        sink, context = self._sink, self._context
        control = ReadControl()
        try:
            read = ReadRequest(
                context.namespace,
                [self._request.chain.key(position) for position in positions.tolist()],
                0,
                context.shape.layers,
                context.options.layer_group if self._request.layerwise else 0,
                deadline_s,
            )
            with self._scope.on_cancel(control.cancel):
                result = context.peers.peer(node).read(
                    read,
                    pick_blocks(self._request.buffer, positions),
                    verify=self._request.verify != "never",
                    on_layers=self._progress(positions, may_retry) if self._request.layerwise else None,
                    control=control,
                )
            outcomes = np.array(result.outcomes, np.uint8)
            outcomes[outcomes == Outcome.TIMEOUT] = Outcome.UNAVAILABLE  # TIMEOUT in the end, if no other node brings it
            sink.record(positions, outcomes, np.array(result.tiers, np.uint8), node.node_id, PATH_PREFILL)
        except KVStoreError as error:
            self._record_failure(node, positions, error)
        finally:
            sink.settle(positions)
            sink.give_up(positions[~may_retry[positions] & (sink.outcomes[positions] != Outcome.HIT)])

    def _progress(self, positions: Positions, may_retry: Mask) -> LayerProgress:
        """Return a callback that records the layers of a read in the sink."""
        sink = self._sink

        def on_layers(first_layer: int, layer_count: int, good: Mask) -> None:
            failed = positions[~good]
            sink.give_up(failed[~may_retry[failed]])
            sink.layers_arrived(positions[good], first_layer, layer_count)

        return on_layers

    def _record_failure(self, node: NodeRef, positions: Positions, error: KVStoreError) -> None:
        outcomes = self._sink.outcomes
        outcomes[positions[outcomes[positions] != Outcome.HIT]] = Outcome.UNAVAILABLE
        if self._scope.cancelled:
            return  # the client ended the read, not the node
        self._sink.record_error(error)
        self._context.incidents.report(client_metrics.PEER_FAILED, f"read from a node failed: {node.node_id}", error)
