"""How far each block of a load is, layer by layer, whichever path its bytes take."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvclient.load.layerwise import LayerGate
from kvclient.memory.device_buffer import FarBlocks
from kvstore.core.buffers import BlockBuffer
from kvstore.core.errors import KVStoreError


class LayerBoard:
    """Leading layers that have arrived, a block each; announces at a gate what has arrived of all blocks. Thread-safe.

    Args:
        blocks: how many.
        layers: layers of each.
        gate: told of layers that all blocks have; None: nobody waits for layers.
        buffer: where they arrive. Into a device's they are sent on before they are announced.
    """

    def __init__(self, blocks: int, layers: int, gate: LayerGate | None, buffer: BlockBuffer | None = None) -> None:
        self._far = buffer if isinstance(buffer, FarBlocks) else None
        self._layers = layers
        self._gate = gate
        self._lock = threading.Lock()
        self._ready = np.zeros(blocks, np.int32)
        self._promised = blocks
        self._announced = 0

    def arrived(self, positions: npt.NDArray[np.intp], first_layer: int, layer_count: int) -> None:
        """Layers of some blocks are in the buffer, verified. Layers above a gap do not count until the gap is filled."""
        if self._far is not None and len(positions):
            try:
                self._far.landed(positions, first_layer, layer_count)
            except KVStoreError:  # told by the end of the load, where it meets the same
                self.lost(positions)
                return
        with self._lock:
            ready = self._ready[positions]
            self._ready[positions] = np.where(ready >= first_layer, np.maximum(ready, first_layer + layer_count), ready)
            self._announce()

    def ready(self, positions: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """Leading layers that have arrived of some blocks."""
        with self._lock:
            found: npt.NDArray[np.int32] = self._ready[positions]
            return found

    def complete(self) -> npt.NDArray[np.bool_]:
        """Which blocks have all layers."""
        with self._lock:
            done: npt.NDArray[np.bool_] = self._ready == self._layers
            return done

    @property
    def announced(self) -> bool:
        """Whether any layer has been announced: what was lost by then must not come later on."""
        return self._announced > 0

    def restart(self, positions: npt.NDArray[np.intp]) -> bool:
        """Some blocks are to be read once more from their first layer on: what has arrived of them does not count any more.

        Returns:
            False: layers have been announced, an engine may be reading them, and nothing may be written over them.
        """
        with self._lock:
            if self._announced:
                return False
            self._ready[positions] = 0
            return True

    def lost(self, positions: npt.NDArray[np.intp]) -> None:
        """Some blocks will not come: only those before the first of them are promised any more."""
        if not len(positions):
            return
        position = int(positions.min())
        with self._lock:
            if position < self._promised:
                self._promised = position
                if self._gate is not None:
                    self._gate.shrink(position)
                self._announce()

    def _announce(self) -> None:
        if self._gate is None or self._promised == 0:
            return
        layers = int(self._ready[: self._promised].min())
        if layers > self._announced:
            self._announced = layers
            self._gate.advance(layers)
