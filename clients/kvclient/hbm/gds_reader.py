"""The local node's disks, read straight into the pool's memory: past the node, its arena and this process's host memory.

The engine mounts its own node's volumes, read-only. Which slot holds a block the node says, and keeps it there under a lease
(``Node.Locate``). That it was the block is proved by the slot's header, read after the payload, and by the checksum of every
Layer Block, made of what has arrived: it is fetched back from the device for that (``kvstore.tiers.nvme.mounted``). A slot that
was given to another block, under a reader that outlived its lease, is a miss.

Whether reads go straight is found out volume by volume, in the background, by a process of its own
(``kvstore.tiers.io_engines.probe``). Where they are only pretended, or the pool is host memory, none are done: the node reads as
well as we would, and more often finds the block in its arena afterwards. What fails is counted, and left to the node. A read that
does not come back in time cannot be called back: the slots that it writes to are not used again before it has, and nobody else is
sent that way meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from kvclient.hbm.pool_state import PoolState
from kvclient.memory.device_buffer import DeviceHung
from kvclient.memory.engine_pool import StoredVolume
from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.core.types import BlockKey, Outcome
from kvstore.node.config import MountConfig
from kvstore.node.loads.mounts import Answers, Mount
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.tiers.contract import Slot
from kvstore.tiers.io_engines.kvikio_library import Kvikio, load_kvikio
from kvstore.tiers.io_engines.probe import choose_gds, glance_at_gds
from kvstore.tiers.io_engines.tensor_memory import TensorMemory

_log = logging.getLogger(__name__)

GdsMode = Literal["auto", "required", "off", "forced"]
"""Whether disks are read straight into the pool: ``auto``: where it is real; ``required``: or clients do not connect; ``forced``:
by whatever way there is, pretended ones too (tests, benchmarks)."""

REST_S = 60.0
"""How long a volume that failed is left alone: its node reads it meanwhile."""
MOST_VOLUMES = 256
"""Known to one pool: those of its node, and of nodes before it."""
MOST_IN_FLIGHT = 256
INTERRUPT_S = 10.0
"""A thread that is interrupted while it waits for reads waits so long for their end."""
READERS = 4
"""Volumes read at once for one load."""


class ReadsPending(DeviceHung):
    """Reads have not come back: their slots are given back by themselves once they have."""


class DiskRead(NamedTuple):
    """One block to be read."""

    key: BlockKey
    volume: int
    """Position of its volume."""
    source: Slot
    """Where it lies there."""
    target: Slot
    """Where it goes, in the pool."""


@dataclass(slots=True)
class _VolumeReader:
    """What is known of a volume: nothing yet, that it is read, or why not."""

    mount: Mount | None = None
    says: str = "being looked at"


class GdsReader:
    """The volumes of a pool's node. Thread-safe.

    Args:
        parts: the pool's.
        mode: see ``GdsMode``.
        in_flight: blocks read at once from each volume.

    Raises:
        InvalidArgument: no such mode, or none for this device; or an impossible number.
    """

    def __init__(self, parts: PoolState, mode: GdsMode, in_flight: int) -> None:
        if mode not in get_args(GdsMode):
            raise InvalidArgument("gds takes auto, required, off or forced", gds=mode)
        if mode == "required" and parts.volume.device.type != "cuda":
            raise InvalidArgument("gds = required takes a pool on a CUDA device", device=parts.volume.device)
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or not 1 <= in_flight <= MOST_IN_FLIGHT:
            raise InvalidArgument("gds_in_flight takes a number of blocks", gds_in_flight=in_flight, most=MOST_IN_FLIGHT)
        self._parts = parts
        self._mode = mode
        self._in_flight = in_flight
        self._why_not = _why_not(mode, parts.volume.device.type)
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._disks: dict[StoredVolume, _VolumeReader] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._registering = threading.Lock()
        self._kvikio: Kvikio | None = None
        self._registered: TensorMemory | None = None
        self._closed = False

    # ---- which are read ----
    def prepare(self, volumes: Sequence[StoredVolume]) -> None:
        """Begins to find out about volumes that are new; see ``NearBlocks.prepare_disks``."""
        new = self._new(volumes)
        if self._mode == "required":
            for volume in volumes if not self._closed else ():
                if volume not in self._disks:
                    raise Unsupported("HbmPool(gds=...) = required, and this pool has known too many volumes", most=MOST_VOLUMES)
                self._look(volume)
        elif new:
            threading.Thread(target=self._look_at_all, args=(new,), name="hbm-disks", daemon=True).start()

    def ready(self, volumes: Sequence[StoredVolume]) -> bool:
        """Whether all of some volumes are read straight, and none is in trouble now."""
        if self._why_not or not volumes:
            return False
        mounts = [disk.mount if (disk := self._disks.get(volume)) is not None else None for volume in volumes]
        if None in mounts and self._mode != "required":
            self.prepare(volumes)
        return all(mount is not None and mount.usable for mount in mounts)

    def _new(self, volumes: Sequence[StoredVolume]) -> list[StoredVolume]:
        if self._why_not:
            return []
        with self._lock:
            new = [volume for volume in dict.fromkeys(volumes) if volume not in self._disks]
            if self._closed or len(self._disks) + len(new) > MOST_VOLUMES:
                return []
            self._disks.update((volume, _VolumeReader()) for volume in new)
        return new

    def _look_at_all(self, volumes: Sequence[StoredVolume]) -> None:
        for volume in volumes:
            try:
                self._look(volume)
            except Exception:  # noqa: BLE001  # the edge of this thread: that volume is read by its node
                self._parts.counters.add("hbm_disk_bugs_total")
                _log.exception("pool %s: volume %s is not read into it", self._parts.node_id, volume.volume_id)
                self._disks[volume].says = "not read: looking at it failed"

    def _look(self, volume: StoredVolume) -> None:
        """Finds out whether a volume can be read straight into the pool.

        Raises:
            Unsupported: that is required, and it cannot.
        """
        parts = self._parts
        with self._looking:  # one probe at a time
            if self._disks[volume].mount is not None:
                return
            if self._mode == "forced":
                kvikio, says = self._any_way()
            else:
                kvikio, found = choose_gds(
                    self._mode, volume.path, threads=self._in_flight, counters=parts.counters,
                    setting="HbmPool(gds=...)", look=glance_at_gds,
                )  # fmt: skip
                says = f"read straight, GPUDirect Storage is {found.describe()}"
                if kvikio is None:
                    self._disks[volume].says = f"not read, GPUDirect Storage is {found.describe()}"
                    return
            if kvikio is not None:
                self._register(kvikio)
            config = MountConfig(volume.volume_id, volume.path)
            mount = Mount(
                config,
                io_threads=self._in_flight,
                counters=parts.counters,
                clock=parts.clock,
                gds=kvikio,
                places=False,
                rest_s=REST_S,
            )
            mount.catch_up_soon()  # opens it, and is in use until then
            with self._lock:
                closed = self._closed
                self._disks[volume].says = says
                self._disks[volume].mount = None if closed else mount
            if closed:
                mount.close()
            else:
                _log.info("pool %s reads volume %s by itself: %s", parts.node_id, volume.volume_id, says)

    def _any_way(self) -> tuple[Kvikio | None, str]:
        """Any way at all of reading into the pool: kvikio where it can be loaded, real or not."""
        try:
            kvikio = load_kvikio(threads=self._in_flight)
        except Unsupported as error:
            return None, f"read as was forced: by posix and host memory ({error})"
        return kvikio, f"read as was forced: by kvikio {kvikio.version}, whether straight or not"

    def describe(self) -> list[str]:
        """What is in use, for people; one line a volume."""
        pool = self._parts.volume.volume_id
        if self._why_not:
            return [f"disks into {pool}: none ({self._why_not})"]
        with self._lock:
            disks: Mapping[StoredVolume, _VolumeReader] = dict(self._disks)
        lines = []
        for volume, disk in disks.items():
            now = "" if disk.mount is None else f"; now: {disk.mount.describe()}"
            lines.append(f"{volume.volume_id} into {pool}: {disk.says}{now}")
        return lines or [f"disks into {pool}: none known yet"]

    # ---- reads ----
    def read(
        self, namespace: NodeNamespace, volumes: Sequence[StoredVolume], wanted: Sequence[DiskRead], deadline_s: float
    ) -> list[bytes]:
        """Reads blocks into slots of the pool that the caller holds.

        Args:
            namespace: whose they are.
            volumes: which the blocks' ``volume`` count.
            wanted: the blocks.
            deadline_s: a part of the time until then is waited for.

        Returns:
            One entry for each of the leading blocks that came: its packed checksums, which the bytes match.

        Raises:
            ReadsPending: not all reads came back in time; the slots are given back here.
        """
        parts = self._parts
        memory, size = parts.volume.memory, namespace.shape.block_bytes
        items = [
            (read.key, read.source, TensorMemory(memory[read.target.offset : read.target.offset + size])) for read in wanted
        ]  # before anything is under way: should this fail, the slots are free
        by_volume: dict[int, list[int]] = {}
        for at, read in enumerate(wanted):
            by_volume.setdefault(read.volume, []).append(at)
        out = _PendingReads(len(by_volume))
        rows = [b""] * len(wanted)

        def read_one(volume: StoredVolume, positions: Sequence[int]) -> None:
            disk = self._disks.get(volume)
            mount = disk.mount if disk is not None else None
            answers: Answers | None = None
            if mount is None:
                out.back()
            else:
                answers = mount.read_device(namespace, [items[at] for at in positions], deadline_s, out.back)
                if answers is not None:
                    out.back()
                    if all(outcome is Outcome.MISS for outcome, _ in answers):
                        mount.catch_up_soon()  # it may be another volume by now
            for at, (outcome, checksums) in zip(positions, answers or (), strict=False):
                rows[at] = checksums if outcome is Outcome.HIT else b""

        def give_back() -> None:
            parts.table.unreserve([read.target for read in wanted])

        groups = [(volumes[number], positions) for number, positions in by_volume.items()]
        try:
            if len(groups) == 1:
                read_one(*groups[0])
            else:
                self._at_once(groups, read_one, out)
        except BaseException as error:  # an interrupt: the caller gives the slots back, so nothing may write to them any more
            if not out.wait(INTERRUPT_S) and not out.all_back(give_back):
                raise ReadsPending("interrupted while blocks are being read from the node's disks") from error
            raise
        if not out.all_back(give_back):
            parts.counters.add("hbm_disk_late_blocks_total", len(wanted))
            raise ReadsPending("blocks are still being read from the node's disks", blocks=len(wanted))
        return rows[: next((at for at, row in enumerate(rows) if not row), len(rows))]

    def _at_once(
        self,
        groups: Sequence[tuple[StoredVolume, Sequence[int]]],
        read_one: Callable[[StoredVolume, Sequence[int]], None],
        out: _PendingReads,
    ) -> None:
        """Reads from several volumes; what is not begun when this ends, for it was interrupted, never is."""
        futures: list[Future[None]] = []
        try:
            for group in groups:
                try:
                    futures.append(self._threads().submit(read_one, *group))
                except RuntimeError:  # the pool is being closed
                    out.back()
            for future in futures:
                future.result()
        finally:
            for future in futures:
                if future.cancel():
                    out.back()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="hbm-disks")
            return self._readers

    # ---- the pool's memory ----
    def _register(self, kvikio: Kvikio) -> None:
        """Registers the pool's memory with cuFile, once: reads need no bounce buffer of the driver's then."""
        with self._registering:
            self._kvikio = kvikio
            self._register_now()

    def _register_now(self) -> None:
        if self._kvikio is None or self._registered is not None or self._parts.volume.device.type != "cuda" or self._parts.closed:
            return
        memory = TensorMemory(self._parts.volume.memory)
        if self._kvikio.register(memory):
            self._registered = memory
        else:
            self._parts.counters.add("hbm_not_registered_with_gds_total")

    @contextmanager
    def memory_changes(self) -> Iterator[None]:
        """Within it the pool's memory may become another; nothing is being read."""
        with self._registering:  # nobody registers meanwhile what is about to be freed
            self._deregister()
            try:
                yield
            finally:  # also where there was no room for the new size: it has other memory all the same
                self._register_now()

    def _deregister(self) -> None:
        if self._kvikio is not None and self._registered is not None:
            self._kvikio.deregister(self._registered)
        self._registered = None

    def close(self, *, idle: bool) -> None:
        """Reads no more. Does not wait for what hangs; ``idle``: nothing does, and the pool's memory is about to be freed."""
        with self._lock:
            self._closed = True
            mounts = [disk.mount for disk in self._disks.values() if disk.mount is not None]
            readers = self._readers
        for mount in mounts:
            mount.close()
        if readers is not None:
            readers.shutdown(wait=False)
        if idle:
            with self._registering:
                self._deregister()


class _PendingReads:
    """How many groups of reads may still write to memory. Thread-safe."""

    def __init__(self, groups: int) -> None:
        self._lock = threading.Condition()
        self._groups = groups
        self._then: Callable[[], None] | None = None

    def back(self) -> None:
        """One has ended."""
        with self._lock:
            self._groups -= 1
            self._lock.notify_all()
            then = self._then if not self._groups else None
        if then is not None:
            then()

    def wait(self, timeout_s: float) -> bool:
        """Waits until all have ended. False: not in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._groups, timeout_s)

    def all_back(self, then: Callable[[], None]) -> bool:
        """Whether all have ended. If not, ``then`` is called as soon as they have."""
        with self._lock:
            if not self._groups:
                return True
            self._then = then
            return False


def _why_not(mode: GdsMode, device: str) -> str:
    """Why no disk is read at all; empty: some may be."""
    if mode == "off":
        return "switched off"
    return "" if device == "cuda" or mode == "forced" else "the pool is host memory"
