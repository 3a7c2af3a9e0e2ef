"""A write that is sent layer by layer, as the sender computes: one connection, held until the end.

Nothing becomes visible before every layer has come and matches its checksums. A sender that dies, or gives up, closes its
connection: the other side then gives the slots back, and no late byte can reach them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import BlockShape, StoreOutcome
from kvstore.transport import frames
from kvstore.transport.arrival import SummedSend
from kvstore.transport.contract import LayerWrite, WriteRequest
from kvstore.transport.frames import FrameKind, WriteFrame
from kvstore.transport.layout import Layout
from kvstore.transport.pool import AnsweredError, Connection, ConnectionPool
from kvstore.transport.reading import budget_ms


class TcpLayerWrite(LayerWrite):
    """See ``LayerWrite``. Made by ``TcpPeer.begin_write``.

    Args:
        pool: where the connection came from.
        connection: ours until the end.
        request: what is written.
        broke: told of an exchange that ended badly.
        sent: told of bytes sent.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        connection: Connection,
        request: WriteRequest,
        broke: Callable[[KVStoreError], None],
        sent: Callable[[int], None],
    ) -> None:
        """Asks for slots.

        Raises:
            KVStoreError: refused, or no answer; the connection is dropped.
        """
        self._pool = pool
        self._connection: Connection | None = connection
        self._request = request
        self._broke = broke
        self._sent = sent
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
        except AnsweredError as refusal:
            self._drop()
            raise refusal.error from None
        except KVStoreError as error:
            self._drop()
            self._broke(error)
            raise
        self.granted: npt.NDArray[np.intp] = np.flatnonzero(np.array(self._outcomes) == StoreOutcome.STORED)
        if not len(self.granted):
            self._give_back()

    @property
    def outcomes(self) -> Sequence[StoreOutcome]:
        return self._outcomes

    def put(self, first_layer: int, source: BlockBuffer) -> None:
        layers = source.shape.layers
        shape = self._request.shape
        if source.shape != BlockShape(layers, shape.layer_block_bytes) or source.count != len(self._request.run.keys):
            raise InvalidArgument("the layers are not of the blocks that are written", shape=source.shape, blocks=source.count)
        with self._lock:
            if first_layer + layers > shape.layers or not self._left[first_layer : first_layer + layers].all():
                raise InvalidArgument("no such layers, or put before", first_layer=first_layer, layers=layers)
            self._left[first_layer : first_layer + layers] = False
            if not len(self.granted):
                return
            connection = self._open()
            size = len(self.granted) * layers * shape.layer_block_bytes
            head = frames.encode_layers(self._request_id, first_layer, layers, size)
            pieces = Layout(source, writable=False).pieces(self.granted, 0, layers)
            try:
                sums = SummedSend(pieces, shape.layer_block_bytes).run(connection.wire, head, self._request.deadline_s)
                connection.wire.send((frames.encode_checksums(self._request_id, sums),), self._request.deadline_s)
            except KVStoreError as error:
                self._drop()
                self._broke(error)
                raise
            self._sent(size)

    def commit(self) -> Sequence[StoreOutcome]:
        with self._lock:
            if self._left.any():
                raise InvalidArgument("layers are missing", missing=int(self._left.sum()))
            if not len(self.granted):
                return self._outcomes
            connection = self._open()
            try:
                _, header = connection.answer(self._request_id, FrameKind.WRITTEN, self._request.deadline_s)
                written = frames.decode_store_outcomes(header, len(self.granted))
            except AnsweredError as refusal:
                self._drop()
                raise refusal.error from None
            except KVStoreError as error:
                self._drop()
                self._broke(error)
                raise
            for place, outcome in zip(self.granted.tolist(), written, strict=True):
                self._outcomes[place] = outcome
            self._give_back()
            return self._outcomes

    def abort(self) -> None:
        with self._lock:
            self._drop()

    def _open(self) -> Connection:
        if self._connection is None:
            raise Unavailable("the write has broken, or was given up")
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.drop(connection)

    def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection)
            self._pool.went_well()
