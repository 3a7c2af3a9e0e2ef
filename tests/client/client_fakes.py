"""A node and a metadata server with scripted answers, over real gRPC, sockets and a memfd arena.

The client under test runs unchanged: only the servers on the other side of its sockets are fakes.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvclient import Lookup
from kvclient.results import NodeRef, Run
from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc
from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import KVStoreError, LeaseLost, NotFound
from kvstore.core.spec import CacheSpec
from kvstore.core.types import (
    BlockKey,
    BlockShape,
    BootId,
    NamespaceId,
    NodeId,
    Outcome,
    SessionId,
    StoreOutcome,
    Tier,
    VolumeId,
    unpack_keys,
)
from kvstore.observe.counters import Counters
from kvstore.rpc.errors import abort_arguments
from kvstore.transport.contract import BlockProvider, ReadPart, ReadRequest, WriteGrant, WriteRequest
from kvstore.transport.shm import ArenaServer
from kvstore.transport.tcp.server import TcpServer
from kvstore.transport.tickets import TicketAuthority
from support.chains import token_chain

LoadScript = Callable[[node_pb2.LoadRequest, grpc.ServicerContext], Iterator[node_pb2.LoadProgress]]
PromptScript = Callable[[node_pb2.AwaitPromptRequest, grpc.ServicerContext], Iterator[node_pb2.LoadProgress]]
PlanScript = Callable[[metadata_pb2.PlanLoadRequest], metadata_pb2.LoadPlan]
ResidentScript = Callable[[node_pb2.LoadRequest, grpc.ServicerContext], node_pb2.LoadProgress]


class SkewedClock:
    """The real clock, which tests can advance."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return time.monotonic() + self.ahead_s


def payload_of(key: BlockKey, shape: BlockShape) -> bytes:
    """Return the bytes of the block of a key."""
    return np.random.default_rng(int.from_bytes(key, "little")).bytes(shape.block_bytes)


def payloads(keys: Sequence[BlockKey], shape: BlockShape) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of some blocks, ``[blocks, block_bytes]``."""
    return np.frombuffer(b"".join(payload_of(key, shape) for key in keys), np.uint8).reshape(len(keys), shape.block_bytes)


class Blocks:
    """Blocks of one fake node."""

    def __init__(self, shape: BlockShape) -> None:
        self.shape = shape
        self.held: dict[BlockKey, bytes] = {}

    def hold(self, keys: Sequence[BlockKey]) -> None:
        self.held.update((key, payload_of(key, self.shape)) for key in keys)


class FakeProvider(BlockProvider):
    """The provider of a fake node's data plane."""

    def __init__(self, blocks: Blocks, namespace: NamespaceId) -> None:
        self._blocks = blocks
        self._namespace = namespace
        self.reads = 0
        self.before_read: Callable[[ReadRequest], None] | None = None

    def shape(self, namespace: NamespaceId) -> BlockShape | None:
        return self._blocks.shape if namespace == self._namespace else None

    def read(self, request: ReadRequest) -> Iterator[ReadPart]:
        self.reads += 1
        if self.before_read is not None:
            self.before_read(request)
        found = [self._blocks.held.get(key) for key in request.keys]
        views = [memoryview(one) for one in found if one is not None]
        sums = b"".join(layer_checksums(view, self._blocks.shape) for view in views)
        checksums = np.frombuffer(sums, "<u8").reshape(len(views), self._blocks.shape.layers)
        outcomes = [Outcome.MISS if one is None else Outcome.HIT for one in found]
        yield ReadPart(0, outcomes, views, checksums, Tier.DRAM, lambda: None)

    def write(self, request: WriteRequest) -> WriteGrant:
        return FakeGrant(self._blocks, request)


