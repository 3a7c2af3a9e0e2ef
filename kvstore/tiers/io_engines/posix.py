"""I/O engine ``posix``: ``preadv`` and ``pwritev``, with O_DIRECT where the file system takes it. Always there.

A slab keeps it open whatever engine reads: it writes, syncs, and takes over where another one fails.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.allocator import ALIGNMENT, round_up
from kvstore.tiers.io_engines.contract import DeviceMemory, IoEngine

_log = logging.getLogger(__name__)

STEP_BYTES = 1 << 20
"""A thread moves a long run in calls of so many bytes. Measured: with four threads 5-10 % faster than one call of 4 MiB; half as
long, with eight threads, a seventh slower, for what is in flight is the threads times this."""


class PosixFile(IoEngine):
    """A slab file by its descriptor.

    Args:
        path: the file, which exists.
        direct: ask for O_DIRECT.
        writable: False: opened read-only.
        counters: where fallbacks are counted.

    Raises:
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: Path, *, direct: bool, writable: bool, counters: Counters) -> None:
        self.path = path
        self._counters = counters
        flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
        self.fd, self.direct, self._name = self._open(flags, direct)
        self._writable = writable
        self._replaced_fd = -1

    def _open(self, flags: int, direct: bool) -> tuple[int, bool, str]:
        if not direct:
            return os.open(self.path, flags), False, "posix buffered"
        fd = -1
        try:
            fd = os.open(self.path, flags | os.O_DIRECT)
            with mmap.mmap(-1, ALIGNMENT) as probe:  # some file systems accept the flag and refuse the I/O
                os.preadv(fd, [probe], 0)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # twice the CPU and half the throughput of direct I/O; data is durable all the same, by fdatasync
            self._counters.add(volumes_metrics.NVME_DIRECT_IO_REFUSED)
            _log.warning("slab %s: O_DIRECT refused (%s): buffered I/O, which is slower", self.path, error.strerror)
            return os.open(self.path, flags), False, f"posix buffered (O_DIRECT refused: {error.strerror})"
        return fd, True, "posix O_DIRECT"

    @property
    def name(self) -> str:
        return self._name

    def make_writable(self) -> None:
        """From now on writes are possible, where the file was opened read-only. Reads under way go on undisturbed.

        Raises:
            OSError: it still cannot be opened for writing.
        """
        if self._writable:
            return
        fd = os.open(self.path, os.O_CLOEXEC | os.O_RDWR | (os.O_DIRECT if self.direct else 0))
        self._replaced_fd, self.fd = self.fd, fd  # reads under way use the old one until they end
        self._writable = True

    def read(self, pieces: Sequence[memoryview], position: int) -> int:
        return _in_steps(os.preadv, self.fd, pieces, position)

    def read_device(self, memory: DeviceMemory, position: int) -> bool:  # noqa: ARG002  # the kernel reads into host memory
        self._counters.add(volumes_metrics.DEVICE_READS_BOUNCED)
        return False

    def write(self, pieces: Sequence[memoryview], position: int) -> int:
        """Writes pieces one after the other from ``position`` on.

        Returns:
            Bytes written; -1 where a call before the last came back short.

        Raises:
            OSError: they cannot be written.
        """
        return _in_steps(os.pwritev, self.fd, pieces, position)

    def sync(self) -> None:
        """Data, and what is needed to find it, to stable storage."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        os.close(self.fd)
        if self._replaced_fd >= 0:
            os.close(self._replaced_fd)


def _in_steps(call: Callable[[int, list[memoryview], int], int], fd: int, pieces: Sequence[memoryview], position: int) -> int:
    """Reads or writes pieces one after the other from a byte position on, in equal calls of ``STEP_BYTES`` or a little more.

    Returns:
        Bytes transferred; -1 where a call before the last came back short.
    """
    total = sum(piece.nbytes for piece in pieces)
    size = round_up(-(-total // max(1, total // STEP_BYTES)))
    done = 0
    step: list[memoryview] = []
    room = size
    for piece in pieces:
        at = 0
        while at < piece.nbytes:
            part = piece[at : at + room]
            step.append(part)
            at += part.nbytes
            room -= part.nbytes
            if room == 0:
                if call(fd, step, position + done) != size:
                    return -1
                done += size
                step, room = [], size
    return done + (call(fd, step, position + done) if step else 0)
