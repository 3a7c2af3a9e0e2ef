"""I/O engine ``posix``: ``preadv`` and ``pwritev``, with O_DIRECT if the file system supports it. Always available.

Every slab has one: it writes and syncs, and it is the fallback of other engines.
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
"""Size of the calls into which a thread splits a long run. Measured: with four threads 5-10 % faster than one call of 4 MiB. With
half the size and eight threads a seventh slower, because fewer bytes are in flight.
"""


class PosixFile(IoEngine):
    """A slab file by its descriptor.

    Args:
        path: the file, which exists.
        direct: use O_DIRECT.
        writable: False: open read-only.
        counters: counts fallbacks.

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
            with mmap.mmap(-1, ALIGNMENT) as probe:  # some file systems accept the flag and reject the I/O
                os.preadv(fd, [probe], 0)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # twice the CPU and half the throughput of direct I/O; fdatasync makes data durable
            self._counters.add(volumes_metrics.NVME_DIRECT_IO_REFUSED)
            _log.warning("O_DIRECT refused: %s (error=%s); buffered I/O is slower", self.path, error.strerror)
            return os.open(self.path, flags), False, f"posix buffered (O_DIRECT refused: {error.strerror})"
        return fd, True, "posix O_DIRECT"

    @property
    def name(self) -> str:
        return self._name

    def make_writable(self) -> None:
        """Allow writes to a file that was opened read-only. Running reads continue.

        Raises:
            OSError: the file still cannot be opened for writing.
        """
        if self._writable:
            return
        fd = os.open(self.path, os.O_CLOEXEC | os.O_RDWR | (os.O_DIRECT if self.direct else 0))
        self._replaced_fd, self.fd = self.fd, fd  # running reads use the old descriptor until they end
        self._writable = True

    def read(self, pieces: Sequence[memoryview], position: int) -> int:
        return _in_steps(os.preadv, self.fd, pieces, position)

    def read_device(self, memory: DeviceMemory, position: int) -> bool:  # noqa: ARG002  # the kernel reads into host memory
        self._counters.add(volumes_metrics.DEVICE_READS_BOUNCED)
        return False

    def write(self, pieces: Sequence[memoryview], position: int) -> int:
        """Write pieces in sequence from ``position`` on.

        Returns:
            Bytes written; -1 if a call before the last was short.

        Raises:
            OSError: an I/O error.
        """
        return _in_steps(os.pwritev, self.fd, pieces, position)

    def sync(self) -> None:
        """Write data, and the metadata to find it, to stable storage."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        os.close(self.fd)
        if self._replaced_fd >= 0:
            os.close(self._replaced_fd)


def _in_steps(call: Callable[[int, list[memoryview], int], int], fd: int, pieces: Sequence[memoryview], position: int) -> int:
    """Read or write pieces in sequence from a byte position on, in equal calls of about ``STEP_BYTES``.

    Returns:
        Bytes transferred; -1 if a call before the last was short.
    """
    total = sum(piece.nbytes for piece in pieces)
    size = round_up(-(-total // max(1, total // STEP_BYTES)))
    done = 0
    step: list[memoryview] = []
    space = size
    for piece in pieces:
        at = 0
        while at < piece.nbytes:
            part = piece[at : at + space]
            step.append(part)
            at += part.nbytes
            space -= part.nbytes
            if space == 0:
                if call(fd, step, position + done) != size:
                    return -1
                done += size
                step, space = [], size
    return done + (call(fd, step, position + done) if step else 0)
