"""Reads from the local node's volumes directly into memory of the engine's device, without the node, its arena or host memory.

The engine mounts its node's volumes read-only. The node names the slot of a block and keeps it under a lease (``Node.Locate``).
The slot's header, read after the payload, and the checksum of every layer block, computed from the received bytes, prove that
it is the block. For a pool the bytes are copied back from the device for this check (``kvstore.tiers.nvme.mounted``). A landing
ring computes the checksums on the device. A slot that was reused after the lease ended is a miss.

A probe process checks in the background, per volume, whether GPUDirect Storage works (``kvstore.tiers.io_engines.probe``). If
reads only work in compatibility mode, or the target is host memory, the node reads instead: it is as fast, and more often finds
the block in its arena later. Failed reads are counted and left to the node. A late read cannot be cancelled: its slots stay
reserved until it ends, and its volume is not read until then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch

from kvclient.memory.device_buffer import DeviceHung
from kvclient.memory.engine_pool import StoredVolume
from kvstore.config.node import MountSection
from kvstore.core.clock import Clock
from kvstore.core.errors import InvalidArgument, Unavailable, Unsupported
from kvstore.core.types import BlockKey, Outcome
from kvstore.node.loads.mounts import TIME_SHARE, Answers, Mount
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import device as device_metrics
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.process.threads.submission import start_thread, submit
from kvstore.tiers.contract import Slot
from kvstore.tiers.io_engines.kvikio_library import Kvikio, load_kvikio
from kvstore.tiers.io_engines.probe import choose_gds, glance_at_gds
from kvstore.tiers.io_engines.tensor_memory import TensorMemory

_log = logging.getLogger(__name__)
_limited = LimitedLog(_log)

GdsMode = Literal["auto", "required", "off", "forced"]
"""Whether volumes are read directly into device memory. ``auto``: if GPUDirect Storage works; ``required``: else clients cannot
connect; ``forced``: by any method, also in compatibility mode (tests, benchmarks)."""

REST_S = 60.0
"""How long a failed volume is not read; its node reads it in this time."""
MOST_VOLUMES = 256
"""Volumes known to one reader: those of its node, and of earlier nodes."""
MOST_IN_FLIGHT = 256
INTERRUPT_S = 10.0
"""How long an interrupted thread waits for the end of its reads."""
KVIKIO_THREADS = 64
"""Requests in flight in one process, over all volumes and readers: eight volumes with the default of eight reads each. Fixed,
because kvikio waits for all requests before it changes the number of its threads. Only a larger ``in_flight`` raises it."""
READERS = 4
"""Volumes read in parallel for one load."""


class ReadsPending(DeviceHung):
    """Reads have not ended in time; their slots are released after they end."""


class DiskRead(NamedTuple):
    """One block to read."""

    key: BlockKey
    volume: int
    """Position of its volume."""
    source: Slot
    """Its slot in the volume."""
    target: Slot
    """Its slot in the target's memory."""


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """Device memory that blocks are read into: an engine's pool, or a landing ring.

    Attributes:
        name: for people.
        setting: the setting that chose the mode, for errors.
        device: device of the memory.
        counters: metrics.
        clock: time.
        memory: returns the memory: uint8 ``[bytes]``; None: not allocated.
        closed: returns whether the target is closed.
        release: takes slots back whose reads have ended late.
        verify_on_host: fetch the bytes back and compare their checksums. False: the caller compares them on the device.
    """

    name: str
    setting: str
    device: torch.device
    counters: Counters
    clock: Clock
    memory: Callable[[], torch.Tensor | None]
    closed: Callable[[], bool]
    release: Callable[[Sequence[Slot]], None]
    verify_on_host: bool = True


@dataclass(slots=True)
class _VolumeReader:
    """State of one volume: unknown, mounted, or the reason why not."""

    mount: Mount | None = None
    status: str = "probe is running"