class FakeGrant(WriteGrant):
    def __init__(self, blocks: Blocks, request: WriteRequest) -> None:
        self._blocks = blocks
        self.outcomes = [StoreOutcome.EXISTS if key in blocks.held else StoreOutcome.STORED for key in request.run.keys]
        self._keys = [key for key, outcome in zip(request.run.keys, self.outcomes, strict=True) if outcome is StoreOutcome.STORED]
        self._memory = [bytearray(blocks.shape.block_bytes) for _ in self._keys]
        self.views = [memoryview(one) for one in self._memory]

    def commit(self, checksums: Any, good: Sequence[bool]) -> Sequence[StoreOutcome]:
        for key, memory, fine in zip(self._keys, self._memory, good, strict=True):
            if fine:
                self._blocks.held[key] = bytes(memory)
        return [StoreOutcome.STORED if fine else StoreOutcome.CORRUPT for fine in good]

    def abort(self) -> None:
        pass


def abort(error: KVStoreError, context: grpc.ServicerContext) -> None:
    code, message, metadata = abort_arguments(error)
    context.set_trailing_metadata(metadata)
    context.abort(code, message)


class FakeNode(node_pb2_grpc.NodeServicer):
    """One node. Scripts replace its answers; ``fail`` makes a method raise an error."""

    def __init__(
        self, folder: Path, spec: CacheSpec, node_id: str = "near", *, arena_bytes: int = 8 << 20, lease_ms: int = 5_000
    ) -> None:
        self.spec, self.node_id, self.lease_ms = spec, node_id, lease_ms
        self.blocks = Blocks(spec.shape)
        self.socket = folder / f"{node_id}.sock"
        self._arena_path = folder / f"{node_id}.arena"
        self._arena_bytes = arena_bytes
        self.fail: dict[str, KVStoreError] = {}
        self.calls: list[tuple[str, Any]] = []
        self.called = threading.Condition()
        self.load_script: LoadScript | None = None
        self.prompt_script: PromptScript | None = None
        self.all_resident = False
        """Whether ``LoadResident`` answers for blocks that are held; otherwise none is in the arena."""
        self.resident_script: ResidentScript | None = None
        self.prepare_script: Callable[[node_pb2.PrepareRequest], node_pb2.PrepareResponse | None] = lambda _: None
        self.complete_script: Callable[[node_pb2.CompleteRequest], node_pb2.CompleteResponse | None] = lambda _: None
        self.hint_script: Callable[[node_pb2.HintRequest], None] = lambda _: None
        self.forgets_sessions = False
        """Whether a hint finds its session ended, however new that is."""
        self.provider = FakeProvider(self.blocks, spec.namespace)
        self.start()

    # ---- life ----
    def start(self) -> None:
        self._running = True
        self.boot_id = BootId(secrets.token_bytes(16))
        self._fd = os.memfd_create(self.node_id)
        os.ftruncate(self._fd, self._arena_bytes)
        self.arena = mmap.mmap(self._fd, self._arena_bytes)
        self._next_offset = 0
        self._leases = itertools.count(1)
        self.prepared: dict[bytes, dict[BlockKey, int]] = {}
        self.completed: dict[tuple[bytes, bytes], node_pb2.CompleteResponse] = {}
        self.sessions: set[bytes] = set()
        self.left: list[bytes] = []
        self.arena_server = ArenaServer(self._arena_path, self._hand_out, self._leave, counters=Counters())
        self.arena_server.start()
        authority = TicketAuthority(secrets.token_bytes(32), self.boot_id, MonotonicClock())
        self._authority = authority
        self.data = TcpServer(self.provider, authority=authority)
        self.data.start()
        self.data_address = self.data.address
        self._server = grpc.server(ThreadPoolExecutor(16))
        node_pb2_grpc.add_NodeServicer_to_server(self, self._server)
        self.socket.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        """Stop as if killed, and lose everything in memory. No effect if it was stopped before."""
        if not self._running:
            return
        self._running = False
        self._server.stop(None).wait(5)
        self.arena_server.stop()
        self.data.stop()
        self.arena.close()
        os.close(self._fd)
        self.blocks.held.clear()

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def info(self) -> common_pb2.NodeInfo:
        return common_pb2.NodeInfo(
            node_id=self.node_id,
            boot_id=self.boot_id,
            roles=["prefill"],
            control_address=f"127.0.0.1:{self.port}",
            data_address=self.data_address,
            local_socket=self.address,
            volumes=[common_pb2.VolumeInfo(volume_id=f"{self.node_id}/dram", tier=common_pb2.TIER_DRAM, capacity_bytes=1 << 20)],
        )

    def _hand_out(self, session: SessionId) -> tuple[int, int] | None:
        return (self._fd, self._arena_bytes) if session in self.sessions else None

    def _leave(self, session: SessionId) -> None:
        with self.called:
            self.left.append(session)
            self.called.notify_all()

    def _enter(self, name: str, request: Any, context: grpc.ServicerContext) -> None:
        with self.called:
            self.calls.append((name, request))
            self.called.notify_all()
        if (error := self.fail.get(name)) is not None:
            abort(error, context)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def wait_called(self, name: str, times: int = 1) -> None:
        with self.called:
            assert self.called.wait_for(lambda: self.names().count(name) >= times, 10), self.names()

    # ---- who ----
    def GetNode(self, request: Any, context: grpc.ServicerContext) -> common_pb2.NodeInfo:  # noqa: N802
        return self.info

    def IssueTicket(self, request: Any, context: grpc.ServicerContext) -> node_pb2.IssueTicketResponse:  # noqa: N802
        self._enter("IssueTicket", request, context)
        ticket = self._authority.issue(self.spec.namespace, 60.0)
        return node_pb2.IssueTicketResponse(ticket=ticket, boot_id=self.boot_id)

    def OpenSession(self, request: Any, context: grpc.ServicerContext) -> node_pb2.OpenSessionResponse:  # noqa: N802
        self._enter("OpenSession", request, context)
        session = secrets.token_bytes(16)
        self.sessions.add(session)
        return node_pb2.OpenSessionResponse(
            session_id=session,
            arena_socket=str(self._arena_path),
            arena_bytes=self._arena_bytes,
            lease_ms=self.lease_ms,
            node=self.info,
        )

    # ---- loads ----
    def place(self, data: bytes) -> int:
        """Puts bytes into the arena; where. Never the same place twice, until it is full."""
        offset = self._next_offset
        self._next_offset = (offset + len(data) + 4095) // 4096 * 4096
        if self._next_offset > self._arena_bytes:
            offset, self._next_offset = 0, (len(data) + 4095) // 4096 * 4096
        self.arena[offset : offset + len(data)] = data
        return offset

    def progress(
        self,
        keys: Sequence[BlockKey],
        start: int = 0,
        *,
        checksums: bool = False,
        source: str | None = None,
        tier: int = Tier.DRAM,
    ) -> node_pb2.LoadProgress:
        """A message that answers these keys, at positions from ``start`` on: hits where held, else misses."""
        runs = []
        for position, key in enumerate(keys, start):
            data = self.blocks.held.get(key)
            if data is None:
                runs.append(node_pb2.LoadedRun(start=position, count=1, outcome=common_pb2.OUTCOME_MISS))
                continue
            offsets = self.place(data).to_bytes(8, "little")
            sums = layer_checksums(memoryview(data), self.spec.shape) if checksums else b""
            runs.append(
                node_pb2.LoadedRun(
                    start=position,
                    count=1,
                    outcome=common_pb2.OUTCOME_HIT,
                    tier=tier,
                    source_node=source or self.node_id,
                    offsets=offsets,
                    checksums=sums,
                )
            )
        return node_pb2.LoadProgress(runs=runs, lease_id=next(self._leases))

    def Load(self, request: node_pb2.LoadRequest, context: grpc.ServicerContext) -> Iterator[node_pb2.LoadProgress]:  # noqa: N802
        self._enter("Load", request, context)
        if self.load_script is not None:
            yield from self.load_script(request, context)
        else:
            yield self.progress(unpack_keys(request.keys), checksums=request.want_checksums)

    def AwaitPrompt(  # noqa: N802
        self, request: node_pb2.AwaitPromptRequest, context: grpc.ServicerContext
    ) -> Iterator[node_pb2.LoadProgress]:
        """Without a script no prompt ever arrives: the call ends when the client ends it."""
        if self.prompt_script is not None:
            yield from self.prompt_script(request, context)
            return
        ended = threading.Event()
        if context.add_callback(ended.set):
            self._enter("AwaitPrompt", request, context)
            assert ended.wait(30)
        yield from ()

    def LoadResident(self, request: node_pb2.LoadRequest, context: grpc.ServicerContext) -> node_pb2.LoadProgress:  # noqa: N802
        self._enter("LoadResident", request, context)
        if self.resident_script is not None:
            return self.resident_script(request, context)
        keys = unpack_keys(request.keys)
        if not self.all_resident or not all(key in self.blocks.held for key in keys):
            return node_pb2.LoadProgress()
        return self.progress(keys, checksums=request.want_checksums)

    def ReadAhead(self, request: node_pb2.LoadRequest, context: grpc.ServicerContext) -> node_pb2.ReadAheadResponse:  # noqa: N802
        self._enter("ReadAhead", request, context)
        return node_pb2.ReadAheadResponse()

    def Hint(self, request: node_pb2.HintRequest, context: grpc.ServicerContext) -> node_pb2.HintResponse:  # noqa: N802
        self._enter("Hint", request, context)
        if self.forgets_sessions or request.session_id not in self.sessions:
            abort(LeaseLost("the session has ended; open another"), context)
        self.hint_script(request)
        return node_pb2.HintResponse()

    def Release(self, request: Any, context: grpc.ServicerContext) -> node_pb2.ReleaseResponse:  # noqa: N802
        self._enter("Release", request, context)
        return node_pb2.ReleaseResponse()

    # ---- stores ----
    def Prepare(self, request: node_pb2.PrepareRequest, context: grpc.ServicerContext) -> node_pb2.PrepareResponse:  # noqa: N802
        self._enter("Prepare", request, context)
        if (scripted := self.prepare_script(request)) is not None:
            return scripted
        keys = unpack_keys(request.blocks.keys)
        outcomes = [StoreOutcome.EXISTS if key in self.blocks.held else StoreOutcome.STORED for key in keys]
        slots = {
            key: self.place(bytes(self.spec.block_bytes))
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome is StoreOutcome.STORED
        }
        self.prepared[request.operation_id] = slots
        return node_pb2.PrepareResponse(
            outcomes=bytes(outcomes), offsets=b"".join(offset.to_bytes(8, "little") for offset in slots.values())
        )

    def Complete(self, request: node_pb2.CompleteRequest, context: grpc.ServicerContext) -> node_pb2.CompleteResponse:  # noqa: N802
        self._enter("Complete", request, context)
        if (scripted := self.complete_script(request)) is not None:
            return scripted
        repeated = self.completed.get((request.operation_id, request.keys))
        if repeated is not None:  # like a node's: a slow machine makes clients ask again
            return repeated
        outcomes = []
        size = self.spec.block_bytes
        for number, key in enumerate(unpack_keys(request.keys)):
            offset = self.prepared[request.operation_id].pop(key)
            data = self.arena[offset : offset + size]
            row = self.spec.layers * 8
            good = layer_checksums(memoryview(data), self.spec.shape) == request.checksums[number * row : (number + 1) * row]
            outcomes.append(StoreOutcome.STORED if good else StoreOutcome.CORRUPT)
            if good:
                self.blocks.held[key] = data
        response = self.completed[request.operation_id, request.keys] = node_pb2.CompleteResponse(outcomes=bytes(outcomes))
        return response

    def Abort(self, request: node_pb2.AbortRequest, context: grpc.ServicerContext) -> node_pb2.AbortResponse:  # noqa: N802
        self._enter("Abort", request, context)
        return node_pb2.AbortResponse()

    def Flush(self, request: Any, context: grpc.ServicerContext) -> node_pb2.FlushResponse:  # noqa: N802
        self._enter("Flush", request, context)
        return node_pb2.FlushResponse(complete=True)


