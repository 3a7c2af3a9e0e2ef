"""The backend's counters, in addition to those of its clients, and samples for SGLang's metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import hooks as hooks_metrics

_MOST_SAMPLES = 4_096
"""Limit of samples per kind until SGLang fetches them; the oldest are dropped."""
_GB = 1e9
_LOG_INTERVAL_S = 10.0


@dataclass(slots=True)
class Samples:
    """Operations since the samples were last taken.

    Attributes:
        pages: pages moved per operation.
        gigabytes_per_second: bandwidth per operation.
    """

    pages: deque[int] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    gigabytes_per_second: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))


class BackendStats:
    """Counters and samples. Thread-safe."""

    def __init__(self) -> None:
        self.incidents = LimitedLog(logging.getLogger("kvclient"), _LOG_INTERVAL_S)
        self._lock = threading.Lock()
        self._samples = {"get": Samples(), "set": Samples()}

    def taken(self, kind: str) -> Samples:
        """Return and reset the samples of ``get`` or ``set``."""
        with self._lock:
            samples, self._samples[kind] = self._samples[kind], Samples()
        return samples

    @contextmanager
    def moving(self, kind: str, asked: int, page_bytes: int) -> Iterator[list[bool]]:
        """Time and count one operation; its body appends the moved pages to the list."""
        moved: list[bool] = []
        began_s = time.monotonic()
        yield moved
        seconds, good = max(time.monotonic() - began_s, 1e-9), sum(moved)
        counters = self.incidents.counters
        counters.add(hooks_metrics.SGLANG_CALLS[kind])
        counters.add(hooks_metrics.SGLANG_PAGES[kind], asked)
        counters.add(hooks_metrics.SGLANG_GOOD_PAGES[kind], good)
        with self._lock:
            self._samples[kind].pages.append(good)
            self._samples[kind].gigabytes_per_second.append(good * page_bytes / _GB / seconds)
