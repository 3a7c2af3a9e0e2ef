"""The data-plane client: reads blocks of one peer directly into the caller's memory, over several connections at once.

A read runs in the caller's thread and, if it is large enough, also in helper threads, each with one connection. All of them
have ended before ``read`` returns, so nothing writes to the destination afterwards. A connection that was interrupted within a
frame is closed, so late bytes cannot arrive.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np

from kvstore.core import limits
from kvstore.core.buffers import BlockBuffer, Layout
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvstore.core.types import KEY_BYTES, BlockRun, BlockShape, StoreOutcome
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.process.threads.submission import submit
from kvstore.transport.contract import (
    BlockPeer,
    Checksums,
    LayerProgress,
    LayerWrite,
    ReadControl,
    ReadRequest,
    ReadResult,
    WriteRequest,
)
from kvstore.transport.liveness import CircuitBreaker, LivenessMonitor, data_plane
from kvstore.transport.shaping.traffic import KvTraffic
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.connection_pool import Connection, ConnectionPool, PeerError, Ticket
from kvstore.transport.tcp.frames import FrameKind, WriteFrame
from kvstore.transport.tcp.layer_write import TcpLayerWrite
from kvstore.transport.tcp.receive import ChecksummedSend
from kvstore.transport.tcp.striped_read import UNIT_KEYS, UNITS_AHEAD, StripedRead, Unit, budget_ms
from kvstore.transport.tls import PeerTls

log = logging.getLogger(__name__)
limited = LimitedLog(log)

MAX_WRITE_BYTES = 256 << 20
"""Maximum payload of one write exchange. A longer run needs several, so that the peer's slots do not stay unwritten for long."""


