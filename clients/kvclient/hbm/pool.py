"""The pool: memory, table, demotion thread and cluster node. One per engine and device."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from kvclient.call.arguments import check_seconds
from kvclient.gds.volume_reader import GdsMode, GdsReader, ReadTarget
from kvclient.hbm import memory
from kvclient.hbm.demotion import Demoter
from kvclient.hbm.namespace_view import NamespaceView
from kvclient.hbm.pool_node import PoolNode
from kvclient.hbm.pool_state import PoolState
from kvclient.hbm.volume import HbmVolume
from kvclient.memory.engine_pool import Demote
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec
from kvstore.core.types import NamespaceId, VolumeId
from kvstore.node.eviction.operator_requests import evict_down_to
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.node.state.residency import Residency
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import device as device_metrics
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
    """Whole blocks in device memory. Thread-safe; a context manager. Create it after forking, and close its clients first.

    Args:
        device: ``cuda:N``, or ``cpu``: host memory, for tests and for engines on CPUs.
        capacity_bytes: its size; or
        share: its size as a share of the free device memory.
        metadata: address of the metadata server, so that other engines see and read the pool; None: private. If the server does
            not answer within some seconds, the pool serves its engine, logs a warning, and registers when the server answers.
        node_id: its name among nodes; None: generated. Two living nodes must not have one name.
        listen: address for peers, ``host:port``. Other hosts can only reach it if the address is not loopback.
        advertise_host: host that peers dial; None: the host of ``listen``.
        allow_insecure_remote: listen beyond this host without TLS.
        tls: for all connections.
        token_file: file with the token for the metadata server, of the role ``node``; None: none.
        tokens_file: accepted tokens (``kvstore.rpc.auth.tokens``), in the format of nodes; None: any caller.
        policy: eviction policy; see ``kvstore.tiers.eviction.policy``.
        demote: offer evicted blocks to the tiers below first; False: drop them.
        space_wait_s: how long a copy into the pool waits for space (until blocks are demoted); then it is skipped.
        anti_entropy_interval_s: how often the index is compared with the pool.
        gds: whether blocks on the local node's volumes are read directly into the pool; see ``volume_reader.GdsMode``. The engine
            needs permission to read the volumes' folders.
        gds_in_flight: blocks read in parallel from each of its volumes. All volumes of a process share 64 threads, or
            ``gds_in_flight`` if it is larger.

    Raises:
        InvalidArgument: an impossible size, name, device, policy or choice; or it would listen beyond this host without TLS.
        Unavailable: there is no CUDA device, or an address cannot be bound.
        CapacityExceeded: the device has too little memory.
        Conflict: a living node or pool has this name. Raised after some seconds, because a dead one is soon forgotten.
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
        policy: str = "reuse-distance",
        demote: bool = True,
        space_wait_s: float = 0.02,
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
        space_wait_s = check_seconds("space_wait_s", space_wait_s, zero=True)
        self._counters = Counters()
        self._clock = MonotonicClock()
        self.namespaces = NamespaceRegistry()
        self._targets: dict[NamespaceId, list[Demote]] = {}
        self._lock = threading.Lock()
        self._sizing = threading.Lock()
        chosen = make_policy(policy)
        volume_id = VolumeId(f"{self.node_id}/hbm")
        self._volume = HbmVolume(volume_id, where, capacity, counters=self._counters)
        self._log = ReplicaChangeLog([volume_id], self._counters, self._clock, keep=metadata is not None)
        # the table only allocates from the volume; a node's loader, provider, write-back and migrations need views
        residency = Residency(self._volume, chosen, [], self._log, self._counters, self._clock, cascades_chains=True)  # type: ignore[arg-type]
        self._table = BlockTable(residency, writes_back=demote)
        self.state = PoolState(self.node_id, self._volume, self._table, self._counters, self._clock, space_wait_s, demote=demote)
        """Shared state; for benchmarks and tests."""
        self.gds_reader = GdsReader(self._read_target(), gds, gds_in_flight)
        self._demoter = Demoter(self.state, self._targets)
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
                    parts=self.state,
                    io_engines=self.io_engines,
                    replica_log=self._log,
                    namespaces=self.namespaces,
                    anti_entropy_interval_s=check_seconds("anti_entropy_interval_s", anti_entropy_interval_s),
                )
                self._presence.start()
        except BaseException:
            self._volume.close()
            raise
        self._demoter.start()
        _log.info("pool opened: %s (mib=%d, device=%s)", self.node_id, capacity >> 20, where)

    def _read_target(self) -> ReadTarget:
        return ReadTarget(
            name=f"pool {self._volume.volume_id}",
            setting="HbmPool(gds=...)",
            device=self._volume.device,
            counters=self._counters,
            clock=self._clock,
            memory=lambda: self._volume.memory,
            closed=lambda: self.state.closed,
            release=self._table.unreserve,
        )

    # ---- clients ----
    def attach(self, spec: CacheSpec, demote: Demote) -> NamespaceView:
        """Attach a client: a namespace, and the callback that demotes its blocks. For ``KVClient.connect``.

        Raises:
            InvalidArgument: the pool is closed, or too small for a block of this namespace.
            Conflict, CapacityExceeded: as a node refuses namespaces.
        """
        with self._lock:
            if self.state.closed:
                raise InvalidArgument("the pool is closed", node_id=self.node_id)
            self._volume.check_fits(spec.shape)
            namespace = self.namespaces.of_spec(spec)
            self._targets.setdefault(spec.namespace, []).append(demote)

        def detach(_: NamespaceView) -> None:
            with self._lock:
                targets = self._targets.get(spec.namespace, [])
                if demote in targets:
                    targets.remove(demote)

        return NamespaceView(self.state, self.gds_reader, namespace, detach)

    def blocks(self, spec: CacheSpec) -> NamespaceView:
        """Return a namespace for an engine's own copies on its device (``copy_to_tensor``, ``insert_tensor``, ``pinned``).

        Raises:
            InvalidArgument: the pool is closed, or too small for a block of this namespace.
            Conflict, CapacityExceeded: as a node refuses namespaces.
        """
        with self._lock:
            if self.state.closed:
                raise InvalidArgument("the pool is closed", node_id=self.node_id)
            self._volume.check_fits(spec.shape)
            return NamespaceView(self.state, self.gds_reader, self.namespaces.of_spec(spec), lambda _: None)

    # ---- memory ----
    def usage(self) -> VolumeUsage:
        """Capacity and used bytes."""
        return self._volume.usage()

    def evict(self, *, demote: bool = True, timeout_s: float = _STOP_S) -> int:
        """Evict all blocks that are not pinned, as far as time allows.

        Args:
            demote: offer them to the tiers below first, if the pool demotes at all.
            timeout_s: time limit of the demotion; the rest is then dropped.

        Returns:
            Number of evicted blocks.
        """
        if demote and self.state.demote and not self.state.lost:
            self._table.requeue_writeback(sorted(self._table.snapshot(), key=lambda block: block.namespace_id))
            self._table.wait_written(self._clock.now_s() + timeout_s)
        self._demoter.skip_batch()
        self._table.mark_clean(self._table.snapshot())
        return evict_down_to(self._table, None, 0).blocks

    def resize(self, capacity_bytes: int, *, demote: bool = True, timeout_s: float = _STOP_S) -> bool:
        """Release memory to the device, or take more.

        All blocks are evicted, because the memory is one piece; loads miss until it ends.

        Args:
            capacity_bytes: the new size, at least a page.
            demote: as for ``evict``, for half of the time.
            timeout_s: how long to wait for readers.

        Returns:
            False: blocks stayed in use, and the size is unchanged; or the pool is closed.

        Raises:
            InvalidArgument: an impossible size.
            CapacityExceeded: the device has too little memory. If this is known in advance, the pool is unchanged; if the
                allocation fails, the pool keeps one page.
        """
        if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < memory.PAGE_BYTES:
            raise InvalidArgument("capacity_bytes must be at least 4096", capacity_bytes=capacity_bytes)
        timeout_s = check_seconds("timeout_s", timeout_s, zero=True)
        until_s = self._clock.now_s() + timeout_s
        with self._sizing:
            if self.state.closed:
                return False
            memory.check_space(self._volume.device, capacity_bytes, self._volume.usage().capacity_bytes)
            self.state.resizing = True
            try:
                self.evict(demote=demote, timeout_s=timeout_s / 2)
                if not self._drain(until_s) or not self._take(capacity_bytes):
                    self._counters.add(device_metrics.HBM_RESIZE_REFUSED)
                    _log.warning("pool resize refused: %s (blocks in use)", self.node_id)
                    return False
            finally:
                self.state.resizing = False
                now_bytes = self._volume.usage().capacity_bytes
                if self._presence is not None:
                    self._presence.info.volumes[0].capacity_bytes = now_bytes
        _log.info("pool resized: %s (mib=%d)", self.node_id, now_bytes >> 20)
        return True

    def _take(self, capacity_bytes: int) -> bool:
        with self.gds_reader.memory_changes():
            return self._volume.resize(capacity_bytes // memory.PAGE_BYTES * memory.PAGE_BYTES)

    def _drain(self, until_s: float) -> bool:
        """Evict blocks as readers unpin them. Returns whether no slot is reserved any longer."""
        pause = threading.Event()
        while True:
            self.evict(demote=False)
            if not self._volume.usage().blocks:
                return True
            if self._clock.now_s() >= until_s:
                return False
            pause.wait(_DRAIN_PAUSE_S)

    # ---- lifecycle ----
    def wait_published(self, timeout_s: float = 10.0) -> bool:
        """Wait until lookups return the pool's current blocks. False: not in time, or the pool is private."""
        return self._log.wait_published([self._volume.volume_id], self._clock.now_s() + timeout_s)

    def stats(self) -> dict[str, int]:
        """Totals by name, capacity and used bytes."""
        usage = self._volume.usage()
        sizes = {"hbm_capacity_bytes": usage.capacity_bytes, "hbm_used_bytes": usage.used_bytes, "hbm_blocks": usage.blocks}
        return {**self._counters.snapshot(), **sizes, "hbm_lost": int(self.state.lost)}

    def io_engines(self) -> list[str]:
        """Describe, for people, the device and the volumes that are read directly."""
        return [f"{self._volume.volume_id}: {self._volume.device}", *self.gds_reader.describe()]

    def close(self) -> None:
        """Evict all blocks, so that lookups no longer return them, and release the memory. Blocks are not demoted.

        Waits a moment for readers. Memory that is still read afterwards is released with its last reader.
        """
        with self._lock:
            if self.state.closed:
                return
            self.state.closed = True
        self._demoter.stop(_STOP_S)
        with self._sizing:
            self.evict(demote=False)
            if self._presence is not None:
                self._presence.stop()
            idle = self._drain(self._clock.now_s() + _STOP_S)
            self.gds_reader.close(idle=idle)
            if idle:
                self._volume.close()
            else:
                self._counters.add(device_metrics.HBM_CLOSED_IN_USE)
                _log.warning("pool closed in use: %s; its memory is released after the last read", self.node_id)
            self._table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _own_name(device: str) -> str:
    """A unique name: host, device and random digits."""
    host = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in socket.gethostname().partition(".")[0])
    return f"{host[:30] or 'host'}-{device.replace(':', '')}-{secrets.token_hex(4)}"
