"""The reading side: as ``TcpPeer``, with the payload of reads moved by NIXL where both sides have it.

Each connection says ATTACH once; the server answers who will move the bytes. Units are read straight into the caller's memory
where the port has it registered, or, where this side pulls and the memory is one stretch, can register it for the time of the
read. Else they go by way of a bounce slab, from where they are copied once they have been checked.

Whatever goes wrong with NIXL sends this peer back to TCP for ``OFF_S``, counted and logged; a unit of which nothing has arrived
is asked for again at once. Memory that was given up with bytes possibly still on their way is fenced before anybody else may use
it. Writes (stores to a peer) go over the connections.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable, Unsupported
from kvstore.observe.limited_log import LimitedLog
from kvstore.transport import frames
from kvstore.transport.arrival import LayerHasher
from kvstore.transport.contract import LayerProgress, ReadRequest
from kvstore.transport.frames import DataFrame, FrameKind, Head
from kvstore.transport.layout import Layout
from kvstore.transport.nixl.frames import (
    AttachFrame,
    FetchFrame,
    PlacedFrame,
    Way,
    decode_attached,
    decode_placed,
    encode_attach,
    encode_fetch,
)
from kvstore.transport.nixl.landing import Landing, landing_of, move_rows, paired_rows, row_after_row
from kvstore.transport.nixl.port import WAIT_S, NixlPort, OneSidedFailed, Region, Slab, has_rdma, host_id
from kvstore.transport.pool import AnsweredError, Connection
from kvstore.transport.reading import ReadState, Unit
from kvstore.transport.tcp_peer import TcpPeer
from kvstore.transport.wire import PlainWire

log = logging.getLogger(__name__)
limited = LimitedLog(log)

DIRECT_UNIT_BYTES = 128 << 20
"""Of a unit that needs no bounce: a reader that pulls asks for the next only when it has this one."""
OFF_S = 30.0
"""How long a peer is read over TCP after NIXL failed with it."""


@dataclass(frozen=True, slots=True)
class _Attachment:
    """What a connection agreed on. ``server``: its agent, where this side pulls."""

    epoch: int
    way: Way
    server: str


@dataclass(slots=True)
class _Fetch:
    """A unit under way: where its bytes land, and whether bytes may come that nobody waits for."""

    attachment: _Attachment
    landing: Landing
    slab: Slab | None
    loose: bool


class NixlReadState(ReadState):
    """A read whose payload may be moved by NIXL.

    Args:
        request: what is read.
        destination: where to.
        streams: most connections to use.
        port: registers its memory.
        way: who moved the bytes of reads before; None: this is the first.
        most_bytes: of a unit that takes a bounce.
        more: as ``ReadState``.
    """

    def __init__(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        streams: int,
        *,
        port: NixlPort,
        way: Way | None,
        most_bytes: int,
        **more: Any,  # noqa: ANN401 - passed on
    ) -> None:
        layout = Layout(destination, writable=True)
        self._landing = landing_of(layout, len(request.keys), request.first_layer, request.layer_count)
        self.lasting = self._landing is not None and port.covers(self._landing.extent(request.layer_count))
        borrows = way is Way.PULL and self._landing is not None and layout.stretch is not None
        super().__init__(
            request, destination, streams, most_bytes=DIRECT_UNIT_BYTES if self.lasting or borrows else most_bytes, **more
        )  # fmt: skip
        self._port = port
        self._registering = threading.Lock()
        self._borrowed: tuple[int, Region] | None = None

    def landing(self, attachment: _Attachment) -> Landing | None:
        """The buffer's memory, where NIXL may read or write it; None: it takes a bounce."""
        if self.lasting or self._landing is None or attachment.way is Way.PUSH or self.layout.stretch is None:
            return self._landing if self.lasting else None
        with self._registering:
            if self._borrowed is None or self._borrowed[0] != attachment.epoch:
                region = Region(*self.layout.stretch)
                self._borrowed = (attachment.epoch, region) if self._port.borrow(attachment.epoch, region) else None
            return None if self._borrowed is None else self._landing

    def end(self) -> None:
        """Nothing is on its way any more: the memory is the caller's alone."""
        if self._borrowed is not None:
            self._port.give_back(*self._borrowed)
            self._borrowed = None


