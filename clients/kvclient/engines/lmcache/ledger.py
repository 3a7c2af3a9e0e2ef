"""Keys that this process stored: for LMCache's usage and listing. A hint: the store itself decides what it keeps."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_SETTLED_S = 5.0
"""A block that was stored within this time may not be in lookups yet."""


@dataclass(slots=True)
class _Entry:
    """A known key.

    Attributes:
        number: position in listings.
        size: bytes of the object.
        seen_s: monotonic time at which it was last known to be stored.
    """

    number: int
    size: int
    seen_s: float


class KeyLedger:
    """Known keys with their sizes, and keys that LMCache deleted. Thread-safe. Bounded: the oldest keys are forgotten.

    Args:
        most: known keys, and as many deleted ones.
        now_s: a monotonic clock.
    """

    def __init__(self, most: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._now_s = now_s
        self._lock = threading.Lock()
        self._next = 0
        self._known: dict[Any, _Entry] = {}
        self._checks: OrderedDict[Any, None] = OrderedDict()
        """Known keys, least recently checked first."""
        self._deleted: OrderedDict[Any, None] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return len(self._known)

    def add(self, stored: Iterable[tuple[Any, int]]) -> tuple[list[tuple[Any, int]], list[tuple[Any, int]]]:
        """Note stored keys with their sizes.

        Returns:
            Those that were not known, and those that were forgotten for lack of space.
        """
        new: list[tuple[Any, int]] = []
        forgotten: list[tuple[Any, int]] = []
        now_s = self._now_s()
        with self._lock:
            for key, size in stored:
                self._deleted.pop(key, None)
                if (entry := self._known.get(key)) is not None:
                    entry.seen_s = now_s
                    continue
                self._known[key] = _Entry(self._next, size, now_s)
                self._checks[key] = None
                self._next += 1
                new.append((key, size))
            while len(self._known) > self._most:
                oldest = next(iter(self._known))
                forgotten.append((oldest, self._remove(oldest)))
        return new, forgotten

    def delete(self, keys: Iterable[Any]) -> list[tuple[Any, int]]:
        """Hide keys until they are stored again, and return the known ones among them with their sizes."""
        gone = []
        with self._lock:
            for key in keys:
                self._deleted[key] = None
                if key in self._known:
                    gone.append((key, self._remove(key)))
            while len(self._deleted) > self._most:
                self._deleted.popitem(last=False)
        return gone

    def hidden(self, keys: Sequence[Any]) -> list[bool]:
        """Return which keys are hidden."""
        with self._lock:
            if not self._deleted:
                return [False] * len(keys)
            return [key in self._deleted for key in keys]

    def to_check(self, count: int) -> list[tuple[Any, int]]:
        """Return known keys with their sizes, least recently checked first."""
        with self._lock:
            chosen = [key for key, _ in zip(self._checks, range(count), strict=False)]
            for key in chosen:
                self._checks.move_to_end(key)
            return [(key, self._known[key].size) for key in chosen]

    def forget_missing(self, keys: Iterable[Any]) -> list[tuple[Any, int]]:
        """Forget keys that a lookup did not find, unless they were stored a moment ago, and return them with their sizes."""
        before_s = self._now_s() - _SETTLED_S
        with self._lock:
            known = ((key, self._known.get(key)) for key in keys)
            return [(key, self._remove(key)) for key, entry in known if entry is not None and entry.seen_s <= before_s]

    def page(self, model: str | None, size: int, after: int) -> tuple[list[tuple[Any, int]], int | None]:
        """Return a page of known keys with their sizes, in the order in which they were stored.

        Args:
            model: only keys of this model; None: all.
            size: the most keys.
            after: the number that the page before returned; -1: the first page.

        Returns:
            The page, and the number for the next one; None: this was the last.
        """
        found: list[tuple[Any, int]] = []
        last = after
        with self._lock:
            for key, entry in self._known.items():
                if entry.number > after and (model is None or key.model_name == model):
                    if len(found) == size:
                        return found, last
                    found.append((key, entry.size))
                    last = entry.number
        return found, None

    def _remove(self, key: Any) -> int:  # noqa: ANN401
        self._checks.pop(key, None)
        return self._known.pop(key).size
