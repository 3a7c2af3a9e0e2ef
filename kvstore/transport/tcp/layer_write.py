"""A write that is sent layer by layer while the sender computes, over one connection that it holds until the end.

Nothing becomes visible before every layer has arrived and matches its checksums. If the sender dies or aborts, its connection is
closed. The other side then frees the slots, and late bytes cannot reach them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer, Layout
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import BlockShape, StoreOutcome
from kvstore.transport.contract import LayerWrite, WriteRequest
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.connection_pool import Connection, ConnectionPool, PeerError
from kvstore.transport.tcp.frames import FrameKind, WriteFrame
from kvstore.transport.tcp.receive import ChecksummedSend
from kvstore.transport.tcp.striped_read import budget_ms


class TcpLayerWrite(LayerWrite):
    """See ``LayerWrite``. Made by ``TcpPeer.begin_write``.

    Args:
        pool: the pool of the connection.
        connection: owned until the write ends.
        request: the run, its shape and the deadline.
        on_error: called if the exchange fails.
        on_sent: called with the number of bytes sent.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        connection: Connection,
        request: WriteRequest,
        on_error: Callable[[KVStoreError], None],
        on_sent: Callable[[int], None],
    ) -> None:
        """Request slots.

        Raises:
            KVStoreError: the peer refused or did not answer; the connection is dropped.
        """
        self._pool = pool
        self._connection: Connection | None = connection
        self._request = request
        self._on_error = on_error
        self._on_sent = on_sent
        self._lock = threading.Lock()
        self._left = np.ones(request.shape.layers, bool)
        self._request_id = connection.next_id()
        run, deadline_s = request.run, request.deadline_s
        try:
            budget = budget_ms(deadline_s - time.monotonic())
            frame = WriteFrame(run, request.shape, request.durable, budget, layerwise=True, tail=request.tail)
            connection.wire.send((frames.encode_write(self._request_id, frame),), deadline_s)
            _, header = connection.answer(self._request_id, FrameKind.GRANT, deadline_s)
            self._outcomes = frames.decode_store_outcomes(header, len(run.keys))
        except PeerError as refusal:
            self._drop()
            raise refusal.error from None
        except KVStoreError as error:
            self._drop()
            self._on_error(error)
            raise
        self.granted: npt.NDArray[np.intp] = np.flatnonzero(np.array(self._outcomes) == StoreOutcome.STORED)
        if not len(self.granted):
            self._release()

    @property
    def outcomes(self) -> Sequence[StoreOutcome]:
        return self._outcomes

    def put(self, first_layer: int, source: BlockBuffer) -> None:
        layers = source.shape.layers
        shape = self._request.shape
        if source.shape != BlockShape(layers, shape.layer_block_bytes) or source.count != len(self._request.run.keys):
            raise InvalidArgument("the buffer does not match the blocks of the write", shape=source.shape, blocks=source.count)
        with self._lock:
            if first_layer + layers > shape.layers or not self._left[first_layer : first_layer + layers].all():
                raise InvalidArgument("layers outside the block shape, or put before", first_layer=first_layer, layers=layers)
            self._left[first_layer : first_layer + layers] = False
            if not len(self.granted):
                return
            connection = self._active_connection()
            size = len(self.granted) * layers * shape.layer_block_bytes
            head = frames.encode_layers(self._request_id, first_layer, layers, size)
            pieces = Layout(source, writable=False).pieces(self.granted, 0, layers)
            try:
                sums = ChecksummedSend(pieces, shape.layer_block_bytes).run(connection.wire, head, self._request.deadline_s)
                connection.wire.send((frames.encode_checksums(self._request_id, sums),), self._request.deadline_s)
            except KVStoreError as error:
                self._drop()
                self._on_error(error)
                raise
            self._on_sent(size)

    def commit(self) -> Sequence[StoreOutcome]:
        with self._lock:
            if self._left.any():
                raise InvalidArgument("layers are missing", missing=int(self._left.sum()))
            if not len(self.granted):
                return self._outcomes
            connection = self._active_connection()
            try:
                _, header = connection.answer(self._request_id, FrameKind.WRITTEN, self._request.deadline_s)
                written = frames.decode_store_outcomes(header, len(self.granted))
            except PeerError as refusal:
                self._drop()
                raise refusal.error from None
            except KVStoreError as error:
                self._drop()
                self._on_error(error)
                raise
            for position, outcome in zip(self.granted.tolist(), written, strict=True):
                self._outcomes[position] = outcome
            self._release()
            return self._outcomes

    def abort(self) -> None:
        with self._lock:
            self._drop()

    def _active_connection(self) -> Connection:
        if self._connection is None:
            raise Unavailable("the write failed or was aborted")
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.drop(connection)

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)
            self._pool.record_success()
