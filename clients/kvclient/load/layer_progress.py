"""The layers of each block that have arrived, from any source."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvclient.load.layerwise import LayerBarrier
from kvclient.memory.device_buffer import DeviceBuffer
from kvstore.core.errors import KVStoreError


class LayerTracker:
    """Number of leading layers that have arrived, per block. Opens a barrier for layers that all blocks have. Thread-safe.

    Args:
        blocks: number of blocks.
        layers: number of layers of each.
        barrier: opened for layers that all blocks have; None: no thread waits for layers.
        device: the load's buffer if it is a device's: layers are sent on to the device before they are announced.
    """

    def __init__(self, blocks: int, layers: int, barrier: LayerBarrier | None = None, device: DeviceBuffer | None = None) -> None:
        self._device = device
        self._layers = layers
        self._barrier = barrier
        self._lock = threading.Lock()
        self._ready = np.zeros(blocks, np.int32)
        self._promised = blocks
        self._announced = 0

    def arrived(self, positions: npt.NDArray[np.intp], first_layer: int, layer_count: int) -> None:
        """Record layers that are in the buffer, verified. Layers above a gap do not count until the gap is filled."""
        if self._device is not None and len(positions):
            try:
                self._device.host_copy_ready(positions, first_layer, layer_count)
            except KVStoreError:  # the flush at the end of the load meets the same error and records it
                self.mark_failed(positions)
                return
        with self._lock:
            ready = self._ready[positions]
            self._ready[positions] = np.where(ready >= first_layer, np.maximum(ready, first_layer + layer_count), ready)
            self._announce()

    def ready(self, positions: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """Return the number of leading layers that have arrived, per block."""
        with self._lock:
            found: npt.NDArray[np.int32] = self._ready[positions]
            return found

    def complete(self) -> npt.NDArray[np.bool_]:
        """Return which blocks have all layers."""
        with self._lock:
            done: npt.NDArray[np.bool_] = self._ready == self._layers
            return done

    def restart(self, positions: npt.NDArray[np.intp]) -> bool:
        """Forget the layers of blocks that are about to be read again.

        Returns:
            False: layers have been announced, so an engine may be reading them and nothing may be written over them.
        """
        with self._lock:
            if self._announced:
                return False
            self._ready[positions] = 0
            return True

    def mark_failed(self, positions: npt.NDArray[np.intp]) -> None:
        """Record that some blocks will not arrive: only blocks before the first of them are still promised."""
        if not len(positions):
            return
        position = int(positions.min())
        with self._lock:
            if position < self._promised:
                self._promised = position
                if self._barrier is not None:
                    self._barrier.shrink(position)
                self._announce()

    def _announce(self) -> None:
        if self._barrier is None or self._promised == 0:
            return
        layers = int(self._ready[: self._promised].min())
        if layers > self._announced:
            self._announced = layers
            self._barrier.advance(layers)
