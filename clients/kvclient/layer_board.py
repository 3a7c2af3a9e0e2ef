"""How far each block of a load is, layer by layer, whichever path its bytes take."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvclient.layers import LayerGate


class LayerBoard:
    """Leading layers that have arrived, a block each; announces at a gate what has arrived of all blocks. Thread-safe.

    Args:
        blocks: how many.
        layers: layers of each.
        gate: told of layers that all blocks have; None: nobody waits for layers.
    """

    def __init__(self, blocks: int, layers: int, gate: LayerGate | None) -> None:
        self._layers = layers
        self.gate = self._gate = gate
        self._lock = threading.Lock()
        self._ready = np.zeros(blocks, np.int32)
        self._promised = blocks
        self._announced = 0

    def arrived(self, positions: npt.NDArray[np.intp], first_layer: int, layer_count: int) -> None:
        """Layers of some blocks are in the buffer, verified. Layers above a gap do not count until the gap is filled."""
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

    def lost(self, position: int) -> None:
        """A block will not come: only those before it are promised any more."""
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
