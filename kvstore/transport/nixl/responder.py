"""The server side of one-sided transfers, for one connection.

Parts are split into chunks. If the reader pulls, PLACED gives the addresses of a chunk, and the part stays pinned until the
reader sends TAKEN, its connection ends, or its deadline passes. A reader that reads later gets other bytes, which its checksums
detect. If the server pushes, PLACED follows after NIXL has written all bytes of a chunk, while the next chunk is under way.
Blocks outside the registered memory are copied through a bounce slab.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from kvstore.core.errors import DeadlineExceeded, Unsupported
from kvstore.core.types import Outcome
from kvstore.native import address_of
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.transport.contract import ReadPart
from kvstore.transport.nixl.address_table import AddressTable, consecutive_blocks, copy_rows, paired_rows
from kvstore.transport.nixl.agent import SERVING, WAIT_S, NixlAgent, NixlTransfer, Slab, has_rdma, host_id
from kvstore.transport.nixl.frames import (
    AttachFrame,
    FetchFrame,
    PlacedFrame,
    TransferMode,
    decode_attach,
    decode_fetch,
    encode_attached,
    encode_placed,
)
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.frames import DataFrame, FrameKind, ReadFrame
from kvstore.transport.tcp.one_sided import OneSidedFailed, OneSidedResponder, SendPart
from kvstore.transport.wire import PeerGone, PeerStalled, PlainWire

log = logging.getLogger(__name__)
limited = LimitedLog(log)

CHUNK_BYTES = 8 << 20
"""Target size of a chunk. The reader verifies one chunk while the next is transferred."""
AHEAD = 2
"""Maximum chunks that are being written or are in bounce memory."""
_PROGRESS_INTERVAL_S = 1e-3
"""Polling interval while a reader pulls. The reader needs progress on this side only to connect."""
SERVING_AGENT = re.compile(rf".*-{SERVING}-[0-9a-f]{{32}}")
"""Names of agents that serve an arena."""
_NONE = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some layers of some keys of a part."""

    data: DataFrame
    source: AddressTable
    hits: slice
    """The hits of the part that belong to this chunk."""
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class _PendingChunk:
    """A chunk that the reader pulls or that is being written."""

    placed: PlacedFrame
    slab: Slab | None
    transfer: NixlTransfer | None


def choose_mode(attach: AttachFrame, *, only_tcp: bool) -> TransferMode:
    """Return who moves the bytes. A reader may pull over RDMA and within a host. Over TCP the server always pushes.

    Pulling over UCX's TCP would need emulation by messages from the server, which ``NOT_EMULATED`` disables because UCX would end
    the server if the reader died.
    """
    same_host = attach.host == host_id() and any(attach.host)
    can_pull = not only_tcp and (same_host or (attach.rdma and has_rdma()))
    return TransferMode.PULL if can_pull and attach.mode != "push" else TransferMode.PUSH