class NixlPeer(TcpPeer):
    """One node's data plane, as seen from another process.

    Args:
        address: as ``TcpPeer``.
        port: this process's agent; owned by the caller, and shared by its peers.
        more: as ``TcpPeer``.
    """

    def __init__(self, address: str, port: NixlPort, **more: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(address, **more)
        self._port = port
        self._off_until_s = 0.0
        self._attached: WeakKeyDictionary[Connection, _Attachment] = WeakKeyDictionary()
        self._fetches: WeakKeyDictionary[Connection, dict[int, _Fetch]] = WeakKeyDictionary()
        self._way: Way | None = None
        self._pulls_fail = False
        """Whether the last that failed was pulled: containers of one host may be kept from each other's memory."""

    @property
    def one_sided(self) -> bool:
        """Whether reads go by NIXL now, as far as this side knows."""
        return time.monotonic() >= self._off_until_s

    # ---------------------------------------------------------------- reads

    def _begun_read(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        *,
        verify: bool,
        on_layers: LayerProgress | None,
        on_bytes: Callable[[int], None],
    ) -> ReadState:
        if not request.keys or not self.one_sided:
            return super()._begun_read(request, destination, verify=verify, on_layers=on_layers, on_bytes=on_bytes)
        return NixlReadState(
            request,
            destination,
            self._streams,
            verify=verify,
            on_layers=on_layers,
            on_bytes=on_bytes,
            most_bytes=self._port.slab_bytes,
            port=self._port,
            way=self._way,
        )

    def _run_streams(self, state: ReadState) -> KVStoreError | None:
        try:
            return super()._run_streams(state)
        finally:
            if isinstance(state, NixlReadState):
                state.end()

    def _asked_ahead(self, state: ReadState) -> int:
        if not self._goes_one_sided(state):
            return super()._asked_ahead(state)
        # a server that waits for TAKEN would meet what is asked next; and who holds a slab must not wait for another
        return 2 if self._way is Way.PUSH and isinstance(state, NixlReadState) and state.lasting else 1

    def _goes_one_sided(self, state: ReadState) -> bool:
        return isinstance(state, NixlReadState) and self.one_sided

    def _ask(self, connection: Connection, state: ReadState, unit: Unit) -> int:
        if not self._goes_one_sided(state) or not isinstance(connection.wire, PlainWire):
            return super()._ask(connection, state, unit)
        assert isinstance(state, NixlReadState), "checked"
        request, deadline_s = state.request, state.request.deadline_s
        try:
            attachment = self._attachment(connection, deadline_s)
        except AnsweredError as refusal:
            if not isinstance(refusal.error, Unsupported) and refusal.in_step:
                raise refusal.error from None
            self._turn_off(refusal.error)
            if refusal.in_step:
                return super()._ask(connection, state, unit)
            raise OneSidedFailed("the peer does not know one-sided reads", error=refusal.error) from None
        slab, whole = None, state.landing(attachment)
        if whole is not None:
            landing = whole.pick(np.arange(unit.first, unit.first + unit.count), 0)
        elif unit.count * request.layer_count * self._layer_bytes(state) > self._port.slab_bytes:
            self._counters.add("transport_nixl_unfit_reads_total")
            return super()._ask(connection, state, unit)
        else:
            slab = self._port.take_slab(deadline_s - time.monotonic())
            if slab is None:
                raise DeadlineExceeded("no bounce memory came free in time", address=self.address)
            landing = row_after_row(slab.address, unit.count, request.layer_count, self._layer_bytes(state))
        fetch = _Fetch(attachment, landing, slab, loose=False)
        request_id = connection.next_id()
        self._fetches.setdefault(connection, {})[request_id] = fetch
        read = state.read_frame(unit, deadline_s - time.monotonic())
        pushed = attachment.way is Way.PUSH
        try:
            fetch.loose = pushed
            connection.wire.send((encode_fetch(request_id, FetchFrame(read, landing if pushed else None)),), deadline_s)
        except BaseException:
            self._end_all(connection)
            raise
        return request_id

    def _take_in(self, connection: Connection, state: ReadState, request_id: int, unit: Unit) -> None:
        fetch = self._fetches.get(connection, {}).get(request_id)
        if fetch is None:
            super()._take_in(connection, state, request_id, unit)
            return
        try:
            self._take_answers(connection, state, fetch, request_id, unit)
            fetch.loose = False
            self._ended(connection, request_id)
        except AnsweredError as refusal:
            if refusal.in_step and isinstance(refusal.error, Unsupported):
                self._end_all(connection)
                raise OneSidedFailed("the peer's NIXL failed", error=refusal.error) from None
            # an answer that both sides are in step with comes after its last write, unless one failed
            fetch.loose = fetch.loose and not refusal.in_step
            self._ended(connection, request_id)
            raise
        except BaseException:
            self._end_all(connection)
            raise

    def _take_answers(self, connection: Connection, state: ReadState, fetch: _Fetch, request_id: int, unit: Unit) -> None:
        """Until the unit has been answered."""
        while True:
            head, header = self._answer(connection, fetch, request_id, state.request.deadline_s)
            if head.kind is FrameKind.READ_END:
                break
            if head.kind is FrameKind.PLACED:
                placed = decode_placed(header, self._layer_bytes(state))
                if fetch.attachment.way is Way.PULL and len(placed.addresses) != placed.data.hits:
                    raise frames.BadFrame("the peer does not say where its blocks lie")
                self._take_placed(connection, state, fetch, request_id, unit, placed)
            elif head.kind is FrameKind.DATA and not head.payload_bytes:  # a namespace that it does not know
                data = frames.decode_data(header, 0, self._layer_bytes(state))
                state.take_in(unit, data, 0, lambda hits, _: np.ones(len(hits), np.bool_))
            else:
                raise frames.BadFrame("FETCH is answered by PLACED", kind=head.kind.name)
        state.check_answered(unit)

    def _take_placed(
        self, connection: Connection, state: ReadState, fetch: _Fetch, request_id: int, unit: Unit, placed: PlacedFrame
    ) -> None:
        """One chunk: moves it (where this side pulls), says so, checks it and copies it to where it belongs."""
        first_layer = placed.data.first_layer - state.request.first_layer

        def arrive(hits: npt.NDArray[np.int64], data: DataFrame) -> npt.NDArray[np.bool_]:
            size = self._layer_bytes(state)
            target = fetch.landing.pick(hits - unit.first, first_layer)
            if fetch.attachment.way is Way.PULL:
                self._pull(fetch, target, Landing(placed.addresses, size, size), state, data.layer_count)
                if placed.wants_taken:
                    connection.wire.send((frames.encode_head(FrameKind.TAKEN, request_id),), state.request.deadline_s)
            self._counters.add("transport_nixl_bytes_received_total", placed.moved_bytes)
            good = np.ones(len(hits), np.bool_)
            if state.verify and len(hits):
                good = _matching(_memory(fetch, state, hits, unit, data, first_layer), data, size)
            if fetch.slab is not None and len(hits):
                rows = _buffer_rows(state, hits, data)
                lengths = rows[:, 1]
                sources = np.zeros_like(rows)
                behind = np.cumsum(lengths) - lengths
                block_bytes = np.uint64(data.layer_count * size)
                sources[:, 0] = target.addresses[(behind // block_bytes).astype(np.int64)] + behind % block_bytes
                sources[:, 1] = lengths
                move_rows(rows, sources)
            if state.on_bytes is not None:
                state.on_bytes(placed.moved_bytes)
            return good

        state.take_in(unit, placed.data, placed.moved_bytes, arrive)

    def _pull(self, fetch: _Fetch, target: Landing, source: Landing, state: ReadState, layers: int) -> None:
        """Reads a chunk from the server's memory."""
        if not len(source.addresses):
            return
        ours, theirs = paired_rows(target, source, layers)
        attachment = fetch.attachment
        fetch.loose = True  # a start that fails may have begun
        transfer = self._port.start(attachment.epoch, "READ", ours, theirs, attachment.server)
        while transfer is not None and not self._port.done(transfer):
            self._check_time(state)
            time.sleep(WAIT_S)
        fetch.loose = False

    def _answer(self, connection: Connection, fetch: _Fetch, request_id: int, deadline_s: float) -> tuple[Head, bytes]:
        """The next frame; while it is awaited, what the server pushes comes in."""
        wire = connection.wire
        assert isinstance(wire, PlainWire), "checked when it was asked"
        if fetch.attachment.way is Way.PUSH:
            while not wire.readable():
                if time.monotonic() >= deadline_s:
                    raise DeadlineExceeded("the data plane's deadline has passed")
                self._port.progress(fetch.attachment.epoch)
                time.sleep(WAIT_S)
        return connection.answer(request_id, None, deadline_s)

    @staticmethod
    def _check_time(state: ReadState) -> None:
        if state.abandoned:
            raise Unavailable("the read was ended")
        if time.monotonic() >= state.request.deadline_s:
            raise DeadlineExceeded("the data plane's deadline has passed")

    def _end_all(self, connection: Connection) -> None:
        """Nothing more is expected on a connection."""
        for request_id in list(self._fetches.get(connection, {})):
            self._ended(connection, request_id)

    def _ended(self, connection: Connection, request_id: int) -> None:
        """A unit is over: its memory is fenced if bytes may still come, and its slab given back."""
        fetch = self._fetches.get(connection, {}).pop(request_id, None)
        if fetch is None:
            return
        if fetch.loose:
            self._port.fence(fetch.attachment.epoch)
        if fetch.slab is not None:
            self._port.give_slab(fetch.slab)

    # ---------------------------------------------------------------- who, and whether at all

    def _attachment(self, connection: Connection, deadline_s: float) -> _Attachment:
        """What this connection agreed on; asks where it has not, or where the agent was made anew.

        Raises:
            AnsweredError: the server will not.
            OneSidedFailed, KVStoreError: NIXL does not work here; the wire broke.
        """
        known = self._attached.get(connection)
        if known is not None and known.epoch == self._port.epoch:
            return known
        try:
            epoch, metadata = self._port.metadata()
        except Unsupported as error:
            raise OneSidedFailed("NIXL does not work here", error=error) from error
        request_id = connection.next_id()
        options = self._port.options
        wish = "push" if options.only_tcp or self._pulls_fail else options.wish
        asked = AttachFrame(host_id(), wish, has_rdma(), metadata)
        connection.wire.send((encode_attach(request_id, asked),), deadline_s)
        _, header = connection.answer(request_id, FrameKind.ATTACHED, deadline_s)
        way, server = decode_attached(header)
        name = ""
        if way is Way.PULL:
            name = self._port.meet(epoch, server)  # kept until the agent ends: another connection may use it
        attachment = self._attached[connection] = _Attachment(epoch, way, name)
        self._way = way
        log.info("reads from %s go by NIXL: %s", self.address, way.name.lower())
        return attachment

    def _goes_on(self, state: ReadState, unit: Unit | None, error: KVStoreError) -> bool:
        if not isinstance(error, OneSidedFailed):
            return False
        self._turn_off(error)
        if unit is not None and not state.take_back(unit):
            state.unit_failed(unit, Unavailable("a one-sided read broke", error=error))
        return True

    def _turn_off(self, error: KVStoreError) -> None:
        self._off_until_s = time.monotonic() + OFF_S
        self._pulls_fail = self._way is Way.PULL
        self._counters.add("transport_nixl_fallbacks_total")
        limited.warning("reads from %s go over TCP for %g s: %s", self.address, OFF_S, error)

    @staticmethod
    def _layer_bytes(state: ReadState) -> int:
        return state.layout.shape.layer_block_bytes


def _memory(
    fetch: _Fetch, state: ReadState, hits: npt.NDArray[np.int64], unit: Unit, data: DataFrame, first_layer: int
) -> list[memoryview]:
    """What has landed of a chunk: in the caller's memory, or in the slab."""
    if fetch.slab is None:
        return state.layout.pieces(hits, data.first_layer, data.layer_count)
    size = state.layout.shape.layer_block_bytes
    block_bytes = state.request.layer_count * size
    starts = (hits - unit.first) * block_bytes + first_layer * size
    return [fetch.slab.memory[start : start + data.layer_count * size] for start in starts.tolist()]


def _matching(pieces: list[memoryview], data: DataFrame, layer_bytes: int) -> npt.NDArray[np.bool_]:
    hasher = LayerHasher(layer_bytes, data.hits * data.layer_count)
    hasher.update(pieces)
    good: npt.NDArray[np.bool_] = (hasher.digests().reshape(data.checksums.shape) == data.checksums).all(axis=1)
    return good


def _buffer_rows(state: ReadState, hits: npt.NDArray[np.int64], data: DataFrame) -> npt.NDArray[np.uint64]:
    """Where a chunk belongs in the caller's memory; no piece reaches from one block into the next."""
    addresses, lengths = state.layout.addresses(hits, data.first_layer, data.layer_count)
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses.astype(np.uint64), lengths.astype(np.uint64)
    return rows
