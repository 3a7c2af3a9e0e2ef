"""One part of a planned load: some blocks, read from storage by one node and brought from there into the caller's buffer.

The node is this host's (prefill path: bytes are copied out of its arena) or another one (decode path and relay: bytes come over
the compute network as soon as the node has them). In both cases the node reports blocks or layer groups as soon as they are
ready, and the part then copies or reads them.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import closing

import numpy as np

from kvclient.load.sink import BlockSink, LoadRequest, Mask, Positions, spans
from kvclient.load.sources.node_stream import NodeLoadStream, NodeRun, NodeSession, copy_leased_blocks
from kvclient.memory.buffers import pick_blocks
from kvclient.memory.device_buffer import DeviceBuffer
from kvclient.nodes.local_session import Session, is_session_lost
from kvclient.results import NodeRef, Outcomes, outcome_table
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import KVStoreError, LeaseLost
from kvstore.core.types import Outcome
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.transport.contract import ReadControl, ReadRequest

SLOWEST_BYTES_PER_S = 10e6
"""Lowest expected rate of bytes that a node has ready: their transfer time is added to the time limit of a stall."""
OPEN_SESSION_S = 2.0
"""Maximum time to open a session with a node of another host."""
_MIN_TIMEOUT_S = 0.001
_COPY_THREADS = 1
"""One thread per part is enough, because the network is the bottleneck."""
_HOP_FAILURES = outcome_table(Outcome.TIMEOUT, Outcome.CORRUPT)
"""Outcomes of the hop from another host's node that say nothing about the bytes in storage."""


