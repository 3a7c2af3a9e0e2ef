"""The pool itself: memory, table, the thread that demotes, and how others see it. One an engine and device."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from kvclient.call.operation import check_seconds
from kvclient.hbm import memory
from kvclient.hbm.demotion import Demoter
from kvclient.hbm.gds_reader import GdsMode, GdsReader
from kvclient.hbm.namespace_view import NamespaceView
from kvclient.hbm.pool_node import PoolNode
from kvclient.hbm.pool_state import PoolState
from kvclient.hbm.volume import HbmVolume
from kvclient.memory.engine_pool import Demote
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, NamespaceId, VolumeId
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.process.node_id import check_node_id
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.auth.tokens import tokens_file as known_tokens
from kvstore.tiers.contract import VolumeUsage
from kvstore.tiers.eviction.policy import make_policy

_log = logging.getLogger(__name__)

_STOP_S = 5.0
_DRAIN_PAUSE_S = 0.005


class HbmPool:
    """Whole blocks in device memory. Thread-safe; a context manager. Make it after forking, and close its clients first.

    Args:
        device: ``cuda:N``, or ``cpu``: host memory, for tests and for engines that compute there.
        capacity_bytes: its size; or
        share: its size as a share of what is free on the device now.
        metadata: address of the metadata server, so that others see and read what is here; None: nobody does. One that does not
            answer is waited for some seconds; then the pool serves its engine, logs a warning, and shows others what is here
            as soon as the server answers.
        node_id: its name among nodes; None: made up anew. Two that live must not have one name.
        listen: where peers read from it, ``host:port``. Other hosts reach it only where this is an address of theirs too.
        advertise_host: what it tells others to dial; None: the host of ``listen``.
        allow_insecure_remote: listen beyond this host without TLS.
        tls: for all of that.
        token_file: file with the token that the metadata server is shown, of the role ``node``; None: none.
        tokens_file: who may ask the pool (``kvstore.rpc.auth.tokens``), as nodes' own; None: whoever reaches it.
        policy: which blocks leave first; see ``kvstore.tiers.eviction.policy``.
        demote: what leaves is offered to the tiers below before; False: it is dropped, as where those hold everything anyway.
        room_wait_s: a copy into the pool waits at most so long for room (for what is being demoted); then it is left out.
        anti_entropy_interval_s: how often the index is compared with what is here.
        gds: whether what lies on the local node's disks alone is read straight into the pool; see ``disks.GdsMode``. The engine
            needs permission to read the volumes' folders.
        gds_in_flight: blocks read at once from each of its volumes.

    Raises:
        InvalidArgument: an impossible size, name, device, policy or choice; or it would listen beyond this host without TLS.
        Unavailable: there is no CUDA device, or an address cannot be had.
        CapacityExceeded: the device has not so much memory.
        Conflict: a node or pool of this name lives; known after some seconds, for one that has just died is soon forgotten.
    """

    def __init__(
        self,
        device: str,
        *,
        capacity_bytes: int | None = None,
        share: float | None = None,
        metadata: str | None = None,
        node_id: str | None = None,
        listen: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        allow_insecure_remote: bool = False,
        tls: TlsConfig | None = None,
        policy: str = "gap",
        demote: bool = True,
        room_wait_s: float = 0.02,
        anti_entropy_interval_s: float = 60.0,
        gds: GdsMode = "auto",
        gds_in_flight: int = 8,
        token_file: Path | None = None,
        tokens_file: Path | None = None,
    ) -> None:
        token, tokens = TokenSource.of(file=token_file), None if tokens_file is None else known_tokens(tokens_file)
        where = memory.find_device(device)
        capacity = memory.pool_bytes(where, capacity_bytes, share)
        self.node_id = check_node_id(node_id or _own_name(str(where)))
        room_wait_s = check_seconds("room_wait_s", room_wait_s, zero=True)
        self._counters = Counters()
        self._clock = MonotonicClock()
        self._namespaces = NamespaceRegistry()
        self._ways: dict[NamespaceId, list[Demote]] = {}
        self._lock = threading.Lock()
        self._sizing = threading.Lock()
        chosen = make_policy(policy)
        volume_id = VolumeId(f"{self.node_id}/hbm")
        self._volume = HbmVolume(volume_id, where, capacity, counters=self._counters)
        self._log = ReplicaChangeLog([volume_id], self._counters, self._clock, keep=metadata is not None)
        # of a volume the table wants room alone; views are for a node's movers, which a pool has none of
        self._table = BlockTable(
            self._volume,  # type: ignore[arg-type]
            chosen,
            [],
            self._log,
            self._counters,
            self._clock,
            writes_behind=demote,
            cascades_chains=True,
        )
        self._parts = PoolState(self.node_id, self._volume, self._table, self._counters, self._clock, room_wait_s, demote=demote)
        self._disks = GdsReader(self._parts, gds, gds_in_flight)
        self._demoter = Demoter(self._parts, self._ways)
        self._presence: PoolNode | None = None
        try:
            if metadata is not None:
                self._presence = PoolNode(
                    self.node_id,
                    metadata,
                    listen,
                    advertise_host=advertise_host,
                    allow_insecure_remote=allow_insecure_remote,
                    tls=tls,
                    token=token,
                    tokens=tokens,
                    parts=self._parts,
                    io_engines=self.io_engines,
                    replica_log=self._log,
                    namespaces=self._namespaces,
                    anti_entropy_interval_s=check_seconds("anti_entropy_interval_s", anti_entropy_interval_s),
                )
                self._presence.start()
        except BaseException:
            self._volume.close()
            raise
        self._demoter.start()
        _log.info("pool %s: %d MiB on %s", self.node_id, capacity >> 20, where)

    # ---- clients ----
    def attach(self, spec: CacheSpec, demote: Demote) -> NamespaceView:
        """For ``KVClient.connect``: a namespace, and where its blocks go when they must leave.

        Raises:
            InvalidArgument: the pool is closed, or too small for a block of this namespace.
            Conflict, CapacityExceeded: as a node refuses namespaces.
        """
        with self._lock:
            if self._parts.closed:
                raise InvalidArgument("the pool is closed", node_id=self.node_id)
            self._volume.check_fits(spec.shape)
            namespace = self._namespaces.of_spec(spec)
            self._ways.setdefault(spec.namespace, []).append(demote)

        def detach(_: NamespaceView) -> None:
            with self._lock:
                ways = self._ways.get(spec.namespace, [])
                if demote in ways:
                    ways.remove(demote)

        return NamespaceView(self._parts, self._disks, namespace, detach)

    def blocks(self, spec: CacheSpec) -> NamespaceView:
        """A namespace, for an engine's own copies on its device (``copy_to_tensor``, ``keep_tensor``, ``pinned``).

        Raises:
            InvalidArgument: the pool is closed, or too small for a block of this namespace.
            Conflict, CapacityExceeded: as a node refuses namespaces.
        """
        with self._lock:
            if self._parts.closed:
                raise InvalidArgument("the pool is closed", node_id=self.node_id)
            self._volume.check_fits(spec.shape)
            return NamespaceView(self._parts, self._disks, self._namespaces.of_spec(spec), lambda _: None)

    # ---- memory ----
    def usage(self) -> VolumeUsage:
        """How full it is."""
        return self._volume.usage()

    def evict(self, *, demote: bool = True, timeout_s: float = _STOP_S) -> int:
        """Empties it of all that nobody reads now, as far as time allows. Returns how many blocks left.

        Args:
            demote: offer them to the tiers below first, if the pool does that at all.
            timeout_s: how long that may take; what is not written below by then leaves all the same.
        """
        if demote and self._parts.demote and not self._parts.lost:
            waiting: dict[NamespaceId, list[BlockKey]] = {}
            for block in self._table.snapshot():
                waiting.setdefault(block.namespace_id, []).append(block.key)
            for namespace_id, keys in waiting.items():
                self._table.requeue_writeback(self._namespaces.get(namespace_id), keys)
            self._table.wait_written(self._clock.now_s() + timeout_s)
        self._demoter.hurry()
        self._table.mark_clean(self._table.snapshot())
        return self._table.evict_dram()

    def resize(self, capacity_bytes: int, *, demote: bool = True, timeout_s: float = _STOP_S) -> bool:
        """Gives memory back to the device, or takes more: all blocks leave, for the memory is one piece. Meanwhile loads miss.

        Args:
            capacity_bytes: the new size; a page is the least.
            demote: as for ``evict``, for half of the time.
            timeout_s: how long to wait for those who read.

        Returns:
            False: blocks were in use all the time, and the size is as it was; or the pool is closed.

        Raises:
            InvalidArgument: an impossible size.
            CapacityExceeded: the device has not so much. Found before anything is done, the pool is as it was; found when the
                memory is taken (others may be quicker), it is left with a page.
        """
        if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < memory.PAGE_BYTES:
            raise InvalidArgument("a pool takes at least a page of 4096 bytes", capacity_bytes=capacity_bytes)
        timeout_s = check_seconds("timeout_s", timeout_s, zero=True)
        until_s = self._clock.now_s() + timeout_s
        with self._sizing:
            if self._parts.closed:
                return False
            memory.check_room(self._volume.device, capacity_bytes, self._volume.usage().capacity_bytes)
            self._parts.resizing = True
            try:
                self.evict(demote=demote, timeout_s=timeout_s / 2)
                if not self._drain(until_s) or not self._take(capacity_bytes):
                    self._counters.add("hbm_resize_refused_total")
                    _log.warning("pool %s keeps its size: blocks are in use", self.node_id)
                    return False
            finally:
                self._parts.resizing = False
                now_bytes = self._volume.usage().capacity_bytes
                if self._presence is not None:
                    self._presence.info.volumes[0].capacity_bytes = now_bytes
        _log.info("pool %s: %d MiB now", self.node_id, now_bytes >> 20)
        return True

    def _take(self, capacity_bytes: int) -> bool:
        with self._disks.memory_changes():
            return self._volume.resize(capacity_bytes // memory.PAGE_BYTES * memory.PAGE_BYTES)

    def _drain(self, until_s: float) -> bool:
        """Empties it as readers let go of blocks. Whether no slot is held any more."""
        pause = threading.Event()
        while True:
            self.evict(demote=False)
            if not self._volume.usage().blocks:
                return True
            if self._clock.now_s() >= until_s:
                return False
            pause.wait(_DRAIN_PAUSE_S)

    # ---- life ----
    def wait_published(self, timeout_s: float = 10.0) -> bool:
        """Waits until lookups show what is here now. False: not in time, or the pool is nobody's but its engine's."""
        return self._log.wait_published([self._volume.volume_id], self._clock.now_s() + timeout_s)

    def stats(self) -> dict[str, int]:
        """Totals by name, and how full it is."""
        usage = self._volume.usage()
        sizes = {"hbm_capacity_bytes": usage.capacity_bytes, "hbm_used_bytes": usage.used_bytes, "hbm_blocks": usage.blocks}
        return {**self._counters.snapshot(), **sizes, "hbm_lost": int(self._parts.lost)}

    def io_engines(self) -> list[str]:
        """What is really in use, for people: where the memory lies, and which disks are read straight into it."""
        return [f"{self._volume.volume_id}: {self._volume.device}", *self._disks.describe()]

    def close(self) -> None:
        """Empties it, so that lookups do not show it any more, and gives the memory back. Nothing is demoted.

        Waits a moment for those who read. Memory that somebody still reads after that goes when the last of them has let go.
        """
        with self._lock:
            if self._parts.closed:
                return
            self._parts.closed = True
        self._demoter.stop(_STOP_S)
        with self._sizing:
            self.evict(demote=False)
            if self._presence is not None:
                self._presence.stop()
            idle = self._drain(self._clock.now_s() + _STOP_S)
            self._disks.close(idle=idle)
            if idle:
                self._volume.close()
            else:
                self._counters.add("hbm_closed_in_use_total")
                _log.warning("pool %s is closed while blocks are read: its memory is kept until they are let go of", self.node_id)
            self._table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _own_name(device: str) -> str:
    """A name that no other pool has: the host's, the device's, and something drawn."""
    host = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in socket.gethostname().partition(".")[0])
    return f"{host[:30] or 'host'}-{device.replace(':', '')}-{secrets.token_hex(4)}"