class TcpPeer(BlockPeer):
    """Client of one node's data plane. Connects at the first use.

    Args:
        address: ``host:port`` of the node's ``TcpServer``.
        ticket: sent on each new connection. A callable is called for each new connection, also after a ticket has expired, in a
            scope that ends with the call (``cancel_scope.current``). It may raise the errors that ``read`` may raise.
        streams: maximum connections per read. At most half of the ``cores`` are used (at least one), because a stream keeps one
            core busy, and the kernel's work for it a part of another. Measured with both ends on two cores, one stream verifies a
            tenth more bytes per second than two.
        cores: number of cores for the streams' threads; None: the cores that this process may use.
        tls: client side of TLS; None: clear text.
        connect_timeout_s: timeout for TCP connect, TLS and HELLO together.
        max_connections: maximum open connections for reads and writes (None: enough for four reads). Layer-wise writes have their
            own limit (``MAX_HELD_CONNECTIONS``), because they hold a connection while the caller computes.
        breaker_failures: consecutive failures after which calls fail fast for ``breaker_open_s``.
        breaker_open_s: how long calls fail fast after that, in seconds.
        counters: counts events.
        traffic: marks and caps the sockets; None: unmarked and uncapped.
        liveness: finds out whether the node answers; None: a call to a hung node lasts until its own deadline.
        control_address: where the node's gRPC server is probed. Its data plane is probed as well.
    """

    def __init__(
        self,
        address: str,
        *,
        ticket: Ticket = b"",
        streams: int = 4,
        cores: int | None = None,
        tls: PeerTls | None = None,
        connect_timeout_s: float = 5.0,
        max_connections: int | None = None,
        breaker_failures: int = 3,
        breaker_open_s: float = 1.0,
        counters: Counters | None = None,
        traffic: KvTraffic | None = None,
        liveness: LivenessMonitor | None = None,
        control_address: str = "",
    ) -> None:
        if streams < 1:
            raise InvalidArgument("streams must be at least 1", streams=streams)
        self.address = address
        cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._streams = min(streams, max(1, cores // 2))
        self._counters = counters if counters is not None else Counters()
        self._pool = ConnectionPool(
            address,
            ticket=ticket,
            tls=tls,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections if max_connections is not None else 4 * streams,
            breaker=CircuitBreaker(MonotonicClock(), failures=breaker_failures, open_s=breaker_open_s),
            counters=self._counters,
            traffic=traffic,
            servers=() if liveness is None else [liveness.server(control_address)],
        )
        if liveness is not None:
            self._pool.watch(liveness.server(data_plane(address), self._pool.probe))
        self._helpers_lock = threading.Lock()
        self._helpers: ThreadPoolExecutor | None = None
        self._max_helpers = max(1, (max_connections if max_connections is not None else 4 * streams) - 1)
        self._closed = False

    def read(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        *,
        verify: bool = True,
        on_layers: LayerProgress | None = None,
        control: ReadControl | None = None,
    ) -> ReadResult:
        _check_read(request, destination)
        control = ReadControl() if control is None else control

        def on_bytes(size: int) -> None:
            control.add_bytes(size)
            self._counters.add(transport_metrics.PEER_BYTES_RECEIVED, size)

        state = self._start_read(request, destination, verify=verify, on_layers=on_layers, on_bytes=on_bytes)
        state.scope = control
        if not request.keys:
            return state.result()
        self._check_open()
        with control.on_cancel(state.cancel):
            error = self._run_streams(state)
        if state.error is not None:
            raise state.error
        if error is not None and not state.has_answers([Unit(0, len(request.keys))]):
            refused = isinstance(error, (Unauthenticated, PermissionDenied))
            if refused or (not state.connected and not isinstance(error, DeadlineExceeded)):
                raise error
        state.fail_rest(error, self.address)
        if state.corrupt:
            self._counters.add(transport_metrics.PEER_CORRUPT_BLOCKS, state.corrupt)
            limited.warning("corrupt blocks received: %d (peer=%s)", state.corrupt, self.address)
        return state.result()

    def write(self, request: WriteRequest, source: BlockBuffer, checksums: Checksums | None = None) -> list[StoreOutcome]:
        _check_write(request, source, checksums)
        outcomes = [StoreOutcome.LOST] * len(request.run.keys)
        if not outcomes:
            return outcomes
        self._check_open()
        layout = Layout(source, writable=False)
        at = 0  # number of answered keys
        fresh = False
        while at < len(outcomes):
            try:
                connection = self._pool.acquire(request.deadline_s, fresh=fresh)
            except DeadlineExceeded:
                break
            except (Unavailable, Unauthenticated, PermissionDenied):
                if at == 0:
                    raise
                break
            assert connection is not None, "acquire waits"
            try:
                for start, run in _runs(request.run, request.shape, at):
                    self._write_run(connection, replace(request, run=run), layout, checksums, start, outcomes)
                    at = start + len(run.keys)
                self._pool.release(connection)
                self._pool.record_success()
            except _NotGrantedError as not_granted:
                cause = not_granted.error
                self._pool.drop(connection)
                if connection.reused and not fresh and isinstance(cause, (Unavailable, Unauthenticated)):
                    fresh = True  # the connection died while idle, or its ticket expired: not a failure of the peer
                    continue
                if not_granted.answered:
                    if at == 0 and not cause.retryable:
                        raise cause from None
                else:
                    self._record_error(cause)
                break
            except KVStoreError as error:
                self._pool.drop(connection)
                self._record_error(error)
                break
            except BaseException:
                self._pool.drop(connection)
                raise
        if lost := outcomes.count(StoreOutcome.LOST):
            self._counters.add(transport_metrics.PEER_WRITES_LOST, lost)
        return outcomes

    def begin_write(self, request: WriteRequest) -> LayerWrite:
        _check_run(request)
        self._check_open()
        fresh = False
        while True:
            connection = self._pool.acquire(request.deadline_s, fresh=fresh, held=True)
            assert connection is not None, "acquire waits"
            reused = connection.reused
            try:
                return TcpLayerWrite(self._pool, connection, request, self._record_error, self._count_sent)
            except (Unavailable, Unauthenticated):
                if not reused or fresh:
                    raise
                fresh = True  # the connection died while idle, or its ticket expired: not a failure of the peer

    def _count_sent(self, size: int) -> None:
        self._counters.add(transport_metrics.PEER_BYTES_SENT, size)

    def close(self) -> None:
        with self._helpers_lock:
            self._closed = True
            helpers = self._helpers
        self._pool.close()
        if helpers is not None:
            helpers.shutdown(wait=False)

    # ---------------------------------------------------------------- reads

    def _run_streams(self, state: StripedRead) -> KVStoreError | None:
        """Run all streams of a read to their end. Return the error that ended a stream early, if any."""
        helpers: list[Future[KVStoreError | None]] = []
        try:
            if state.streams > 1:
                with self._helpers_lock:
                    if self._helpers is None and not self._closed:
                        self._helpers = ThreadPoolExecutor(self._max_helpers, f"data-{self.address}")
                    if self._helpers is not None and not self._closed:
                        self._start_helpers(self._helpers, state, helpers)
            ended = [self._run_stream(state, helper=False)]
        except BaseException:
            state.cancel()
            raise
        finally:
            # a helper that has not started yet would find no units
            started = [helper for helper in helpers if not helper.cancel()]
            wait(started)  # bounded, because every wait of a stream has the request's deadline
        ended += [helper.result() for helper in started]
        return next((found for found in ended if found is not None), None)

    def _start_helpers(self, pool: ThreadPoolExecutor, state: StripedRead, helpers: list[Future[KVStoreError | None]]) -> None:
        """Start helper threads and add each to ``helpers`` at once. Without a thread, the streams that run read everything."""
        try:
            for _ in range(state.streams - 1):
                helpers.append(submit(pool, self._run_helper, state))  # noqa: PERF401  # kept if a later one is refused
        except Unavailable as error:
            self._counters.add(transport_metrics.PEER_HELPERS_REFUSED)
            limited.warning("helper thread of a read not started: %s (peer=%s)", error, self.address)

    def _run_helper(self, state: StripedRead) -> KVStoreError | None:
        return self._run_stream(state, helper=True)

    def _run_stream(self, state: StripedRead, *, helper: bool) -> KVStoreError | None:
        """Run units on connections until none is left. Return the error that ended the stream early, if any."""
        fresh = False
        while True:
            try:
                connection = self._pool.acquire(state.request.deadline_s, wait=not helper, fresh=fresh, scope=state.scope)
            except KVStoreError as unreachable:
                return unreachable
            if connection is None:
                return None  # all connections are in use; the caller's own stream does the work
            state.add_connection(connection)
            try:
                error, retry = self._run_units(state, connection)
            except BaseException:
                self._pool.drop(connection)
                raise
            finally:
                state.remove_connection(connection)
            if not retry or state.cancelled:
                return error
            fresh = True

    def _start_read(
        self,
        request: ReadRequest,
        destination: BlockBuffer,
        *,
        verify: bool,
        on_layers: LayerProgress | None,
        on_bytes: Callable[[int], None],
    ) -> StripedRead:
        return StripedRead(request, destination, self._streams, verify=verify, on_layers=on_layers, on_bytes=on_bytes)

    def _send_request(self, connection: Connection, state: StripedRead, unit: Unit) -> int:
        """Request a unit; return the id of the request."""
        request_id, deadline_s = connection.next_id(), state.request.deadline_s
        frame = frames.encode_read(request_id, state.read_frame(unit, deadline_s - time.monotonic()))
        connection.wire.send((frame,), deadline_s)
        return request_id

    def _receive_unit(self, connection: Connection, state: StripedRead, request_id: int, unit: Unit) -> None:
        """Receive the complete answer for a unit. Raises as ``StripedRead.receive_unit``."""
        state.receive_unit(connection, request_id, unit)

    def _max_requests_ahead(self, state: StripedRead) -> int:  # noqa: ARG002 - subclasses use the argument
        """Return the maximum number of unanswered requests on a connection."""
        return UNITS_AHEAD

    def _retry_unit(self, state: StripedRead, unit: Unit | None, error: KVStoreError) -> bool:  # noqa: ARG002 - subclasses use the arguments
        """Return whether a failed unit was put back, to be read in another way."""
        return False

    def _run_units(self, state: StripedRead, connection: Connection) -> tuple[KVStoreError | None, bool]:
        """Request and receive units until none is left, then release or drop the connection.

        Returns:
            The error that ended the stream early, and whether to retry with a new connection.
        """
        ahead: deque[tuple[int, Unit]] = deque()
        unit: Unit | None = None  # the unit that is being requested
        answered = 0
        try:
            while True:
                while len(ahead) < self._max_requests_ahead(state) and (not ahead or ahead[0][1].count <= UNIT_KEYS):
                    unit = state.next_unit()
                    if unit is None:
                        break
                    ahead.append((self._send_request(connection, state, unit), unit))
                    unit = None
                if not ahead:
                    state.remove_connection(connection)
                    self._pool.release(connection)
                    if answered:
                        self._pool.record_success()
                    return None, False
                request_id, requested = ahead[0]
                try:
                    self._receive_unit(connection, state, request_id, requested)
                except PeerError as refusal:
                    if not refusal.in_step or isinstance(refusal.error, Unauthenticated):
                        raise refusal.error from None
                    state.fail_unit(requested, refusal.error)
                ahead.popleft()
                answered += 1
        except KVStoreError as error:
            self._pool.drop(connection)
            units = [requested for _, requested in ahead] + ([] if unit is None else [unit])
            if self._retry_unit(state, units[0] if units else None, error):
                state.return_units(units[1:])
                return error, True
            expired = isinstance(error, Unauthenticated) and (connection.reused or answered)
            if expired or (
                connection.reused and not answered and not state.has_answers(units) and isinstance(error, Unavailable)
            ):
                # the ticket expired, or the connection died while idle: not a failure of the peer
                state.return_units(units)
                return error, True
            if units:
                state.fail_unit(units[0], error)
                state.return_units(units[1:])  # another stream may read them
            if not state.cancelled:
                self._record_error(error)
            return error, False

    # ---------------------------------------------------------------- writes

    def _write_run(
        self,
        connection: Connection,
        request: WriteRequest,
        layout: Layout,
        checksums: Checksums | None,
        start: int,
        outcomes: list[StoreOutcome],
    ) -> None:
        """Run one write exchange: request slots, send the granted blocks, record the outcome of each key.

        Raises:
            _NotGrantedError: nothing was granted.
            KVStoreError: the exchange failed later; unconfirmed blocks stay LOST.
        """
        run, shape, deadline_s = request.run, request.shape, request.deadline_s
        count = len(run.keys)
        request_id = connection.next_id()
        budget = budget_ms(deadline_s - time.monotonic())
        send = ChecksummedSend(layout.pieces(np.arange(start, start + count), 0, shape.layers), shape.layer_block_bytes)
        try:
            frame = WriteFrame(run, shape, request.durable, budget)
            connection.wire.send((frames.encode_write(request_id, frame),), deadline_s)
            if checksums is None:
                send.hash_ahead()  # nearly always, all blocks are granted
            _, header = connection.answer(request_id, FrameKind.GRANT, deadline_s)
            granted = frames.decode_store_outcomes(header, count)
        except PeerError as refusal:
            raise _NotGrantedError(refusal.error, answered=True) from None
        except KVStoreError as error:
            raise _NotGrantedError(error, answered=False) from error
        positions = start + np.flatnonzero(np.array(granted) == StoreOutcome.STORED)
        for position, outcome in enumerate(granted, start):
            if outcome is not StoreOutcome.STORED:
                outcomes[position] = outcome
        if not len(positions):
            return
        payload_bytes = len(positions) * shape.block_bytes
        head = frames.encode_head(FrameKind.PAYLOAD, request_id, 0, payload_bytes)
        if checksums is not None:
            connection.wire.send([head, *layout.pieces(positions, 0, shape.layers)], deadline_s)
            sums = checksums[positions]
        else:
            if len(positions) < count:
                send = ChecksummedSend(layout.pieces(positions, 0, shape.layers), shape.layer_block_bytes)
            sums = send.run(connection.wire, head, deadline_s)
        connection.wire.send((frames.encode_checksums(request_id, sums),), deadline_s)
        try:
            _, header = connection.answer(request_id, FrameKind.WRITTEN, deadline_s)
        except PeerError as refusal:
            raise refusal.error from None
        for position, outcome in zip(positions.tolist(), frames.decode_store_outcomes(header, len(positions)), strict=True):
            outcomes[position] = outcome
        self._counters.add(transport_metrics.PEER_BYTES_SENT, payload_bytes)

    # ---------------------------------------------------------------- helpers

    def _record_error(self, error: KVStoreError) -> None:
        """Record a failed exchange."""
        if isinstance(error, DeadlineExceeded):
            self._counters.add(transport_metrics.PEER_TIMEOUTS)
        else:
            self._counters.add(transport_metrics.PEER_BROKEN)
        log.info("data-plane exchange failed: %s (error=%s)", self.address, error)
        if not isinstance(error, Unauthenticated):  # a refusal is an answer: the peer works
            self._pool.record_failure()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the data-plane peer is closed", address=self.address)


class _NotGrantedError(Exception):
    """Nothing of a write was granted, so the whole write may be tried again. ``answered``: the peer refused it."""

    def __init__(self, error: KVStoreError, *, answered: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.answered = answered


def _runs(run: BlockRun, shape: BlockShape, start: int) -> list[tuple[int, BlockRun]]:
    """Split the rest of a run, from key ``start`` on, into runs that fit one exchange, parents before children."""
    size = max(1, min(frames.max_write_keys(shape.layers), MAX_WRITE_BYTES // shape.block_bytes))
    return [
        (
            at,
            BlockRun(run.namespace, run.keys[at - 1] if at else run.parent, run.depth + at, run.keys[at : at + size]),
        )
        for at in range(start, len(run.keys), size)
    ]


def _check_run(request: WriteRequest) -> tuple[BlockRun, BlockShape]:
    run, shape = request.run, _check_shape(request.shape)
    most = frames.max_write_keys(shape.layers)
    if len(run.keys) > most and request.tail:
        raise InvalidArgument("too many keys for one write with a tail", keys=len(run.keys), limit=most)
    if not 0 <= run.depth <= limits.MAX_DEPTH - len(run.keys):
        raise InvalidArgument("chain too long, or negative depth", depth=run.depth, keys=len(run.keys), limit=limits.MAX_DEPTH)
    _check_ids(run.namespace, run.keys if run.parent is None else (run.parent, *run.keys))
    return run, shape


def _check_read(request: ReadRequest, destination: BlockBuffer) -> None:
    shape = _check_shape(destination.shape)
    if destination.count < len(request.keys):
        raise InvalidArgument("more keys than blocks in the destination", keys=len(request.keys), blocks=destination.count)
    if len(request.keys) > limits.MAX_KEYS_PER_CALL:
        raise InvalidArgument("too many keys for one read", keys=len(request.keys), limit=limits.MAX_KEYS_PER_CALL)
    if not (request.first_layer >= 0 and 0 < request.layer_count <= shape.layers - request.first_layer):
        raise InvalidArgument(
            "layers outside the block shape", layers=shape.layers, first=request.first_layer, count=request.layer_count
        )
    if not 0 <= request.layer_group <= shape.layers:
        raise InvalidArgument("layer group outside the block shape", layers=shape.layers, layer_group=request.layer_group)
    _check_ids(request.namespace, request.keys)


def _check_write(request: WriteRequest, source: BlockBuffer, checksums: Checksums | None) -> None:
    run, shape = _check_run(request)
    if source.shape != shape or source.count < len(run.keys) or len(run.keys) > limits.MAX_KEYS_PER_CALL:
        raise InvalidArgument(
            "the source does not match the write request", shape=source.shape, expected=shape, keys=len(run.keys)
        )
    if checksums is not None and checksums.shape != (len(run.keys), shape.layers):
        raise InvalidArgument(
            "one checksum per layer block is required", shape=checksums.shape, expected=(len(run.keys), shape.layers)
        )


def _check_shape(shape: BlockShape) -> BlockShape:
    return frames.check_shape(shape.layers, shape.layer_block_bytes)


def _check_ids(namespace: bytes, keys: Sequence[bytes]) -> None:
    if len(namespace) != KEY_BYTES or set(map(len, keys)) - {KEY_BYTES}:
        raise InvalidArgument("namespaces and keys must have 16 bytes each")
