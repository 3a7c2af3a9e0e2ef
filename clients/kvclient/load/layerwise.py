"""Layer-wise loads: an engine computes layer 0 while later layers still arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvclient.call.arguments import check_seconds
from kvclient.call.execution import CallScope
from kvclient.call.handle import GRACE_S, CallHandle
from kvclient.results import LoadResult
from kvstore.core.errors import InvalidArgument


class LayerBarrier:
    """Number of leading layers that have arrived. A ``LayerTracker``, which knows each block, opens it; engines wait at it."""

    def __init__(self, blocks: int) -> None:
        self._changed = threading.Condition()
        self._layers = 0
        self._done = False
        self.promised_blocks = blocks
        """Number of leading blocks that may still become hits. Only shrinks."""

    def advance(self, layers: int) -> None:
        """Record that layers below ``layers`` of the first ``promised_blocks`` blocks are in the buffer."""
        with self._changed:
            if layers > self._layers:
                self._layers = layers
                self._changed.notify_all()

    def shrink(self, blocks: int) -> None:
        """Record that at most ``blocks`` leading blocks can still become hits."""
        self.promised_blocks = min(self.promised_blocks, blocks)

    def finish(self, blocks: int) -> None:
        """Record that no more layers will arrive, and wake all threads that wait."""
        self.shrink(blocks)
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Wait for a layer. False: it did not arrive in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done or self._layers > layer, timeout_s)


class LoadHandle(CallHandle[LoadResult]):
    """A load that runs in the background, as ``KVClient.start_load`` returns it.

    Example::

        handle = client.start_load(lookup, buffer)
        for layer in range(client.spec.layers):
            handle.wait_layer(layer)             # the first handle.promised_blocks blocks have this layer
            ...                                  # compute the layer
        result = handle.result()
    """

    def __init__(
        self,
        scope: CallScope,
        barrier: LayerBarrier,
        future: Future[LoadResult],
        layers: int,
        wait_on_stream: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(scope, future)
        self._wait_on_stream = wait_on_stream
        self._barrier = barrier
        self._layers = layers

    @property
    def promised_blocks(self) -> int:
        """Number of leading blocks that may still become hits. Only shrinks, and ends as the result's ``hit_blocks``."""
        return self._barrier.promised_blocks

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until one layer of every block that will be a hit is in the buffer.

        With a device's buffer: until the copies to the device are enqueued. Work that the caller enqueues next on its current
        stream runs after them.

        Args:
            layer: 0-based.
            timeout_s: maximum wait; None: until the deadline of the load.

        Returns:
            True: the first ``promised_blocks`` blocks may be used up to this layer; ``result`` reports later failures. False: not
            in time. The load continues; ``cancel`` it before the buffer is used for anything else.

        Raises:
            InvalidArgument: there is no such layer, or ``timeout_s`` is not a number of seconds.
        """
        if not isinstance(layer, int) or not 0 <= layer < self._layers:
            raise InvalidArgument("no such layer", layer=layer, layers=self._layers)
        left_s = self._scope.left_s() + GRACE_S
        arrived = self._barrier.wait(
            layer, left_s if timeout_s is None else min(check_seconds("timeout_s", timeout_s, zero=True), left_s)
        )
        if arrived and self._wait_on_stream is not None:
            self._wait_on_stream(layer)
        return arrived
