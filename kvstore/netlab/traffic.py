"""Traffic of each link of a lab: byte counters, sampled over time.

All counters come from *one* file: the switch has a port per NIC, so ``/proc/net/dev`` of the switch's namespace contains every
counter (a port sends what its NIC receives). A thread that enters the namespace opens the file once. Each later read costs some
ten microseconds per host, so that one thread of the lab's owner samples all hosts.

The counters count bytes of Ethernet frames *after* shaping. Of a large segment that the NIC would divide they count one header,
so they are up to 1 % below the rate of the link.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import InvalidArgument, NotFound
from kvstore.netlab import netns

Network = Literal["storage", "compute"]
Direction = Literal["rx", "tx"]
DEFAULT_INTERVAL_S = 0.05
_MAX_SAMPLES = 20_000
"""At this many, every second one is dropped: counters only grow, so no byte is lost, only detail."""
_READ_BYTES = 1 << 20


class LabNic(NamedTuple):
    """One network card of one host."""

    host: str
    network: Network


class Counts(NamedTuple):
    """Bytes of one NIC since the lab began, as the host sees them."""

    rx_bytes: int
    tx_bytes: int


class CounterFile:
    """The counters of all NICs.

    Args:
        switch_fd: namespace of the switch.
        ports: NIC -> name of the switch's port.
    """

    def __init__(self, switch_fd: int, ports: Mapping[LabNic, str]) -> None:
        self.nics: tuple[LabNic, ...] = tuple(ports)
        self._ports = [port.encode() for port in ports.values()]
        # "thread-self": plain /proc/net is that of the process's first thread
        self._fd = netns.call_inside(switch_fd, lambda: os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC))

    def read(self) -> list[Counts]:
        """Counters now, in the order of ``nics``."""
        text = b""
        while piece := os.pread(self._fd, _READ_BYTES, len(text)):
            text += piece
        lines = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)
        found = {name.strip(): line.split() for name, line in lines.items()}
        # fields: rx bytes, packets, errs, drop, fifo, frame, compressed, multicast, tx bytes; the port's tx is the host's rx
        return [Counts(int(found[port][8]), int(found[port][0])) for port in self._ports]

    def close(self) -> None:
        """Close the file. The namespace cannot be removed before."""
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Series:
    """Counters of one NIC over time.

    Attributes:
        nic: whose.
        at_s: times of the samples, seconds of ``time.monotonic``, shape ``[n]``.
        rx_bytes: received since the lab began, shape ``[n]``.
        tx_bytes: sent since the lab began, shape ``[n]``.
    """

    nic: LabNic
    at_s: npt.NDArray[np.float64]
    rx_bytes: npt.NDArray[np.int64]
    tx_bytes: npt.NDArray[np.int64]

    def total_bytes(self, direction: Direction) -> int:
        """Bytes between the first sample and the last."""
        counts = self._counts(direction)
        return int(counts[-1] - counts[0]) if len(counts) else 0

    def mbit(self, direction: Direction) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Rate over time, for plots: middle of each interval (seconds since the first sample), Mbit/s; shapes ``[n - 1]``."""
        spans = np.diff(self.at_s)
        middle = self.at_s[:-1] + spans / 2 - (self.at_s[0] if len(self.at_s) else 0.0)
        return middle, np.diff(self._counts(direction)) * 8e-6 / spans

    def bytes_in_windows(self, direction: Direction, window_s: float) -> npt.NDArray[np.float64]:
        """Bytes in each whole window since the first sample, interpolated between samples."""
        if len(self.at_s) < 2:
            return np.zeros(0)
        windows = int((self.at_s[-1] - self.at_s[0]) / window_s)
        edges = self.at_s[0] + window_s * np.arange(windows + 1)
        return np.diff(np.interp(edges, self.at_s, self._counts(direction).astype(np.float64)))

    def _counts(self, direction: Direction) -> npt.NDArray[np.int64]:
        return self.rx_bytes if direction == "rx" else self.tx_bytes


class LinkRecorder:
    """Samples every NIC in the background. A context manager; its samples stay readable afterwards.

    Args:
        counters: counters to read; closed at the end.
        interval_s: time between samples.
    """

    def __init__(self, counters: CounterFile, interval_s: float = DEFAULT_INTERVAL_S) -> None:
        if not 0.001 <= interval_s <= 60:
            raise InvalidArgument("interval_s must be 0.001 to 60", interval_s=interval_s)
        self._counters = counters
        self._interval_s = interval_s
        self._at = array("d")
        self._counts = [array("q") for _ in range(2 * len(counters.nics))]
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="netlab-recording", daemon=True)

    def __enter__(self) -> Self:
        self._take()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        self._thread.join()
        self._take()
        self._counters.close()

    @property
    def nics(self) -> tuple[LabNic, ...]:
        """Whose counters these are."""
        return self._counters.nics

    def series(self, host: str, network: Network) -> Series:
        """Counters of one NIC so far.

        Raises:
            NotFound: unknown NIC.
        """
        nic = LabNic(host, network)
        if nic not in self.nics:
            raise NotFound("no such NIC in this lab", host=host, network=network)
        place = 2 * self.nics.index(nic)
        with self._lock:
            rx, tx = (np.array(counts, dtype=np.int64) for counts in self._counts[place : place + 2])
            return Series(nic, np.array(self._at), rx, tx)

    def max_over_avg(self, network: Network, hosts: Sequence[str], direction: Direction = "rx", window_s: float = 1.0) -> float:
        """Balance of some NICs: the busiest one's bytes over the average, over windows weighted by their traffic.

        1.0 is perfect; the number of hosts is the worst. 1.0 without any traffic.

        Raises:
            NotFound: unknown NIC.
        """
        loads = np.array([self.series(host, network).bytes_in_windows(direction, window_s) for host in hosts])
        average = float(loads.mean(axis=0).sum()) if loads.size else 0.0
        return float(loads.max(axis=0).sum()) / average if average else 1.0

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._take()

    def _take(self) -> None:
        counts = self._counters.read()
        with self._lock:
            if len(self._at) >= _MAX_SAMPLES:  # before the newest is taken in: the last one of all must stay
                self._interval_s *= 2
                del self._at[1::2]
                for column in self._counts:
                    del column[1::2]
            self._at.append(time.monotonic())
            for column, value in zip(self._counts, (value for pair in counts for value in pair), strict=True):
                column.append(value)
