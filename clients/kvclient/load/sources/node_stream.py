"""One ``Load`` call to a node: its messages, checked, and the copy of leased blocks out of the arena of this host.

Blocks that a node answers are leased: they stay in its arena for the lease time, counted from the moment ``granted_ms`` after the
call reached the node. The clock is read *after* each copy: if the lease may have ended by then, the bytes may be those of another
block and do not count.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import grpc
import numpy as np
import numpy.typing as npt

from kvclient.call.execution import CallScope, call_within
from kvclient.load.sink import LoadRequest, Mask
from kvclient.nodes.lease_release import LeaseReleaser
from kvclient.nodes.local_session import Session, new_operation_id
from kvclient.results import Run
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import Internal, KVStoreError, LeaseLost, Unavailable
from kvstore.core.limits import MAX_SOURCES
from kvstore.core.types import Outcome, Tier
from kvstore.observe.tracing import inject
from kvstore.rpc.client import ChannelBroken, start_call
from kvstore.rpc.codec import unpack_u64
from kvstore.rpc.errors import FailedCall, from_rpc_error
from kvstore.transport.liveness import WatchedServer

_MIN_TIMEOUT_S = 0.001
_OUTCOMES = frozenset(map(int, Outcome))
_TIERS = frozenset(map(int, Tier))


class NodeSession(Protocol):
    """A session with a node, of this host or of another one."""

    @property
    def stub(self) -> node_pb2_grpc.NodeStub:
        """Its methods."""

    @property
    def session_id(self) -> bytes:
        """Id of the session."""

    @property
    def server(self) -> WatchedServer:
        """Whether the node answers."""

    @property
    def releaser(self) -> LeaseReleaser:
        """Ends leases."""


@dataclass(frozen=True, slots=True)
class NodeRun:
    """Consecutive blocks ``[start, stop)`` of a load that a node has answered alike.

    ``offsets`` and ``checksums`` (``[blocks, layers of the run]``) are given for hits, if the arena is of this host and if
    checksums were requested.
    """

    start: int
    stop: int
    outcome: Outcome
    tier: int
    node_id: str
    first_layer: int
    layer_count: int
    offsets: npt.NDArray[np.uint64] | None = None
    checksums: npt.NDArray[np.uint64] | None = None
    lease_end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """One message of the stream. ``lease_id`` 0: none. ``bytes_received``: by this load, from other nodes."""

    runs: Sequence[NodeRun]
    lease_id: int
    bytes_received: int


class NodeLoadStream:
    """Asks a node for blocks ``[start, stop)`` of a load. Iterate once, and close the iterator.

    Args:
        request: the load.
        session: with the node.
        scope: ends the call early.
        start: first block.
        stop: one past the last block.
        runs: replicas that the node may read from.
        storage: the node reads over its storage link, from the storage addresses of the replicas' nodes.
        want_checksums: the node is to answer with checksums.
        layer_group: layers that the node reads together; 0: whole blocks.
        first_layer: first layer to read.
        resident: scope for blocks that are probably in the node's arena. They are first requested in one response, which is
            cheaper than a stream.
    """

    def __init__(
        self,
        request: LoadRequest,
        session: NodeSession,
        scope: CancelScope,
        start: int,
        stop: int,
        runs: Sequence[Run],
        *,
        storage: bool,
        want_checksums: bool,
        layer_group: int = 0,
        first_layer: int = 0,
        resident: CallScope | None = None,
    ) -> None:
        self._resident = resident
        self.error: KVStoreError | None = None
        """Why the stream ended early. None also if the scope ended it, which is not a failure of the node."""
        self._session = session
        self._scope = scope
        self._start = start
        self._count = stop - start
        self._shape = request.context.shape
        self._clock = request.context.clock
        self._arena_bytes = session.arena.size if isinstance(session, Session) else None
        self._lease_s = session.lease_s - request.context.options.lease_margin_s if isinstance(session, Session) else math.inf
        self._want_checksums = want_checksums
        part = request.chain.part(start, stop)
        self.message = node_pb2.LoadRequest(
            session_id=session.session_id,
            operation_id=new_operation_id(),
            keys=part.packed,
            sources=load_sources(runs, start, stop, storage=storage),
            want_checksums=want_checksums,
            parent=part.parent or b"",
            depth=part.depth,
            heads=part.heads,
            layer_group=layer_group,
            first_layer=first_layer,
        )

    def __iter__(self) -> Generator[NodeMessage, None, None]:
        """Yield messages until the call ends or fails; see ``error``.

        Raises:
            Internal: the node answers something impossible.
        """
        began_s = self._clock.now_s()
        if self._resident is not None:
            message = self._load_resident(self._resident)
            if message is None:
                return
            if message.runs:
                yield self._checked(message, began_s)
                return
            began_s = self._clock.now_s()
        try:
            timeout_s = max(_MIN_TIMEOUT_S, self._scope.left_s())
            call = start_call(self._session.stub.Load, self.message, timeout=timeout_s, metadata=inject())
        except ChannelBroken as error:
            self.error = error
            return
        except ValueError:  # the channel was closed
            self.error = LeaseLost("the session ended during the load")
            return
        with self._scope.on_cancel(call.cancel):
            try:
                with self._session.server.waiting(call.cancel):
                    for message in call:
                        yield self._checked(message, began_s)
            except Unavailable as hung:
                self.error = hung
            except grpc.RpcError as failed:
                if not self._scope.ended:
                    self.error = from_rpc_error(cast("FailedCall", failed))
            finally:
                call.cancel()  # no effect after the end of the call

    def _load_resident(self, scope: CallScope) -> node_pb2.LoadProgress | None:
        """Request the blocks in one response. It has no runs if some block is not in the arena. None: the call failed."""
        session, timeout_s = self._session, max(_MIN_TIMEOUT_S, scope.left_s())
        try:
            message = call_within(scope, session.server, session.stub.LoadResident, self.message, timeout_s)
            return cast("node_pb2.LoadProgress", message)
        except ValueError:  # the channel was closed
            self.error = LeaseLost("the session ended during the load")
        except KVStoreError as error:
            self.error = None if scope.ended else error
        return None

    def _checked(self, message: node_pb2.LoadProgress, began_s: float) -> NodeMessage:
        lease_end_s = began_s + message.granted_ms / 1000 + self._lease_s
        runs = [self._checked_run(run, lease_end_s) for run in message.runs]
        return NodeMessage(runs, message.lease_id, message.bytes_received)

    def _checked_run(self, run: node_pb2.LoadedRun, lease_end_s: float) -> NodeRun:
        start, count, outcome, tier = run.start, run.count, int(run.outcome), int(run.tier)
        if count == 0 or start + count > self._count or outcome not in _OUTCOMES:
            raise Internal("the node answered for blocks that were not requested", start=start, count=count, outcome=outcome)
        layers = self._shape.layers
        first_layer, layer_count = (run.first_layer, run.layer_count) if run.layer_count else (0, layers)
        start, stop = self._start + start, self._start + start + count
        if outcome != Outcome.HIT:
            return NodeRun(start, stop, Outcome(outcome), tier, run.source_node, first_layer, layer_count)
        if tier not in _TIERS or first_layer + layer_count > layers:
            raise Internal("the node answered impossible layers", tier=tier, first_layer=first_layer, layer_count=layer_count)
        offsets = checksums = None
        if self._arena_bytes is not None:
            offsets = unpack_u64(run.offsets, "offsets", count)
            if int(offsets.max()) + self._shape.block_bytes > self._arena_bytes:
                raise Internal("the node answered with blocks outside its arena", arena_bytes=self._arena_bytes)
            if self._want_checksums:
                checksums = unpack_u64(run.checksums, "checksums", count * layer_count).reshape(count, layer_count)
        return NodeRun(start, stop, Outcome.HIT, tier, run.source_node, first_layer, layer_count, offsets, checksums, lease_end_s)


def copy_leased_blocks(
    request: LoadRequest, session: Session, run: NodeRun, part: slice, first_layer: int, layer_count: int, threads: int
) -> Mask:
    """Copy layers of some blocks of a run out of the arena, and compare their checksums if the run has them.

    Args:
        request: the load.
        session: whose arena it is.
        run: leased blocks.
        part: which of its blocks.
        first_layer: first layer to copy.
        layer_count: number of layers to copy.
        threads: used for the copy. A device's buffer is copied to without waiting; drain it before the lease ends.

    Returns:
        Which of these blocks are good.
    """
    assert run.offsets is not None, "hits of the local node have offsets"
    offsets, first = run.offsets[part], run.start + part.start
    at = first_layer - run.first_layer
    expected = None if run.checksums is None else run.checksums[part, at : at + layer_count]
    return session.arena.begin_copy_out(offsets, request.buffer, first, first_layer, layer_count, threads, expected)


def load_sources(runs: Sequence[Run], start: int, stop: int, *, storage: bool) -> list[node_pb2.LoadSource]:
    """Return the parts of runs within ``[start, stop)``, as positions from ``start`` on."""
    sources: list[node_pb2.LoadSource] = []
    for run in runs:
        first, last = max(run.start, start), min(run.end, stop)
        if first < last and len(sources) < MAX_SOURCES:
            sources.append(
                node_pb2.LoadSource(
                    start=first - start,
                    count=last - first,
                    node_id=run.node_id,
                    control_address=run.node.control_address,
                    data_address=run.node.storage if storage else run.node.data_address,
                    volume_id=run.volume_id,
                )
            )
    return sources