class StoragePathSource(ABC):
    """A part of a planned load over one node. Call ``fetch`` once, in a separate thread; ``cancel`` from any thread.

    Args:
        enclosing: the scope of the load.
        path: name of the path in results.
        node_id: the node that reads.
        layer_group: see ``Paths``.
        stall_s: see ``Paths``.
    """

    def __init__(self, enclosing: CancelScope, path: str, node_id: str, layer_group: int, stall_s: float) -> None:
        self.scope = enclosing.nested()
        """Deadline and cancellation of this part."""
        self.path = path
        self.node_id = node_id
        self.progress_s = math.inf
        """Time of the last progress; infinite until the part begins."""
        self.error: KVStoreError | None = None
        self._layer_group = layer_group
        self._stall_s = stall_s
        self._received = -1
        self._failure = ""

    def seconds_without_progress(self, now_s: float) -> float:
        """Return the seconds since the last progress; negative before the part begins."""
        return now_s - self.progress_s

    @property
    def failure(self) -> str:
        """Why not all blocks came, for people."""
        return str(self.error) if self.error is not None else self._failure or "it ended before all blocks had come"

    @property
    @abstractmethod
    def on_this_host(self) -> bool:
        """Whether the node of this host reads."""

    def fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        """Bring the blocks; see ``LoadSource``. Failures of the store are left in ``error`` and in outcomes."""
        self.progress_s = request.context.clock.now_s()
        try:
            self._fetch(request, missing, sink)
        except KVStoreError as error:
            self.error = error

    @abstractmethod
    def _fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        """Bring the blocks in one session or more."""

    def _read_all(self, request: LoadRequest, missing: Positions, sink: BlockSink, session: NodeSession) -> None:
        """Bring the blocks in one session."""
        layers = request.context.shape.layers
        group = min(self._layer_group, layers)
        for start, stop in spans(missing):
            # layers that an earlier attempt brought are not read again
            first_layer = int(sink.ready_layers(np.arange(start, stop)).min()) if group else 0
            if first_layer < layers and not self.scope.ended:
                self._read(request, sink, session, start, stop, group, first_layer)

    def _read(
        self, request: LoadRequest, sink: BlockSink, session: NodeSession, start: int, stop: int, group: int, first_layer: int
    ) -> None:
        own = session if isinstance(session, Session) else None
        stream = NodeLoadStream(
            request,
            session,
            self.scope,
            start,
            stop,
            request.runs,
            storage=True,
            want_checksums=own is not None and own.verifies_copies(request.verify),
            layer_group=group,
            first_layer=first_layer,
        )
        with closing(iter(stream)) as messages:
            for message in messages:
                if message.runs or message.bytes_received != self._received:
                    self.progress_s, self._received = request.context.clock.now_s(), message.bytes_received
                try:
                    for run in message.runs:
                        self._receive_run(request, sink, session, run)
                        if self.scope.ended:
                            return
                finally:
                    if message.lease_id:
                        session.releaser.release([message.lease_id])
        self.error = stream.error or self.error

    def _receive_run(self, request: LoadRequest, sink: BlockSink, session: NodeSession, run: NodeRun) -> None:
        """Bring the bytes of one run, and record them."""
        layers = request.context.shape.layers
        positions = np.arange(run.start, run.stop)
        if run.outcome is not Outcome.HIT:
            missing = positions[sink.ready_layers(positions) < layers]
            sink.outcomes[missing] = run.outcome
            if len(missing):
                self._note_failed(sink.outcomes[missing], "in storage")
            return
        # Layers that have arrived are not written again: the engine may be reading them, and if the new bytes proved corrupt the
        # layers would count all the same.
        ready_in_run = np.clip(sink.ready_layers(positions) - run.first_layer, 0, run.layer_count)
        for level in np.unique(ready_in_run[ready_in_run < run.layer_count]).tolist():
            for first, last in spans(np.flatnonzero(ready_in_run == level)):
                pending = positions[first:last]
                first_layer, layer_count = run.first_layer + level, run.layer_count - level
                good = self._copy_layers(request, sink, session, run, slice(first, last), first_layer, layer_count)
                sink.layers_arrived(pending[good], first_layer, layer_count)
                done = pending[good]
                done = done[sink.ready_layers(done) == layers]
                if len(done):
                    sink.record(done, Outcome.HIT, run.tier, run.node_id or self.node_id, self.path)
                self.progress_s = request.context.clock.now_s()

    @abstractmethod
    def _copy_layers(
        self,
        request: LoadRequest,
        sink: BlockSink,
        session: NodeSession,
        run: NodeRun,
        part: slice,
        first_layer: int,
        layer_count: int,
    ) -> Mask:
        """Bring layers of some blocks of a run into the buffer.

        Returns:
            Which of these blocks are good. The outcomes of the others are recorded.
        """

    def _note_failed(self, outcomes: Outcomes, where: str) -> None:
        """Keep the outcomes of the first blocks that failed, for ``failure``."""
        counts = ", ".join(f"{count} blocks {Outcome(outcome).name}" for outcome, count in Counter(outcomes.tolist()).items())
        self._failure = self._failure or f"{counts} {where}"


class PrefillPath(StoragePathSource):
    """The prefill path: this host's node reads into its arena, and the bytes are copied from there."""

    on_this_host = True

    def __init__(self, enclosing: CancelScope, path: str, session: Session, layer_group: int, stall_s: float) -> None:
        super().__init__(enclosing, path, session.node_id, layer_group, stall_s)
        self._session = session

    def _fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        with self._session.used():
            self._read_all(request, missing, sink, self._session)

    def _copy_layers(
        self,
        request: LoadRequest,
        sink: BlockSink,
        session: NodeSession,  # noqa: ARG002  # the same
        run: NodeRun,
        part: slice,
        first_layer: int,
        layer_count: int,
    ) -> Mask:
        positions = np.arange(run.start, run.stop)[part]
        good = copy_leased_blocks(request, self._session, run, part, first_layer, layer_count, _COPY_THREADS)
        if isinstance(request.buffer, DeviceBuffer):
            request.buffer.drain()
        sink.outcomes[positions[~good]] = Outcome.CORRUPT
        if request.context.clock.now_s() > run.lease_end_s:
            message = "blocks dropped: copied after their lease"
            request.context.incidents.report(client_metrics.LEASE_EXPIRED_BLOCKS, message, amount=len(positions))
            sink.outcomes[positions] = Outcome.UNAVAILABLE
            self._failure = self._failure or "blocks were copied after their lease"
            return np.zeros(len(positions), bool)
        return good


