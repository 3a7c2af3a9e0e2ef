"""Volumes of other nodes that this node mounts and reads directly, without their owner.

A mount may be slow or hang, because its file servers belong to others. A read that hangs cannot be cancelled: the kernel may
write to its memory at any later time. So all I/O of a mount is guarded (``kvstore.node.base.volume_guard``): a load waits while
the mount answers, and for a part of the load's time at most. Memory of a read that did not end in time stays reserved until the
read ends, and until then no load uses that mount. Other sources of the load deliver the blocks.

The slot of a block comes from the volume's slot manifest. The manifest is read again if a load requests blocks that it does not
name. For an engine of the owner's host that reads into device memory (``kvclient.gds``), the owner locates the block instead
(``reads_manifest=False``).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvstore.config.node import MountSection
from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey, Outcome, VolumeId
from kvstore.node.base.volume_guard import STALL_S, VolumeGuard, VolumeStalled, ignore
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.io_engines.contract import DeviceMemory
from kvstore.tiers.io_engines.kvikio_library import Kvikio
from kvstore.tiers.nvme.mounted import MountedSlab

log = logging.getLogger(__name__)

THREADS = 8
"""Reads of one mount at once. Each alone saturates the device."""
TIME_SHARE = 0.5
"""Part of a load's remaining time that a mount may use, so that another source can still be read."""
BACKOFF_S = 5.0
"""Back-off after a failure."""

HostReads = Sequence[tuple[BlockKey, Slot, memoryview]]
DeviceReads = Sequence[tuple[BlockKey, Slot, DeviceMemory]]
Answers = list[tuple[Outcome, BlockRecord]]
T = TypeVar("T")


@dataclass(slots=True)
class _Opened:
    """The open volume and its number of users. If it was abandoned, the last user closes it."""

    volume: MountedSlab
    users: int = 0
    abandoned: bool = False


