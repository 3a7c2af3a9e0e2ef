"""Sources that make loads slow: other nodes, and the volumes of this node. Health findings name them."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import NodeId
from kvstore.observe.slow_loads import WINDOW_S

MIN_LOADS: Final = 3
"""A source is slow if this many loads of the last minute waited for it."""
SLOW_BYTES_PER_S: Final = 100_000_000
"""A long load that was at least this fast is large, not slow. It is less than a link of 1 Gb/s carries."""
_MOST_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class SlowSource:
    """A source that loads of the last minute waited for.

    Attributes:
        node_id: the node that holds the data.
        loads: slow loads that waited for it.
        longest_s: duration of the longest one.
    """

    node_id: NodeId
    loads: int
    longest_s: float


class SlowSources:
    """Sources of the slow loads of one node. Thread-safe.

    Args:
        node_id: this node. As a source it means its own volumes.
        clock: time.
    """

    def __init__(self, node_id: NodeId, clock: Clock) -> None:
        self.node_id = node_id
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, NodeId, float]] = deque(maxlen=_MOST_KEPT)

    def record(self, source: NodeId, seconds: float, loaded_bytes: int) -> None:
        """Record a long load that ended now and spent most of its time waiting for ``source``."""
        if loaded_bytes < SLOW_BYTES_PER_S * seconds:
            with self._lock:
                self._kept.append((self._clock.now_s(), source, seconds))

    def found(self) -> list[SlowSource]:
        """Return the slow sources of the last minute, by name."""
        since_s = self._clock.now_s() - WINDOW_S
        durations: dict[NodeId, list[float]] = {}
        with self._lock:
            for ended_s, source, seconds in self._kept:
                if ended_s > since_s:
                    durations.setdefault(source, []).append(seconds)
        return [SlowSource(node, len(each), max(each)) for node, each in sorted(durations.items()) if len(each) >= MIN_LOADS]
