"""The Node service over gRPC: a thin shell over table, sessions and loaders.

Work in memory runs on the event loop. Work that may wait (for slots, disks, peers, the metadata server) runs in bounded pools.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc
from kvstore.core.cancel_scope import run_in_pool
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import CapacityExceeded, InvalidArgument, Unavailable, Unsupported
from kvstore.core.limits import (
    MAX_DEPTH,
    MAX_NAME_BYTES,
    MAX_REASON,
    MAX_SOURCES,
    MAX_SOURCES_PER_BLOCK,
    MAX_TRANSFER_ID_BYTES,
)
from kvstore.core.types import BlockKey, BlockRun, NodeId, OperationId, SessionId, Tier, VolumeId
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.loads.locate import located_runs, pin_stored
from kvstore.node.loads.peers import PeerAddress
from kvstore.node.loads.runs import BlockRequest, Runs, SourceRange
from kvstore.node.loads.timings import LoadTimer
from kvstore.node.rpc.hint_request import apply_hint
from kvstore.node.rpc.load_stream import LoadStreams
from kvstore.node.rpc.parts import NodeParts
from kvstore.node.rpc.sessions import Session
from kvstore.node.rpc.wait_threads import WaitThreads
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.rpc.auth.interceptor import require_tenant, tenant
from kvstore.rpc.codec import check_id, check_name, keys_from_packed, run_from_proto, runs_from_proto, spec_from_proto

_limited = LimitedLog(logging.getLogger(__name__))
Result = TypeVar("Result")
Context = Any  # grpc.aio.ServicerContext, generic in request and response

MAX_WAIT_S = 300.0
"""Upper bound of every call's deadline."""
TICKET_VALID_S = 60.0

MAX_LOADS = 256
"""Maximum number of concurrent loads of whole blocks, apart from those served from DRAM."""
MAX_LAYERED_LOADS = 256
"""Maximum number of concurrent loads in layer groups."""
MAX_WAITS = 256
"""Maximum number of concurrent calls that wait for slots, disks or the index."""
MAX_PROMPTS = 256
"""Maximum number of concurrent waits for prompts."""
MAX_READS_AHEAD = 32
"""Maximum number of concurrent calls of ``ReadAhead``."""
MAX_PULLED = 4_096
"""Maximum number of keys per call of ``PullBlocks``."""
CLOSED_PROMPT_WAIT_S = 0.5
"""How long a node that rejects new blocks waits for a prompt: enough to read blocks from its own volumes."""


