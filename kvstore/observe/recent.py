"""The last loads of a process, so that the slowest of the last minute, and why it was, can be asked for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

MOST_KEPT: Final = 2_048
SHOWN: Final = 50
WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """How one load went.

    Attributes:
        request_id: the client's name for it; the same in the logs and traces of all who had a part in it.
        at_unix_s: when it ended.
        seconds: how long it took.
        blocks: asked for.
        hit_blocks: of them came.
        reason: what took the time, or why blocks are missing, in a few words.
        parts: figures by name, e.g. seconds of the lookup, bytes by source.
    """

    request_id: str
    at_unix_s: float
    seconds: float
    blocks: int
    hit_blocks: int
    reason: str
    parts: Mapping[str, object] = field(default_factory=dict)


class RecentLoads:
    """A bounded memory of loads. Thread-safe."""

    def __init__(self, now_unix_s: Callable[[], float] = time.time) -> None:
        self._now_unix_s = now_unix_s
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, float, Callable[[], LoadRecord]]] = deque(maxlen=MOST_KEPT)

    def add(self, at_unix_s: float, seconds: float, make: Callable[[], LoadRecord]) -> None:
        """Takes a load in; the oldest leaves. ``make`` words its record once somebody asks: few are ever asked for."""
        with self._lock:
            self._kept.append((at_unix_s, seconds, make))

    def slowest(self, window_s: float = WINDOW_S, most: int = SHOWN) -> list[LoadRecord]:
        """Loads that ended within the last seconds, slowest first."""
        since_s = self._now_unix_s() - window_s
        with self._lock:
            found = [kept for kept in self._kept if kept[0] >= since_s]
        found.sort(key=lambda kept: kept[1], reverse=True)
        return [make() for _, _, make in found[:most]]

    def page(self) -> dict[str, object]:
        """As the page ``/loads`` shows them."""
        return {"window_s": WINDOW_S, "slowest": [asdict(record) for record in self.slowest()]}
