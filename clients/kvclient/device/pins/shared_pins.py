"""One pin per process and arena. All copiers, sessions and weights epochs of the process share it."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from kvclient.device.driver import HostPinning
from kvclient.device.pins.pinned_range import PinnedRange
from kvstore.observe.counters import Counters


@dataclass(slots=True)
class _Entry:
    pins: PinnedRange
    users: int = 0
    closing: bool = False
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when the driver has been asked to release all pins."""


class SharedPins:
    """The pinned ranges of this process, with counts of their users. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[object, int], _Entry] = {}

    def acquire(
        self,
        address: int,
        nbytes: int,
        driver: HostPinning,
        counters: Counters,
        *,
        chunk_bytes: int,
        cpus: Collection[int] | None,
        descriptor: int | None,
    ) -> PinnedRange:
        """Return the pinned range of a mapping, and begin to pin it if this is its first user.

        ``release`` ends the use. For arguments, see ``PinnedRange``.
        """
        key = (driver.scope, address)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.closing:
                pins = PinnedRange(
                    address,
                    nbytes,
                    driver,
                    counters,
                    chunk_bytes=chunk_bytes,
                    cpus=cpus,
                    descriptor=descriptor,
                    after=entry.closed if entry is not None else None,
                )
                entry = self._entries[key] = _Entry(pins)
            entry.users += 1
            return entry.pins

    def release(self, pins: PinnedRange) -> bool:
        """End one use. The last one unpins, without copies in flight. False: the memory must stay mapped."""
        key = (pins.driver.scope, pins.address)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.pins is not pins:  # a fork's child, or newer pins of the same memory
                entry = _Entry(pins, 1)
            if entry.users > 1:
                entry.users -= 1
                return True
            entry.closing = True
        sound = pins.close()
        entry.closed.set()
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]
        return sound

    def forget(self) -> None:
        """After a fork, in the child: the pins belong to the parent, and no other thread holds the lock."""
        self._lock = threading.Lock()
        self._entries = {}


process_pins = SharedPins()
"""The pins of this process."""
os.register_at_fork(after_in_child=process_pins.forget)
