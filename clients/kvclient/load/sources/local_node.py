"""The part of a load that goes through the local node: its arena is mapped here, so a block costs one copy.

Blocks that ``Load`` answers are leased: they stay put for ``lease_s`` from some moment after the call was sent. The clock is
read *after* each copy; if the lease may have ended by then, the bytes may be another block's and do not count.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import grpc
import numpy as np
import numpy.typing as npt

from kvclient.call.context import Core
from kvclient.call.operation import Operation
from kvclient.load.layer_progress import LayerBoard
from kvclient.load.outcomes import Tally, spans
from kvclient.memory.device_buffer import FarBlocks
from kvclient.nodes.local_session import Session, means_lost, new_operation_id
from kvclient.options import Verify
from kvclient.results import PATH_LOCAL, PATH_PREFILL, Outcomes, Run, outcome_table
from kvproto.v1 import node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import DeadlineExceeded, Internal, KVStoreError, Unavailable
from kvstore.core.types import KEY_BYTES, BlockKey, Outcome, Tier
from kvstore.observe.context import inject
from kvstore.rpc.codec import unpack_u64
from kvstore.rpc.errors import FailedCall, from_rpc_error

MAX_SOURCES = 4_096
"""Runs that one load names to the node; more than these are left out (a node reads at most so many)."""
_LAYERWISE_ARENA_SHARE = 4
"""A layer-wise load holds all its blocks until its end; beyond 1/4 of the arena it is done block by block instead, and so is what
is left of one that waits: what it holds may keep the very room that it waits for, or that another such load does."""
COPY_THREADS = 2
"""Copy what lies in DRAM already: one reaches about half of what the memory gives."""
FINAL_LOCALLY = outcome_table(Outcome.MISS, Outcome.CORRUPT, Outcome.TIMEOUT)
"""Answers of the local node after which nobody else is asked: it has asked the others itself."""
_OUTCOMES = frozenset(map(int, Outcome))
_TIERS = frozenset(map(int, Tier))


@dataclass(frozen=True, slots=True)
class _Leased:
    """Consecutive blocks that lie in the arena."""

    first: int
    offsets: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64] | None
    tier: int
    node: str
    good: npt.NDArray[np.bool_]

    @property
    def count(self) -> int:
        return len(self.offsets)


class LocalLoad:
    """Loads through one session into the tally and the buffer of a load."""

    def __init__(
        self,
        core: Core,
        session: Session,
        tally: Tally,
        buffer: BlockBuffer,
        operation: Operation,
        verify: Verify,
        board: LayerBoard | None,
    ) -> None:
        self._core = core
        self._session = session
        self._tally = tally
        self._buffer = buffer
        self._operation = operation
        self._far = buffer if isinstance(buffer, FarBlocks) else None
        self._want_checksums = session.verifies_copies(verify)
        self._step = max(1, core.options.copy_chunk_bytes // core.shape.block_bytes)
        """Blocks copied between two looks at the clock; a device is waited for as often, so it gets all there is at once."""
        self._layerwise = board is not None and self._fits_layerwise(len(tally.outcomes))
        self._board = board
        self._leased: list[_Leased] = []  # layer-wise: what is copied layer by layer after the stream
        self._lease_ids: list[int] = []
        self._lease_bytes = 0
        self._lease_end_s = 0.0
        self._expired: list[tuple[int, int]] = []
        self._over = False

    def _fits_layerwise(self, blocks: int) -> bool:
        size = blocks * self._core.shape.block_bytes
        if size <= min(self._session.arena.size // _LAYERWISE_ARENA_SHARE, self._core.options.load_chunk_bytes):
            return True
        self._core.incidents.counters.add("client_layerwise_too_large_total")
        return False

    def run(self, packed: bytes, runs: Sequence[Run], parent: BlockKey | None, depth: int) -> None:
        """Loads the blocks of the tally that are no hits yet. Never raises for failures of ours."""
        missing = spans(np.flatnonzero(self._tally.outcomes != Outcome.HIT))
        piece = max(1, self._core.options.load_chunk_bytes // self._core.shape.block_bytes)
        pieces = [(at, min(end, at + piece)) for start, end in missing for at in range(start, end, piece)]
        sources = [run for run in runs if run.node_id != self._session.node_id]
        try:
            with self._session.used():
                for start, stop in pieces:
                    self._load(packed, sources, parent, depth, start, stop)
                    expired, self._expired = self._expired, []
                    if expired and self._board is not None and not self._board.restart(_positions(expired)):
                        expired = []
                    for begin, end in _joined(expired):
                        self._load(packed, sources, parent, depth, begin, end)
                    if self._over:
                        break
        except KVStoreError as error:
            self._failed(error)

    # ---- one call ----
    def _load(self, packed: bytes, sources: Sequence[Run], parent: BlockKey | None, depth: int, start: int, stop: int) -> None:
        """Asks for blocks ``[start, stop)`` and copies what comes."""
        operation, session = self._operation, self._session
        if self._over or operation.over:
            self._unanswered(start, stop, Outcome.TIMEOUT)
            return
        before = packed[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else parent or b""
        request = node_pb2.LoadRequest(
            session_id=session.session_id,
            operation_id=new_operation_id(),
            keys=packed[start * KEY_BYTES : stop * KEY_BYTES],
            sources=_sources(sources, start, stop),
            want_checksums=self._want_checksums,
            parent=before,
            depth=depth + start,
        )
        answered = np.zeros(stop - start, bool)
        self._lease_end_s = self._core.clock.now_s() + session.lease_s - self._core.options.lease_margin_s
        try:
            with closing(self._stream(request)) as stream:
                for progress in stream:
                    if not self._take(progress, start, answered):
                        break
            if self._layerwise:
                self._copy_layers(start + np.flatnonzero(answered))
        finally:
            self._settle()  # whatever ended it: nobody may have the leases back before
            self._give_back()
            if not answered.all():
                fate = Outcome.TIMEOUT if operation.over else Outcome.UNAVAILABLE
                for first, last in spans(np.flatnonzero(~answered)):
                    self._unanswered(start + first, start + last, fate)

    def _stream(self, request: node_pb2.LoadRequest) -> Generator[node_pb2.LoadProgress, None, None]:
        """The progress of a call, until it ends or fails; a failure is noted, and ends it."""
        try:
            stream = self._session.stub.Load(request, timeout=self._operation.left_s(), metadata=inject())
        except ValueError:  # the channel was closed under us
            self._over = True
            return
        with self._operation.on_cancel(stream.cancel):
            try:
                with self._session.server.waiting(stream.cancel):
                    yield from stream
            except Unavailable as hung:
                self._failed(hung)
            except grpc.RpcError as failed:
                self._failed(from_rpc_error(cast("FailedCall", failed)))
            finally:
                stream.cancel()  # no effect where it has ended

    def _failed(self, error: KVStoreError) -> None:
        """The call, and with it this way of loading, is over."""
        self._over = True
        if self._operation.over or isinstance(error, DeadlineExceeded):
            self._tally.note(self._operation.error())
            return
        self._tally.note(error)
        if means_lost(error) and self._core.local is not None and not self._session.server.hung:
            self._core.local.lost(self._session, error)
        else:
            self._core.incidents.report("client_local_load_failed_total", "the local node refused a load", error)

    # ---- what it answers ----
    def _take(self, progress: node_pb2.LoadProgress, base: int, answered: npt.NDArray[np.bool_]) -> bool:
        """Handles one message: checks it, copies what is leased, gives the lease back. False: time is over."""
        if progress.lease_id:
            self._lease_ids.append(progress.lease_id)
        shape = self._core.shape
        for run in progress.runs:
            start, count, outcome, tier = run.start, run.count, int(run.outcome), int(run.tier)
            if count == 0 or start + count > len(answered) or outcome not in _OUTCOMES:
                raise Internal("the node answers for blocks that were not asked for", start=start, count=count, outcome=outcome)
            if outcome != Outcome.HIT:
                answered[start : start + count] = True
                self._tally.outcomes[base + start : base + start + count] = outcome
                continue
            offsets = unpack_u64(run.offsets, "offsets", count)
            if int(offsets.max()) + shape.block_bytes > self._session.arena.size or tier not in _TIERS:
                raise Internal("the node answers with blocks outside its arena", tier=tier)
            checksums = None
            if self._want_checksums:
                checksums = unpack_u64(run.checksums, "checksums", count * shape.layers).reshape(count, shape.layers)
            answered[start : start + count] = True
            leased = _Leased(base + start, offsets, checksums, tier, run.source_node, np.ones(count, bool))
            if self._layerwise:
                self._leased.append(leased)
                self._copy(leased, 0, count, 0, 1)  # layer 0 at once: the later messages are waited for anyway
            else:
                self._copy_blocks(leased)
            self._lease_bytes += count * shape.block_bytes
        if self._leased and not progress.runs:
            self._stop_layers()
        if not self._layerwise:
            self._give_back()
        return not self._over

    def _stop_layers(self) -> None:
        """The node has nothing yet of what is to come: what is held is copied whole and goes; so does what comes from here on."""
        self._core.incidents.counters.add("client_layerwise_held_up_total")
        self._layerwise = False
        leased, self._leased = self._leased, []
        for one in leased:
            self._copy_blocks(one)

    def _settle(self) -> None:
        """Waits for a device's copies out of the arena."""
        if self._far is not None:
            self._far.drain()

    def _give_back(self) -> None:
        """What was copied may go: also what is to come may be waiting for its room."""
        if self._lease_ids:
            self._session.returner.release(self._lease_ids, self._lease_bytes)
            self._lease_ids, self._lease_bytes = [], 0

    def _copy_blocks(self, leased: _Leased) -> None:
        """Copies Full Blocks, piece by piece, so that deadline and cancellation are seen in between."""
        step = self._step if self._far is None else leased.count
        for at in range(0, leased.count, step):
            if self._operation.over:
                self._unanswered(leased.first + at, leased.first + leased.count, Outcome.TIMEOUT)
                self._over = True
                return
            upto = min(leased.count, at + step)
            self._copy(leased, at, upto, 0, self._core.shape.layers)
            self._settle()
            self._count(leased, at, upto)

    def _copy(self, leased: _Leased, at: int, upto: int, first_layer: int, layer_count: int) -> None:
        """Copies layers of some blocks and, where asked, checks what was copied."""
        first = leased.first + at
        # what a disk or a peer brings comes slower than one thread copies: a second would only take time from who brings it
        threads = COPY_THREADS if leased.tier == Tier.DRAM and leased.node == self._session.node_id else 1
        arena, offsets = self._session.arena, leased.offsets[at:upto]
        if self._far is not None:
            arena.begin_copy_out(offsets, self._far, first, first_layer, layer_count)
        else:
            arena.copy_out(offsets, self._buffer, first, first_layer, layer_count, threads)
        if leased.checksums is not None:
            wanted = leased.checksums[at:upto, first_layer : first_layer + layer_count]
            leased.good[at:upto] &= ~arena.differing(offsets, self._buffer, first, first_layer, wanted)

    def _count(self, leased: _Leased, at: int, upto: int) -> None:
        """Counts copied blocks as hits, unless the lease may have ended while they were copied."""
        if self._core.clock.now_s() > self._lease_end_s:
            self._lease_over(leased.first + at, leased.first + upto)
        else:
            self._record(leased, at, upto)

    def _record(self, leased: _Leased, at: int, upto: int) -> None:
        outcomes: Outcomes | Outcome = Outcome.HIT
        if leased.checksums is not None:
            outcomes = np.where(leased.good[at:upto], np.uint8(Outcome.HIT), np.uint8(Outcome.CORRUPT))
        node = self._tally.node_number(leased.node)
        path = PATH_LOCAL if leased.node == self._session.node_id else PATH_PREFILL
        self._tally.record(slice(leased.first + at, leased.first + upto), outcomes, leased.tier, node, path)

    def _lease_over(self, first: int, last: int) -> None:
        self._unanswered(first, last, Outcome.UNAVAILABLE)
        self._expired.append((first, last))
        self._core.incidents.report(
            "client_lease_expired_blocks_total", "blocks were copied too late to trust them", amount=last - first
        )

    # ---- layer by layer ----
    def _copy_layers(self, answered: npt.NDArray[np.intp]) -> None:
        """Copies the layers behind the first one, each over all blocks, and tells the board of them as they are there.

        What was not answered, or failed in a way that another node may make good, is left open, and nothing is announced
        until it is settled.
        """
        leased, self._leased = self._leased, []
        board = self._board
        assert board is not None
        here = _positions([(one.first, one.first + one.count) for one in leased])
        board.lost(np.setdiff1d(answered[FINAL_LOCALLY[self._tally.outcomes[answered]]], here))
        for layer in range(self._core.shape.layers):
            if self._operation.over:
                self._over = True
                for one in leased:
                    self._unanswered(one.first, one.first + one.count, Outcome.TIMEOUT)
                return
            if layer:
                for one in leased:
                    self._copy(one, 0, one.count, layer, 1)
            if self._core.clock.now_s() > self._lease_end_s:
                for one in leased:
                    self._lease_over(one.first, one.first + one.count)
                return
            if leased:
                good = np.concatenate([one.good for one in leased])
                board.lost(here[~good])  # a corrupt block is asked of nobody else
                board.arrived(here[good], layer, 1)
        self._settle()
        if self._far is not None and self._core.clock.now_s() > self._lease_end_s:
            for one in leased:  # layers that an engine has seen by now count no more: the result says so
                self._lease_over(one.first, one.first + one.count)
            return
        for one in leased:
            self._record(one, 0, one.count)

    def _unanswered(self, start: int, stop: int, fate: Outcome) -> None:
        """Blocks that did not come, and why."""
        self._tally.outcomes[start:stop] = fate
        if fate is Outcome.TIMEOUT:
            self._tally.note(self._operation.error())


def _positions(stretches: Sequence[tuple[int, int]]) -> npt.NDArray[np.intp]:
    """The positions in some stretches, in the order of these."""
    return np.concatenate([np.empty(0, np.intp), *(np.arange(first, last) for first, last in stretches)])


def _joined(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches in order, neighbours made one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(stretches):
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def _sources(runs: Sequence[Run], start: int, stop: int) -> list[node_pb2.LoadSource]:
    """The part of some runs that lies in ``[start, stop)``, as positions from ``start`` on."""
    sources = []
    for run in runs[:MAX_SOURCES]:
        first, last = max(run.start, start), min(run.end, stop)
        if first < last:
            sources.append(
                node_pb2.LoadSource(
                    start=first - start,
                    count=last - first,
                    node_id=run.node_id,
                    control_address=run.node.control_address,
                    data_address=run.node.data_address,
                    volume_id=run.volume_id,
                )
            )
    return sources
