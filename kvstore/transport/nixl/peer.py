"""The reading side of one-sided transfers: a ``TcpPeer`` whose reads move their payload by NIXL if both sides support it.

Each connection sends ATTACH before its first read and after each fence, and the server answers who moves the bytes. Units are
read directly into the caller's memory only if the agent was made with it as a region, as a node's arena is. Otherwise they are
read into a bounce slab, verified, and copied, because an engine cannot do without its memory if late bytes may arrive in it.

Any failure of NIXL is counted and logged, and switches this peer to TCP for ``OFF_S``. A unit of which nothing has arrived is
requested again at once. If bytes may still arrive in memory after a failure, the agent is fenced before the memory is reused. If
the fence fails, bounce slabs are kept for ever, and a read directly into registered memory raises ``LateBytes``.
Writes to a peer go over the connections.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer, Layout
from kvstore.core.checksum import piece_checksums
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable, Unsupported
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.transport.contract import LateBytes, LayerProgress, ReadRequest
from kvstore.transport.nixl.address_table import AddressTable, address_table_of, consecutive_blocks, copy_rows, paired_rows
from kvstore.transport.nixl.agent import WAIT_S, NixlAgent, Slab, has_rdma, host_id
from kvstore.transport.nixl.frames import (
    AttachFrame,
    FetchFrame,
    PlacedFrame,
    RequestedMode,
    TransferMode,
    decode_attached,
    decode_placed,
    encode_attach,
    encode_fetch,
)
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.connection_pool import Connection, PeerError
from kvstore.transport.tcp.frames import DataFrame, FrameKind, Head
from kvstore.transport.tcp.one_sided import OneSidedFailed
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.striped_read import StripedRead, Unit
from kvstore.transport.wire import PlainWire

log = logging.getLogger(__name__)
limited = LimitedLog(log)

DIRECT_UNIT_BYTES = 128 << 20
"""Maximum unit without bounce memory. A reader that pulls requests the next unit only after it has this one."""
OFF_S = 30.0
"""How long a peer is read over TCP after a failure of NIXL."""


@dataclass(frozen=True, slots=True)
class _Attachment:
    """Result of ATTACH on one connection. ``server``: name of the server's agent if this side pulls, else empty."""

    epoch: int
    mode: TransferMode
    server: str


@dataclass(slots=True)
class _Fetch:
    """A requested unit: the destination of its bytes, and whether late bytes may still arrive if it is abandoned."""

    attachment: _Attachment
    destination: AddressTable
    slab: Slab | None
    needs_fence: bool


class NixlStripedRead(StripedRead):
    """A read whose payload may be moved by NIXL.

    Args:
        request: keys, layers and deadline.
        destination: the caller's memory.
        streams: maximum number of connections.
        agent: knows the registered memory.
        max_unit_bytes: maximum size of a unit that needs bounce memory.
        more: as ``StripedRead``.
    """

    def __init__(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        streams: int,
        *,
        agent: NixlAgent,
        max_unit_bytes: int,
        **more: Any,  # noqa: ANN401 - passed on
    ) -> None:
        layout = Layout(destination, writable=True)
        addresses = address_table_of(layout, len(request.keys), request.first_layer, request.layer_count)
        if addresses is not None and not agent.covers(addresses.extent(request.layer_count)):
            addresses = None
        self.registered = addresses
        """Addresses of the destination in registered memory; None: bounce memory is needed."""
        if addresses is not None:
            max_unit_bytes = DIRECT_UNIT_BYTES
        super().__init__(request, destination, streams, max_unit_bytes=max_unit_bytes, **more)
        self.late_bytes = False
        """Whether bytes may still arrive in the registered memory after the read."""


