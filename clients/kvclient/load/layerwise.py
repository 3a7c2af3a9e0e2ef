"""Layer-wise hand-over: an engine computes layer 0 while the later layers still arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvclient.call.arguments import check_seconds
from kvclient.call.handle import CallHandle
from kvclient.call.scope import CallScope
from kvclient.results import LoadResult
from kvstore.core.errors import InvalidArgument


class LayerBarrier:
    """How many leading layers have arrived. Opened by a ``LayerBoard`` alone, which knows each block; waited at by engines."""

    def __init__(self, blocks: int) -> None:
        self._changed = threading.Condition()
        self._layers = 0
        self._done = False
        self.promised_blocks = blocks
        """Leading blocks that may still become hits; only shrinks."""

    def advance(self, layers: int) -> None:
        """Layers below ``layers`` of the first ``promised_blocks`` blocks are in the buffer."""
        with self._changed:
            if layers > self._layers:
                self._layers = layers
                self._changed.notify_all()

    def shrink(self, blocks: int) -> None:
        """No more than ``blocks`` leading blocks can still become hits."""
        self.promised_blocks = min(self.promised_blocks, blocks)

    def finish(self, blocks: int) -> None:
        """Nothing more will arrive."""
        self.shrink(blocks)
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Waits for a layer. False: it did not come in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done or self._layers > layer, timeout_s)


class LoadHandle(CallHandle[LoadResult]):
    """A load that runs in the background, as ``KVClient.start_load`` returns it.

    handle = client.start_load(lookup, buffer)
    for layer in range(client.spec.layers):
        handle.wait_layer(layer)             # the first handle.promised_blocks blocks have this layer
        ...                                  # compute the layer
    result = handle.result()
    """

    def __init__(
        self,
        scope: CallScope,
        gate: LayerBarrier,
        future: Future[LoadResult],
        layers: int,
        follow: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(scope, future)
        self._follow = follow
        self._gate = gate
        self._layers = layers

    @property
    def promised_blocks(self) -> int:
        """Leading blocks that may still become hits; only shrinks, and ends as the result's ``hit_blocks``."""
        return self._gate.promised_blocks

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Waits until one layer of every block that will be a hit is in the buffer.

        Of a device's buffer: until it is on its way there. What the caller asks the device to do next, on its current stream,
        begins when it is there.

        Args:
            layer: 0-based.
            timeout_s: how long to wait; None: as long as the load may take.

        Returns:
            True: the first ``promised_blocks`` blocks may be used up to this layer; what fails later is told by ``result``.
            False: not in time. The load goes on; ``cancel`` before the buffer is used for anything else.

        Raises:
            InvalidArgument: there is no such layer, or ``timeout_s`` is no number of seconds.
        """
        if not isinstance(layer, int) or not 0 <= layer < self._layers:
            raise InvalidArgument("no such layer", layer=layer, layers=self._layers)
        left_s = self._scope.left_s() + _GRACE_S
        arrived = self._gate.wait(
            layer, left_s if timeout_s is None else min(check_seconds("timeout_s", timeout_s, zero=True), left_s)
        )
        if arrived and self._follow is not None:
            self._follow(layer)
        return arrived


_GRACE_S = 0.5
"""Between a load's deadline and the end of its last piece of work."""
