"""Reads ahead: nodes bring found blocks into their DRAM while the request still waits in the engine's queue.

    ahead = client.read_ahead(lookup, paths=Paths())
    ...                                  # the request waits
    result = client.load(lookup, buffer, paths=ahead.paths if ahead is not None else None)
    if ahead is not None:
        ahead.end()

Each node reads while no load is reading there, within a budget of its arena (``node.read_ahead``), and holds the blocks until the
call ends. Nothing here waits. Blocks that could not be read ahead are read by the load itself.

Blocks that only other hosts' storage has are read ahead by plan, as a load would read them: by this host's node, that of the
decode host, and idle ones, each over its own storage link. The load that follows uses the same plan, so each node finds its part
in its DRAM. It may be a load of some of the blocks. If it begins while nodes are still called, it reads the other parts itself. A
load of other blocks, or one that begins before any node was called, revokes the planned part of the read ahead, and plans by
itself. Each node that was called completes its current window, so the load may read these blocks a second time over another link.
If a part of the plan fails during the load, its blocks are planned afresh, because the planner has forgotten the plan. The node
that failed may then be tried once more.
"""

from __future__ import annotations

import logging
import threading
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import grpc
import numpy as np

from kvclient.call.arguments import check_seconds
from kvclient.load.planned import blocks_beyond, storage_runs
from kvclient.load.sink import Positions, spans
from kvclient.load.sources.node_stream import NodeSession, load_sources
from kvclient.load.sources.storage_path import OPEN_SESSION_S
from kvclient.nodes.local_session import Session, is_session_lost, new_operation_id
from kvclient.nodes.remote_sessions import RemoteSession
from kvclient.results import Run
from kvproto.v1 import node_pb2
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import Tier
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.observe.tracing import inject
from kvstore.rpc.client import ChannelBroken, start_call
from kvstore.rpc.errors import FailedCall, from_rpc_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvclient.call.context import ClientContext
    from kvclient.load.paths import Paths, Plan
    from kvclient.nodes.metadata_client import MetadataClient
    from kvstore.core.chain import ChainSlice

_log = logging.getLogger(__name__)

_ENDED = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_MAX_CALLS = 8
"""Maximum number of calls of one read ahead: a node serves 32 at once. The rest of a prefix in more pieces is not read ahead."""


class ReadAhead:
    """Blocks that nodes read ahead and hold.

    Args:
        paths: of the read ahead.
        depth: depth of the first block in its chain.

    Attributes:
        paths: for the load that follows: those of the read ahead, with its plan.
    """

    def __init__(self, paths: Paths | None, depth: int = 0) -> None:
        self.paths = None if paths is None else replace(paths, ahead=self)
        self._depth = depth
        self._lock = threading.Lock()
        self._calls: list[grpc.Future[Any]] = []
        self._planned_calls: list[grpc.Future[Any]] = []
        self._over = False
        self._plan_wanted = True
        self._planning = False
        self._plan: tuple[Positions, Plan] | None = None

    @property
    def ended(self) -> bool:
        """Whether no node holds blocks any more: deadlines are over, or the calls were refused, lost or ended."""
        with self._lock:
            return not self._planning and all(call.done() for call in (*self._calls, *self._planned_calls))

    @property
    def plan_is_wanted(self) -> bool:
        """Whether the planned part of the read ahead goes on: it was neither ended nor revoked, and no load uses its plan yet."""
        with self._lock:
            return self._plan_wanted

    def end(self) -> None:
        """Have the nodes release the blocks soon. Idempotent; does not wait."""
        with self._lock:
            self._over, self._plan, self._plan_wanted = True, None, False
            calls = [*self._calls, *self._planned_calls]
        for call in calls:
            call.cancel()

    def plan_for(self, depths: Positions) -> Plan | None:
        """Return the plan by which these blocks are read ahead, numbered from the first one. None: the load makes another plan.

        A load of other blocks, or one that comes before a node was called, revokes it, lest two hosts read the same block.
        """
        with self._lock:
            self._plan_wanted = False
            planned, self._plan = self._plan, None
            held = any(not call.done() for call in self._planned_calls)
            plan = None if planned is None or not held else _part_of_plan(planned[1], planned[0], depths)
            if plan is not None:
                return plan
            calls = list(self._planned_calls)
        for call in calls:
            call.cancel()
        return None

    def begin_plan(self) -> None:
        """Record that a plan for some of the blocks is being made."""
        self._planning = True

    def use_plan(self, positions: Positions, plan: Plan) -> None:
        """Record the plan before its calls begin, unless it is not wanted any more.

        Args:
            positions: its blocks in the read ahead.
            plan: the plan.
        """
        with self._lock:
            if self._plan_wanted:
                self._plan = self._depth + positions, plan

    def end_plan(self) -> None:
        """Record that no more planned calls will begin."""
        self._planning = False

    def begin_call(self, begin: Callable[[], grpc.Future[Any]], *, planned: bool) -> grpc.Future[Any] | None:
        """Begin a node's call. None: it is not wanted any more. A load sees it begun, or prevents it."""
        with self._lock:
            if self._over or (planned and not self._plan_wanted):
                return None
            call = begin()
            (self._planned_calls if planned else self._calls).append(call)
        return call