class NixlPeer(TcpPeer):
    """Client of one node's data plane that reads by NIXL if possible.

    Args:
        address: as ``TcpPeer``.
        agent: this process's agent; owned by the caller, and shared by its peers.
        more: as ``TcpPeer``.
    """

    def __init__(self, address: str, agent: NixlAgent, **more: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(address, **more)
        self._agent = agent
        self._off_until_s = 0.0
        self._attached: WeakKeyDictionary[Connection, _Attachment] = WeakKeyDictionary()
        self._fetches: WeakKeyDictionary[Connection, dict[int, _Fetch]] = WeakKeyDictionary()
        self._mode: TransferMode | None = None
        self._pull_failed = False
        """Whether the last failed read was a pull: containers of one host may be unable to read each other's memory."""

    @property
    def one_sided(self) -> bool:
        """Whether this side reads by NIXL at the moment."""
        return time.monotonic() >= self._off_until_s

    # ---------------------------------------------------------------- reads

    def _start_read(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        *,
        verify: bool,
        on_layers: LayerProgress | None,
        on_bytes: Callable[[int], None],
    ) -> StripedRead:
        if not request.keys or not self.one_sided:
            return super()._start_read(request, destination, verify=verify, on_layers=on_layers, on_bytes=on_bytes)
        return NixlStripedRead(
            request,
            destination,
            self._streams,
            verify=verify,
            on_layers=on_layers,
            on_bytes=on_bytes,
            max_unit_bytes=self._agent.slab_bytes,
            agent=self._agent,
        )

    def _run_streams(self, state: StripedRead) -> KVStoreError | None:
        try:
            return super()._run_streams(state)
        finally:
            if isinstance(state, NixlStripedRead) and state.late_bytes:
                raise LateBytes("bytes of an abandoned transfer may still arrive", address=self.address)

    def _max_requests_ahead(self, state: StripedRead) -> int:
        if not self._reads_one_sided(state):
            return super()._max_requests_ahead(state)
        # only one: a server that waits for TAKEN must not receive the next request, and a stream must not hold two slabs
        return 2 if self._mode is TransferMode.PUSH and isinstance(state, NixlStripedRead) and state.registered is not None else 1

    def _reads_one_sided(self, state: StripedRead) -> bool:
        return isinstance(state, NixlStripedRead) and self.one_sided

    def _send_request(self, connection: Connection, state: StripedRead, unit: Unit) -> int:
        if not self._reads_one_sided(state) or not isinstance(connection.wire, PlainWire):
            return super()._send_request(connection, state, unit)
        assert isinstance(state, NixlStripedRead), "checked"
        request, deadline_s = state.request, state.request.deadline_s
        try:
            attachment = self._attachment(connection, deadline_s)
        except PeerError as refusal:
            if not isinstance(refusal.error, Unsupported) and refusal.in_step:
                raise refusal.error from None
            self._turn_off(refusal.error)
            if refusal.in_step:
                return super()._send_request(connection, state, unit)
            raise OneSidedFailed("the peer does not support one-sided reads", error=refusal.error) from None
        slab = None
        if state.registered is not None:
            destination = state.registered.select(np.arange(unit.first, unit.first + unit.count), 0)
        elif unit.count * request.layer_count * self._layer_bytes(state) > self._agent.slab_bytes:
            self._counters.add(transport_metrics.NIXL_UNFIT_READS)
            return super()._send_request(connection, state, unit)
        else:
            slab = self._agent.acquire_slab(deadline_s - time.monotonic(), state.scope)
            if slab is None:
                if state.scope is not None and state.scope.cancelled:
                    raise state.scope.error()
                raise DeadlineExceeded("no bounce memory became free in time", address=self.address)
            destination = consecutive_blocks(slab.address, unit.count, request.layer_count, self._layer_bytes(state))
        fetch = _Fetch(attachment, destination, slab, needs_fence=False)
        request_id = connection.next_id()
        self._fetches.setdefault(connection, {})[request_id] = fetch
        read = state.read_frame(unit, deadline_s - time.monotonic())
        pushed = attachment.mode is TransferMode.PUSH
        try:
            fetch.needs_fence = pushed
            connection.wire.send((encode_fetch(request_id, FetchFrame(read, destination if pushed else None)),), deadline_s)
        except BaseException:
            self._end_fetches(connection, state)
            raise
        return request_id

    def _receive_unit(self, connection: Connection, state: StripedRead, request_id: int, unit: Unit) -> None:
        fetch = self._fetches.get(connection, {}).get(request_id)
        if fetch is None:
            super()._receive_unit(connection, state, request_id, unit)
            return
        assert isinstance(state, NixlStripedRead), "it requested the unit"
        try:
            self._receive_answers(connection, state, fetch, request_id, unit)
            fetch.needs_fence = False
            self._end_fetch(connection, state, request_id)
        except PeerError as refusal:
            if refusal.in_step and isinstance(refusal.error, Unsupported):
                self._end_fetches(connection, state)
                raise OneSidedFailed("NIXL failed on the peer", error=refusal.error) from None
            # an error frame in step comes after the last write of the peer, unless a write failed
            fetch.needs_fence = fetch.needs_fence and not refusal.in_step
            self._end_fetch(connection, state, request_id)
            raise
        except BaseException:
            self._end_fetches(connection, state)
            raise

    def _receive_answers(self, connection: Connection, state: StripedRead, fetch: _Fetch, request_id: int, unit: Unit) -> None:
        """Receive PLACED frames until the unit has been answered."""
        while True:
            head, header = self._answer(connection, fetch, request_id, state.request.deadline_s)
            if head.kind is FrameKind.READ_END:
                break
            if head.kind is FrameKind.PLACED:
                placed = decode_placed(header, self._layer_bytes(state))
                if fetch.attachment.mode is TransferMode.PULL and len(placed.addresses) != placed.data.hits:
                    raise frames.BadFrame("PLACED without the addresses of its blocks")
                self._receive_placed(connection, state, fetch, request_id, unit, placed)
            elif head.kind is FrameKind.DATA and not head.payload_bytes:  # the peer does not know the namespace
                data = frames.decode_data(header, 0, self._layer_bytes(state))
                state.accept(unit, data, 0, lambda hits, _: np.ones(len(hits), np.bool_))
            else:
                raise frames.BadFrame("FETCH must be answered by PLACED", kind=head.kind.name)
        state.check_answered(unit)

    def _receive_placed(
        self, connection: Connection, state: StripedRead, fetch: _Fetch, request_id: int, unit: Unit, placed: PlacedFrame
    ) -> None:
        """Receive one chunk: pull it if this side pulls, send TAKEN, verify, and copy it from the slab to its destination."""
        first_layer = placed.data.first_layer - state.request.first_layer

        def transfer(hits: npt.NDArray[np.int64], data: DataFrame) -> npt.NDArray[np.bool_]:
            size = self._layer_bytes(state)
            target = fetch.destination.select(hits - unit.first, first_layer)
            if fetch.attachment.mode is TransferMode.PULL:
                self._pull(fetch, target, AddressTable(placed.addresses, size, size), state, data.layer_count)
                if placed.wants_taken:
                    connection.wire.send((frames.encode_head(FrameKind.TAKEN, request_id),), state.request.deadline_s)
            self._counters.add(transport_metrics.NIXL_BYTES_RECEIVED, placed.moved_bytes)
            good = np.ones(len(hits), np.bool_)
            if state.verify and len(hits):
                good = _verify(_received_memory(fetch, state, hits, unit, data, first_layer), data, size)
            if fetch.slab is not None and len(hits):
                rows = _buffer_rows(state, hits, data)
                lengths = rows[:, 1]
                sources = np.zeros_like(rows)
                before = np.cumsum(lengths) - lengths
                block_bytes = np.uint64(data.layer_count * size)
                sources[:, 0] = target.addresses[(before // block_bytes).astype(np.int64)] + before % block_bytes
                sources[:, 1] = lengths
                copy_rows(rows, sources)
            if state.on_bytes is not None:
                state.on_bytes(placed.moved_bytes)
            return good

        state.accept(unit, placed.data, placed.moved_bytes, transfer)

    def _pull(self, fetch: _Fetch, target: AddressTable, source: AddressTable, state: StripedRead, layers: int) -> None:
        """Read a chunk from the server's memory."""
        if not len(source.addresses):
            return
        ours, theirs = paired_rows(target, source, layers)
        attachment = fetch.attachment
        fetch.needs_fence = True  # even a failed start may have begun to move bytes
        transfer = self._agent.start(attachment.epoch, "READ", ours, theirs, attachment.server)
        while transfer is not None and not self._agent.is_done(transfer):
            self._check_time(state)
            time.sleep(WAIT_S)
        fetch.needs_fence = False

    def _answer(self, connection: Connection, fetch: _Fetch, request_id: int, deadline_s: float) -> tuple[Head, bytes]:
        """Receive the next frame. While waiting, make progress for the server's writes."""
        wire = connection.wire
        assert isinstance(wire, PlainWire), "checked when the unit was requested"
        if fetch.attachment.mode is TransferMode.PUSH:
            while not wire.readable():
                if time.monotonic() >= deadline_s:
                    raise DeadlineExceeded("data-plane deadline exceeded")
                self._agent.progress(fetch.attachment.epoch)
                time.sleep(WAIT_S)
        return connection.answer(request_id, None, deadline_s)

    @staticmethod
    def _check_time(state: StripedRead) -> None:
        if state.cancelled:
            raise Unavailable("the read was cancelled")
        if time.monotonic() >= state.request.deadline_s:
            raise DeadlineExceeded("data-plane deadline exceeded")

    def _end_fetches(self, connection: Connection, state: NixlStripedRead) -> None:
        """End all requested units of a connection."""
        for request_id in list(self._fetches.get(connection, {})):
            self._end_fetch(connection, state, request_id)

    def _end_fetch(self, connection: Connection, state: NixlStripedRead, request_id: int) -> None:
        """End a requested unit: fence the agent if bytes may still arrive, and release the slab.

        If the fence fails, the slab is never released. Without a slab, the read ends with ``LateBytes``.
        """
        fetch = self._fetches.get(connection, {}).pop(request_id, None)
        if fetch is None:
            return
        fenced = not fetch.needs_fence or self._agent.fence(fetch.attachment.epoch)
        if fetch.slab is not None:
            if fenced:
                self._agent.release_slab(fetch.slab)
        elif not fenced:
            state.late_bytes = True
            state.cancel()

    # ---------------------------------------------------------------- attachment and fallback

    def _attachment(self, connection: Connection, deadline_s: float) -> _Attachment:
        """Return the attachment of a connection; send ATTACH if there is none, or if the agent was replaced.

        Raises:
            PeerError: the server refused.
            OneSidedFailed: NIXL does not work here.
            KVStoreError: the wire broke.
        """
        known = self._attached.get(connection)
        if known is not None and known.epoch == self._agent.epoch:
            return known
        try:
            epoch, metadata = self._agent.metadata()
        except Unsupported as error:
            raise OneSidedFailed("NIXL does not work on this host", error=error) from error
        request_id = connection.next_id()
        options = self._agent.options
        requested: RequestedMode = "push" if options.only_tcp or self._pull_failed else options.mode
        attach = AttachFrame(host_id(), requested, has_rdma(), metadata)
        connection.wire.send((encode_attach(request_id, attach),), deadline_s)
        _, header = connection.answer(request_id, FrameKind.ATTACHED, deadline_s)
        mode, server = decode_attached(header)
        name = ""
        if mode is TransferMode.PULL:
            name = self._agent.add_remote(epoch, server)  # kept until the agent ends, because other connections may use it
        attachment = self._attached[connection] = _Attachment(epoch, mode, name)
        self._mode = mode
        log.info("NIXL attached: %s (mode=%s)", self.address, mode.name.lower())
        return attachment

    def _retry_unit(self, state: StripedRead, unit: Unit | None, error: KVStoreError) -> bool:
        if not isinstance(error, OneSidedFailed):
            return False
        self._turn_off(error)
        if unit is not None and not state.reset_unit(unit):
            state.fail_unit(unit, Unavailable("one-sided read failed", error=error))
        return True

    def _turn_off(self, error: KVStoreError) -> None:
        self._off_until_s = time.monotonic() + OFF_S
        self._pull_failed = self._mode is TransferMode.PULL
        self._counters.add(transport_metrics.NIXL_FALLBACKS)
        limited.warning("NIXL switched off: %s (tcp_for_s=%g, error=%s)", self.address, OFF_S, error)

    @staticmethod
    def _layer_bytes(state: StripedRead) -> int:
        return state.layout.shape.layer_block_bytes


def _received_memory(
    fetch: _Fetch, state: StripedRead, hits: npt.NDArray[np.int64], unit: Unit, data: DataFrame, first_layer: int
) -> list[memoryview]:
    """Return the received bytes of a chunk: in the caller's memory, or in the slab."""
    if fetch.slab is None:
        return state.layout.pieces(hits, data.first_layer, data.layer_count)
    size = state.layout.shape.layer_block_bytes
    block_bytes = state.request.layer_count * size
    starts = (hits - unit.first) * block_bytes + first_layer * size
    return [fetch.slab.memory[start : start + data.layer_count * size] for start in starts.tolist()]


def _verify(pieces: list[memoryview], data: DataFrame, layer_bytes: int) -> npt.NDArray[np.bool_]:
    found = piece_checksums(pieces, layer_bytes).reshape(data.checksums.shape)
    good: npt.NDArray[np.bool_] = (found == data.checksums).all(axis=1)
    return good


def _buffer_rows(state: StripedRead, hits: npt.NDArray[np.int64], data: DataFrame) -> npt.NDArray[np.uint64]:
    """Return descriptors of a chunk in the caller's memory. No piece reaches from one block into the next."""
    addresses, lengths = state.layout.addresses(hits, data.first_layer, data.layer_count)
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses.astype(np.uint64), lengths.astype(np.uint64)
    return rows
