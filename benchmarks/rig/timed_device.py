"""A device whose copies take a scripted time and move no byte: shows how long the client leaves a device without work.

No figure of such a device says how fast a GPU is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvclient.device.blocks import PageRange
from kvclient.device.copier import DeviceCopier
from kvclient.device.driver import Addresses, HostPinning
from kvclient.device.layouts import PagedCache
from kvclient.device.streams import Event


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """Event that is reached at a time of the monotonic clock."""

    at_s: float

    def done(self) -> bool:
        """Whether it is reached."""
        return time.monotonic() >= self.at_s


class TimedStream:
    """A stream that copies at a constant rate.

    Args:
        bytes_per_s: the rate.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self.busy_s = 0.0
        """Time that all copies take together."""

    def run(self, work: Callable[[], None]) -> None:
        """Do the work at once: it is not timed."""
        work()

    def wait(self, event: Event) -> None:
        """Copy later bytes after an event."""
        assert isinstance(event, TimedEvent)
        self._free_s = max(self._free_s, event.at_s)

    def record(self) -> TimedEvent:
        """Return an event after all bytes."""
        return TimedEvent(self._free_s)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:  # noqa: ARG002
        """Take the time of a copy of rows."""
        self.take(width * rows)

    def copy_batch(
        self,
        targets: Addresses,  # noqa: ARG002
        sources: Addresses,  # noqa: ARG002
        sizes: Addresses,
        *,
        final_sources: bool = False,  # noqa: ARG002
    ) -> None:
        """Take the time of a batch."""
        self.take(int(sizes.sum()))

    def take(self, nbytes: int) -> None:
        """Be busy for as long as a copy takes."""
        took_s = nbytes / self._bytes_per_s
        self._free_s = max(self._free_s, time.monotonic()) + took_s
        self.busy_s += took_s


class TimedDevice:
    """A device with such streams.

    Args:
        bytes_per_s: rate of each stream.
    """

    memory = torch.device("cpu")
    pinning: HostPinning | None = None
    bus_id = ""
    has_batch = True
    reads_host = False

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s

    def stream(self) -> TimedStream:
        """Create a stream."""
        return TimedStream(self.bytes_per_s)

    def mark(self) -> TimedEvent:
        """Return an event that is reached: nothing computes on this device."""
        return TimedEvent(0.0)

    def wait_event(self, event: Event) -> None:
        """Wait for an event in this thread, as the engine's stream would."""
        assert isinstance(event, TimedEvent)
        time.sleep(max(0.0, event.at_s - time.monotonic()))

    def run(self, work: Callable[[], None]) -> None:
        """Do the work at once."""
        work()


class _TimedChecksums:
    """Zeros, after the time that their computation takes."""

    def __init__(self, blocks: int, layers: int, event: TimedEvent, wait: Callable[[Sequence[Event]], None]) -> None:
        self._found = np.zeros((blocks, layers), np.uint64)
        self._event = event
        self._wait = wait

    def result(self) -> npt.NDArray[np.uint64]:
        """Wait for them."""
        self._wait([self._event])
        return self._found


class TimedCopier(DeviceCopier):
    """Copies of a cache on such a device.

    Args:
        cache: its pages; they are not touched.
        device: the device.
        hash_bytes_per_s: rate at which the device computes checksums; 0: the host does.
    """

    def __init__(self, cache: PagedCache, device: TimedDevice, hash_bytes_per_s: float = 0.0) -> None:
        super().__init__(cache, strategy="batched", device=device)
        self._hashes = TimedStream(hash_bytes_per_s) if hash_bytes_per_s else None

    def begin_checksums(self, pages: PageRange, after: Sequence[Event]) -> _TimedChecksums | None:  # type: ignore[override]
        """See ``DeviceCopier``."""
        if self._hashes is None:
            return None
        for event in after:
            self._hashes.wait(event)
        blocks = len(pages.page_ids) // self.pages_per_block
        self._hashes.take(blocks * pages.layers * self.shape.layer_block_bytes)
        return _TimedChecksums(blocks, pages.layers, self._hashes.record(), self.wait)
