"""Generations of a process's KV: KV of an earlier generation must not be found any more.

SGLang creates a backend whenever storage is attached, while the engine and its weights remain. So generations
belong to the process.
"""

from __future__ import annotations

import threading


class Generations:
    """Counts clears and weight updates, and assigns a generation to each name of weights. Thread-safe.

    A name that was used before a clear stays in the generation of the last clear. A name used only afterwards is in generation 0,
    because it states which weights the engine has now. No method fails, so a clear always takes effect.

    While paused, no name has a generation: the engine's own caches may hold KV of other weights, so nothing is loaded or stored.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = 0
        self._paused = False
        self._by_epoch: dict[str, int] = {}  # one entry per name that the operator attached

    def clear(self) -> None:
        """Begin a new generation for all names used until now, and end a pause."""
        self._begin(paused=False)

    def begin_update(self) -> None:
        """Begin a new generation and pause, because the weights are about to change."""
        self._begin(paused=True)

    def pause(self) -> None:
        """Stop loads and stores until ``resume`` or ``clear``."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """End a pause: the engine's own caches were flushed."""
        with self._lock:
            self._paused = False

    def of(self, weights_epoch: str) -> int | None:
        """Return the generation in which a name of weights is used now; 0: it was never cleared; None: paused."""
        with self._lock:
            generation = self._by_epoch.setdefault(weights_epoch, 0)
            return None if self._paused else generation

    def _begin(self, *, paused: bool) -> None:
        with self._lock:
            self._latest += 1
            self._by_epoch = dict.fromkeys(self._by_epoch, self._latest)
            self._paused = paused


OF_THIS_PROCESS = Generations()
