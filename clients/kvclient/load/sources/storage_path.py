"""One part of a planned load: some blocks, read from storage by one node, and brought from there into the caller's buffer.

The node is this host's (prefill path: the bytes are copied out of its arena) or another one (decode path and relays: the bytes
come over the compute network, as soon as the node has them). Either way the node tells block by block, or layer group by layer
group, what is ready, and the part follows.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any, cast

import grpc
import numpy as np
import numpy.typing as npt

from kvclient.call.context import Core
from kvclient.call.operation import Operation
from kvclient.load.layer_progress import LayerBoard
from kvclient.load.outcomes import Tally, spans
from kvclient.memory.buffers import pick_blocks
from kvclient.nodes.local_session import Session, means_lost, new_operation_id
from kvclient.nodes.remote_sessions import Stage
from kvclient.results import NodeRef, Outcomes, Run, outcome_table
from kvproto.v1 import node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import Internal, KVStoreError, LeaseLost, Unavailable
from kvstore.core.types import KEY_BYTES, BlockKey, Outcome, Tier
from kvstore.observe.context import inject
from kvstore.rpc.codec import unpack_u64
from kvstore.rpc.errors import FailedCall, from_rpc_error
from kvstore.transport.contract import ReadControl, ReadRequest
from kvstore.transport.liveness import WatchedServer

Positions = npt.NDArray[np.intp]

SLOWEST_BYTES_PER_S = 10e6
"""A piece that a node has ready is given so much time for its bytes, beyond the time that a stall may take."""
MAX_SOURCES = 4_096
"""Runs that one part names to a node; more are left out (a node reads at most so many)."""
OPEN_STAGE_S = 2.0
"""Opening a session with another host's node takes at most so long."""
_COPY_THREADS = 1
"""The wire is the limit."""
_BY_THIS_HOP = outcome_table(Outcome.TIMEOUT, Outcome.CORRUPT)
"""Fates on the way from another host's node that say nothing of what is in storage."""
_OUTCOMES = frozenset(map(int, Outcome))
_TIERS = frozenset(map(int, Tier))


