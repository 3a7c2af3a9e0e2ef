"""The Node service over gRPC: a thin shell over table, sessions and loader.

What is pure memory work runs on the event loop; what may wait (room, disks, peers, the metadata server) runs in a bounded pool.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc
from kvstore.core.clock import Clock
from kvstore.core.errors import CapacityExceeded, InvalidArgument, Unsupported
from kvstore.core.limits import MAX_DEPTH, MAX_NAME_BYTES, MAX_REASON, MAX_TRANSFER_ID_BYTES
from kvstore.core.types import BlockKey, BlockRun, NodeId, OperationId, Outcome, SessionId
from kvstore.node.base.admission_gate import Gate
from kvstore.node.base.cancellation import Wanted, run_in_pool
from kvstore.node.control.drain import Drainer
from kvstore.node.control.pull import Puller
from kvstore.node.eviction.on_demand import evict_all_nvme
from kvstore.node.loads.layered import Stager
from kvstore.node.loads.loader import Loader, Part, Source, offsets_of
from kvstore.node.loads.locate import pin_stored, runs_of
from kvstore.node.loads.peers import PeerAddress
from kvstore.node.loads.prompt_wait import Prompts
from kvstore.node.loads.provider import runs_of_equal
from kvstore.node.loads.timings import LoadTimer, LoadTimings
from kvstore.node.rpc.sessions import Session, Sessions
from kvstore.node.rpc.wait_threads import WaitThreads
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.rpc.auth.interceptor import require_tenant, tenant
from kvstore.rpc.codec import check_id, check_name, keys_from_packed, run_from_proto, runs_from_proto, spec_from_proto
from kvstore.transport.tickets import TicketAuthority

Result = TypeVar("Result")
Context = Any  # grpc.aio.ServicerContext, generic in request and response

MAX_WAIT_S = 300.0
"""No call waits longer, whatever its deadline says."""
TICKET_VALID_S = 60.0
MAX_SOURCES = 4096
MAX_LOADS = 256
"""Loads block by block under way at once, but those of what lies in DRAM."""
MAX_WAITS = 256
"""Calls that wait for room, for disks or for the index at once."""
MAX_PROMPTS = 256
MAX_PULLED = 4_096
"""Keys that one call pulls."""
SHUT_PROMPT_S = 0.5
"""How long a prompt is awaited that nobody will bring any more: until what lies on NVMe here has been read."""
MAX_STAGED = 256
"""Loads in layer groups under way at once."""
SIGN_OF_LIFE_S = 0.2
"""How often a load that waits says so, and how many bytes have come in meanwhile."""
_RECEIVED = "transport_peer_bytes_received_total"


class NodeServicer(node_pb2_grpc.NodeServicer):
    """Handlers; errors are mapped by the server's interceptor."""

    def __init__(
        self,
        info: common_pb2.NodeInfo,
        namespaces: NamespaceRegistry,
        table: BlockTable,
        sessions: Sessions,
        loader: Loader,
        stager: Stager,
        prompts: Prompts,
        gate: Gate,
        puller: Puller,
        drainer: Drainer,
        replica_log: ReplicaChangeLog,
        authority: TicketAuthority,
        counters: Counters,
        clock: Clock,
        *,
        arena_socket: str,
        arena_bytes: int,
        arena_exposed: bool,
        stored_volumes: Sequence[node_pb2.StoredVolume],
        lease_ms: int,
        prefaulted: bool,
        io_engines: Callable[[], Sequence[str]],
        threads: int,
        timings: LoadTimings,
    ) -> None:
        self._info = info
        self._namespaces = namespaces
        self._table = table
        self._sessions = sessions
        self._loader = loader
        self._stager = stager
        self._prompts = prompts
        self._gate = gate
        self._puller = puller
        self._drainer = drainer
        self._log = replica_log
        self._authority = authority
        self._counters = counters
        self._clock = clock
        self._arena_socket = arena_socket
        self._arena_bytes = arena_bytes
        self._arena_exposed = arena_exposed
        self._stored_volumes = stored_volumes
        self._lease_ms = lease_ms
        self._prefaulted = prefaulted
        self._io_engines = io_engines
        self._timings = timings
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-node-rpc")
        self._load_threads = WaitThreads(MAX_LOADS, "loads", counters)
        self._layered_threads = WaitThreads(MAX_STAGED, "staged-loads", counters)
        self._prompt_threads = WaitThreads(MAX_PROMPTS, "prompts", counters)
        self._wait_threads = WaitThreads(MAX_WAITS, "waits", counters)
        self._ending: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Ends the pool; waits in it are bounded by their deadlines or ended by ``BlockTable.close``."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for threads in (self._load_threads, self._layered_threads, self._prompt_threads, self._wait_threads):
            threads.close()

    async def _apart(self, work: Callable[[], Result]) -> Result:
        """Work for operators and nodes that may take its time, in the pool: for as long as its call lives."""
        return await run_in_pool(self._pool, work)

    async def _waiting(self, work: Callable[[], Result]) -> Result:
        """What an engine waits for, in a thread of its own: it is in no other's way, however long it waits.

        Raises:
            CapacityExceeded: too many wait, of all or of the caller's tenant.
        """
        leave = self._wait_threads.acquire()
        try:
            return await run_in_pool(self._wait_threads.pool, work)
        finally:
            leave()

    def _deadline_s(self, context: Context) -> float:
        left_s = context.time_remaining()
        return self._clock.now_s() + (MAX_WAIT_S if left_s is None else max(0.0, min(left_s, MAX_WAIT_S)))

    def _session(self, session_id: bytes) -> Session:
        session = self._sessions.get(SessionId(check_id(session_id, "session_id")))
        spec = session.namespace.spec
        assert spec is not None, "sessions are opened with a spec"
        require_tenant(spec.tenant)
        return session

    # ---------------------------------------------------------------- who
    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Context) -> common_pb2.NodeInfo:  # noqa: N802, ARG002
        return self._info

    async def IssueTicket(  # noqa: N802
        self,
        request: node_pb2.IssueTicketRequest,
        context: Context,  # noqa: ARG002
    ) -> node_pb2.IssueTicketResponse:
        spec = spec_from_proto(request.spec)
        require_tenant(spec.tenant)
        namespace = self._namespaces.of_spec(spec)
        ticket = self._authority.issue(namespace.namespace_id, TICKET_VALID_S)
        return node_pb2.IssueTicketResponse(ticket=ticket, valid_for_ms=int(TICKET_VALID_S * 1000), boot_id=self._info.boot_id)

    async def OpenSession(  # noqa: N802
        self,
        request: node_pb2.OpenSessionRequest,
        context: Context,
    ) -> node_pb2.OpenSessionResponse:
        if len(request.client_name.encode()) > MAX_NAME_BYTES:
            raise InvalidArgument("client_name is too long", limit=MAX_NAME_BYTES)
        spec = spec_from_proto(request.spec)
        require_tenant(spec.tenant)
        namespace = self._namespaces.of_spec(spec)
        over_tcp = not context.peer().startswith("unix:")
        session = self._sessions.open(namespace, request.client_name, remote=request.remote, over_tcp=over_tcp)
        return node_pb2.OpenSessionResponse(
            session_id=session.session_id,
            arena_socket=self._arena_socket,
            arena_bytes=self._arena_bytes,
            lease_ms=self._lease_ms,
            node=self._info,
            prefaulted=self._prefaulted,
            arena_exposed=self._arena_exposed,
            stored_volumes=self._stored_volumes if _reads_here(session) else (),
        )

    # ---------------------------------------------------------------- store
    async def Prepare(self, request: node_pb2.PrepareRequest, context: Context) -> node_pb2.PrepareResponse:  # noqa: N802
        session = self._session(request.session_id)
        operation = OperationId(check_id(request.operation_id, "operation_id"))
        run: BlockRun = run_from_proto(request.blocks)
        if run.namespace != session.namespace.namespace_id:
            raise InvalidArgument("the run is of another namespace than the session")
        if request.heads and run.depth:
            raise InvalidArgument("heads of chains have no place behind others", depth=run.depth)
        wait_s = min(request.wait_ms / 1000, MAX_WAIT_S)
        deadline_s = min(self._deadline_s(context), self._clock.now_s() + wait_s)
        prepare = partial(self._sessions.prepare, session, operation, run, deadline_s, heads=request.heads)
        outcomes, offsets = await self._waiting(prepare) if wait_s else prepare()
        return node_pb2.PrepareResponse(outcomes=outcomes, offsets=offsets, draining=self._gate.shut)

    async def Complete(self, request: node_pb2.CompleteRequest, context: Context) -> node_pb2.CompleteResponse:  # noqa: N802
        session = self._session(request.session_id)
        operation = OperationId(check_id(request.operation_id, "operation_id"))
        keys = keys_from_packed(request.keys)
        row = session.namespace.shape.layers * 8
        if len(request.checksums) != len(keys) * row:
            raise InvalidArgument("one checksum a layer and key", keys=len(keys), bytes=len(request.checksums))
        checksums = [request.checksums[at : at + row] for at in range(0, len(request.checksums), row)]
        outcomes = self._sessions.complete(session, operation, keys, checksums)
        if request.wait_visible_ms:
            deadline_s = min(self._deadline_s(context), self._clock.now_s() + request.wait_visible_ms / 1000)
            visible = False
            with suppress(CapacityExceeded):  # it is stored, and not waited for
                visible = await self._waiting(lambda: self._log.wait_published([self._table.dram.volume_id], deadline_s))
            if not visible:
                self._counters.add("store_not_yet_visible_total")
        return node_pb2.CompleteResponse(outcomes=bytes(outcomes))

    async def Abort(self, request: node_pb2.AbortRequest, context: Context) -> node_pb2.AbortResponse:  # noqa: N802, ARG002
        operation = OperationId(check_id(request.operation_id, "operation_id"))
        self._sessions.abort(self._session(request.session_id), operation)
        return node_pb2.AbortResponse()

    # ---------------------------------------------------------------- load
    async def Load(self, request: node_pb2.LoadRequest, context: Context) -> AsyncIterator[node_pb2.LoadProgress]:  # noqa: N802
        session = self._session(request.session_id)
        keys = keys_from_packed(request.keys)
        block_bytes, draining = session.namespace.shape.block_bytes, self._gate.shut
        timer = self._timings.begin(len(keys), block_bytes, first_layer=request.first_layer, draining=draining)
        part = self._loader.resident(session.namespace, keys)
        if part is not None:  # all in DRAM: no thread, no window
            timer.ready(part)
            yield self._progress(session, part, want_checksums=request.want_checksums)
            timer.close()
            return
        parent = BlockKey(check_id(request.parent, "parent")) if request.parent else None
        if request.depth + len(keys) > MAX_DEPTH:
            raise InvalidArgument("chain too long", limit=MAX_DEPTH)
        place = {"parent": parent, "depth": request.depth, "sources": self._sources(request.sources)}
        deadline_s = self._deadline_s(context)
        if draining:  # what lies here is served; of the rest the caller asks those who have it
            named = place.pop("sources")
            parts = self._left_to_others(self._loader.load(session.namespace, keys, deadline_s, **place), named)  # type: ignore[arg-type]
            threads = self._load_threads
        elif request.layer_group:
            layers = session.namespace.shape.layers
            if request.first_layer >= layers:
                raise InvalidArgument("no such layer", first_layer=request.first_layer, layers=layers)
            groups = {"layer_group": min(request.layer_group, layers), "first_layer": request.first_layer}
            parts = self._stager.load(session.namespace, keys, deadline_s, **place, **groups)  # type: ignore[arg-type]
            threads = self._layered_threads
        else:
            parts = self._loader.load(session.namespace, keys, deadline_s, **place)  # type: ignore[arg-type]
            threads = self._load_threads
        try:
            async for progress in self._stream(session, parts, threads, timer, want_checksums=request.want_checksums):
                yield progress
        finally:
            timer.close()

    def _left_to_others(self, parts: Iterator[Part], sources: Sequence[Source]) -> Iterator[Part]:
        """The parts of a load that brings nothing here: what is missing and named elsewhere is UNAVAILABLE here, no miss."""
        try:
            for part in parts:
                for at, outcome in enumerate(part.outcomes):
                    position = part.first + at
                    if outcome is Outcome.MISS and any(one.start <= position < one.start + one.count for one in sources):
                        part.outcomes[at] = Outcome.UNAVAILABLE
                        self._counters.add("load_left_to_others_blocks_total")
                yield part
        finally:
            parts.close()  # type: ignore[attr-defined]  # a generator, by construction

    async def Locate(self, request: node_pb2.LocateRequest, context: Context) -> node_pb2.LocateResponse:  # noqa: N802, ARG002
        session = self._session(request.session_id)
        if not _reads_here(session):
            raise InvalidArgument("volumes are read by engines of this host, whose session is over the unix socket")
        found = pin_stored(self._table, session.namespace, keys_from_packed(request.keys))
        lease_id = self._sessions.lease(session, [block for _, block, _, _ in found]) if found else 0
        self._counters.add("located_blocks_total", len(found))
        return node_pb2.LocateResponse(runs=runs_of(found), lease_id=lease_id)

    async def AwaitPrompt(  # noqa: N802
        self, request: node_pb2.AwaitPromptRequest, context: Context
    ) -> AsyncIterator[node_pb2.LoadProgress]:
        session = self._session(request.session_id)
        check_id(request.operation_id, "operation_id")
        keys = keys_from_packed(request.keys)
        if request.transfer_id:
            _check_transfer_id(request.transfer_id)
        deadline_s = self._deadline_s(context)
        if request.wait_ms:
            deadline_s = min(deadline_s, self._clock.now_s() + request.wait_ms / 1000)
        if self._gate.shut:  # what is here is told at once; nothing more is to come here
            deadline_s = min(deadline_s, self._clock.now_s() + SHUT_PROMPT_S)
        parts = self._prompts.arrive(session.namespace, keys, deadline_s, request.transfer_id)
        async for progress in self._stream(session, parts, self._prompt_threads, None, want_checksums=request.want_checksums):
            yield progress

    async def AbandonPrompt(  # noqa: N802
        self,
        request: node_pb2.AbandonPromptRequest,
        context: Context,  # noqa: ARG002
    ) -> node_pb2.AbandonPromptResponse:
        _check_transfer_id(request.transfer_id)
        return node_pb2.AbandonPromptResponse(awaited=self._prompts.abandon(request.transfer_id, tenant()))

    async def _stream(
        self, session: Session, parts: Iterator[Part], threads: WaitThreads, timer: LoadTimer | None, *, want_checksums: bool
    ) -> AsyncIterator[node_pb2.LoadProgress]:
        """The parts of a load as they travel, each under a lease; what was waited for goes into the timer.

        The waiting for them is done in a thread of ``threads``, which are left when no thread works for the load any more. While
        the next part takes its time, a message without runs shows from time to time that a load waits, or that bytes still come
        in.

        Raises:
            CapacityExceeded: no lane is free, or the caller's tenant has its share of them.
        """
        leave = threads.acquire()
        began_s = self._clock.now_s()
        taken: Part | None = None
        turn = threading.Lock()  # `stop` comes after a `following` that still runs: not for long, for nobody wants it any more

        def following() -> Part | None:
            nonlocal taken
            with turn:
                taken = next(parts, None)
                return taken

        def stop() -> None:
            with turn:
                if taken is not None:
                    self._table.unpin(taken.pinned())
                parts.close()  # type: ignore[attr-defined]  # a generator, by construction

        loop = asyncio.get_running_loop()
        coming: asyncio.Future[Part | None] | None = None
        told = 0
        wanted = Wanted()
        request = wanted.context()  # `following` runs in other threads, for the same request
        if timer is not None:
            request.run(timer.peers.record_in_context)
        try:
            while True:
                coming = loop.run_in_executor(threads.pool, request.run, following)
                while not (await asyncio.wait((coming,), timeout=SIGN_OF_LIFE_S))[0]:
                    session.used_s = self._clock.now_s()
                    received = self._counters.get(_RECEIVED)
                    if received != told or timer is not None:  # an engine gives back what it holds when it hears of waiting
                        told = received
                        yield node_pb2.LoadProgress(bytes_received=received)
                part = coming.result()
                if part is None:
                    return
                granted_ms = int((self._clock.now_s() - began_s) * 1000)  # before the lease is: never too late
                taken = None  # from here on its pins are the lease's
                if timer is not None:
                    timer.ready(part)
                progress = self._progress(session, part, want_checksums=want_checksums)
                progress.granted_ms = granted_ms
                handed_s = self._clock.now_s()
                yield progress
                if timer is not None:
                    timer.delivered(handed_s)
        finally:
            wanted.end()  # the caller may have gone
            ending = loop.create_task(self._end_stream(coming, threads.pool, stop, leave))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end_stream(
        self,
        coming: asyncio.Future[Part | None] | None,
        pool: ThreadPoolExecutor,
        stop: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        """Gives back what a load still holds, once no thread drives it any more; until then none waits for that."""
        try:
            if coming is not None and not (await asyncio.wait((coming,)))[0].pop().cancelled():
                coming.exception()  # told where it was waited for, or of no interest to anybody
            with suppress(RuntimeError):  # the pool is closed: so is the table
                await asyncio.get_running_loop().run_in_executor(pool, stop)
        finally:
            leave()

    def _sources(self, sources: Sequence[node_pb2.LoadSource]) -> list[Source]:
        if len(sources) > MAX_SOURCES:
            raise InvalidArgument("too many sources", limit=MAX_SOURCES)
        mine = self._info.node_id
        return [
            Source(one.start, one.count, PeerAddress(NodeId(one.node_id), one.control_address, one.data_address), one.volume_id)
            for one in sources
            if one.node_id != mine
        ]

    def _progress(self, session: Session, part: Part, *, want_checksums: bool) -> node_pb2.LoadProgress:
        """A part as it travels. Its pins are the lease's, or, where this raises, given back."""
        pinned = part.pinned()
        lease_id = self._sessions.lease(session, pinned) if pinned else 0
        runs = []
        for start, end in runs_of_equal(part.outcomes):
            outcome = part.outcomes[start]
            run = node_pb2.LoadedRun(
                start=part.first + start, count=end - start, outcome=cast("common_pb2.Outcome", int(outcome))
            )
            if outcome is Outcome.HIT:
                blocks = [block for block in part.blocks[start:end] if block is not None]
                run.tier = cast("common_pb2.Tier", int(part.tier))
                run.source_node, run.offsets = part.node, offsets_of(blocks)
                run.first_layer, run.layer_count = part.first_layer, part.layer_count
                if want_checksums and part.sums is None:
                    run.checksums = b"".join([block.checksums for block in blocks])
                elif want_checksums and part.sums is not None:
                    hits = sum(one is Outcome.HIT for one in part.outcomes[:start])
                    run.checksums = part.sums[hits : hits + len(blocks)].astype("<u8", copy=False).tobytes()
            runs.append(run)
        return node_pb2.LoadProgress(runs=runs, lease_id=lease_id, bytes_received=self._counters.get(_RECEIVED))

    async def Release(self, request: node_pb2.ReleaseRequest, context: Context) -> node_pb2.ReleaseResponse:  # noqa: N802, ARG002
        self._sessions.release(self._session(request.session_id), request.lease_ids)
        return node_pb2.ReleaseResponse()

    # ---------------------------------------------------------------- care
    async def Flush(self, request: node_pb2.FlushRequest, context: Context) -> node_pb2.FlushResponse:  # noqa: N802
        deadline_s = min(self._deadline_s(context), self._clock.now_s() + request.timeout_ms / 1000)
        keys = keys_from_packed(request.keys)
        session = self._session(request.session_id) if keys else None
        mine = tenant()

        def flush() -> tuple[bool, int]:
            if session is None:
                return self._table.wait_written(deadline_s), self._table.not_durable(mine)
            self._table.requeue_writeback(session.namespace, keys)
            return self._table.wait_written(deadline_s), self._table.are_durable(keys).count(False)

        in_time, missing = await self._waiting(flush)
        counters = self._counters.snapshot() if mine is None else {}  # what others did is not a tenant's to know
        return node_pb2.FlushResponse(
            durable_blocks=counters.get("write_behind_blocks_total", 0),
            dropped_blocks=counters.get("write_behind_dropped_blocks_total", 0),
            complete=in_time and not missing,
            not_durable_blocks=missing,
            why="; ".join(
                f"{node_volume.volume_id} {why}" for node_volume in self._table.node_volumes if (why := node_volume.guard.why())
            )[:MAX_REASON],
        )

    async def Evict(self, request: node_pb2.EvictRequest, context: Context) -> node_pb2.EvictResponse:  # noqa: N802, ARG002
        check_id(request.operation_id, "operation_id")  # evicting twice is harmless
        if request.tier == common_pb2.TIER_DRAM:
            return node_pb2.EvictResponse(evicted_blocks=await self._apart(self._table.evict_dram))
        if request.tier == common_pb2.TIER_NVME:
            return node_pb2.EvictResponse(evicted_blocks=await self._apart(lambda: evict_all_nvme(self._table)))
        raise Unsupported("DRAM and NVMe can be evicted", tier=request.tier)

    async def PullBlocks(self, request: node_pb2.PullBlocksRequest, context: Context) -> node_pb2.PullBlocksResponse:  # noqa: N802
        check_id(request.operation_id, "operation_id")  # pulling twice is harmless: what is there is told so
        spec = spec_from_proto(request.spec)
        runs = runs_from_proto(request.runs, MAX_PULLED)
        if any(run.namespace != spec.namespace for run in runs):
            raise InvalidArgument("a run is of another namespace than the spec")
        address = PeerAddress(
            NodeId(check_name(request.node_id, "node_id")),
            check_name(request.control_address, "control_address"),
            check_name(request.data_address, "data_address"),
        )
        if address.node_id == self._info.node_id:
            raise InvalidArgument("a node has nothing to pull from itself", node_id=address.node_id)
        namespace, deadline_s = self._namespaces.of_spec(spec), self._deadline_s(context)
        outcomes, why = await self._apart(lambda: self._puller.pull(namespace, runs, address, deadline_s))
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
        counters["blocks"], counters["write_behind_waiting_blocks"] = self._table.counts()
        return node_pb2.GetNodeStatsResponse(
            node=self._info, counters=counters, tiers=tiers, io_engines=list(self._io_engines()), drain=self._drainer.progress()
        )


def _reads_here(session: Session) -> bool:
    """Whether its engine may be told where on this host's disks blocks lie."""
    return not session.remote and not session.over_tcp


def _check_transfer_id(transfer_id: str) -> None:
    if not 0 < len(transfer_id.encode()) <= MAX_TRANSFER_ID_BYTES:
        raise InvalidArgument("a transfer_id takes 1 to 64 bytes", bytes=len(transfer_id.encode()))
