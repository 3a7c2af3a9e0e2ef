"""Volumes of other nodes that this node mounts and reads directly, without their owner in the way.

A mount may be slow or hang (its servers are not ours), and a read that hangs cannot be called back: the kernel may still write to
the memory it was given, at any later time. So all I/O of a mount is guarded (``kvstore.node.base.volume_guard``): a load waits
for it while the mount answers, and for a part of the load's time at most. Memory of a read that did not end in time stays
reserved until it ends, and until then no load asks that mount. Blocks that the mount does not bring come from the other sources
of the load.

A block's place comes from the volume's roster, which is read on when a load wants blocks that it does not name yet; or its owner
has said it, to an engine of its host that reads into its device's memory (``kvclient.hbm``).
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
from kvstore.tiers.contract import Slot
from kvstore.tiers.io_engines.contract import DeviceMemory
from kvstore.tiers.io_engines.kvikio_library import Kvikio
from kvstore.tiers.nvme.mounted import MountedSlab

log = logging.getLogger(__name__)

THREADS = 8
"""Reads of one mount under way at once; each fills the device by itself."""
TIME_SHARE = 0.5
"""Part of a load's time that a mount may take, so that another source can still be asked."""
REST_S = 5.0
"""How long a mount that failed is left alone."""

Wanted = Sequence[tuple[BlockKey, Slot, memoryview]]
WantedOnDevice = Sequence[tuple[BlockKey, Slot, DeviceMemory]]
Answers = list[tuple[Outcome, bytes]]
T = TypeVar("T")


@dataclass(slots=True)
class _Opened:
    """The volume while it is open, and how many are at work with it: the last one closes it where it was given up."""

    volume: MountedSlab
    users: int = 0
    given_up: bool = False