def _part_of_plan(plan: Plan, planned: Positions, wanted: Positions) -> Plan | None:
    """Return the plan for some of its blocks, numbered from the first one. None: it lacks one of them."""
    if not len(wanted) or not np.isin(wanted, planned, assume_unique=True).all():
        return None
    parts = []
    for part in plan.parts:
        of_part = planned[part.start : part.start + part.count]
        first, stop = np.searchsorted(wanted, of_part[0]), np.searchsorted(wanted, of_part[-1], "right")
        if first < stop:
            parts.append(replace(part, start=int(first), count=int(stop - first)))
    return replace(plan, parts=tuple(parts))


def read_ahead(
    context: ClientContext, chain: ChainSlice, runs: Sequence[Run], deadline_s: float | None, paths: Paths | None
) -> ReadAhead | None:
    """Start to read ahead. None: all blocks are in the DRAM of this host, or the client is without a local node.

    Args:
        context: the client's parts.
        chain: the blocks.
        runs: their replicas.
        deadline_s: how long nodes hold them at most, in seconds from now; None: the option ``default_deadline_s``.
        paths: hosts whose storage links may be used for blocks in storage; None: this host's.

    Raises:
        InvalidArgument: ``deadline_s`` is not a number of seconds.
    """
    timeout_s = check_seconds("deadline_s", context.options.default_deadline_s if deadline_s is None else deadline_s)
    session = context.local.session() if context.local is not None else None
    if not len(chain) or session is None or _resident(runs, session.node_id) >= len(chain):
        return None
    context.incidents.counters.add(client_metrics.READS_AHEAD)
    ahead = ReadAhead(paths, chain.depth)
    starter = _ReadAheadStarter(context, chain, runs, timeout_s, ahead)
    beyond = blocks_beyond(runs, len(chain), session.node_id)
    if paths is None or context.metadata is None or not beyond.any():
        starter.near(session, np.arange(len(chain)))
        return ahead
    starter.near(session, np.flatnonzero(~beyond))
    if not context.ahead_slots.acquire(blocking=False):
        context.incidents.counters.add(client_metrics.READS_AHEAD_REFUSED)
        return ahead
    positions = np.flatnonzero(beyond)
    ahead.begin_plan()
    try:
        context.ahead_threads.submit(copy_context().run, starter.planned, session, context.metadata, paths, positions)
    except Unavailable:  # the client was closed, or the process may start no thread
        context.ahead_slots.release()
        ahead.end_plan()
    return ahead