class Mount:
    """One mounted volume. Thread-safe. It is opened with its first use, and again after failures.

    Args:
        config: the volume and its folder.
        io_threads: I/O requests at once.
        counters: metrics.
        clock: time.
        gds: kvikio, for reads into device memory; None: they go through host memory.
        reads_manifest: False: ``find`` is not used, because the owner locates blocks.
        backoff_s: pause after a failure.
        stall_s: how long a read may be outstanding while the file system answers nothing.
    """

    def __init__(
        self,
        config: MountSection,
        *,
        io_threads: int,
        counters: Counters,
        clock: Clock,
        gds: Kvikio | None = None,
        reads_manifest: bool = True,
        backoff_s: float = BACKOFF_S,
        stall_s: float = STALL_S,
    ) -> None:
        self.volume_id = VolumeId(config.volume)
        self._config = config
        self._io_threads = io_threads
        self._counters = counters
        self._clock = clock
        self._gds = gds
        self._reads_manifest = reads_manifest
        self._backoff_s = backoff_s
        self._guard = VolumeGuard(self.volume_id, counters, answered_s=self._answered_s, stall_s=stall_s, readers=THREADS)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._opened: _Opened | None = None
        self._backoff_until_s = 0.0
        self._state = "not read yet"
        self._closed = False

    def describe(self) -> str:
        """Return a description for operators."""
        opened = self._opened
        state = self._state if opened is None else f"{opened.volume.io_engine}, {opened.volume.blocks} blocks known"
        return f"{self.volume_id} mounted at {self._config.path}: {state}"

    def find(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """Return the known slots of blocks. Reads memory only. All None while the mount cannot be used."""
        opened = self._opened
        if opened is None or not self.usable:
            return [None] * len(keys)
        return opened.volume.find(keys, namespace.shape)

    def catch_up(self, deadline_s: float) -> None:
        """Read the newest slot manifest. Opens the volume if it is closed."""
        self._bounded(lambda volume: volume.catch_up(), deadline_s, "slot manifest", _nothing)

    def begin_catch_up(self) -> None:
        """Read the newest slot manifest in the background."""
        if self.usable:
            self._guard.begin(lambda: self._do(lambda volume: volume.catch_up()), ignore)

    def read(
        self, namespace: NodeNamespace, items: HostReads, deadline_s: float, on_released: Callable[[], None]
    ) -> Answers | None:
        """Read blocks into memory.

        Returns:
            One answer per block, as ``MountedSlab.read``. None: the read failed; then ``on_released`` is called as soon as
            nothing writes to the memory any more, perhaps before this returns.
        """
        return self._bounded(
            lambda volume: volume.read(namespace.namespace_id, namespace.shape, items),
            deadline_s,
            f"{len(items)} blocks",
            on_released,
        )

    def read_device(
        self,
        namespace: NodeNamespace,
        items: DeviceReads,
        deadline_s: float,
        on_released: Callable[[], None],
        *,
        verify: bool = True,
    ) -> Answers | None:
        """Read blocks into device memory, as ``MountedSlab.read_device``. See ``read``."""
        return self._bounded(
            lambda volume: volume.read_device(namespace.namespace_id, namespace.shape, items, verify=verify),
            deadline_s,
            f"{len(items)} blocks",
            on_released,
        )

    def close(self) -> None:
        """Close the volume after its last user. Does not wait for I/O that hangs."""
        self._closed = True
        self._abandon(self._opened, "closed")
        self._guard.close()

    @property
    def usable(self) -> bool:
        """Whether a read would be attempted now: no read is overdue, and the last failure is long enough ago."""
        return not self._guard.abandoned and self._backoff_until_s <= self._clock.now_s()

    def _answered_s(self) -> float:
        opened = self._opened
        return -math.inf if opened is None else opened.volume.answered_s

    # ---- bounded work ----
    def _bounded(
        self,
        work: Callable[[MountedSlab], T],
        deadline_s: float,
        what: str,
        on_released: Callable[[], None],
    ) -> T | None:
        """Run work in the mount's threads, and wait for a part of the remaining time. None: it failed or has not ended."""
        now_s = self._clock.now_s()
        if not self.usable:
            on_released()
            return None
        until_s = now_s + max(0.0, (deadline_s - now_s) * TIME_SHARE)
        try:
            result = self._guard.read(lambda: self._do(work), lambda _: on_released(), until_s)
        except VolumeStalled:
            if not self._closed:
                self._counters.add(volumes_metrics.MOUNT_STALLED)
                log.warning("mount stalled: %s (read=%s); not used until the read ends", self.volume_id, what)
            return None
        if result is None:
            on_released()
        return result

    def _do(self, work: Callable[[MountedSlab], T]) -> T | None:
        """Run work in a thread of the mount. None: the volume could not be read, and backs off."""
        opened: _Opened | None = None
        try:
            with self._in_use() as opened:
                return work(opened.volume)
        except Exception as error:  # noqa: BLE001  # the folder is another node's: no content of it may fail a load
            self._counters.add(volumes_metrics.MOUNT_ERRORS)
            log.warning(
                "mount failed: %s at %s (error=%s, backoff=%.0f s)",
                self.volume_id,
                self._config.path,
                error,
                self._backoff_s,
            )
            self._backoff_until_s = self._clock.now_s() + self._backoff_s
            self._abandon(opened, str(error))
            return None

    @contextmanager
    def _in_use(self) -> Iterator[_Opened]:
        opened = self._enter()
        try:
            yield opened
        finally:
            with self._lock:
                opened.users -= 1
                last = opened.abandoned and not opened.users
            if last:
                opened.volume.close()

    def _enter(self) -> _Opened:
        """Open the volume unless it is open, and count one more user. The caller leaves it later."""
        with self._opening:
            with self._lock:
                if self._opened is not None:
                    self._opened.users += 1
                    return self._opened
            volume = MountedSlab(
                self._config.path,
                self.volume_id,
                io_threads=self._io_threads,
                direct=self._config.direct,
                counters=self._counters,
                gds=self._gds,
                gds_required=self._gds is not None,
                reads_manifest=self._reads_manifest,
            )
            opened = _Opened(volume, users=1)
            with self._lock:
                self._opened = opened
            return opened

    def _abandon(self, opened: _Opened | None, why: str) -> None:
        self._state = why
        if opened is None:
            return
        with self._lock:
            idle = not opened.abandoned and not opened.users
            opened.abandoned = True
            if self._opened is opened:
                self._opened = None
        if idle:
            opened.volume.close()


class Mounts:
    """All mounts of a node, in the order in which loads use them. Thread-safe."""

    def __init__(self, mounts: Sequence[Mount]) -> None:
        self._mounts = {mount.volume_id: mount for mount in mounts}
        self.all: tuple[Mount, ...] = tuple(self._mounts.values())
        """Replaced when a mount is added, so that threads iterate over it without a lock."""
        self._lock = threading.Lock()

    def add(self, mount: Mount) -> None:
        """Use another mount, unless the volume is mounted already."""
        with self._lock:
            if mount.volume_id not in self._mounts:
                self._mounts = {**self._mounts, mount.volume_id: mount}
                self.all = (*self.all, mount)

    def start(self) -> None:
        """Begin to read the slot manifests in the background."""
        for mount in self.all:
            mount.begin_catch_up()

    def get(self, volume_id: str) -> Mount | None:
        """Return the mount of a volume; None: it is not mounted."""
        return self._mounts.get(VolumeId(volume_id))

    def close(self) -> None:
        """Close all mounts."""
        for mount in self.all:
            mount.close()


def _nothing() -> None:
    pass
