"""Reads ahead: the node of this host brings found blocks into its DRAM while their request still waits in the engine's queue.

    ahead = client.read_ahead(lookup)
    ...                                  # the request waits
    result = client.load(lookup, buffer)
    if ahead is not None:
        ahead.end()

The node reads them while no load is reading, within a budget of its arena (``node.read_ahead``), and holds them until the
call ends. Nothing here waits. Blocks that could not be read ahead are read by the load itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import grpc

from kvclient.call.arguments import check_seconds
from kvclient.load.sources.node_stream import load_sources
from kvclient.nodes.local_session import new_operation_id
from kvproto.v1 import node_pb2
from kvstore.core.types import Tier
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.observe.tracing import inject
from kvstore.rpc.errors import FailedCall, from_rpc_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvclient.call.context import ClientContext
    from kvclient.results import Run
    from kvstore.core.chain import ChainSlice

_ENDED = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class ReadAhead:
    """Blocks that the local node reads ahead and holds."""

    def __init__(self, call: grpc.Future[Any]) -> None:
        self._call = call

    @property
    def ended(self) -> bool:
        """Whether the node has ended the call: its deadline is over, or it was refused or lost."""
        return bool(self._call.done())

    def end(self) -> None:
        """Have the node release the blocks soon. Idempotent; does not wait."""
        self._call.cancel()


def read_ahead(context: ClientContext, chain: ChainSlice, runs: Sequence[Run], deadline_s: float | None) -> ReadAhead | None:
    """Start to read ahead. None: all blocks are in the DRAM of this host, or the client is without a local node.

    Args:
        context: the client's parts.
        chain: the blocks.
        runs: their replicas.
        deadline_s: how long the node holds them at most, in seconds from now; None: the option ``default_deadline_s``.

    Raises:
        InvalidArgument: ``deadline_s`` is not a number of seconds.
    """
    timeout_s = check_seconds("deadline_s", context.options.default_deadline_s if deadline_s is None else deadline_s)
    session = context.local.session() if context.local is not None else None
    if not len(chain) or session is None or _resident(runs, session.node_id) >= len(chain):
        return None
    others = sorted((run for run in runs if run.node_id != session.node_id), key=lambda run: run.distance)
    request = node_pb2.LoadRequest(
        session_id=session.session_id,
        operation_id=new_operation_id(),
        keys=chain.packed,
        sources=load_sources(others, 0, len(chain), storage=False),
        parent=chain.parent or b"",
        depth=chain.depth,
    )
    counters, incidents = context.incidents.counters, context.incidents
    try:
        call = session.stub.ReadAhead.future(request, timeout=timeout_s, metadata=inject())
    except ValueError:  # the channel was closed
        return None

    def ended(done: grpc.Future[Any]) -> None:
        failed = None if done.cancelled() else done.exception()
        if not isinstance(failed, grpc.RpcError) or (code := cast("FailedCall", failed).code()) in _ENDED:
            return
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            counters.add(client_metrics.READS_AHEAD_REFUSED)
            return
        error = from_rpc_error(cast("FailedCall", failed))
        incidents.report(client_metrics.READS_AHEAD_FAILED, "read ahead failed", error)

    counters.add(client_metrics.READS_AHEAD)
    call.add_done_callback(ended)
    return ReadAhead(call)


def _resident(runs: Sequence[Run], node_id: str) -> int:
    """Count the leading blocks that the lookup saw in the DRAM of a node."""
    reached = 0
    for run in sorted((run for run in runs if run.node_id == node_id and run.tier is Tier.DRAM), key=lambda run: run.start):
        if run.start > reached:
            break
        reached = max(reached, run.end)
    return reached