class GdsReader:
    """The volumes of the engine's node. Thread-safe.

    Args:
        target: the memory to read into.
        mode: see ``GdsMode``.
        in_flight: blocks read in parallel from each volume.

    Raises:
        InvalidArgument: an unknown mode, or one that this device does not support; or a number out of range.
    """

    def __init__(self, target: ReadTarget, mode: GdsMode, in_flight: int) -> None:
        if mode not in get_args(GdsMode):
            raise InvalidArgument("gds must be auto, required, off or forced", gds=mode)
        if mode == "required" and target.device.type != "cuda":
            raise InvalidArgument("gds=required requires memory of a CUDA device", device=target.device)
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or not 1 <= in_flight <= MOST_IN_FLIGHT:
            raise InvalidArgument("gds: reads in flight per volume out of range", got=in_flight, least=1, most=MOST_IN_FLIGHT)
        self._target = target
        self._mode = mode
        self._in_flight = in_flight
        self._why_not = _why_not(mode, target.device.type)
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._disks: dict[StoredVolume, _VolumeReader] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._registering = threading.Lock()
        self._kvikio: Kvikio | None = None
        self._registered: TensorMemory | None = None
        self._full = False
        """Whether volumes were left to the node because too many are known."""
        self._closed = False

    # ---- probes ----
    def prepare(self, volumes: Sequence[StoredVolume]) -> None:
        """Begin to probe new volumes; see ``prepare_disks``."""
        new = self._new(volumes)
        if self._mode == "required":
            for volume in volumes if not self._closed else ():
                if volume not in self._disks:
                    raise Unsupported(f"{self._target.setting} = required, but too many volumes are known", most=MOST_VOLUMES)
                self._probe(volume)
        elif new and start_thread(partial(self._probe_all, new), "gds-probe") is None:
            _limited.warning("volumes not probed yet: %s (reason=no more threads); the node reads them", self._target.name)
            with self._lock:
                for volume in new:  # the next call probes them
                    del self._disks[volume]

    def ready(self, volumes: Sequence[StoredVolume]) -> bool:
        """Whether all of these volumes are read directly and healthy."""
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
            if self._closed:
                return []
            known = len(self._disks) + len(new)
            if known <= MOST_VOLUMES:
                self._disks.update((volume, _VolumeReader()) for volume in new)
                return new
            first, self._full = not self._full, True
        if first:
            self._target.counters.add(volumes_metrics.GDS_NOT_USABLE, len(new))
            _log.warning(
                "too many volumes for direct reads: %s (volumes=%d, most=%d); the node reads new ones",
                self._target.name,
                known,
                MOST_VOLUMES,
            )
        return []

    def _probe_all(self, volumes: Sequence[StoredVolume]) -> None:
        for volume in volumes:
            try:
                self._probe(volume)
            except Exception:  # noqa: BLE001  # edge of this thread: its node reads the volume
                self._target.counters.add(device_metrics.HBM_DISK_BUGS)
                _log.exception("probe failed: %s does not read volume %s directly", self._target.name, volume.volume_id)
                self._disks[volume].status = "not read: the probe failed"

    def _probe(self, volume: StoredVolume) -> None:
        """Probe whether a volume can be read directly.

        Raises:
            Unsupported: gds=required, and it cannot.
        """
        target = self._target
        with self._looking:  # one probe at a time
            if self._disks[volume].mount is not None:
                return
            if self._mode == "forced":
                kvikio, status = self._any_method()
            else:
                kvikio, found = choose_gds(
                    self._mode, volume.path, threads=self._threads_of_kvikio(), counters=target.counters,
                    setting=target.setting, look=glance_at_gds,
                )  # fmt: skip
                status = f"read directly, GPUDirect Storage is {found.describe()}"
                if kvikio is None:
                    self._disks[volume].status = f"not read, GPUDirect Storage is {found.describe()}"
                    _log.info(
                        "direct reads not used: %s, volume %s (gds=%s); the node reads it",
                        target.name, volume.volume_id, found.describe(),
                    )  # fmt: skip
                    return
            if kvikio is not None:
                self._register(kvikio)
            config = MountSection(volume=volume.volume_id, path=volume.path)
            mount = Mount(
                config,
                io_threads=self._in_flight,
                counters=target.counters,
                clock=target.clock,
                gds=kvikio,
                reads_manifest=False,
                backoff_s=REST_S,
            )
            mount.begin_catch_up()  # opens it; the mount is in use until then
            with self._lock:
                closed = self._closed
                self._disks[volume].status = status
                self._disks[volume].mount = None if closed else mount
            if closed:
                mount.close()
            else:
                _log.info("volume opened for direct reads: %s, volume %s (status=%s)", target.name, volume.volume_id, status)

    def _threads_of_kvikio(self) -> int:
        return max(KVIKIO_THREADS, self._in_flight)

    def _any_method(self) -> tuple[Kvikio | None, str]:
        """Any method of reading into the memory: kvikio if it can be loaded, in any mode."""
        try:
            kvikio = load_kvikio(threads=self._threads_of_kvikio())
        except Unsupported as error:
            return None, f"forced: by posix through host memory ({error})"
        return kvikio, f"forced: by kvikio {kvikio.version} in any mode"

    def describe(self) -> list[str]:
        """Describe the volumes for people; one line per volume."""
        name = self._target.name
        if self._why_not:
            return [f"disks into {name}: none ({self._why_not})"]
        with self._lock:
            disks: Mapping[StoredVolume, _VolumeReader] = dict(self._disks)
        lines = []
        for volume, disk in disks.items():
            now = "" if disk.mount is None else f"; now: {disk.mount.describe()}"
            lines.append(f"{volume.volume_id} into {name}: {disk.status}{now}")
        return lines or [f"disks into {name}: none known yet"]

    # ---- reads ----
    def read(
        self, namespace: NodeNamespace, volumes: Sequence[StoredVolume], wanted: Sequence[DiskRead], deadline_s: float
    ) -> list[bytes]:
        """Read blocks into slots of the target that the caller holds.

        Args:
            namespace: namespace of the blocks.
            volumes: the volumes that ``DiskRead.volume`` indexes.
            wanted: the blocks.
            deadline_s: the call waits for a part of the time until then.

        Returns:
            One entry per leading block that was read: its packed checksums. They match the bytes if ``verify_on_host``.

        Raises:
            ReadsPending: reads have not ended in time; the slots are released later.
        """
        target = self._target
        memory, size = target.memory(), namespace.shape.block_bytes
        if memory is None:
            return []
        items = [
            (read.key, read.source, TensorMemory(memory[read.target.offset : read.target.offset + size])) for read in wanted
        ]  # before any read begins: if this fails, the slots are free
        by_volume: dict[int, list[int]] = {}
        for at, read in enumerate(wanted):
            by_volume.setdefault(read.volume, []).append(at)
        pending = _PendingReads(len(by_volume))
        rows = [b""] * len(wanted)

        def read_one(volume: StoredVolume, positions: Sequence[int]) -> None:
            disk = self._disks.get(volume)
            mount = disk.mount if disk is not None else None
            answers: Answers | None = None
            if mount is None:
                pending.ended()
            else:
                answers = mount.read_device(
                    namespace, [items[at] for at in positions], deadline_s, pending.ended, verify=target.verify_on_host
                )
                if answers is not None:
                    pending.ended()
                    if all(outcome is Outcome.MISS for outcome, _ in answers):
                        mount.begin_catch_up()  # the volume may have been replaced
            for at, (outcome, record) in zip(positions, answers or (), strict=False):
                rows[at] = record.checksums if outcome is Outcome.HIT else b""

        def give_back() -> None:
            target.release([read.target for read in wanted])

        groups = [(volumes[number], positions) for number, positions in by_volume.items()]
        try:
            if len(groups) == 1 and threading.current_thread() is not threading.main_thread():
                read_one(*groups[0])  # no KeyboardInterrupt here: a mount does not report the end of an interrupted read
            else:
                self._in_parallel(groups, read_one, pending, deadline_s)
        except BaseException as error:  # an interrupt: the caller releases the slots, so no read may still write to them
            if not pending.wait(INTERRUPT_S) and not pending.when_ended(give_back):
                raise ReadsPending("interrupted during reads from the node's volumes") from error
            raise
        if not pending.when_ended(give_back):
            target.counters.add(device_metrics.HBM_DISK_LATE_BLOCKS, len(wanted))
            raise ReadsPending("reads from the node's volumes did not end in time", blocks=len(wanted))
        return rows[: next((at for at, row in enumerate(rows) if not row), len(rows))]

    def _in_parallel(
        self,
        groups: Sequence[tuple[StoredVolume, Sequence[int]]],
        read_one: Callable[[StoredVolume, Sequence[int]], None],
        pending: _PendingReads,
        deadline_s: float,
    ) -> None:
        """Read from several volumes. Reads that have not begun in a part of the time, or at an interrupt, are cancelled.

        Mounts bound the reads that have begun by the deadline.
        """
        futures: list[Future[None]] = []
        try:
            for group in groups:
                try:
                    futures.append(submit(self._threads(), read_one, *group))
                except Unavailable as error:  # the pool is being closed, or no thread can be started
                    pending.ended()
                    _limited.warning("no thread for direct reads: %s (error=%s); the node reads", self._target.name, error)
            wait(futures, max(0.0, (deadline_s - self._target.clock.now_s()) * TIME_SHARE))
        finally:
            begun = [future for future in futures if not future.cancel()]
            for _ in range(len(futures) - len(begun)):
                pending.ended()
        if len(begun) < len(futures):
            _limited.warning(
                "direct reads not begun in time: %s (volumes=%d); the node reads", self._target.name, len(futures) - len(begun)
            )
        for future in begun:
            future.result()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="gds-reader")
            return self._readers

    # ---- the target's memory ----
    def _register(self, kvikio: Kvikio) -> None:
        """Register the memory with cuFile, once: reads then need no bounce buffer of the driver."""
        with self._registering:
            self._kvikio = kvikio
            self._register_now()

    def _register_now(self) -> None:
        target, tensor = self._target, self._target.memory()
        if (
            self._kvikio is None
            or self._registered is not None
            or target.device.type != "cuda"
            or target.closed()
            or tensor is None
        ):
            return
        memory = TensorMemory(tensor)
        if self._kvikio.register(memory):
            self._registered = memory
        else:
            self._target.counters.add(device_metrics.HBM_NOT_REGISTERED_WITH_GDS)

    @contextmanager
    def memory_changes(self) -> Iterator[None]:
        """Allow the target's memory to be replaced within the context; no read is in flight."""
        with self._registering:  # no registration of memory that is about to be freed
            self._deregister()
            try:
                yield
            finally:  # also if the new size did not fit: the memory is new in any case
                self._register_now()

    def _deregister(self) -> None:
        if self._kvikio is not None and self._registered is not None:
            self._kvikio.deregister(self._registered)
        self._registered = None

    def close(self, *, idle: bool) -> None:
        """Stop reading. Does not wait for hung reads.

        Args:
            idle: no read is in flight, and the target's memory is about to be freed.
        """
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
    """Number of groups of reads that may still write to memory. Thread-safe."""

    def __init__(self, groups: int) -> None:
        self._lock = threading.Condition()
        self._groups = groups
        self._then: Callable[[], None] | None = None

    def ended(self) -> None:
        """Record the end of one group."""
        with self._lock:
            self._groups -= 1
            self._lock.notify_all()
            then = self._then if not self._groups else None
        if then is not None:
            then()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have ended. False: not in time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._groups, timeout_s)

    def when_ended(self, then: Callable[[], None]) -> bool:
        """Whether all have ended. If not, ``then`` is called when they have."""
        with self._lock:
            if not self._groups:
                return True
            self._then = then
            return False


def _why_not(mode: GdsMode, device: str) -> str:
    """The reason why no volume is read directly; empty: volumes may be read."""
    if mode == "off":
        return "switched off"
    return "" if device == "cuda" or mode == "forced" else "the target is host memory"
