"""Stores: prefix first, written once, and never more than offered.

Through the local node a store is three steps a chunk: ask for slots (``Prepare``), copy into them, make them visible
(``Complete``). Without one, blocks go over TCP to a node. Either way a block is stored only if everything before it in the call
is held or being written, and a failure of ours skips what is left: the engine goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvclient.call.context import Core
from kvclient.call.execution import call_within
from kvclient.call.operation import Operation
from kvclient.memory.buffers import pick_blocks
from kvclient.nodes.local_session import Session, means_lost, new_operation_id
from kvclient.results import HELD, NodeRef, Outcomes, StoreResult
from kvproto.v1 import common_pb2, node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import Internal, KVStoreError, Unavailable
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, StoreOutcome
from kvstore.rpc.client import RetryPolicy
from kvstore.rpc.codec import pack_u64, unpack_u64
from kvstore.transport.contract import WriteRequest

_KNOWN = frozenset(StoreOutcome)
RETRY = RetryPolicy(attempts=3)
"""Mutating calls carry an operation id: sending them again is safe."""
_ARENA_SHARE = 8
_WAIT_SHARE = 0.8
"""Part of the time left that ``Prepare`` may wait for room: the rest is for the copy."""

FindStoreNode = Callable[[float], NodeRef]
"""Where stores go without a local node; bounded by so many seconds. Raises ``KVStoreError`` where there is none."""


class Grant:
    """Slots of one ``Prepare``: which blocks of a run are to be written, and where in the arena."""

    def __init__(
        self,
        core: Core,
        session: Session,
        packed: bytes,
        parent: BlockKey | None,
        depth: int,
        operation: Operation,
        *,
        heads: bool = False,
    ) -> None:
        """Asks for slots for a run of packed keys; ``heads``: each is the head of a chain of its own.

        Raises:
            KVStoreError: the node refused, or does not answer.
        """
        self._core = core
        self._session = session
        self._packed = packed
        self._operation = operation
        self._operation_id = new_operation_id()
        self._open = False
        count = len(packed) // KEY_BYTES
        left_s = operation.left_s()
        request = node_pb2.PrepareRequest(
            session_id=session.session_id,
            operation_id=self._operation_id,
            blocks=common_pb2.BlockRun(namespace_id=core.namespace, parent=parent or b"", depth=depth, keys=packed),
            wait_ms=int(min(core.options.room_wait_s, left_s * _WAIT_SHARE) * 1000),
            heads=heads,
        )
        self._open = True
        try:
            answer = call_within(operation, session.server, session.stub.Prepare, request, left_s, RETRY)
        except KVStoreError:
            self.abort()  # the answer may be lost, and slots granted
            raise
        self.outcomes: Outcomes = np.frombuffer(answer.outcomes, np.uint8).copy()
        granted = np.flatnonzero(self.outcomes == StoreOutcome.STORED)
        try:
            if len(self.outcomes) != count or not _KNOWN.issuperset(answer.outcomes):
                raise Internal("the node does not answer one outcome a key", keys=count, outcomes=len(self.outcomes))
            offsets = unpack_u64(answer.offsets, "offsets", len(granted))
            if len(offsets) and int(offsets.max()) + core.shape.block_bytes > session.arena.size:
                raise Internal("the node grants slots outside its arena")
        except KVStoreError:
            self.abort()
            raise
        skip_rest(self.outcomes)
        self.draining = answer.draining
        """What is SKIPPED is so because the node drains or ends."""
        if answer.draining and (skipped := int(np.count_nonzero(self.outcomes == StoreOutcome.SKIPPED))):
            core.incidents.report(
                "client_store_skipped_draining_blocks_total", "the node of this host drains or ends: not stored", amount=skipped
            )
        self.positions = np.flatnonzero(self.outcomes == StoreOutcome.STORED)
        """Blocks of the run to be written, rising."""
        self.offsets = offsets[: len(self.positions)]  # what was granted behind a gap is given back unwritten
        self._surplus = len(self.positions) < len(granted)

    def complete(self, checksums: bytes, timeout_s: float, *, wait_visible: bool) -> None:
        """Makes the written blocks visible; their final outcomes are in ``outcomes``.

        Args:
            checksums: packed, layers a written block.
            timeout_s: bound of the call.
            wait_visible: answer only once the metadata server shows the blocks, or most of the time is up.

        Raises:
            KVStoreError: it is not known whether they are visible.
        """
        if len(self.positions):
            keys = self._packed
            if len(self.positions) < len(self.outcomes):
                keys = b"".join([keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in self.positions.tolist()])
            request = node_pb2.CompleteRequest(
                session_id=self._session.session_id,
                operation_id=self._operation_id,
                keys=keys,
                checksums=checksums,
                wait_visible_ms=int(timeout_s * _WAIT_SHARE * 1000) if wait_visible else 0,
            )
            answer = call_within(self._operation, self._session.server, self._session.stub.Complete, request, timeout_s, RETRY)
            if len(answer.outcomes) != len(self.positions) or not _KNOWN.issuperset(answer.outcomes):
                raise Internal("the node does not answer one outcome a key", keys=len(self.positions))
            self.outcomes[self.positions] = np.frombuffer(answer.outcomes, np.uint8)
            skip_rest(self.outcomes)
        if self._surplus:
            self.abort()
        self._open = False

    def abort(self) -> None:
        """Gives back what was not completed. Nobody may touch the slots any more. Never raises, never waits."""
        if not self._open:
            return
        self._open = False
        if self._session.arena.stuck:
            return  # a device may still write to them: they rest until the session ends
        self._session.returner.abort(self._operation_id)


def skip_rest(outcomes: Outcomes) -> None:
    """Behind the first block that is not held everything is SKIPPED: a chain is stored prefix first."""
    bad = ~HELD[outcomes]
    if bad.any():
        first = int(bad.argmax())
        outcomes[first + 1 :] = StoreOutcome.SKIPPED


class Store:
    """One store of consecutive blocks of a chain, or of heads of chains. ``run`` once, in any thread."""

    def __init__(
        self,
        core: Core,
        keys: Sequence[BlockKey],
        packed: bytes,
        parent: BlockKey | None,
        depth: int,
        buffer: BlockBuffer,
        operation: Operation,
        find_node: FindStoreNode,
        *,
        durable: bool,
        wait_visible: bool,
        heads: bool = False,
    ) -> None:
        self._core = core
        self._keys = keys
        self._packed = packed
        self._parent = parent
        self._depth = depth
        self._buffer = buffer
        self._operation = operation
        self._find_node = find_node
        self._durable = durable
        self._wait_visible = wait_visible
        self._heads = heads
        self._result = StoreResult(np.full(len(keys), StoreOutcome.SKIPPED, np.uint8))

    def run(self) -> StoreResult:
        """Does it. Errors of ours end in outcomes and ``error``."""
        result = self._result
        try:
            if not self._keys:
                result.durable = self._durable
            else:
                self._through_local() if self._core.local is not None else self._through_peer()
        except KVStoreError as error:
            self._note(error)
        skip_rest(result.outcomes)
        result.seconds = self._operation.elapsed_s()
        count_store(self._core, result)
        return result

    def _note(self, error: KVStoreError) -> None:
        if self._result.error is None:
            self._result.error = error
        self._core.incidents.report("client_store_failed_total", "a store was given up", error)

    # ---- through the local node ----
    def _through_local(self) -> None:
        local = self._core.local
        assert local is not None
        session = local.session()
        if session is None:
            self._result.error = local.unavailable()
            self._core.incidents.counters.add("client_stores_without_session_total")
            return
        size = min(self._core.options.store_chunk_bytes, session.arena.size // _ARENA_SHARE)
        try:
            with session.used():
                if self._in_chunks(size, lambda start, stop: self._store_chunk(session, start, stop)) and self._durable:
                    self._flush(session)
        except KVStoreError as error:
            if means_lost(error) and not session.server.hung:
                local.lost(session, error)
            raise

    def _in_chunks(self, size: int, store: Callable[[int, int], Outcomes]) -> bool:
        """Stores chunk after chunk, until one makes no progress. True: all is held.

        A node with little room grants a part of a chunk, prefix first; the rest is asked for again, once the part is there.
        """
        count = len(self._keys)
        step = max(1, size // self._core.shape.block_bytes)
        start = 0
        while start < count:
            if self._operation.over:
                self._note(self._operation.error())
                return False
            outcomes = store(start, min(count, start + step))
            held = HELD[outcomes]
            through = len(held) if held.all() else int(held.argmin())
            if through == 0 or (through < len(held) and outcomes[through] != StoreOutcome.SKIPPED):
                return False
            start += through
        return True

    def _store_chunk(self, session: Session, start: int, stop: int) -> Outcomes:
        """Prepare, copy, complete. One outcome a block; from the first that is not held on, none is."""
        outcomes = self._result.outcomes
        packed = self._packed[start * KEY_BYTES : stop * KEY_BYTES]
        grant = Grant(self._core, session, packed, *self._place(start), self._operation, heads=self._heads)
        try:
            checksums = self._write(session, grant, start)
            if checksums is None:
                outcomes[start:stop] = grant.outcomes
                outcomes[start + grant.positions] = StoreOutcome.SKIPPED
                return outcomes[start:stop]
            outcomes[start + grant.positions] = StoreOutcome.LOST  # until the answer is here
            grant.complete(checksums, max(self._operation.left_s(), _LAST_CALL_S), wait_visible=self._wait_visible)
        finally:
            grant.abort()  # no effect once completed
        outcomes[start:stop] = grant.outcomes
        self._result.draining |= grant.draining
        self._result.bytes_stored += (
            int(np.count_nonzero(grant.outcomes[grant.positions] == StoreOutcome.STORED)) * self._block_bytes
        )
        return grant.outcomes

    def _write(self, session: Session, grant: Grant, start: int) -> bytes | None:
        """Copies granted blocks into their slots, piece by piece; their checksums, or None where time ran out.

        Checksums are of the *source*. Should the copy go wrong or the caller write into the buffer meanwhile, bytes and checksum
        differ. That is found by every reader over a wire, by write-behind before the block becomes durable, and by a load with
        ``verify="always"``; a load out of the local node's arena does not sum bytes again by default, and does not find it.
        """
        step = max(1, self._core.options.copy_chunk_bytes // self._block_bytes)
        packed = []
        for at in range(0, len(grant.positions), step):
            if self._operation.over:
                self._note(self._operation.error())
                return None
            piece = pick_blocks(self._buffer, grant.positions[at : at + step] + start)
            packed.append(pack_u64(session.arena.copy_in(piece, grant.offsets[at : at + step])))
        return b"".join(packed)

    def _flush(self, session: Session) -> None:
        timeout_s = self._operation.left_s()
        wait_ms = int(timeout_s * 1000 * _WAIT_SHARE)
        request = node_pb2.FlushRequest(timeout_ms=wait_ms, session_id=session.session_id, keys=self._packed)
        answer = call_within(self._operation, session.server, session.stub.Flush, request, timeout_s)
        self._result.durable = answer.complete
        if not answer.complete:
            self._not_durable(int(answer.not_durable_blocks), answer.why)

    def _not_durable(self, blocks: int, why: str = "") -> None:
        """Stored, but not durable: the caller is told why, as far as it is known here."""
        error = Unavailable(
            f"stored, but not durable: {why}"
            if why
            else "stored, but not durable: not written in time, no disk takes it, or its tenant is at its quota (the node's log,"
            " `kvstore status` and `kvstore tenants` tell)",
            not_durable_blocks=blocks,
        )
        self._core.incidents.report("client_stores_not_durable_total", "a store did not become durable", error)
        if self._result.error is None:
            self._result.error = error

    # ---- straight to a node ----
    def _through_peer(self) -> None:
        node = self._find_node(self._operation.left_s())
        peer = self._core.peers.peer(node)

        def store(start: int, stop: int) -> Outcomes:
            run = BlockRun(self._core.namespace, *self._place(start), tuple(self._keys[start:stop]))
            request = WriteRequest(run, self._core.shape, self._durable, self._operation.deadline_s)
            piece = pick_blocks(self._buffer, np.arange(start, stop))
            outcomes = np.array(peer.write(request, piece), np.uint8)
            self._result.outcomes[start:stop] = outcomes
            self._result.bytes_stored += int(np.count_nonzero(outcomes == StoreOutcome.STORED)) * self._block_bytes
            return outcomes

        through = self._in_chunks(self._block_bytes if self._heads else self._core.options.copy_chunk_bytes, store)
        self._result.durable = through and self._durable
        if self._durable and not through:
            self._not_durable(int(np.count_nonzero(~HELD[self._result.outcomes])))

    def _place(self, start: int) -> tuple[BlockKey | None, int]:
        """Parent and depth of a block of this store."""
        if self._heads or not start:
            return self._parent, self._depth
        return self._keys[start - 1], self._depth + start

    @property
    def _block_bytes(self) -> int:
        return self._core.shape.block_bytes


_LAST_CALL_S = 0.2
"""Blocks that were copied in time are completed even if the deadline is almost over."""


def count_store(core: Core, result: StoreResult) -> None:
    """Counts what a store did."""
    counters = core.incidents.counters
    counters.add("client_stores_total")
    counters.observe("client_store_seconds", result.seconds)
    counters.add("client_store_blocks_total", len(result.outcomes))
    counters.add("client_stored_bytes_total", result.bytes_stored)
    numbers = np.bincount(result.outcomes, minlength=max(StoreOutcome) + 1).tolist()
    for outcome in StoreOutcome:
        if numbers[outcome]:
            counters.add(f"client_store_{outcome.name.lower()}_blocks_total", numbers[outcome])
