"""A cache of open connections that closes none in use."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

IDLE_S: Final = 120.0
"""A value that was asked for within this time counts as in use."""
IN_USE_FACTOR: Final = 8
"""Even if all are in use, at most this many times ``most`` values are kept."""


class IdleCache(Generic[Key, Value]):
    """Values by key. Beyond ``most``, those that were not asked for during ``IDLE_S`` are retired, the least recently used first.

    More than ``most`` stay while they are in use, because closing a connection fails its readers: at most ``IN_USE_FACTOR``
    times as many. Not thread-safe.

    Args:
        most: number of values that are kept, in use or not.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Key, tuple[Value, float]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def peek(self, key: Key) -> Value | None:
        """Return the value of a key, without a use."""
        entry = self._values.get(key)
        return None if entry is None else entry[0]

    def get(self, key: Key, now_s: float) -> Value | None:
        """Return the value of a key, which is used now."""
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values[key] = (entry[0], now_s)
        self._values.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, now_s: float) -> list[Value]:
        """Add a value, which is used now. Returns the values that were removed for it; close them."""
        self._values[key] = (value, now_s)
        retired = []
        while len(self._values) > self._most:
            oldest, (unused, used_s) = next(iter(self._values.items()))
            if now_s - used_s < IDLE_S and len(self._values) <= IN_USE_FACTOR * self._most:
                break
            del self._values[oldest]
            retired.append(unused)
        return retired

    def pop(self, key: Key) -> Value | None:
        """Remove a key and return its value."""
        entry = self._values.pop(key, None)
        return None if entry is None else entry[0]

    def clear(self) -> list[Value]:
        """Remove and return all values."""
        values = [value for value, _ in self._values.values()]
        self._values.clear()
        return values
