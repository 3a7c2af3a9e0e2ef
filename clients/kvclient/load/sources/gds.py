"""Loads from the local node's disks straight into device memory, and from there to the buffer.

The node says which blocks are on its NVMe volumes and in no nearer tier, and keeps them there under a lease. The engine's own
pool, or its landing ring, reads them into device memory, without the node and its arena. Blocks that do not come this way are
left to the node, as all blocks are if such reads are only emulated. The bytes count as read by the local node, because they come
from its disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvclient.load.sink import BlockSink, LoadRequest, Mask, Positions, spans
from kvclient.memory.engine_pool import DiskLocations, DiskReader
from kvclient.nodes.local_session import LocalNode, Session, is_session_lost
from kvclient.results import PATH_LOCAL
from kvproto.v1 import node_pb2
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import Internal, KVStoreError
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.core.types import Outcome, Tier
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.rpc.client import call
from kvstore.rpc.codec import unpack_u64

CHUNK_BYTES = 256 << 20
"""Located, read and copied out of the pool at a time: enough to keep a disk busy, little enough for its lease."""
MIN_BLOCKS = 4
"""Shorter runs between others are left to the node: they would cut its part of the load into as many calls."""
MAX_FAILURES = 3
"""Blocks that failed, after which the rest is left to the node."""
_LOCATE_S = 1.0
_MIN_TIMEOUT_S = 0.001
_MAX_OFFSET = 1 << 60

Located = tuple[int, DiskLocations]
"""Position of the first of consecutive blocks, and their locations."""


class GdsSource:
    """The disks of the local node, read into device memory by GPUDirect Storage."""

    def __init__(self, reader: DiskReader, local: LocalNode) -> None:
        self._reader = reader
        self._local = local

    def fetch(self, request: LoadRequest, missing: Positions, sink: BlockSink) -> None:
        """See ``LoadSource``."""
        session = self._local.session()
        if session is None or not self._reader.accepts(request.buffer) or not self._reader.reads_disks(session.volumes):
            return
        with request.trace.phase("disks into device memory"):
            _DiskLoad(request, self._reader, self._local, session, sink).run(missing)
            sink.settle(missing)


class _DiskLoad:
    """One load from the disks of one session's node. ``run`` once."""

    def __init__(self, request: LoadRequest, reader: DiskReader, local: LocalNode, session: Session, sink: BlockSink) -> None:
        self._request = request
        self._context = request.context
        self._reader = reader
        self._local = local
        self._session = session
        self._sink = sink
        self._failures = 0

    def run(self, missing: Positions) -> None:
        """Load missing blocks that are on the node's disks."""
        chain = self._request.chain
        step = min(MAX_KEYS_PER_CALL, max(1, CHUNK_BYTES // self._context.shape.block_bytes))
        for start, stop in spans(missing[self._on_disk_only()[missing]]):
            for at in range(start, stop, step):
                if not self._may_continue():
                    return
                upto = min(stop, at + step)
                with self._locate(chain.part(at, upto), at) as located:
                    for first, locations in located:
                        last = first + len(locations.offsets)
                        if last - first >= MIN_BLOCKS or last == len(chain):
                            self._read(first, last, locations)

    def _may_continue(self) -> bool:
        reads = self._reader.reads_disks(self._session.volumes)
        return self._failures < MAX_FAILURES and not self._request.scope.ended and reads

    def _on_disk_only(self) -> Mask:
        """Return which blocks are on the node's disks and not in its DRAM, according to the lookup; all if it named no runs."""
        blocks = len(self._request.chain)
        if not self._request.runs:
            return np.ones(blocks, bool)
        stored, nearer = np.zeros(blocks, bool), np.zeros(blocks, bool)
        volume_ids = {volume.volume_id for volume in self._session.volumes}
        for run in self._request.runs:
            if run.volume_id in volume_ids:
                stored[run.start : run.end] = True
            elif run.node_id == self._session.node_id and run.tier is Tier.DRAM:
                nearer[run.start : run.end] = True
        only: Mask = stored & ~nearer
        return only

    @contextmanager
    def _locate(self, part: ChainSlice, start: int) -> Iterator[Sequence[Located]]:
        """Ask the node where blocks are on its disks. They stay there inside the ``with`` statement."""
        context, session = self._context, self._session
        request = node_pb2.LocateRequest(session_id=session.session_id, keys=part.packed)
        lease_ids: list[int] = []
        located: Sequence[Located] = ()
        try:
            timeout_s = min(_LOCATE_S, max(_MIN_TIMEOUT_S, self._request.scope.left_s()))
            answer = call(session.stub.Locate, request, timeout_s)
            lease_ids += [answer.lease_id] if answer.lease_id else []
            located = self._checked(answer, start, len(part))
        except (KVStoreError, ValueError) as error:  # ValueError: the channel was closed
            self._failures = MAX_FAILURES
            failure = error if isinstance(error, KVStoreError) else None
            context.incidents.report(client_metrics.LOCATE_FAILED, "local node did not locate blocks", failure)
            if failure is not None and is_session_lost(failure):
                self._local.lost(session, failure)
        try:
            yield located
        finally:
            if lease_ids:
                session.releaser.release(lease_ids)

    def _checked(self, answer: node_pb2.LocateResponse, start: int, count: int) -> Sequence[Located]:
        """Check an answer, which decides what is read from where."""
        located: list[Located] = []
        behind, volumes = 0, len(self._session.volumes)
        for run in answer.runs:
            numbers = np.frombuffer(run.volumes, np.uint8)
            if not run.count or not behind <= run.start <= run.start + run.count <= count or len(numbers) != run.count:
                raise Internal("the node located blocks that were not requested", start=run.start, count=run.count)
            offsets = unpack_u64(run.offsets, "offsets", run.count)
            generations = unpack_u64(run.generations, "generations", run.count)
            if int(numbers.max()) >= volumes or int(offsets.max()) > _MAX_OFFSET:
                raise Internal("the node located blocks outside its volumes", volumes=volumes)
            located.append((start + run.start, DiskLocations(numbers, offsets, generations)))
            behind = run.start + run.count
        return located

    def _read(self, first: int, last: int, locations: DiskLocations) -> None:
        """Read a run of blocks. Blocks that fail are skipped, up to the allowed number of failures."""
        request = self._request
        at = first
        while at < last and self._may_continue():
            rest = slice(at - first, last - first)
            part = request.chain.part(at, last)
            good = self._reader.fetch_stored(
                part.keys,
                part.parent,
                part.depth,
                self._session.volumes,
                DiskLocations(locations.volumes[rest], locations.offsets[rest], locations.generations[rest]),
                request.buffer,
                at,
                request.scope,
                verify=request.verify == "always",
            )
            self._sink.record(slice(at, at + good), Outcome.HIT, Tier.NVME, self._session.node_id, PATH_LOCAL)
            at += good
            if at < last:
                self._failures += 1
                at += 1  # left to the node
