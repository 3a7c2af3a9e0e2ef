"""The serving side of one connection whose payload moves by NIXL.

Parts are cut into chunks. Where the reader pulls, it is told where a chunk lies, and the part stays pinned until it says TAKEN,
until its connection ends or its time is up: a reader that is later than that reads other bytes, which its checksums tell it, and
its result does not count. Where this side pushes, PLACED follows once NIXL says that all bytes are there, with one more chunk on
its way meanwhile. Blocks outside the registered memory go by way of a bounce slab.
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
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.transport import frames
from kvstore.transport.contract import ReadPart
from kvstore.transport.frames import DataFrame, FrameKind
from kvstore.transport.layout import address_of
from kvstore.transport.nixl.frames import AttachFrame, FetchFrame, PlacedFrame, Way, encode_attached, encode_placed
from kvstore.transport.nixl.landing import Landing, move_rows, paired_rows, row_after_row
from kvstore.transport.nixl.port import WAIT_S, NixlPort, OneSidedFailed, Slab, Transfer, has_rdma, host_id
from kvstore.transport.wire import PeerGone, PeerStalled, PlainWire

log = logging.getLogger(__name__)
limited = LimitedLog(log)

CHUNK_BYTES = 8 << 20
"""Bytes in one PLACED: the reader checks them while the next are on their way."""
AHEAD = 2
"""Chunks that are written, or lie in bounce memory, at once."""
_HELP_INTERVAL_S = 1e-3
"""Between two looks while a reader pulls: it needs this side's help to connect, and for nothing else."""
SERVES = re.compile(r".*-serves-[0-9a-f]{32}")
"""Names of the agents that serve."""
_NONE = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some keys of a part, and some layers of them."""

    data: DataFrame
    source: Landing
    hits: slice
    """Which of the part's hits."""
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A chunk that the other side has been told of, or that is being written."""

    placed: PlacedFrame
    slab: Slab | None
    transfer: Transfer | None


def choose_way(asked: AttachFrame, *, only_tcp: bool) -> Way:
    """Who moves the bytes: a reader may pull over RDMA and within a host, and is pushed to over TCP, whatever it wishes.

    What is pulled over UCX's TCP is sent by this side, and UCX ends the process whose reader left meanwhile (``NOT_EMULATED``).
    """
    near = asked.host == host_id() and any(asked.host)
    reaches = not only_tcp and (near or (asked.rdma and has_rdma()))
    return Way.PULL if reaches and asked.wish != "push" else Way.PUSH


class OneSidedServing:
    """One connection's part of it. All of it runs in the connection's thread.

    Args:
        port: this process's agent.
        wire: the connection.
        counters: where events are counted.
    """

    def __init__(self, port: NixlPort, wire: PlainWire, counters: Counters) -> None:
        self._port = port
        self._wire = wire
        self._counters = counters
        self._way = Way.PULL
        self._epoch = -1
        self._reader = ""

    def attach(self, request_id: int, asked: AttachFrame) -> bytes:
        """The answer to an ATTACH.

        Raises:
            Unsupported: NIXL does not work here, the reader's agent is not taken, or it is one that serves: who names such a one
                would have this side write into another node's arena.
        """
        self.close()
        self._way = choose_way(asked, only_tcp=self._port.options.only_tcp)
        if asked.wish == "pull" and self._way is Way.PUSH:
            self._counters.add("transport_nixl_pulls_denied_total")
            limited.warning("a reader that wishes to pull is pushed to: there is only TCP between it and this side")
        self._epoch, metadata = self._port.metadata()
        if self._way is Way.PUSH:
            reader = self._port.meet(self._epoch, asked.agent)
            self._reader, metadata = reader, b""
            if SERVES.fullmatch(reader):
                self.close()
                raise Unsupported("an agent that serves is not pushed to", name=reader)
        self._counters.add("transport_nixl_attached_total")
        return encode_attached(request_id, self._way, metadata)

    def close(self) -> None:
        """The connection has ended."""
        if self._reader:
            self._port.leave(self._epoch, self._reader)
            self._reader = ""

    def send_part(self, request_id: int, asked: FetchFrame, part: ReadPart, deadline_s: float) -> None:
        """Moves one part of the provider's; it may be released afterwards.

        Raises:
            OneSidedFailed: NIXL failed, and both sides are in step.
            KVStoreError: the wire broke or stalled.
        """
        if self._epoch != self._port.epoch or (asked.landing is None) != (self._way is Way.PULL):
            raise OneSidedFailed("a FETCH takes an ATTACH before it that agreed on the way")
        addresses = np.array([address_of(view) for view in part.views], np.uint64)
        size = asked.read.shape.layer_block_bytes
        whole = Landing(addresses, size, size)
        direct = self._port.covers(whole.extent(asked.read.shape.layers))
        ahead: deque[_UnderWay] = deque()
        try:
            chunks = list(self._chunks(asked, part, whole))
            for at, chunk in enumerate(chunks):
                # to be told of every chunk would cost the reader more than the last of a pinned part tells
                wants_taken = self._way is Way.PULL and (not direct or at == len(chunks) - 1)
                while len(ahead) >= AHEAD and (wants_taken or self._way is Way.PUSH):
                    self._end_one(request_id, ahead, deadline_s)
                ahead.append(self._begin(request_id, asked, chunk, deadline_s, direct=direct, wants_taken=wants_taken))
            while ahead:
                self._end_one(request_id, ahead, deadline_s)
        finally:
            for left in ahead:
                if left.transfer is not None:
                    self._port.drop(left.transfer)
                if left.slab is not None:
                    self._port.give_slab(left.slab)

    def _chunks(self, asked: FetchFrame, part: ReadPart, whole: Landing) -> Iterator[_Chunk]:
        """A part, in pieces of about ``CHUNK_BYTES``; layer group after layer group."""
        read, outcomes = asked.read, bytes(part.outcomes)
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
                source = whole.pick(np.arange(hits.start, hits.stop), layer)
                yield _Chunk(data, source, hits, count * layers * size)

    def _begin(
        self, request_id: int, asked: FetchFrame, chunk: _Chunk, deadline_s: float, *, direct: bool, wants_taken: bool
    ) -> _UnderWay:
        """Tells of a chunk, or begins to write it."""
        data, source, slab, transfer = chunk.data, chunk.source, None, None
        if chunk.moved_bytes and not direct:
            slab, source = self._bounced(chunk, deadline_s)
        try:
            if self._way is Way.PULL:
                placed = PlacedFrame(data, chunk.moved_bytes, source.addresses, wants_taken)
                self._wire.send((encode_placed(request_id, placed),), deadline_s)
                return _UnderWay(placed, slab, None)
            placed = PlacedFrame(data, chunk.moved_bytes, _NONE)
            if chunk.moved_bytes:
                assert asked.landing is not None, "send_part has checked"
                keys = data.first + np.flatnonzero(np.frombuffer(data.outcomes, np.uint8) == Outcome.HIT)
                target = asked.landing.pick(keys, data.first_layer - asked.read.first_layer)
                ours, theirs = paired_rows(source, target, data.layer_count)
                transfer = self._port.start(self._epoch, "WRITE", ours, theirs, self._reader)
            return _UnderWay(placed, slab, transfer)
        except BaseException:
            if slab is not None:
                self._port.give_slab(slab)
            raise

    def _bounced(self, chunk: _Chunk, deadline_s: float) -> tuple[Slab, Landing]:
        """A copy of a chunk's bytes in registered memory."""
        data = chunk.data
        if chunk.moved_bytes > self._port.slab_bytes:
            raise OneSidedFailed("a block too long for the bounce memory", bytes=chunk.moved_bytes)
        slab = self._port.take_slab(deadline_s - time.monotonic())
        if slab is None:
            raise OneSidedFailed("no bounce memory came free in time")
        target = row_after_row(slab.address, data.hits, data.layer_count, chunk.source.layer_bytes)
        move_rows(*paired_rows(target, chunk.source, data.layer_count))
        self._counters.add("transport_nixl_bounced_bytes_total", chunk.moved_bytes)
        return slab, target

    def _end_one(self, request_id: int, ahead: deque[_UnderWay], deadline_s: float) -> None:
        """Waits for the oldest chunk: until it was taken (where that is asked), or until it is there and that was told."""
        oldest = ahead[0]
        if self._way is Way.PULL:
            if oldest.placed.wants_taken:
                self._wait_taken(request_id, deadline_s)
        else:
            if oldest.transfer is not None:
                self._wait_written(oldest.transfer, deadline_s)
            self._wire.send((encode_placed(request_id, oldest.placed),), deadline_s)
        ahead.popleft()
        if oldest.slab is not None:
            self._port.give_slab(oldest.slab)
        self._counters.add("transport_nixl_bytes_sent_total", oldest.placed.moved_bytes)
        self._counters.add("transport_bytes_sent_total", oldest.placed.moved_bytes)

    def _wait_taken(self, request_id: int, deadline_s: float) -> None:
        began_s = time.monotonic()
        while not self._wire.readable(_HELP_INTERVAL_S):
            self._check_time(began_s, deadline_s)
            self._port.progress(self._epoch)
        head = frames.decode_head(self._wire.receive(frames.HEAD_BYTES, deadline_s))
        if (head.kind, head.request_id) != (FrameKind.TAKEN, request_id):
            raise frames.BadFrame("where it is wanted, PLACED is answered by TAKEN", kind=head.kind.name)

    def _wait_written(self, transfer: Transfer, deadline_s: float) -> None:
        began_s = time.monotonic()
        while not self._port.done(transfer):
            self._check_time(began_s, deadline_s)
            if self._wire.ended():
                raise PeerGone("the reader left while it was written to")
            time.sleep(WAIT_S)

    def _check_time(self, began_s: float, deadline_s: float) -> None:
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise DeadlineExceeded("the data plane's deadline has passed")
        if self._wire.stall_s is not None and now_s - began_s > self._wire.stall_s:
            raise PeerStalled("a one-sided transfer makes no progress", seconds=self._wire.stall_s)