class _ReadAheadStarter:
    """Begins the calls of one read ahead."""

    def __init__(
        self, context: ClientContext, chain: ChainSlice, runs: Sequence[Run], timeout_s: float, ahead: ReadAhead
    ) -> None:
        self._context = context
        self._chain = chain
        self._runs = runs
        self._end_s = context.clock.now_s() + timeout_s
        self._ahead = ahead
        self._calls_left = _MAX_CALLS

    def near(self, session: Session, positions: Positions) -> None:
        """Have this host's node read from its volumes, and from other nodes over the compute network."""
        others = sorted((run for run in self._runs if run.node_id != session.node_id), key=lambda run: run.distance)
        self._call(session, positions, others, planned=False)

    def planned(self, session: Session, metadata: MetadataClient, paths: Paths, positions: Positions) -> None:
        """Plan blocks in other hosts' storage, and have each node read its part. Runs in a thread: it waits for answers."""
        try:
            if self._ahead.plan_is_wanted:
                self._planned(session, metadata, paths, positions)
        except Exception:  # noqa: BLE001  # the edge of the thread: nothing reads the result of its work
            self._context.incidents.counters.add(client_metrics.BUGS)
            _log.exception("read ahead not planned: unexpected failure")
        finally:
            self._ahead.end_plan()
            self._context.ahead_slots.release()

    def _planned(self, session: Session, metadata: MetadataClient, paths: Paths, positions: Positions) -> None:
        if self._is_late():
            return
        try:
            plan = metadata.plan_load(
                session.node_id,
                paths.decode_node,
                paths.policy,
                len(positions),
                self._context.shape.block_bytes,
                self._context.spec.block_tokens,
                self._left_s(),
                relays=paths.relays,
            )
        except KVStoreError as error:
            self._context.incidents.report(client_metrics.READS_AHEAD_FAILED, "read ahead not planned", error)
            return
        # Reads ahead let loads go first, so they do not count in the queues that loads are planned by.
        metadata.report_loads({plan.plan_id: ()}, finished=True)
        self._ahead.use_plan(positions, plan)
        stored = storage_runs(self._runs, session.node_id)
        for part in plan.parts:
            if not self._ahead.plan_is_wanted or self._is_late():
                return
            node: NodeSession = session
            if part.node.node_id != session.node_id:
                try:
                    node = self._context.remote_sessions.session(part.node, min(OPEN_SESSION_S, self._left_s()))
                except KVStoreError as error:
                    message = f"read ahead failed at node {part.node.node_id}"
                    self._context.incidents.report(client_metrics.READS_AHEAD_FAILED, message, error)
                    continue
            self._call(node, positions[part.start : part.start + part.count], stored, planned=True)

    def _call(self, session: NodeSession, positions: Positions, runs: Sequence[Run], *, planned: bool) -> None:
        for start, stop in spans(positions):
            self._calls_left -= 1
            if self._calls_left < 0:
                if self._calls_left == -1:  # a read ahead is counted once
                    self._context.incidents.counters.add(client_metrics.READS_AHEAD_REFUSED)
                return
            part = self._chain.part(start, stop)
            request = node_pb2.LoadRequest(
                session_id=session.session_id,
                operation_id=new_operation_id(),
                keys=part.packed,
                sources=load_sources(runs, start, stop, storage=planned),
                parent=part.parent or b"",
                depth=part.depth,
            )
            begin = partial(start_call, session.stub.ReadAhead.future, request, timeout=self._left_s(), metadata=inject())
            try:
                call = self._ahead.begin_call(begin, planned=planned)
            except ValueError:  # the channel was closed
                return
            except ChannelBroken as error:
                if isinstance(session, RemoteSession):
                    self._context.remote_sessions.lost(session, error)
                elif isinstance(session, Session) and self._context.local is not None:
                    self._context.local.lost(session, error)
                return
            if call is None:
                return
            call.add_done_callback(partial(self._ended, session))

    def _is_late(self) -> bool:
        """Whether the deadline is over before all calls have begun, which is reported."""
        late = self._left_s() <= 0
        if late:
            self._context.incidents.report(client_metrics.READS_AHEAD_FAILED, "read ahead not begun in time")
        return late

    def _left_s(self) -> float:
        """Return what is left of the time for which nodes hold the blocks."""
        return self._end_s - self._context.clock.now_s()

    def _ended(self, session: NodeSession, done: grpc.Future[Any]) -> None:
        failed = None if done.cancelled() else done.exception()
        if not isinstance(failed, grpc.RpcError) or (code := cast("FailedCall", failed).code()) in _ENDED:
            return
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._context.incidents.counters.add(client_metrics.READS_AHEAD_REFUSED)
            return
        error = from_rpc_error(cast("FailedCall", failed))
        if isinstance(session, RemoteSession) and is_session_lost(error):
            self._context.remote_sessions.lost(session, error)  # sessions that are idle for long end
        self._context.incidents.report(client_metrics.READS_AHEAD_FAILED, "read ahead failed", error)


def _resident(runs: Sequence[Run], node_id: str) -> int:
    """Count the leading blocks that the lookup saw in the DRAM of a node."""
    reached = 0
    for run in sorted((run for run in runs if run.node_id == node_id and run.tier is Tier.DRAM), key=lambda run: run.start):
        if run.start > reached:
            break
        reached = max(reached, run.end)
    return reached