class NixlResponder(OneSidedResponder):
    """See ``OneSidedResponder``. All methods run in the connection's thread.

    Args:
        agent: this process's agent.
        wire: the connection.
        counters: counts events.
    """

    def __init__(self, agent: NixlAgent, wire: PlainWire, counters: Counters) -> None:
        self._agent = agent
        self._wire = wire
        self._counters = counters
        self._mode = TransferMode.PULL
        self._epoch = -1
        self._reader = ""

    def attach(self, request_id: int, header: bytes) -> bytes:
        """Return the answer to an ATTACH frame.

        Raises:
            BadFrame: the header is malformed.
            Unsupported: NIXL does not work here, NIXL refuses the reader's agent, or the agent serves an arena, into which this
                side would write.
        """
        attach = decode_attach(header)
        self.close()
        self._mode = choose_mode(attach, only_tcp=self._agent.options.only_tcp)
        if attach.mode == "pull" and self._mode is TransferMode.PUSH:
            self._counters.add(transport_metrics.NIXL_PULLS_DENIED)
            limited.warning("pull request changed to push: the reader can be reached over TCP only")
        self._epoch, metadata = self._agent.metadata()
        if self._mode is TransferMode.PUSH:
            reader = self._agent.add_remote(self._epoch, attach.agent)
            self._reader, metadata = reader, b""
            if SERVING_AGENT.fullmatch(reader):
                self.close()
                raise Unsupported("refusing to write into an agent that serves an arena", name=reader)
        self._counters.add(transport_metrics.NIXL_ATTACHED)
        return encode_attached(request_id, self._mode, metadata)

    def close(self) -> None:
        """Remove the reader's agent."""
        if self._reader:
            self._agent.remove_remote(self._epoch, self._reader)
            self._reader = ""

    def fetch(self, header: bytes) -> tuple[ReadFrame, SendPart]:
        fetch = decode_fetch(header)

        def send_part(request_id: int, _: ReadFrame, part: ReadPart, deadline_s: float) -> None:
            self._send_part(request_id, fetch, part, deadline_s)

        return fetch.read, send_part

    def _send_part(self, request_id: int, fetch: FetchFrame, part: ReadPart, deadline_s: float) -> None:
        if self._epoch != self._agent.epoch or (fetch.destination is None) != (self._mode is TransferMode.PULL):
            raise OneSidedFailed("FETCH requires an ATTACH with the same mode before it")
        addresses = np.array([address_of(view) for view in part.views], np.uint64)
        size = fetch.read.shape.layer_block_bytes
        blocks = AddressTable(addresses, size, size)
        direct = self._agent.covers(blocks.extent(fetch.read.shape.layers))
        pending: deque[_PendingChunk] = deque()
        try:
            chunks = list(self._chunks(fetch, part, blocks))
            for at, chunk in enumerate(chunks):
                # the reader sends one TAKEN per pinned part, because one per chunk would cost it more
                wants_taken = self._mode is TransferMode.PULL and (not direct or at == len(chunks) - 1)
                while len(pending) >= AHEAD and (wants_taken or self._mode is TransferMode.PUSH):
                    self._end_one(request_id, pending, deadline_s)
                pending.append(self._begin(request_id, fetch, chunk, deadline_s, direct=direct, wants_taken=wants_taken))
            while pending:
                self._end_one(request_id, pending, deadline_s)
        finally:
            for left in pending:
                if left.transfer is not None:
                    self._agent.abandon(left.transfer)
                if left.slab is not None:
                    self._agent.release_slab(left.slab)

    def _chunks(self, fetch: FetchFrame, part: ReadPart, blocks: AddressTable) -> Iterator[_Chunk]:
        """Split a part into chunks of about ``CHUNK_BYTES``, layer group after layer group."""
        read, outcomes = fetch.read, bytes(part.outcomes)
        size = read.shape.layer_block_bytes
        group = read.layer_group or read.layer_count
        keys_at_once = max(1, min(frames.MAX_CHECKSUMS_PER_DATA // group, CHUNK_BYTES // (group * size)))
        hits_before = [0, *accumulate(outcome == Outcome.HIT for outcome in outcomes)]
        end = read.first_layer + read.layer_count
        for layer in range(read.first_layer, end, group):
            layers = min(group, end - layer)
            for key in range(0, len(outcomes), keys_at_once):
                keys = outcomes[key : key + keys_at_once]
                hits = slice(hits_before[key], hits_before[key + len(keys)])
                count = hits.stop - hits.start
                sums = part.checksums[hits, layer : layer + layers]
                data = DataFrame(part.first + key, keys, count, layer, layers, part.tier, sums)
                source = blocks.select(np.arange(hits.start, hits.stop), layer)
                yield _Chunk(data, source, hits, count * layers * size)

    def _begin(
        self, request_id: int, fetch: FetchFrame, chunk: _Chunk, deadline_s: float, *, direct: bool, wants_taken: bool
    ) -> _PendingChunk:
        """Send the addresses of a chunk, or begin to write it."""
        data, source, slab, transfer = chunk.data, chunk.source, None, None
        if chunk.moved_bytes and not direct:
            slab, source = self._copy_to_slab(chunk, deadline_s)
        try:
            if self._mode is TransferMode.PULL:
                placed = PlacedFrame(data, chunk.moved_bytes, source.addresses, wants_taken)
                self._wire.send((encode_placed(request_id, placed),), deadline_s)
                return _PendingChunk(placed, slab, None)
            placed = PlacedFrame(data, chunk.moved_bytes, _NONE)
            if chunk.moved_bytes:
                assert fetch.destination is not None, "checked by _send_part"
                keys = data.first + np.flatnonzero(np.frombuffer(data.outcomes, np.uint8) == Outcome.HIT)
                target = fetch.destination.select(keys, data.first_layer - fetch.read.first_layer)
                ours, theirs = paired_rows(source, target, data.layer_count)
                transfer = self._agent.start(self._epoch, "WRITE", ours, theirs, self._reader)
            return _PendingChunk(placed, slab, transfer)
        except BaseException:
            if slab is not None:
                self._agent.release_slab(slab)
            raise

    def _copy_to_slab(self, chunk: _Chunk, deadline_s: float) -> tuple[Slab, AddressTable]:
        """Copy a chunk into registered bounce memory; return the slab and the addresses of the copy."""
        data = chunk.data
        if chunk.moved_bytes > self._agent.slab_bytes:
            raise OneSidedFailed("block too large for the bounce memory", bytes=chunk.moved_bytes)
        slab = self._agent.acquire_slab(deadline_s - time.monotonic())
        if slab is None:
            raise OneSidedFailed("no bounce memory became free in time")
        target = consecutive_blocks(slab.address, data.hits, data.layer_count, chunk.source.layer_bytes)
        copy_rows(*paired_rows(target, chunk.source, data.layer_count))
        self._counters.add(transport_metrics.NIXL_BOUNCED_BYTES, chunk.moved_bytes)
        return slab, target

    def _end_one(self, request_id: int, pending: deque[_PendingChunk], deadline_s: float) -> None:
        """Finish the oldest chunk: wait for its TAKEN if requested, or until it is written, and then send PLACED."""
        oldest = pending[0]
        if self._mode is TransferMode.PULL:
            if oldest.placed.wants_taken:
                self._wait_taken(request_id, deadline_s)
        else:
            if oldest.transfer is not None:
                self._wait_written(oldest.transfer, deadline_s)
            self._wire.send((encode_placed(request_id, oldest.placed),), deadline_s)
        pending.popleft()
        if oldest.slab is not None:
            self._agent.release_slab(oldest.slab)
        self._counters.add(transport_metrics.NIXL_BYTES_SENT, oldest.placed.moved_bytes)
        self._counters.add(transport_metrics.BYTES_SENT, oldest.placed.moved_bytes)

    def _wait_taken(self, request_id: int, deadline_s: float) -> None:
        began_s = time.monotonic()
        while not self._wire.readable(_PROGRESS_INTERVAL_S):
            self._check_time(began_s, deadline_s)
            self._agent.progress(self._epoch)
        head = frames.decode_head(self._wire.receive(frames.HEAD_BYTES, deadline_s))
        if (head.kind, head.request_id) != (FrameKind.TAKEN, request_id):
            raise frames.BadFrame("PLACED must be answered by TAKEN if it requests that", kind=head.kind.name)

    def _wait_written(self, transfer: NixlTransfer, deadline_s: float) -> None:
        began_s = time.monotonic()
        while not self._agent.is_done(transfer):
            self._check_time(began_s, deadline_s)
            if self._wire.ended():
                raise PeerGone("the reader disconnected during a transfer")
            time.sleep(WAIT_S)

    def _check_time(self, began_s: float, deadline_s: float) -> None:
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise DeadlineExceeded("data-plane deadline exceeded")
        if self._wire.stall_s is not None and now_s - began_s > self._wire.stall_s:
            raise PeerStalled("one-sided transfer makes no progress", seconds=self._wire.stall_s)