class Wanted:
    """What all parts of one load share: keys, where they are stored, the buffer, and the accounts.

    Args:
        core: the client's parts.
        keys: consecutive keys of a chain.
        packed: the same, packed.
        parent: key before the first.
        depth: position of the first.
        runs: who has them in storage.
        buffer: room for all of them.
        operation: deadline and cancellation.
        verify_copies: whether bytes are summed again after a copy from the local arena.
        verify_wire: whether bytes are summed after they came over a wire.
        tally: outcomes and sources.
        board: layers.
    """

    def __init__(
        self,
        core: Core,
        keys: Sequence[BlockKey],
        packed: bytes,
        parent: BlockKey | None,
        depth: int,
        runs: Sequence[Run],
        buffer: BlockBuffer,
        operation: Operation,
        tally: Tally,
        board: LayerBoard,
        *,
        verify_copies: bool,
        verify_wire: bool,
    ) -> None:
        self.core = core
        self.keys = keys
        self.packed = packed
        self.parent = parent
        self.depth = depth
        self.runs = runs
        self.buffer = buffer
        self.operation = operation
        self.tally = tally
        self.board = board
        self.verify_copies = verify_copies
        self.verify_wire = verify_wire

    def request(self, session_id: bytes, start: int, stop: int, layer_group: int, first_layer: int) -> node_pb2.LoadRequest:
        """What a node is asked for blocks ``[start, stop)``, to be read over its storage link."""
        sources: list[node_pb2.LoadSource] = []
        for run in self.runs:
            if len(sources) == MAX_SOURCES:
                break
            first, last = max(run.start, start), min(run.end, stop)
            if first < last:
                sources.append(
                    node_pb2.LoadSource(
                        start=first - start,
                        count=last - first,
                        node_id=run.node_id,
                        control_address=run.node.control_address,
                        data_address=run.node.storage,
                        volume_id=run.volume_id,
                    )
                )
        before = self.packed[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else self.parent or b""
        return node_pb2.LoadRequest(
            session_id=session_id,
            operation_id=new_operation_id(),
            keys=self.packed[start * KEY_BYTES : stop * KEY_BYTES],
            sources=sources,
            want_checksums=self.verify_copies,
            parent=before,
            depth=self.depth + start,
            layer_group=layer_group,
            first_layer=first_layer,
        )


class StagedPart(ABC):
    """Some blocks over one node. ``run`` once, in a thread of its own; ``cancel`` from any thread.

    Args:
        wanted: the load.
        positions: its blocks (rising).
        path: how results call this path.
        node_id: the node that reads.
        layer_group: see ``Paths``.
        stall_s: see ``Paths``.
    """

    def __init__(self, wanted: Wanted, positions: Positions, path: str, node_id: str, layer_group: int, stall_s: float) -> None:
        self.positions = positions
        self.path = path
        self.node_id = node_id
        self.moved_s = math.inf
        """When something last moved; infinite until it begins."""
        self.error: KVStoreError | None = None
        self._wanted = wanted
        self._layer_group = min(layer_group, wanted.core.shape.layers)
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._cancelled = False
        self._call: Any = None
        self._received = -1
        self._trouble = ""

    def cancel(self) -> None:
        """Ends ``run`` soon."""
        with self._lock:
            self._cancelled = True
            call = self._call
        if call is not None:
            call.cancel()

    def still_for(self, now_s: float) -> float:
        """For how many seconds nothing has moved; below 0 where it has not begun."""
        return now_s - self.moved_s

    @property
    def trouble(self) -> str:
        """What kept it from bringing everything, for people."""
        return str(self.error) if self.error is not None else self._trouble or "it ended before everything had come"

    def _failed(self, outcomes: Outcomes, where: str) -> None:
        """Some blocks did not come: notes how many met which fate, of the first that did not."""
        fates = ", ".join(f"{count} blocks {Outcome(fate).name}" for fate, count in Counter(outcomes.tolist()).items())
        self._trouble = self._trouble or f"{fates} {where}"

    @property
    def over(self) -> bool:
        """Whether to stop."""
        return self._cancelled or self._wanted.operation.over

    def run(self) -> None:
        """Brings what can be brought. Failures of ours are left in ``error`` and in outcomes."""
        wanted = self._wanted
        layers = wanted.core.shape.layers
        self.moved_s = wanted.core.clock.now_s()
        try:
            for start, stop in spans(self.positions):
                ready = wanted.board.ready(np.arange(start, stop))
                first_layer = int(ready.min()) if self._layer_group else 0  # what came in an earlier attempt is not read again
                if first_layer < layers and not self.over:
                    self._load(start, stop, first_layer)
        except KVStoreError as error:
            self.error = error

    def _load(self, start: int, stop: int, first_layer: int) -> None:
        with closing(self._progress(start, stop, first_layer)) as stream:
            for progress in stream:
                received = progress.bytes_received
                if progress.runs or received != self._received:
                    self.moved_s, self._received = self._wanted.core.clock.now_s(), received
                try:
                    for run in progress.runs:
                        self._take(run, start, stop - start, progress.granted_ms)
                        if self.over:
                            return
                finally:
                    if progress.lease_id:
                        self._release(progress.lease_id)

    def _progress(self, start: int, stop: int, first_layer: int) -> Any:  # noqa: ANN401  # a generator of LoadProgress
        """The messages of one call."""
        wanted = self._wanted
        request = wanted.request(self._session_id(), start, stop, self._layer_group, first_layer)
        self._began_s = wanted.core.clock.now_s()
        try:
            call = self._stub().Load(request, timeout=max(0.001, wanted.operation.left_s()), metadata=inject())
        except ValueError:
            raise LeaseLost("the session was given up under this load") from None
        with self._lock:
            self._call = call
            cancelled = self._cancelled
        if cancelled:
            call.cancel()
        try:
            with wanted.operation.on_cancel(call.cancel), self._server().waiting(call.cancel):
                yield from call
        except Unavailable as hung:
            self.error = hung
        except grpc.RpcError as failed:
            if not self.over:  # we ended it ourselves: that says nothing of the session
                self.error = from_rpc_error(cast("FailedCall", failed))
        finally:
            call.cancel()  # no effect where it has ended

    def _take(self, run: node_pb2.LoadedRun, base: int, count: int, granted_ms: int) -> None:
        """One answered run: checked, its bytes brought, its layers told."""
        wanted, layers = self._wanted, self._wanted.core.shape.layers
        outcome, tier = int(run.outcome), int(run.tier)
        if run.count == 0 or run.start + run.count > count or outcome not in _OUTCOMES:
            raise Internal("the node answers for blocks that were not asked for", start=run.start, count=run.count)
        positions = np.arange(base + run.start, base + run.start + run.count)
        first_layer, layer_count = (run.first_layer, run.layer_count) if run.layer_count else (0, layers)
        if outcome != Outcome.HIT:
            missing = positions[wanted.board.ready(positions) < layers]
            wanted.tally.outcomes[missing] = outcome
            if len(missing):
                self._failed(wanted.tally.outcomes[missing], "in storage")
            return
        if tier not in _TIERS or first_layer + layer_count > layers:
            raise Internal("the node answers layers that there are not", first_layer=first_layer, layer_count=layer_count)
        # What counts as arrived is not written again, block by block: the engine may be reading it, and should these bytes prove
        # bad, it would count all the same.
        behind = np.clip(wanted.board.ready(positions) - first_layer, 0, layer_count)
        for level in np.unique(behind[behind < layer_count]).tolist():
            for start, stop in spans(np.flatnonzero(behind == level)):
                some = positions[start:stop]
                good = self._bring(run, slice(start, stop), some, first_layer + level, layer_count - level, granted_ms)
                wanted.board.arrived(some[good], first_layer + level, layer_count - level)
                self._record(run, some[good])

    def _record(self, run: node_pb2.LoadedRun, positions: Positions) -> None:
        """Notes blocks that have come whole."""
        wanted = self._wanted
        done = positions[wanted.board.ready(positions) == wanted.core.shape.layers]
        if len(done):
            number = wanted.tally.node_number(run.source_node or self.node_id)
            wanted.tally.record(done, Outcome.HIT, int(run.tier), number, self.path)
        self.moved_s = wanted.core.clock.now_s()

    @abstractmethod
    def _bring(
        self, run: node_pb2.LoadedRun, part: slice, positions: Positions, first_layer: int, layer_count: int, granted_ms: int
    ) -> npt.NDArray[np.bool_]:
        """Brings the last ``layer_count`` layers of a run's, of those of its blocks that ``part`` says, into the buffer.

        Returns:
            Which blocks are good; the outcomes of the others are noted.
        """

    @abstractmethod
    def _stub(self) -> Any:  # noqa: ANN401  # a NodeStub
        """Whom to ask."""

    @abstractmethod
    def _server(self) -> WatchedServer:
        """Whether it answers."""

    @abstractmethod
    def _session_id(self) -> bytes:
        """In which session."""

    @abstractmethod
    def _release(self, lease_id: int) -> None:
        """What was told under a lease has been brought."""


class LocalPart(StagedPart):
    """The prefill path: this host's node reads into its arena, and we copy."""

    def __init__(
        self, wanted: Wanted, positions: Positions, path: str, session: Session, layer_group: int, stall_s: float
    ) -> None:
        super().__init__(wanted, positions, path, session.node_id, layer_group, stall_s)
        self._session = session

    def run(self) -> None:
        try:
            with self._session.used():
                super().run()
        except KVStoreError as error:
            self.error = error

    def _stub(self) -> Any:  # noqa: ANN401
        return self._session.stub

    def _server(self) -> WatchedServer:
        return self._session.server

    def _session_id(self) -> bytes:
        return self._session.session_id

    def _bring(
        self, run: node_pb2.LoadedRun, part: slice, positions: Positions, first_layer: int, layer_count: int, granted_ms: int
    ) -> npt.NDArray[np.bool_]:
        wanted, core = self._wanted, self._wanted.core
        count, first, shape = len(positions), int(positions[0]), core.shape
        offsets = unpack_u64(run.offsets, "offsets", run.count)[part]
        if int(offsets.max()) + shape.block_bytes > self._session.arena.size:
            raise Internal("the node answers with blocks outside its arena")
        self._session.arena.copy_out(offsets, wanted.buffer, first, first_layer, layer_count, _COPY_THREADS)
        good = np.ones(count, bool)
        if wanted.verify_copies:
            told = run.layer_count or shape.layers
            sums = unpack_u64(run.checksums, "checksums", run.count * told).reshape(run.count, told)
            good = ~self._session.arena.differing(offsets, wanted.buffer, first, first_layer, sums[part, told - layer_count :])
            wanted.tally.outcomes[positions[~good]] = Outcome.CORRUPT
        lease_end_s = self._began_s + granted_ms / 1000 + self._session.lease_s - core.options.lease_margin_s
        if core.clock.now_s() > lease_end_s:  # what was copied may be another block's by now
            core.incidents.report("client_lease_expired_blocks_total", "blocks were copied too late to trust them", amount=count)
            wanted.tally.outcomes[positions] = Outcome.UNAVAILABLE
            self._trouble = self._trouble or "blocks were copied too late to trust them"
            return np.zeros(count, bool)
        return good

    def _release(self, lease_id: int) -> None:
        self._session.returner.release([lease_id])


class RemotePart(StagedPart):
    """The decode path, and relays: another host's node reads into its arena; we take it from there over the compute network."""

    def __init__(self, wanted: Wanted, positions: Positions, path: str, node: NodeRef, layer_group: int, stall_s: float) -> None:
        super().__init__(wanted, positions, path, node.node_id, layer_group, stall_s)
        self._node = node
        self._opened: Stage | None = None
        self._control: ReadControl | None = None
        self._heard = 0

    def run(self) -> None:
        if not self._attempt() and not self.over:
            self.error = None
            self._attempt()

    def _attempt(self) -> bool:
        """One session's worth. False: it had ended before it told anything, as one does that rests; another will do."""
        self.moved_s = self._wanted.core.clock.now_s()
        timeout_s = min(OPEN_STAGE_S, self._stall_s, self._wanted.operation.left_s())
        try:
            self._opened = self._wanted.core.stages.stage(self._node, max(0.001, timeout_s))
        except KVStoreError as error:
            self.error = error
            return True
        super().run()
        if self.error is None:
            return True
        ended = isinstance(self.error, LeaseLost) or not self._wanted.core.stages.holds(self._opened)  # another part found out
        if ended or means_lost(self.error):
            self._wanted.core.stages.lost(self._opened)
        return not ended or self._received >= 0

    def cancel(self) -> None:
        super().cancel()
        self._end_read()

    def still_for(self, now_s: float) -> float:
        control = self._control
        if control is not None and control.bytes_received != self._heard:  # a large read moves long before it is done
            self._heard, self.moved_s = control.bytes_received, now_s
        return super().still_for(now_s)

    def _end_read(self) -> None:
        with self._lock:
            control = self._control
        if control is not None:
            control.cancel()

    @property
    def _stage(self) -> Stage:
        assert self._opened is not None, "opened before anything is asked"
        return self._opened

    def _stub(self) -> Any:  # noqa: ANN401
        return self._stage.stub

    def _server(self) -> WatchedServer:
        return self._stage.server

    def _session_id(self) -> bytes:
        return self._stage.session_id

    def _bring(
        self,
        run: node_pb2.LoadedRun,  # noqa: ARG002  # offsets are of no use from afar
        part: slice,  # noqa: ARG002
        positions: Positions,
        first_layer: int,
        layer_count: int,
        granted_ms: int,  # noqa: ARG002  # the node itself holds the lease against each read
    ) -> npt.NDArray[np.bool_]:
        wanted, core = self._wanted, self._wanted.core
        size = len(positions) * layer_count * core.shape.layer_block_bytes
        deadline_s = min(wanted.operation.deadline_s, core.clock.now_s() + self._stall_s + size / SLOWEST_BYTES_PER_S)
        keys = [wanted.keys[position] for position in positions.tolist()]
        request = ReadRequest(core.namespace, keys, first_layer, layer_count, 0, deadline_s)
        control = ReadControl()
        with self._lock:
            self._control, self._heard = control, 0
        if self.over:  # a cancellation that came before the control was there
            control.cancel()
        with wanted.operation.on_cancel(control.cancel):
            result = core.peers.peer(self._node).read(
                request, pick_blocks(wanted.buffer, positions), verify=wanted.verify_wire, control=control
            )
        outcomes = np.array(result.outcomes, np.uint8)
        good: npt.NDArray[np.bool_] = outcomes == Outcome.HIT
        if not good.all():
            self._failed(outcomes[~good], "on the way from it")
        # The node had read and checked them: what came otherwise was bent on this hop, and comes whole over another.
        outcomes[_BY_THIS_HOP[outcomes]] = Outcome.UNAVAILABLE
        wanted.tally.outcomes[positions[~good]] = outcomes[~good]
        if not good.all() and not self.over:
            self.cancel()  # the rest over another node
        return good

    def _release(self, lease_id: int) -> None:
        self._stage.returner.release([lease_id])