class FakeMetadata(metadata_pb2_grpc.MetadataServicer):
    """A metadata server that answers lookups from ``runs``: (start, count, node)."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.nodes: list[FakeNode] = []
        self.runs: list[tuple[int, int, FakeNode]] = []
        self.fail: KVStoreError | None = None
        self.calls: list[str] = []
        self.lookups: list[metadata_pb2.LookupRequest] = []
        self.plan_script: PlanScript = lambda _: metadata_pb2.LoadPlan(plan_id=1)
        self.reports: list[metadata_pb2.LoadReport] = []
        self.forgotten: list[int] = []
        """Plans that it does not know."""
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(64))
        metadata_pb2_grpc.add_MetadataServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait(5)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _enter(self, name: str, context: grpc.ServicerContext) -> None:
        self.calls.append(name)
        if self.fail is not None:
            abort(self.fail, context)

    def RegisterNamespace(self, request: Any, context: grpc.ServicerContext) -> metadata_pb2.RegisterNamespaceResponse:  # noqa: N802
        self._enter("RegisterNamespace", context)
        return metadata_pb2.RegisterNamespaceResponse(namespace_id=self.spec.namespace)

    def ListNodes(self, request: Any, context: grpc.ServicerContext) -> metadata_pb2.ListNodesResponse:  # noqa: N802
        self._enter("ListNodes", context)
        return metadata_pb2.ListNodesResponse(nodes=[metadata_pb2.NodeStatus(node=node.info, alive=True) for node in self.nodes])

    def Lookup(self, request: metadata_pb2.LookupRequest, context: grpc.ServicerContext) -> metadata_pb2.LookupResponse:  # noqa: N802
        self._enter("Lookup", context)
        self.lookups.append(request)
        count = len(request.keys) // 16
        nodes = list({node.node_id: node for _, _, node in self.runs}.values())
        runs = [
            metadata_pb2.ReplicaRun(start=start, count=min(length, count - start), node=nodes.index(node), volume=0)
            for start, length, node in self.runs
            if start < count
        ]
        hit = max((run.start + run.count for run in runs), default=0)
        return metadata_pb2.LookupResponse(hit_blocks=hit, runs=runs, nodes=[node.info for node in nodes])

    def PlanLoad(self, request: metadata_pb2.PlanLoadRequest, context: grpc.ServicerContext) -> metadata_pb2.LoadPlan:  # noqa: N802
        self._enter("PlanLoad", context)
        return self.plan_script(request)

    def ReplanLoad(self, request: Any, context: grpc.ServicerContext) -> metadata_pb2.LoadPlan:  # noqa: N802
        """Answer as a server that has forgotten the plan."""
        self._enter("ReplanLoad", context)
        abort(NotFound("the plan has ended"), context)
        raise AssertionError("abort raises")

    def ReportLoads(  # noqa: N802
        self, request: metadata_pb2.ReportLoadsRequest, context: grpc.ServicerContext
    ) -> metadata_pb2.ReportLoadsResponse:
        self._enter("ReportLoads", context)
        self.reports += request.loads
        return metadata_pb2.ReportLoadsResponse(forgotten=self.forgotten)


def found(spec: CacheSpec, blocks: int, *runs: tuple[int, int, FakeNode]) -> Lookup:
    """A lookup of blocks that volumes of these nodes have: (start, count, node)."""

    def node(one: FakeNode) -> NodeRef:
        return NodeRef(NodeId(one.node_id), one.info.control_address, one.data_address)

    made = tuple(Run(start, count, node(one), Tier.NVME, VolumeId("v")) for start, count, one in runs)
    return Lookup(token_chain(spec, blocks), blocks, made)


def plan_of(far: FakeNode, blocks: int) -> metadata_pb2.LoadPlan:
    """A plan by which one node reads all blocks."""
    whole = metadata_pb2.PlanPart(
        count=blocks, side=metadata_pb2.READ_SIDE_DECODE, node_id=far.node_id, control_address=far.info.control_address
    )
    return metadata_pb2.LoadPlan(plan_id=1, parts=[whole])