class Mount:
    """One mounted volume. Thread-safe. Opened when first used, and again after failures.

    Args:
        config: which, and where.
        io_threads: I/O requests under way at once.
        counters: where failures are counted.
        clock: where time comes from.
        gds: kvikio, for reads into device memory; None: they go through host memory.
        places: False: ``find`` is never asked, as the owner says where blocks lie.
        rest_s: how long it is left alone after a failure.
        stall_s: patience with a read while nothing comes back from the file system.
    """

    def __init__(
        self,
        config: MountSection,
        *,
        io_threads: int,
        counters: Counters,
        clock: Clock,
        gds: Kvikio | None = None,
        places: bool = True,
        rest_s: float = REST_S,
        stall_s: float = STALL_S,
    ) -> None:
        self.volume_id = VolumeId(config.volume)
        self._config = config
        self._io_threads = io_threads
        self._counters = counters
        self._clock = clock
        self._gds = gds
        self._places = places
        self._rest_s = rest_s
        self._guard = VolumeGuard(self.volume_id, counters, answered_s=self._answered_s, stall_s=stall_s, readers=THREADS)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._opened: _Opened | None = None
        self._resting_until = 0.0
        self._trouble = "not read yet"
        self._closed = False

    def describe(self) -> str:
        """What is in use, for people."""
        opened = self._opened
        state = self._trouble if opened is None else f"{opened.volume.io_engine}, {opened.volume.blocks} blocks known"
        return f"{self.volume_id} mounted at {self._config.path}: {state}"

    def find(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """Where blocks are said to lie, as far as is known. Memory only; nothing while the mount is in trouble."""
        opened = self._opened
        if opened is None or not self.usable:
            return [None] * len(keys)
        return opened.volume.find(keys, namespace.shape)

    def catch_up(self, deadline_s: float) -> None:
        """Takes in what the owner wrote since; opens the volume where it is not."""
        self._bounded(lambda volume: volume.catch_up(), deadline_s, "its roster", _nothing)

    def catch_up_soon(self) -> None:
        """The same, in the background."""
        if self.usable:
            self._guard.begin(lambda: self._do(lambda volume: volume.catch_up()), ignore)

    def read(self, namespace: NodeNamespace, wanted: Wanted, deadline_s: float, when_back: Callable[[], None]) -> Answers | None:
        """Reads blocks into memory.

        Returns:
            One answer a block, as ``MountedSlab.read``; or None: in vain. Then ``when_back`` is called as soon as nothing
            writes to the memory any more, perhaps at once.
        """
        return self._bounded(
            lambda volume: volume.read(namespace.namespace_id, namespace.shape, wanted),
            deadline_s,
            f"{len(wanted)} blocks",
            when_back,
        )

    def read_device(
        self, namespace: NodeNamespace, wanted: WantedOnDevice, deadline_s: float, when_back: Callable[[], None]
    ) -> Answers | None:
        """As ``read``, into device memory and as ``MountedSlab.read_device``."""
        return self._bounded(
            lambda volume: volume.read_device(namespace.namespace_id, namespace.shape, wanted),
            deadline_s,
            f"{len(wanted)} blocks",
            when_back,
        )

    def close(self) -> None:
        """Closes the volume once nobody works with it. Does not wait for what hangs."""
        self._closed = True
        self._give_up(self._opened, "closed")
        self._guard.close()

    @property
    def usable(self) -> bool:
        """Whether anything would be tried now: nothing hangs, and it does not rest after a failure."""
        return not self._guard.left and self._resting_until <= self._clock.now_s()

    def _answered_s(self) -> float:
        opened = self._opened
        return -math.inf if opened is None else opened.volume.answered_s

    # ---- bounded work ----
    def _bounded(
        self,
        work: Callable[[MountedSlab], T],
        deadline_s: float,
        what: str,
        when_back: Callable[[], None],
    ) -> T | None:
        """Does something in the mount's threads and waits a part of the time that is left. None: it failed or is still out."""
        now_s = self._clock.now_s()
        if not self.usable:
            when_back()
            return None
        until_s = now_s + max(0.0, (deadline_s - now_s) * TIME_SHARE)
        try:
            result = self._guard.read(lambda: self._do(work), lambda _: when_back(), until_s)
        except VolumeStalled:
            if not self._closed:
                self._counters.add(volumes_metrics.MOUNT_STALLED)
                log.warning("volume %s: %s did not come in time; it is left alone until it has", self.volume_id, what)
            return None
        if result is None:
            when_back()
        return result

    def _do(self, work: Callable[[MountedSlab], T]) -> T | None:
        """In a thread of the mount: runs ``work``; None where the volume cannot be used, which then rests."""
        opened: _Opened | None = None
        try:
            with self._in_use() as opened:
                return work(opened.volume)
        except Exception as error:  # noqa: BLE001  # whatever lies in a folder that is not ours: it must not end loads
            self._counters.add(volumes_metrics.MOUNT_ERRORS)
            log.warning(
                "volume %s at %s cannot be read (%s): left alone for %.0f s",
                self.volume_id,
                self._config.path,
                error,
                self._rest_s,
            )
            self._resting_until = self._clock.now_s() + self._rest_s
            self._give_up(opened, str(error))
            return None

    @contextmanager
    def _in_use(self) -> Iterator[_Opened]:
        with self._opening:
            if self._opened is None:
                volume = MountedSlab(
                    self._config.path,
                    self.volume_id,
                    io_threads=self._io_threads,
                    direct=self._config.direct,
                    counters=self._counters,
                    gds=self._gds,
                    gds_required=self._gds is not None,
                    places=self._places,
                )
                self._opened = _Opened(volume)
            opened = self._opened
            with self._lock:
                opened.users += 1
        try:
            yield opened
        finally:
            with self._lock:
                opened.users -= 1
                last = opened.given_up and not opened.users
            if last:
                opened.volume.close()

    def _give_up(self, opened: _Opened | None, why: str) -> None:
        self._trouble = why
        if opened is None:
            return
        with self._lock:
            idle = not opened.given_up and not opened.users
            opened.given_up = True
            if self._opened is opened:
                self._opened = None
        if idle:
            opened.volume.close()


class Mounts:
    """All mounts of a node, as a load asks them. Thread-safe."""

    def __init__(self, mounts: Sequence[Mount]) -> None:
        self._mounts = {mount.volume_id: mount for mount in mounts}

    def __iter__(self) -> Iterator[Mount]:
        return iter(self._mounts.values())

    def start(self) -> None:
        """Begins to read the rosters, in the background."""
        for mount in self:
            mount.catch_up_soon()

    def get(self, volume_id: str) -> Mount | None:
        """The mount of a volume, if there is one."""
        return self._mounts.get(VolumeId(volume_id))

    def close(self) -> None:
        """Closes all."""
        for mount in self:
            mount.close()


def make_mounts(
    configs: Sequence[MountSection], *, io_threads: int, counters: Counters, clock: Clock, stall_s: float = STALL_S
) -> Mounts:
    """The mounts of a node."""
    return Mounts([Mount(config, io_threads=io_threads, counters=counters, clock=clock, stall_s=stall_s) for config in configs])


def _nothing() -> None:
    pass
