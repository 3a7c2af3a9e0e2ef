"""The hand-over of a prompt from the prefill engine to the decode engine's host, and the decode engine's wait for it.

The prefill side pushes Layer Blocks into the decode node's arena as layers are computed. What that node holds already, because it
was read over its storage link, is not sent: only the rest goes over the compute network. The decode side takes the prompt when it
is complete, and only then needs memory of its own for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, cast

import grpc
import numpy as np
import numpy.typing as npt

from kvclient.call.context import Core
from kvclient.call.operation import Operation, check_seconds
from kvclient.load.outcomes import Tally, spans
from kvclient.memory.buffers import as_block_buffer
from kvclient.nodes.local_session import Session, means_lost, new_operation_id
from kvclient.nodes.metadata_client import Directory
from kvclient.options import VERIFY_CHOICES, Verify
from kvclient.results import HELD, PATH_LOCAL, LoadResult, NodeRef, Outcomes, StoreResult
from kvclient.store.store import count_store
from kvproto.v1 import node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import CapacityExceeded, Internal, InvalidArgument, KVStoreError, NotFound, Unavailable
from kvstore.core.limits import MAX_TRANSFER_ID_BYTES
from kvstore.core.types import BlockKey, BlockRun, BlockShape, Outcome, StoreOutcome, Tier
from kvstore.rpc.codec import unpack_u64
from kvstore.rpc.errors import FailedCall, from_rpc_error
from kvstore.transport.contract import LayerWrite, WriteRequest


class Handoff:
    """The prefill side: ``put_layer`` once a layer, in any order, then ``commit``. Thread-safe; a context manager that aborts.

    Room on the decode host is asked for with the first layer, not before: by then a load over that host has claimed the blocks
    that it brings, and they need not be sent. Failures of ours end in outcomes; the prefill goes on.
    """

    def __init__(
        self,
        core: Core,
        node: NodeRef | None,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        operation: Operation,
        error: KVStoreError | None,
        *,
        tail: bool,
    ) -> None:
        self._core = core
        self._node = node
        self._keys = keys
        self._parent = parent
        self._depth = depth
        self._operation = operation
        self._tail = tail
        self._lock = threading.Lock()
        self._write: LayerWrite | None = None
        self._left = np.ones(core.shape.layers, bool)
        self._finished = False
        self._result = StoreResult(np.full(len(keys), StoreOutcome.SKIPPED, np.uint8), error=error)

    @property
    def bytes_sent_a_layer(self) -> int:
        """How much of each layer goes over the compute network; 0 until the first was put."""
        return 0 if self._write is None else len(self._write.granted) * self._core.shape.layer_block_bytes

    def put_layer(self, layer: int, data: object) -> None:
        """Hands over one layer of all blocks.

        Args:
            layer: 0-based.
            data: ``[blocks, layer_block_bytes]``: whatever ``as_block_buffer`` takes, one Layer Block a key, a partial last block
                included (its unused part may hold anything). Only what the decode host lacks is read, before the call returns.

        Raises:
            InvalidArgument: wrong size or layer, a layer put twice, or a hand-over that is finished.
        """
        shape = self._core.shape
        if not isinstance(layer, int) or not 0 <= layer < shape.layers:
            raise InvalidArgument("no such layer", layer=layer, layers=shape.layers)
        rows = as_block_buffer(
            data, BlockShape(1, shape.layer_block_bytes), len(self._keys), writable=False, spec=self._core.spec
        )
        with self._lock:
            if self._finished or not self._left[layer]:
                raise InvalidArgument("the layer was put before, or the hand-over is finished", layer=layer)
            self._left[layer] = False
            if self._result.error is not None or not self._keys:
                return
            try:
                self._put(layer, rows)
            except KVStoreError as error:
                self._give_up(error)

    def _put(self, layer: int, rows: BlockBuffer) -> None:
        if self._operation.over:
            raise self._operation.error()
        if self._write is None:
            if self._node is None:
                raise Unavailable("no node to hand over to")
            self._write = self._core.peers.peer(self._node).begin_write(self._request())
        self._write.put(layer, rows)

    def _request(self) -> WriteRequest:
        run = BlockRun(self._core.namespace, self._parent, self._depth, tuple(self._keys))
        return WriteRequest(run, self._core.shape, False, self._operation.deadline_s, self._tail)

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
            if self._keys and self._left.any():
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
                    result.bytes_stored = stored * self._core.shape.block_bytes
                    outcomes[coming] = there[coming]
                    result.outcomes = outcomes
                    self._note_lacking(result, int(np.count_nonzero(there[coming] == StoreOutcome.SKIPPED)))
            result.seconds = self._operation.elapsed_s()
            count_store(self._core, result)
            self._core.incidents.counters.add("client_handoff_bytes_total", result.bytes_stored)
            return result

    def _look(self, coming: npt.NDArray[np.bool_]) -> Outcomes:
        """What became of blocks that were left to a load over that host: there, on their way, or not, if it ended without them.

        Such a load is planned again over other hosts when its part stalls or fails, and these bring nothing to the decode host.
        This is asked before the prompt is whole: afterwards whoever waits for it may have taken it, and its blocks may be gone.
        """
        there: Outcomes = np.full(len(self._keys), StoreOutcome.IN_PROGRESS, np.uint8)
        if not coming.any() or self._node is None or self._operation.over:
            return there
        try:
            probe = self._core.peers.peer(self._node).begin_write(self._request())
        except KVStoreError as error:  # what is handed over is there all the same
            self._result.error = error
            why = "it is not known whether a prompt that is handed over is whole"
            self._core.incidents.report("client_handoffs_failed_total", why, error)
            return there
        now: Outcomes = np.array(probe.outcomes, np.uint8)
        probe.abort()
        there[now == StoreOutcome.EXISTS] = StoreOutcome.EXISTS
        there[(now != StoreOutcome.EXISTS) & (now != StoreOutcome.IN_PROGRESS)] = StoreOutcome.SKIPPED
        return there

    def _note_lacking(self, result: StoreResult, lost: int) -> None:
        """Blocks that the decode host does not have: whoever waits for the prompt there waits in vain."""
        if skipped := int(np.count_nonzero(~HELD[result.outcomes])):
            facts = {"skipped": skipped, "blocks": len(self._keys)}
            if lost:
                result.error = Unavailable("a load over the decode host did not bring what it was to bring", lost=lost, **facts)
            else:
                why = "the decode host did not take all of the prompt: it has no room, or drains"
                result.error = CapacityExceeded(why, **facts)
            self._core.incidents.report(
                "client_handoff_skipped_blocks_total", "a prompt is not handed over whole", result.error, amount=skipped
            )

    def abort(self) -> None:
        """Hands nothing over. No effect on a finished hand-over."""
        self._operation.cancel()
        with self._lock:
            self._finished = True
            if self._write is not None:
                self._write.abort()

    def _give_up(self, error: KVStoreError) -> None:
        self._result.error = error
        self._core.incidents.report("client_handoffs_failed_total", "a prompt is not handed over whole", error)
        if self._write is not None:
            self._write.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._finished:
            self.abort()


class AwaitedPrompt:
    """The decode side: a prompt on its way into the arena of this host. Thread-safe; a context manager that cancels.

    Room in the decode buffer is taken when it begins. ``wait`` until it is complete, then ``take`` it into the engine's memory.
    """

    def __init__(self, core: Core, keys: Sequence[BlockKey], packed: bytes, operation: Operation, transfer_id: str = "") -> None:
        self._core = core
        self._keys = keys
        self._packed = packed
        self._transfer_id = transfer_id
        self._operation = operation
        operation.cancellable = True
        self._tally = Tally(len(keys))
        self._tally.outcomes[:] = Outcome.UNAVAILABLE
        self._offsets = np.zeros(len(keys), np.uint64)
        self._checksums: dict[int, bytes] = {}
        self._session: Session | None = None
        self._lease_ids: list[int] = []
        self._lease_end_s = 0.0
        self._future: Future[None] | None = None

    def begin(self, future: Future[None]) -> None:
        """For the client: ``run`` is under way."""
        self._future = future

    def run(self) -> None:
        """For the client, in a thread: waits for the node's answers. Failures of ours are left in outcomes."""
        local = self._core.local
        session = local.session() if local is not None else None
        if session is None or local is None:
            self._tally.note(Unavailable("no node on this host") if local is None else local.unavailable())
            return
        try:
            session.acquire()
        except KVStoreError as error:
            self._tally.note(error)
            return
        self._session = session
        left_s = max(0.001, self._operation.left_s())
        request = node_pb2.AwaitPromptRequest(
            session_id=session.session_id,
            operation_id=new_operation_id(),
            keys=self._packed,
            want_checksums=True,
            wait_ms=max(1, int(left_s * 1000)),
            transfer_id=self._transfer_id,
        )
        began_s = self._core.clock.now_s()
        try:
            # Time beyond the wait itself: which blocks are here is worth knowing when others are not.
            call = session.stub.AwaitPrompt(request, timeout=left_s + _ANSWER_S)
            with self._operation.on_cancel(call.cancel), session.server.waiting(call.cancel):
                for progress in call:
                    self._take_in(progress, session, began_s)
        except grpc.RpcError as failed:
            why = from_rpc_error(cast("FailedCall", failed))
            if self._operation.over:  # ended by us: that says nothing of the session
                self._tally.note(self._operation.error())
            else:
                self._tally.note(why)
                if means_lost(why):
                    local.lost(session, why)
        except KVStoreError as error:
            self._tally.note(error)

    def _take_in(self, progress: node_pb2.LoadProgress, session: Session, began_s: float) -> None:
        shape, count = self._core.shape, len(self._keys)
        if progress.lease_id:
            self._lease_ids.append(progress.lease_id)
        for run in progress.runs:
            if run.count == 0 or run.start + run.count > count:
                raise Internal("the node answers for blocks that were not asked for", start=run.start, count=run.count)
            span = slice(run.start, run.start + run.count)
            self._tally.outcomes[span] = int(run.outcome)
            if int(run.outcome) != Outcome.HIT:
                continue
            offsets = unpack_u64(run.offsets, "offsets", run.count)
            if int(offsets.max()) + shape.block_bytes > session.arena.size:
                raise Internal("the node answers with blocks outside its arena")
            sums = unpack_u64(run.checksums, "checksums", run.count * shape.layers)
            self._offsets[span] = offsets
            row = shape.layers
            for at in range(run.count):
                self._checksums[run.start + at] = sums[at * row : (at + 1) * row].tobytes()
        self._lease_end_s = began_s + progress.granted_ms / 1000 + session.lease_s - self._core.options.lease_margin_s

    @property
    def done(self) -> bool:
        """Whether the wait is over, one way or the other."""
        return self._future is not None and self._future.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the prompt. True: all of it is here.

        Args:
            timeout_s: how long; None: as long as was given at its beginning.

        Raises:
            InvalidArgument: ``timeout_s`` is no number of seconds.
        """
        left_s = self._operation.left_s() + _GRACE_S
        if timeout_s is not None:
            left_s = min(left_s, check_seconds("timeout_s", timeout_s, zero=True))
        assert self._future is not None
        try:
            self._future.result(left_s)
        except TimeoutError:
            return False
        return bool((self._tally.outcomes == Outcome.HIT).all())

    def take(self, buffer: object, *, skip: int = 0, verify: Verify = "auto") -> LoadResult:
        """Copies what is here into memory of the engine's, and gives the decode buffer back. Once, after ``wait``.

        Args:
            buffer: room for all blocks but those skipped; see ``as_block_buffer``.
            skip: how many leading blocks the engine has already: they are not copied.
            verify: when checksums are compared after the copy; see ``kvclient.options.Verify``.

        Raises:
            InvalidArgument: a buffer that does not fit, or more to skip than there is.
        """
        if not isinstance(skip, int) or not 0 <= skip <= len(self._keys):
            raise InvalidArgument("no more can be skipped than was awaited", skip=skip, blocks=len(self._keys))
        if verify not in VERIFY_CHOICES:
            raise InvalidArgument("unknown choice", verify=verify, choices=VERIFY_CHOICES)
        blocks = as_block_buffer(buffer, self._core.shape, len(self._keys) - skip, spec=self._core.spec)
        if not self.done:
            self._operation.cancel()
            assert self._future is not None
            self._future.result()
        tally, session = self._tally, self._session
        try:
            here = np.flatnonzero(tally.outcomes[skip:] == Outcome.HIT) + skip
            if session is not None and len(here):
                for start, stop in spans(here):
                    self._copy(session, blocks, start, stop, skip, verify=session.verifies_copies(verify))
                number = tally.node_number(session.node_id)
                good = here[tally.outcomes[here] == Outcome.HIT]
                if self._core.clock.now_s() > self._lease_end_s:
                    self._core.incidents.report(
                        "client_lease_expired_blocks_total", "a prompt was taken too late", amount=len(good)
                    )
                    tally.outcomes[good] = Outcome.UNAVAILABLE
                else:
                    tally.record(good, Outcome.HIT, int(Tier.DRAM), number, PATH_LOCAL)
        finally:
            self._let_go()
        result = tally.result(self._core.shape.block_bytes)
        result.seconds = self._operation.elapsed_s()
        self._core.incidents.counters.add("client_prompts_total")
        self._core.incidents.counters.add("client_prompt_blocks_total", result.count(Outcome.HIT))
        return result

    def _copy(self, session: Session, blocks: BlockBuffer, start: int, stop: int, skip: int, *, verify: bool) -> None:
        layers = self._core.shape.layers
        session.arena.copy_out(self._offsets[start:stop], blocks, start - skip, 0, layers, _COPY_THREADS)
        if verify:
            sums = np.frombuffer(b"".join(self._checksums[at] for at in range(start, stop)), np.uint64)
            wanted = sums.reshape(stop - start, layers)
            bad = session.arena.differing(self._offsets[start:stop], blocks, start - skip, 0, wanted)
            self._tally.outcomes[start + np.flatnonzero(bad)] = Outcome.CORRUPT

    def cancel(self) -> None:
        """Gives the prompt up, and its room back."""
        self._operation.cancel()
        if self._future is not None:
            self._future.result()  # bounded: the call is cancelled
        self._let_go()

    def _let_go(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            if self._lease_ids:
                session.returner.release(self._lease_ids, urgent=True)
                self._lease_ids = []
            session.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None or not self.done:
            self.cancel()


def find_decode_node(core: Core, directory: Directory | None, name: str, operation: Operation) -> NodeRef:
    """Where a prompt goes.

    Raises:
        KVStoreError: not found.
    """
    if directory is None:
        raise Unavailable("without a metadata server the decode node cannot be found")
    return directory.node(name, min(operation.left_s(), core.options.lookup_deadline_s))


def abandon_prompt(core: Core, directory: Directory | None, transfer_id: str, decode_node: str, operation: Operation) -> bool:
    """See ``KVClient.abandon_prompt``."""
    gone_s = core.clock.now_s() + _GONE_S
    while True:
        try:
            node = find_decode_node(core, directory, decode_node, operation)
            core.peers.abandon_prompt(node, transfer_id, max(0.001, operation.left_s()))
        except KVStoreError as error:
            # A prompt often does not come because its decode node was not there for a moment, which then waits for it.
            if isinstance(error, (NotFound, Unavailable)) and core.clock.now_s() < gone_s and operation.left_s() > _LOOK_S:
                time.sleep(_LOOK_S)
                continue
            said = "a decode node is not told of a prompt that will not come"
            core.incidents.report("client_abandons_failed_total", said, error)
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


_ANSWER_S = 0.5
"""In which the node says what is here, after it has waited."""
_GRACE_S = _ANSWER_S + 0.5
"""Between the deadline and the end of the last piece of work."""
_GONE_S = 3.0
"""In which a node that was not there for a moment is one of the living again: some heartbeats."""
_LOOK_S = 0.25
_COPY_THREADS = 2