class RemotePath(StoragePathSource):
    """The decode path or a relay: another host's node reads into its arena, and the bytes come over the compute network.

    The stream of that node says which blocks are in its arena, and carries a lease that keeps them there. The bytes are then read
    by key. The lease is released after all blocks of its message were read.
    """

    on_this_host = False

    def __init__(self, enclosing: CancelScope, path: str, node: NodeRef, layer_group: int, stall_s: float) -> None:
        super().__init__(enclosing, path, node.node_id, layer_group, stall_s)
        self._node = node
        self._lock = threading.Lock()
        self._control: ReadControl | None = None
        self._counted = 0

    def _fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        if not self._fetch_in_session(request, missing, sink) and not self.scope.ended:
            self.error = None
            self._fetch_in_session(request, missing, sink)

    def _fetch_in_session(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> bool:
        """Bring the blocks in one session. False: it had ended before it answered, as idle sessions do; try another."""
        sessions = request.context.remote_sessions
        self.progress_s = request.context.clock.now_s()
        timeout_s = min(OPEN_SESSION_S, self._stall_s, self.scope.left_s())
        try:
            session = sessions.session(self._node, max(_MIN_TIMEOUT_S, timeout_s))
        except KVStoreError as error:
            self.error = error
            return True
        try:
            self._read_all(request, missing, sink, session)
        except KVStoreError as error:
            self.error = error
        if self.error is None:
            return True
        ended = isinstance(self.error, LeaseLost) or not sessions.holds(session)  # another part has detected it
        if ended or is_session_lost(self.error):
            sessions.lost(session, self.error)
        return not ended or self._received >= 0

    def seconds_without_progress(self, now_s: float) -> float:
        """Return the seconds since the last progress. A large read makes progress long before it ends."""
        control = self._control
        if control is not None and control.bytes_received != self._counted:
            self._counted, self.progress_s = control.bytes_received, now_s
        return super().seconds_without_progress(now_s)

    def _copy_layers(
        self,
        request: LoadRequest,
        sink: BlockSink,
        session: NodeSession,  # noqa: ARG002  # reads are by key
        run: NodeRun,
        part: slice,
        first_layer: int,
        layer_count: int,
    ) -> Mask:
        context = request.context
        positions = np.arange(run.start, run.stop)[part]
        size = len(positions) * layer_count * context.shape.layer_block_bytes
        deadline_s = min(self.scope.deadline_s, context.clock.now_s() + self._stall_s + size / SLOWEST_BYTES_PER_S)
        keys = [request.chain.key(position) for position in positions.tolist()]
        read = ReadRequest(context.namespace, keys, first_layer, layer_count, 0, deadline_s)
        control = ReadControl()
        with self._lock:
            self._control, self._counted = control, 0
        with self.scope.on_cancel(control.cancel):
            result = context.peers.peer(self._node).read(
                read, pick_blocks(request.buffer, positions), verify=request.verify != "never", control=control
            )
        outcomes = np.array(result.outcomes, np.uint8)
        good: Mask = outcomes == Outcome.HIT
        if not good.all():
            self._note_failed(outcomes[~good], "on the way from it")
        # The node had read and verified these blocks: bytes that differ were damaged on this hop, and another path may succeed.
        outcomes[_HOP_FAILURES[outcomes]] = Outcome.UNAVAILABLE
        sink.outcomes[positions[~good]] = outcomes[~good]
        if not good.all():
            self.scope.cancel()  # the rest is planned over another node
        return good
