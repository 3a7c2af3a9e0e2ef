"""The part of a load that comes from the local node's disks straight into the engine's own pool, and from there to its buffer.

The node says which blocks lie on its NVMe volumes and nowhere nearer, and keeps them there under a lease; the pool reads them
past the node and its arena, into its device's memory. What does not come so is left to the node, as everything is where such
reads are only pretended. What comes counts as read by the local node: it is its disk's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvclient.call.context import Core
from kvclient.call.operation import Operation
from kvclient.load.outcomes import Tally, spans
from kvclient.memory.engine_pool import NearBlocks, StoredPlaces
from kvclient.nodes.local_session import Session, means_lost
from kvclient.options import Verify
from kvclient.results import PATH_LOCAL, Run
from kvproto.v1 import node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import Internal, KVStoreError
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.core.types import KEY_BYTES, BlockKey, Outcome, Tier
from kvstore.rpc.client import call
from kvstore.rpc.codec import unpack_u64

CHUNK_BYTES = 256 << 20
"""Located, read and copied out of the pool at a time: enough to keep a disk busy, little enough for its lease and the pool."""
LEAST_BLOCKS = 4
"""Shorter stretches between others are left to the node: they would cut its part of the load into as many calls."""
MOST_FAILURES = 3
"""Blocks that did not come, after which the node is asked for all that is left."""
_LOCATE_S = 1.0
_LEAST_S = 0.001
_MOST_OFFSET = 1 << 60

Located = tuple[int, StoredPlaces]
"""Position of the first of some consecutive blocks, and where they lie."""


class StoredLoad:
    """Brings blocks into the tally and the buffer of a load. ``run`` once."""

    def __init__(
        self,
        core: Core,
        near: NearBlocks,
        session: Session,
        tally: Tally,
        buffer: BlockBuffer,
        operation: Operation,
        verify: Verify,
    ) -> None:
        self._core = core
        self._near = near
        self._session = session
        self._tally = tally
        self._buffer = buffer
        self._operation = operation
        self._verify = verify
        self._failures = 0

    def run(
        self, keys: Sequence[BlockKey], packed: bytes, runs: Sequence[Run], parent: BlockKey | None, depth: int
    ) -> npt.NDArray[np.intp]:
        """Loads what of the tally's blocks lies on the node's disks; arguments as of the load. Never raises for failures of ours.

        Returns:
            Positions of the blocks that came.
        """
        before = self._tally.outcomes == Outcome.HIT
        step = min(MAX_KEYS_PER_CALL, max(1, CHUNK_BYTES // self._core.shape.block_bytes))
        for start, end in spans(np.flatnonzero(self._worth_asking(runs))):
            for at in range(start, end, step):
                if not self._goes_on():
                    break
                upto = min(end, at + step)
                with self._located(packed, at, upto) as found:
                    for first, places in found:
                        if len(places.offsets) >= LEAST_BLOCKS or first + len(places.offsets) == len(keys):
                            self._read(keys, first, places, parent, depth)
        return np.flatnonzero((self._tally.outcomes == Outcome.HIT) & ~before)

    def _goes_on(self) -> bool:
        return self._failures < MOST_FAILURES and not self._operation.over and self._near.reads_disks(self._session.volumes)

    def _worth_asking(self, runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
        """Which blocks the index says to be on the node's disks and not in its DRAM; without it, all that are missing."""
        missing: npt.NDArray[np.bool_] = self._tally.outcomes != Outcome.HIT
        if not runs:
            return missing
        stored, nearer = np.zeros(len(missing), bool), np.zeros(len(missing), bool)
        ours = {volume.volume_id for volume in self._session.volumes}
        for run in runs:
            if run.volume_id in ours:
                stored[run.start : run.end] = True
            elif run.node_id == self._session.node_id and run.tier is Tier.DRAM:
                nearer[run.start : run.end] = True
        worth: npt.NDArray[np.bool_] = missing & stored & ~nearer
        return worth

    @contextmanager
    def _located(self, packed: bytes, start: int, stop: int) -> Iterator[Sequence[Located]]:
        """Asks the node where blocks ``[start, stop)`` lie; those that it names stay there within the context."""
        core, session = self._core, self._session
        request = node_pb2.LocateRequest(session_id=session.session_id, keys=packed[start * KEY_BYTES : stop * KEY_BYTES])
        lease_ids: list[int] = []
        found: Sequence[Located] = ()
        try:
            answer = call(session.stub.Locate, request, min(_LOCATE_S, max(_LEAST_S, self._operation.left_s())))
            lease_ids += [answer.lease_id] if answer.lease_id else []
            found = self._checked(answer, start, stop)
        except (KVStoreError, ValueError) as error:  # ValueError: the channel was closed under us
            self._failures = MOST_FAILURES
            failure = error if isinstance(error, KVStoreError) else None
            core.incidents.report("client_locate_failed_total", "the local node does not say where blocks lie", failure)
            if core.local is not None and failure is not None and means_lost(failure):
                core.local.lost(session, failure)
        try:
            yield found
        finally:
            if lease_ids:
                session.returner.release(lease_ids)

    def _checked(self, answer: node_pb2.LocateResponse, start: int, stop: int) -> Sequence[Located]:
        """What the node answered: it steers what is read where."""
        found: list[Located] = []
        behind, volumes = 0, len(self._session.volumes)
        for run in answer.runs:
            numbers = np.frombuffer(run.volumes, np.uint8)
            if not run.count or not behind <= run.start <= run.start + run.count <= stop - start or len(numbers) != run.count:
                raise Internal("the node locates blocks that were not asked for", start=run.start, count=run.count)
            offsets = unpack_u64(run.offsets, "offsets", run.count)
            generations = unpack_u64(run.generations, "generations", run.count)
            if int(numbers.max()) >= volumes or int(offsets.max()) > _MOST_OFFSET:
                raise Internal("the node locates blocks outside its volumes", volumes=volumes)
            found.append((start + run.start, StoredPlaces(numbers, offsets, generations)))
            behind = run.start + run.count
        return found

    def _read(self, keys: Sequence[BlockKey], first: int, places: StoredPlaces, parent: BlockKey | None, depth: int) -> None:
        """Reads a stretch; what fails within it is passed over, as often as failures are borne with."""
        near, tally, session = self._near, self._tally, self._session
        end = first + len(places.offsets)
        at = first
        while at < end and self._goes_on():
            rest = slice(at - first, end - first)
            good = near.fetch_stored(
                keys[at:end],
                keys[at - 1] if at else parent,
                depth + at,
                session.volumes,
                StoredPlaces(places.volumes[rest], places.offsets[rest], places.generations[rest]),
                self._buffer,
                at,
                self._operation,
                verify=self._verify == "always",
            )
            tally.record(slice(at, at + good), Outcome.HIT, Tier.NVME, tally.node_number(session.node_id), PATH_LOCAL)
            at += good
            if at < end:
                self._failures += 1
                at += 1  # that one is the node's
