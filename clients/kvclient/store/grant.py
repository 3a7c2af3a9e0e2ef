"""Slots that the local node grants for a chunk of a store: asked for by ``Prepare``, made visible by ``Complete``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope, call_within
from kvclient.nodes.local_session import Session, new_operation_id
from kvclient.results import HELD, Outcomes
from kvproto.v1 import common_pb2, node_pb2
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import Internal, KVStoreError
from kvstore.core.types import StoreOutcome
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.rpc.client import RetryPolicy
from kvstore.rpc.codec import unpack_u64

_KNOWN = frozenset(StoreOutcome)
_RETRY = RetryPolicy(attempts=3)
"""Mutating calls carry an operation id, so that a retry is safe."""
WAIT_SHARE = 0.8
"""Share of the time left that a call may wait in the node; the rest is for the work around it."""


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
    def prepare(
        cls, context: ClientContext, session: Session, chain: ChainSlice, scope: CallScope, *, wait: bool = True
    ) -> StoreGrant:
        """Ask the node for slots.

        Args:
            context: the client's parts.
            session: with the local node.
            chain: the blocks.
            scope: deadline and cancellation.
            wait: wait for space, for a bounded time.

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
            wait_ms=int(min(context.options.space_wait_s, left_s * WAIT_SHARE) * 1000) if wait else 0,
            heads=chain.heads,
        )
        try:
            answer = call_within(scope, session.server, session.stub.Prepare, request, left_s, _RETRY)
            grant.accept(answer)
        except KVStoreError:
            grant.abort()  # the answer may be lost, and slots granted
            raise
        return grant

    def accept(self, answer: node_pb2.PrepareResponse) -> None:
        """Take over the answer of the node, checked: it decides what is written where. For ``prepare``."""
        self.outcomes = np.frombuffer(answer.outcomes, np.uint8).copy()
        if len(self.outcomes) != len(self._chain) or not _KNOWN.issuperset(answer.outcomes):
            raise _wrong_outcomes(len(answer.outcomes), len(self._chain))
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
            wait_visible: wait until the metadata server shows the blocks, for ``WAIT_SHARE`` of ``timeout_s`` at most. After that
                the blocks are stored, but may not be visible yet.

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
                wait_visible_ms=int(timeout_s * WAIT_SHARE * 1000) if wait_visible else 0,
            )
            answer = call_within(self._scope, self._session.server, self._session.stub.Complete, request, timeout_s, _RETRY)
            if len(answer.outcomes) != len(self.positions) or not _KNOWN.issuperset(answer.outcomes):
                raise _wrong_outcomes(len(answer.outcomes), len(self.positions))
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


def _wrong_outcomes(outcomes: int, keys: int) -> Internal:
    return Internal(
        f"the node returned {outcomes} outcomes for {keys} keys, or an unknown one:"
        " check that node and client run the same version"
    )