class NodeServicer(node_pb2_grpc.NodeServicer):
    """The handlers. The server's interceptor maps errors to status codes."""

    def __init__(self, parts: NodeParts) -> None:
        self._parts = parts
        self._info = parts.info
        self._table = parts.table
        self._sessions = parts.sessions
        self._loader = parts.loader
        self._gate = parts.gate
        self._counters = counters = parts.counters
        self._clock = parts.clock
        self._log = parts.replica_log
        self._timings = parts.timings
        self._pool = ThreadPoolExecutor(parts.config.load_threads * 2, thread_name_prefix="kvstore-node-rpc")
        self._load_threads = WaitThreads(MAX_LOADS, "loads", counters)
        self._layered_threads = WaitThreads(MAX_LAYERED_LOADS, "layered-loads", counters)
        self._prompt_threads = WaitThreads(MAX_PROMPTS, "prompts", counters)
        self._ahead_threads = WaitThreads(MAX_READS_AHEAD, "reads-ahead", counters)
        self._wait_threads = WaitThreads(MAX_WAITS, "waits", counters)
        self._streams = LoadStreams(parts.table, parts.sessions, parts.clock)

    def close(self) -> None:
        """Shut the pools down without waiting: deadlines or ``BlockTable.close`` end the calls in them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for threads in (
            self._load_threads,
            self._layered_threads,
            self._prompt_threads,
            self._ahead_threads,
            self._wait_threads,
        ):
            threads.close()

    def _stored_volumes(self) -> list[node_pb2.StoredVolume]:
        """Return the volumes of this node with their folders."""
        return [
            node_pb2.StoredVolume(volume_id=node_volume.volume_id, path=str(node_volume.folder.absolute()))
            for node_volume in self._table.node_volumes
            if node_volume.folder is not None
        ]

    async def _run_in_pool(self, work: Callable[[], Result]) -> Result:
        """Run slow work for operators and other nodes, until the call ends."""
        return await run_in_pool(self._pool, work)

    def _deadline_s(self, context: Context) -> float:
        left_s = context.time_remaining()
        return self._clock.now_s() + (MAX_WAIT_S if left_s is None else max(0.0, min(left_s, MAX_WAIT_S)))

    def _session(self, session_id: bytes) -> Session:
        session = self._sessions.get(SessionId(check_id(session_id, "session_id")))
        spec = session.namespace.spec
        assert spec is not None, "sessions are opened with a spec"
        require_tenant(spec.tenant)
        return session

    # ---------------------------------------------------------------- sessions
    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Context) -> common_pb2.NodeInfo:  # noqa: N802, ARG002
        return self._info

    async def IssueTicket(  # noqa: N802
        self,
        request: node_pb2.IssueTicketRequest,
        context: Context,  # noqa: ARG002
    ) -> node_pb2.IssueTicketResponse:
        spec = spec_from_proto(request.spec)
        require_tenant(spec.tenant)
        namespace = self._parts.namespaces.of_spec(spec)
        ticket = self._parts.authority.issue(namespace.namespace_id, TICKET_VALID_S)
        return node_pb2.IssueTicketResponse(ticket=ticket, boot_id=self._info.boot_id)

    async def OpenSession(  # noqa: N802
        self,
        request: node_pb2.OpenSessionRequest,
        context: Context,
    ) -> node_pb2.OpenSessionResponse:
        if len(request.client_name.encode()) > MAX_NAME_BYTES:
            raise InvalidArgument("client_name is too long", limit=MAX_NAME_BYTES)
        spec = spec_from_proto(request.spec)
        require_tenant(spec.tenant)
        self._table.dram.allocate(spec.shape, 0)  # refuses blocks that do not fit the empty arena
        namespace = self._parts.namespaces.of_spec(spec)
        over_tcp = not context.peer().startswith("unix:")
        session = self._sessions.open(namespace, request.client_name, remote=request.remote, over_tcp=over_tcp)
        stored_volumes = self._stored_volumes() if _may_read_volumes(session) else []
        session.volume_ids = [VolumeId(volume.volume_id) for volume in stored_volumes]
        return node_pb2.OpenSessionResponse(
            session_id=session.session_id,
            arena_socket=self._parts.arena_socket,
            arena_bytes=self._parts.arena_bytes,
            lease_ms=self._parts.config.lease_ms,
            node=self._info,
            prefaulted=self._parts.config.prefault,
            arena_exposed=self._parts.nixl.exposes,
            stored_volumes=stored_volumes,
        )

    # ---------------------------------------------------------------- store
    async def Prepare(self, request: node_pb2.PrepareRequest, context: Context) -> node_pb2.PrepareResponse:  # noqa: N802
        session = self._session(request.session_id)
        operation = OperationId(check_id(request.operation_id, "operation_id"))
        run: BlockRun = run_from_proto(request.blocks)
        if run.namespace != session.namespace.namespace_id:
            raise InvalidArgument("the run must have the namespace of the session")
        if request.heads and run.depth:
            raise InvalidArgument("`heads` requires depth 0", depth=run.depth)
        wait_s = min(request.wait_ms / 1000, MAX_WAIT_S)
        deadline_s = min(self._deadline_s(context), self._clock.now_s() + wait_s)
        prepare = partial(self._sessions.prepare, session, operation, run, deadline_s, heads=request.heads)
        outcomes, offsets = await self._wait_threads.run(prepare) if wait_s else prepare()
        return node_pb2.PrepareResponse(outcomes=outcomes, offsets=offsets, draining=self._gate.closed)

    async def Complete(self, request: node_pb2.CompleteRequest, context: Context) -> node_pb2.CompleteResponse:  # noqa: N802
        session = self._session(request.session_id)
        operation = OperationId(check_id(request.operation_id, "operation_id"))
        keys = keys_from_packed(request.keys)
        row = session.namespace.shape.layers * 8
        if len(request.checksums) != len(keys) * row:
            raise InvalidArgument(
                "checksums must have 8 bytes per layer and key", keys=len(keys), layers=row // 8, bytes=len(request.checksums)
            )
        checksums = [request.checksums[at : at + row] for at in range(0, len(request.checksums), row)]
        outcomes = self._sessions.complete(session, operation, keys, checksums)
        if request.wait_visible_ms:
            deadline_s = min(self._deadline_s(context), self._clock.now_s() + request.wait_visible_ms / 1000)
            visible = False
            with suppress(CapacityExceeded, Unavailable):  # the blocks are stored; the caller does not wait
                visible = await self._wait_threads.run(lambda: self._log.wait_published([self._table.dram.volume_id], deadline_s))
            if not visible:
                self._counters.add(node_metrics.STORE_NOT_YET_VISIBLE)
        return node_pb2.CompleteResponse(outcomes=bytes(outcomes))

    async def Abort(self, request: node_pb2.AbortRequest, context: Context) -> node_pb2.AbortResponse:  # noqa: N802, ARG002
        operation = OperationId(check_id(request.operation_id, "operation_id"))
        self._sessions.abort(self._session(request.session_id), operation)
        return node_pb2.AbortResponse()

    # ---------------------------------------------------------------- load
    async def Load(self, request: node_pb2.LoadRequest, context: Context) -> AsyncIterator[node_pb2.LoadProgress]:  # noqa: N802
        session = self._session(request.session_id)
        blocks = self._block_request(session, request, self._deadline_s(context))
        with closing(self._timer(session, request, blocks)) as timer:
            resident = self._loader.load_resident(blocks)
            if resident is not None:  # all in DRAM: the load needs no thread
                timer.ready(resident)
                yield self._streams.message(session, resident, want_checksums=request.want_checksums)
                return
            runs, threads = self._begin_load(blocks)
            async for message in self._streams.stream(session, runs, threads, timer, want_checksums=request.want_checksums):
                yield message

    async def LoadResident(self, request: node_pb2.LoadRequest, context: Context) -> node_pb2.LoadProgress:  # noqa: N802
        session = self._session(request.session_id)
        blocks = self._block_request(session, request, self._deadline_s(context))
        if self._clock.now_s() >= blocks.deadline_s:  # the client has left, and would not release a lease
            return node_pb2.LoadProgress()
        timer = self._timer(session, request, blocks)  # before the wait for the block table
        resident = self._loader.load_resident(blocks)
        if resident is None:
            self._counters.add(node_metrics.LOADS_NOT_RESIDENT)
            return node_pb2.LoadProgress()
        with closing(timer):
            timer.ready(resident)
            return self._streams.message(session, resident, want_checksums=request.want_checksums)

    async def ReadAhead(self, request: node_pb2.LoadRequest, context: Context) -> node_pb2.ReadAheadResponse:  # noqa: N802
        blocks = self._block_request(self._session(request.session_id), request, self._deadline_s(context))
        if self._gate.closed:
            return node_pb2.ReadAheadResponse()
        hold = partial(self._parts.ahead.hold, replace(blocks, layer_group=0, first_layer=0))
        return node_pb2.ReadAheadResponse(bytes_read=await self._ahead_threads.run(hold))

    async def Hint(self, request: node_pb2.HintRequest, context: Context) -> node_pb2.HintResponse:  # noqa: N802, ARG002
        session = self._session(request.session_id)
        try:
            hints, namespace, near = self._parts.hints, session.namespace, not session.remote
            return await self._parts.hint_calls.run(lambda: apply_hint(hints, namespace, request, read_ahead=near))
        except (InvalidArgument, Unsupported, CapacityExceeded):
            self._counters.add(node_metrics.HINTS_REJECTED)
            raise

    def _timer(self, session: Session, request: node_pb2.LoadRequest, blocks: BlockRequest) -> LoadTimer:
        block_bytes = session.namespace.shape.block_bytes
        return self._timings.begin(len(blocks.chain), block_bytes, first_layer=request.first_layer, draining=self._gate.closed)

    def _begin_load(self, blocks: BlockRequest) -> tuple[Runs, WaitThreads]:
        """Return the runs of a load, and the threads that wait for them."""
        if ignored := blocks.sources_ignored():
            self._counters.add(node_metrics.LOAD_SOURCES_IGNORED, ignored)
            _limited.warning("load sources ignored: too many per block (ignored=%d, most=%d)", ignored, MAX_SOURCES_PER_BLOCK)
        if self._gate.closed:  # the client reads blocks of other nodes there
            return self._loader.load_local(blocks), self._load_threads
        if blocks.layer_group:
            return self._parts.layered.load(blocks), self._layered_threads
        return self._loader.load(blocks), self._load_threads

    def _block_request(self, session: Session, request: node_pb2.LoadRequest, deadline_s: float) -> BlockRequest:
        parent = BlockKey(check_id(request.parent, "parent")) if request.parent else None
        chain = ChainSlice(session.namespace.namespace_id, request.keys, parent, request.depth, heads=request.heads)
        if not chain.heads and request.depth + len(chain) > MAX_DEPTH:
            raise InvalidArgument("the chain is too deep", depth=request.depth, keys=len(chain), limit=MAX_DEPTH)
        layers = session.namespace.shape.layers
        if request.layer_group and request.first_layer >= layers:
            raise InvalidArgument(
                "first_layer must be below the number of layers", first_layer=request.first_layer, layers=layers
            )
        return BlockRequest(
            session.namespace,
            chain,
            deadline_s,
            load_sources(request.sources, self._info.node_id),
            layer_group=request.layer_group,
            first_layer=request.first_layer,
        )

    async def Locate(self, request: node_pb2.LocateRequest, context: Context) -> node_pb2.LocateResponse:  # noqa: N802, ARG002
        session = self._session(request.session_id)
        if not _may_read_volumes(session):
            raise InvalidArgument("only an engine of this host with a session over the unix socket may read its volumes")
        found = pin_stored(self._table, session.namespace, keys_from_packed(request.keys), session.volume_ids)
        lease_id = self._sessions.lease(session, [block for _, block, _, _ in found]) if found else 0
        self._counters.add(node_metrics.LOCATED_BLOCKS, len(found))
        return node_pb2.LocateResponse(runs=located_runs(found), lease_id=lease_id)

    async def AwaitPrompt(  # noqa: N802
        self, request: node_pb2.AwaitPromptRequest, context: Context
    ) -> AsyncIterator[node_pb2.LoadProgress]:
        session = self._session(request.session_id)
        check_id(request.operation_id, "operation_id")
        chain = ChainSlice(session.namespace.namespace_id, request.keys)
        if request.transfer_id:
            _check_transfer_id(request.transfer_id)
        deadline_s = self._deadline_s(context)
        if request.wait_ms:
            deadline_s = min(deadline_s, self._clock.now_s() + request.wait_ms / 1000)
        if self._gate.closed:  # no further blocks will arrive
            deadline_s = min(deadline_s, self._clock.now_s() + CLOSED_PROMPT_WAIT_S)
        runs = self._parts.prompts.wait(BlockRequest(session.namespace, chain, deadline_s), request.transfer_id)
        async for message in self._streams.stream(
            session, runs, self._prompt_threads, None, want_checksums=request.want_checksums
        ):
            yield message

    async def AbandonPrompt(  # noqa: N802
        self,
        request: node_pb2.AbandonPromptRequest,
        context: Context,  # noqa: ARG002
    ) -> node_pb2.AbandonPromptResponse:
        _check_transfer_id(request.transfer_id)
        return node_pb2.AbandonPromptResponse(awaited=self._parts.prompts.abandon(request.transfer_id, tenant()))

    async def Release(self, request: node_pb2.ReleaseRequest, context: Context) -> node_pb2.ReleaseResponse:  # noqa: N802, ARG002
        self._sessions.release(self._session(request.session_id), request.lease_ids)
        return node_pb2.ReleaseResponse()

    # ---------------------------------------------------------------- durability, eviction, drain
    async def Flush(self, request: node_pb2.FlushRequest, context: Context) -> node_pb2.FlushResponse:  # noqa: N802
        deadline_s = min(self._deadline_s(context), self._clock.now_s() + request.timeout_ms / 1000)
        keys = keys_from_packed(request.keys)
        session = self._session(request.session_id) if keys else None
        of_tenant = tenant()

        def flush() -> tuple[bool, int]:
            if session is None:
                return self._table.wait_written(deadline_s), self._table.not_durable(of_tenant)
            self._table.requeue_writeback(filter(None, self._table.find(session.namespace, keys)))
            return self._table.wait_written(deadline_s), self._table.are_durable(keys).count(False)

        in_time, missing = await self._wait_threads.run(flush)
        counters = self._counters.snapshot() if of_tenant is None else {}  # totals include other tenants
        return node_pb2.FlushResponse(
            durable_blocks=counters.get(node_metrics.WRITE_BACK_BLOCKS, 0),
            dropped_blocks=counters.get(node_metrics.WRITE_BACK_DROPPED_BLOCKS, 0),
            complete=in_time and not missing,
            not_durable_blocks=missing,
            why="; ".join(
                f"{node_volume.volume_id} {why}" for node_volume in self._table.node_volumes if (why := node_volume.guard.why())
            )[:MAX_REASON],
        )

    async def Evict(self, request: node_pb2.EvictRequest, context: Context) -> node_pb2.EvictResponse:  # noqa: N802, ARG002
        check_id(request.operation_id, "operation_id")  # a retry evicts again, which does no harm
        if request.tier not in (common_pb2.TIER_DRAM, common_pb2.TIER_NVME):
            raise Unsupported("only DRAM and NVMe can be evicted", tier=request.tier)
        tier = Tier.DRAM if request.tier == common_pb2.TIER_DRAM else Tier.NVME
        return node_pb2.EvictResponse(evicted_blocks=await self._run_in_pool(lambda: evict_tier(self._table, tier)))

    async def PullBlocks(self, request: node_pb2.PullBlocksRequest, context: Context) -> node_pb2.PullBlocksResponse:  # noqa: N802
        check_id(request.operation_id, "operation_id")  # a retry finds the blocks: EXISTS
        spec = spec_from_proto(request.spec)
        runs = runs_from_proto(request.runs, MAX_PULLED)
        if any(run.namespace != spec.namespace for run in runs):
            raise InvalidArgument("every run must have the namespace of the spec")
        address = PeerAddress(
            NodeId(check_name(request.node_id, "node_id")),
            check_name(request.control_address, "control_address"),
            check_name(request.data_address, "data_address"),
        )
        if address.node_id == self._info.node_id:
            raise InvalidArgument("a node cannot pull from itself", node_id=address.node_id)
        namespace, deadline_s = self._parts.namespaces.of_spec(spec), self._deadline_s(context)
        outcomes, why = await self._run_in_pool(
            lambda: self._parts.puller.pull(
                namespace, runs, address, deadline_s, second_copy=request.second_copy, may_evict=request.may_evict
            )
        )
        return node_pb2.PullBlocksResponse(outcomes=bytes(outcomes), why=why[:MAX_REASON])

    async def GetNodeStats(  # noqa: N802
        self,
        request: node_pb2.GetNodeStatsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> node_pb2.GetNodeStatsResponse:
        tiers = []
        for volume in (self._table.dram, *(node_volume.volume for node_volume in self._table.node_volumes)):
            usage = volume.usage()
            tiers.append(
                node_pb2.TierUsage(
                    volume_id=volume.volume_id,
                    tier=cast("common_pb2.Tier", int(volume.tier)),
                    capacity_bytes=usage.capacity_bytes,
                    used_bytes=usage.used_bytes,
                    blocks=usage.blocks,
                )
            )
        counters = dict(self._counters.snapshot())
        counters["sessions"] = self._sessions.count()
        counters["blocks"], counters["write_back_waiting_blocks"] = self._table.counts()
        return node_pb2.GetNodeStatsResponse(
            node=self._info,
            counters=counters,
            tiers=tiers,
            io_engines=list(self._parts.io_engines()),
            drain=self._parts.drainer.progress(),
        )


def _may_read_volumes(session: Session) -> bool:
    """Return whether the session's engine may read this host's volumes directly."""
    return not session.remote and not session.over_tcp


def _check_transfer_id(transfer_id: str) -> None:
    size = len(transfer_id.encode())
    if not 0 < size <= MAX_TRANSFER_ID_BYTES:
        raise InvalidArgument("transfer_id must have 1 to 64 bytes", bytes=size)


def load_sources(sources: Sequence[node_pb2.LoadSource], home: str) -> list[SourceRange]:
    """Return the sources of a load, without those that name the node itself (``home``).

    Raises:
        InvalidArgument: there are too many, or one has an invalid node id, which would be shown in findings.
    """
    if len(sources) > MAX_SOURCES:
        raise InvalidArgument("too many sources", sources=len(sources), limit=MAX_SOURCES)
    return [
        SourceRange(
            source.start,
            source.count,
            PeerAddress(NodeId(check_name(source.node_id, "node_id")), source.control_address, source.data_address),
            source.volume_id,
        )
        for source in sources
        if source.node_id != home
    ]
