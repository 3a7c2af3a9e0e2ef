"""Pins of the arenas that one copier uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvclient.device.pins.pinned_range import PinnedRange, PinReport, cpus_near
from kvclient.device.pins.shared_pins import process_pins
from kvclient.device.streams import Device
from kvstore.native import address_of
from kvstore.observe.counters import Counters


class CopierPins:
    """The pins of one copier, by address of the arena. Thread-safe.

    Args:
        device: pins memory.
        counters: counts refusals.
        enabled: whether to pin at all.
        chunk_bytes: bytes pinned by one call of the driver.
        may_unmap: whether no copy can access an arena any more.
    """

    def __init__(
        self, device: Device, counters: Counters, *, enabled: bool, chunk_bytes: int, may_unmap: Callable[[], bool]
    ) -> None:
        self._device = device
        self._counters = counters
        self.enabled = enabled and device.pinning is not None
        self._chunk_bytes = chunk_bytes
        self._may_unmap = may_unmap
        self._lock = threading.Lock()
        self._ranges: dict[int, list[PinnedRange]] = {}
        """Pins by address of the arena, once per session that maps it."""
        self._serving = False

    def mapped(self, arena: memoryview, descriptor: int | None) -> CopierArenaPin:
        """Pin a mapped arena in the background, once per process; see ``ArenaPinner``."""
        address, pins = address_of(arena), None
        if self.enabled:
            pinning = self._device.pinning
            assert pinning is not None
            pins = process_pins.acquire(
                address,
                len(arena),
                pinning,
                self._counters,
                chunk_bytes=self._chunk_bytes,
                cpus=cpus_near(self._device.bus_id),
                descriptor=descriptor,
            )
            with self._lock:
                self._ranges.setdefault(address, []).append(pins)
            if self._serving:
                pins.serve()
        return CopierArenaPin(self, address, pins)

    def unmapped(self, address: int, pins: PinnedRange | None) -> bool:
        """Release the pins of one session before it ends. False: the arena must stay mapped."""
        if not self._may_unmap():
            return False
        if pins is None:
            return True
        if not process_pins.release(pins):
            return False
        with self._lock:
            left = self._ranges.get(address, [])
            if pins in left:
                left.remove(pins)
            if not left:
                self._ranges.pop(address, None)
        return True

    def of_arena(self, address: int) -> PinnedRange | None:
        """The pins of the arena at an address; None: it is not pinned."""
        with self._lock:
            pins = self._ranges.get(address)
            return pins[-1] if pins else None

    def _all(self) -> list[PinnedRange]:
        with self._lock:
            return list({id(pins): pins for ranges in self._ranges.values() for pins in ranges}.values())

    def reports(self) -> list[PinReport]:
        """Progress of pinning, one report per arena."""
        return [pins.report() for pins in self._all()]

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing more can be pinned at the moment. False: not in time."""
        until_s = time.monotonic() + timeout_s
        return all(pins.wait(max(0.0, until_s - time.monotonic())) for pins in self._all())

    def serve(self) -> None:
        """From now on, pause after each pinned chunk."""
        self._serving = True
        for pins in self._all():
            pins.serve()


class CopierArenaPin:
    """One session's use of the pins of an arena; see ``ArenaPin``."""

    def __init__(self, owner: CopierPins, address: int, pins: PinnedRange | None) -> None:
        self._owner = owner
        self._address = address
        self._pins = pins
        self._closed = False

    def close(self) -> bool:
        """Unpin the arena. False: it must stay mapped."""
        if not self._closed:
            self._closed = self._owner.unmapped(self._address, self._pins)
        return self._closed
