"""Publication of this node's blocks to the metadata server: registration, heartbeats, the stream of changes, anti-entropy.

Theory of operation. There are three threads.

1. The *publisher* registers the node, sends the inventories that the server requests, and then streams the ``ReplicaChangeLog``
   in numbered batches, a few of them unacknowledged (``BatchStream``). After a broken stream it repeats unacknowledged batches.
   The server ignores batches that it has applied.
2. The heartbeat thread sends heartbeats. If the server has forgotten this node or has a new index, the node registers again.
3. *Anti-entropy* compares digests with the index and repairs ranges that differ.

No load or store waits for the metadata server. While it is down, other nodes find fewer blocks here.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.core.checksum import key_range
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Conflict, KVStoreError, PermissionDenied, Unauthenticated, Unavailable
from kvstore.core.types import BlockRun, BootId, VolumeId
from kvstore.node.publish.anti_entropy import AntiEntropy
from kvstore.node.publish.batch_stream import BatchStream, SentBatches
from kvstore.node.publish.contract import PublishedBlocks, PublishedVolume
from kvstore.node.publish.health import HealthReporter
from kvstore.node.publish.heartbeat import HeartbeatListener
from kvstore.node.publish.range_checks import RequestedCheck, RequestedChecks
from kvstore.node.publish.server_indexes import ServerIndexes
from kvstore.node.state.change_log import ChainedBlock, LogBatch, ReplicaChangeLog, in_chains, runs_of
from kvstore.node.state.model import NodeVolume
from kvstore.observe.counters import Counters
from kvstore.observe.failure_tracker import FailureTracker
from kvstore.observe.limited_log import INTERVAL_S, LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import RetryPolicy, call
from kvstore.rpc.codec import run_to_proto
from kvstore.rpc.diagnosis import Diagnoser, Target
from kvstore.rpc.failover.connect import connect_metadata

log = logging.getLogger(__name__)

BATCH_EVENTS = 4096
_OVER_QUOTA = (node_metrics.STORE_SKIPPED_QUOTA_BLOCKS, node_metrics.WRITE_BACK_BEYOND_QUOTA_BLOCKS)
RPC_TIMEOUT_S = 5.0
COMPARE_WAIT_S = 10.0
"""Time for which an operator's comparison waits for another one."""
_ACCESS_ERRORS = (Unauthenticated, PermissionDenied)
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 2.0
WARNING_GROWTH = 30


class IndexPublisher:
    """Keeps the index up to date with this node. ``start`` and ``stop`` once each.

    Args:
        address: of the metadata server, or of several.
        node: this node, as it is registered.
        table: its blocks.
        replica_log: changes of its replicas.
        counters: metrics.
        tls: of the channel.
        token: of the node, for the server; None: none is required.
        setting_names: where people set ``tls`` and ``token``, for errors.
        anti_entropy_interval_s: time between two comparisons.
        health: receives failures of the publication, and reports the node's findings.
        listeners: add to heartbeats, and apply the server's orders.
        read_rate: bytes per second that the volumes deliver; None: not measured.
        on_connected: called if the server begins or stops to accept heartbeats.
        warning_interval_s: least time between two equal warnings; it grows up to ``WARNING_GROWTH`` times while they go on.
    """

    def __init__(
        self,
        address: str,
        node: common_pb2.NodeInfo,
        table: PublishedBlocks,
        replica_log: ReplicaChangeLog,
        counters: Counters,
        *,
        tls: TlsConfig | None,
        token: TokenSource | None = None,
        setting_names: tuple[str, str] = ("[node.tls]", "node.token_file"),
        anti_entropy_interval_s: float,
        health: HealthReporter | None = None,
        listeners: Sequence[HeartbeatListener] = (),
        read_rate: Callable[[], float | None] = lambda: None,
        on_connected: Callable[[bool], None] = lambda _connected: None,
        warning_interval_s: float = INTERVAL_S,
    ) -> None:
        self._limited = LimitedLog(log, warning_interval_s, most_interval_s=WARNING_GROWTH * warning_interval_s)
        self._read_rate = read_rate
        self._node = node
        self._health = health or HealthReporter(table, replica_log, MonotonicClock(), FailureTracker())
        self._checks = RequestedChecks()
        self._listeners = [*listeners, self._checks]
        self._over_quota = 0
        self._boot_id = BootId(node.boot_id)
        self._table = table
        self._log = replica_log
        self._counters = counters
        self._anti_entropy_interval_s = anti_entropy_interval_s
        self._channel = connect_metadata(
            address, caller=node.node_id, tls=tls, token=token, node_id=node.node_id, counters=counters
        )
        self._diagnoser = Diagnoser(Target("the metadata server", address, tls, token, *setting_names))
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._anti_entropy = AntiEntropy(self._stub, node.node_id, table, replica_log, counters)
        self._server_indexes = ServerIndexes(self._channel, counters)
        self._comparing = threading.Lock()
        self._volumes = [VolumeId(volume.volume_id) for volume in node.volumes]
        self._stopping = threading.Event()
        self._leaving = threading.Event()
        self._registering = threading.Lock()
        self._again = threading.Event()
        self._registered = threading.Event()
        self.connected = False
        """Whether the metadata server knows this node: it accepted the last heartbeat or registration."""
        self._on_connected = on_connected
        self.refused: Conflict | None = None
        """Why the metadata server refuses this node; None: it does not, or has not answered."""
        self.denied: KVStoreError | None = None
        """The last failure, if this node's token is unknown, missing, or lacks the permission to publish."""
        self._epoch = b""
        self._heartbeat_s = 0.5
        self._heartbeats = 0
        self._sent = SentBatches()
        self._volume_changes: deque[tuple[VolumeId, common_pb2.VolumeInfo | None]] = deque()
        """Volumes that the next registration adds, or (None) no longer has."""
        # work that a broken stream leaves to the next one
        self._inventories_due: dict[VolumeId, None] = {}
        self._round: deque[LogBatch] = deque()
        self._threads = [
            threading.Thread(target=self._publish_loop, name="kvstore-publish", daemon=True),
            threading.Thread(target=self._heartbeat_loop, name="kvstore-heartbeat", daemon=True),
            threading.Thread(target=self._anti_entropy_loop, name="kvstore-anti-entropy", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait for the first registration. Returns whether it succeeded in time."""
        return self._registered.wait(timeout_s)

    def add_volume(self, volume: common_pb2.VolumeInfo) -> None:
        """Register with one more volume, and publish its blocks."""
        self._change_volume(VolumeId(volume.volume_id), volume)

    def remove_volume(self, volume_id: VolumeId) -> None:
        """Register without a volume, which this node only mounts from now on."""
        self._change_volume(volume_id, None)

    def _change_volume(self, volume_id: VolumeId, volume: common_pb2.VolumeInfo | None) -> None:
        self._volume_changes.append((volume_id, volume))
        self._again.set()
        self._log.wake()

    def _apply_volume_changes(self) -> None:
        """Change the registration. Without one of its volumes, the node begins as after a restart: see ``_begin_again``."""
        node = self._node
        while self._volume_changes:
            volume_id, added = self._volume_changes.popleft()
            kept = [volume for volume in node.volumes if volume.volume_id != volume_id]
            mounts = [mount for mount in node.mounts if mount != volume_id]
            del node.volumes[:], node.mounts[:]
            node.volumes.extend(kept if added is None else [*kept, added])
            node.mounts.extend([*mounts, volume_id] if added is None else mounts)
            if added is None:
                self._begin_again()
        self._volumes = [VolumeId(volume.volume_id) for volume in node.volumes]
        self._inventories_due = {volume: None for volume in self._inventories_due if volume in self._volumes}
        self._round = deque(taken for taken in self._round if taken.volume in self._volumes)

    def _begin_again(self) -> None:
        """Take another boot id: what was sent and not acknowledged no longer counts, and inventories replace it."""
        self._boot_id = BootId(secrets.token_bytes(16))
        self._node.boot_id = self._boot_id
        self._epoch = b""

    def compare_now(self) -> int:
        """Compare and repair now. Returns the number of repaired ranges.

        Raises:
            Unavailable: this node is not registered, or has compared for a while.
            KVStoreError: the metadata server does not answer, or the current cancel scope has ended.
        """
        if not self._registered.is_set() or not self.connected:
            raise Unavailable("this node is not connected to the metadata server; try again later", node_id=self._node.node_id)
        if not self._comparing.acquire(timeout=COMPARE_WAIT_S):
            raise Unavailable("this node compares its blocks with the index already; try again later", node_id=self._node.node_id)
        try:
            return self._anti_entropy.compare(self._boot_id, 0.0)
        finally:
            self._comparing.release()

    def _compare(self, max_age_s: float) -> int:
        with self._comparing:
            return self._anti_entropy.compare(self._boot_id, max_age_s)

    def leave(self, timeout_s: float) -> bool:
        """Unregister the node, so that lookups stop naming it. Changes are published until ``stop``.

        Returns:
            Whether the server knows. If not, it hides the node after some time without heartbeats.
        """
        self._leaving.set()
        if not self._registered.is_set():
            return False
        if self._registering.acquire(timeout=timeout_s):  # a later registration would show the node again
            self._registering.release()
        operation = secrets.token_bytes(16)
        request = metadata_pb2.UnregisterNodeRequest(operation_id=operation, node_id=self._node.node_id, boot_id=self._boot_id)
        try:
            answer: metadata_pb2.UnregisterNodeResponse = call(self._stub.UnregisterNode, request, timeout_s, RetryPolicy())
        except KVStoreError as error:
            self._counters.add(node_metrics.UNREGISTER_FAILED)
            log.warning("node not unregistered: %s", error)
            return False
        return answer.known

    def stop(self, timeout_s: float) -> None:
        """Stop the threads."""
        self._stopping.set()
        self._again.set()
        self._log.wake()
        self._checks.wake()
        self._channel.close()
        for thread in self._threads:
            thread.join(timeout_s)

    # ---------------------------------------------------------------- publishing
    def _publish_loop(self) -> None:
        pause_s = RETRY_FIRST_S
        while not (self._stopping.is_set() or self._leaving.is_set()):
            try:
                try:
                    self._again.clear()  # before the changes are read: one that comes later sets it again
                    self._apply_volume_changes()
                    needed = self._register()
                except Conflict as refused:  # another node has this id or volume: retry until an operator has fixed it
                    self.refused = refused
                    self._set_connected(connected=False)
                    self._counters.add(node_metrics.REGISTRATIONS_REFUSED)
                    self._limited.warning("registration refused, trying again: %s", refused)
                    self._stopping.wait(pause_s)
                    pause_s = min(RETRY_MOST_S, pause_s * 2)
                    continue
                self.refused = self.denied = None
                self._registered.set()
                self._set_connected(connected=True)
                self._diagnoser.answered()
                acknowledged = self._sent.acknowledged
                try:
                    self._stream(needed)
                finally:  # an index that rejects batches accepts registrations
                    if not self._sent.unacknowledged or self._sent.acknowledged != acknowledged:
                        pause_s = RETRY_FIRST_S
            except KVStoreError as failed:
                error = self._diagnoser.explain(failed)
                self.denied = error if isinstance(error, _ACCESS_ERRORS) else None
                self._counters.add(node_metrics.PUBLISH_INTERRUPTED)
                self._health.publish_failed(error)
                self._limited.warning("publishing interrupted, trying again: %s", error, cause=type(error).__name__)
                # a refused token says nothing about published batches, and may be accepted later
                if not error.retryable and not isinstance(error, _ACCESS_ERRORS):
                    self._begin_again()  # the sequence numbers no longer match the server's
            except Exception:  # thread edge: publication must go on after a bug
                self._counters.add(node_metrics.PUBLISH_BUGS)
                self._health.publish_failed("unexpected error; see the log of the node")
                log.exception("publishing failed: unexpected error, trying again")
            self._stopping.wait(pause_s)
            pause_s = min(RETRY_MOST_S, pause_s * 2)

    def _register(self) -> list[VolumeId]:
        request = metadata_pb2.RegisterNodeRequest(operation_id=secrets.token_bytes(16), node=self._node)
        with self._registering:
            if self._leaving.is_set():
                raise Unavailable("this node stops")
            response: metadata_pb2.RegisterNodeResponse = call(self._stub.RegisterNode, request, RPC_TIMEOUT_S)
        self._heartbeat_s = max(0.01, response.heartbeat_interval_ms / 1000)
        needed = [VolumeId(need.volume_id) for need in response.volume_needs if need.inventory_needed]
        new_index = bool(self._epoch) and response.index_epoch != self._epoch
        for listener in self._listeners:
            for order in listener.on_registered(response, new_index=new_index):
                call(self._stub.DrainNode, order, RPC_TIMEOUT_S)
        if response.index_epoch != self._epoch:
            self._epoch = response.index_epoch
            self._sent.sequence = 0
            for request_sent, events in self._sent.unacknowledged:  # the inventories include them
                self._log.acknowledge(VolumeId(request_sent.volume_id), events)
            self._sent.unacknowledged.clear()
            self._checks.restarted()
            needed = list(self._volumes)
        return needed

    def _stream(self, inventories: Sequence[VolumeId]) -> None:
        """Publish until the stream breaks, the server requires a registration, or ``stop``.

        First repeat what an earlier stream sent and the server did not acknowledge, then send inventories and the log.

        Raises:
            KVStoreError: the stream broke, or the server does not acknowledge.
        """
        with BatchStream(self._stub, self._sent, self._log, self._health, self._checks, self._must_end_stream) as stream:
            alive = stream.resend()
            batches = self._batches(inventories)
            while alive and not stream.is_over():
                message, events = next(batches)
                if message is None:
                    self._log.wait(0.2)
                else:
                    alive = stream.send(message, events)
        if not self._must_end_stream():
            stream.raise_failure()

    def _must_end_stream(self) -> bool:
        """Whether the publisher stops, or must register again."""
        return self._stopping.is_set() or self._again.is_set()

    def _batches(self, inventories: Sequence[VolumeId]) -> Iterator[tuple[metadata_pb2.PublishRequest | None, int]]:
        """Return the messages to send, with their number of events: inventories, then the log. (None, 0): no changes now."""
        self._inventories_due.update(dict.fromkeys(inventories))
        while True:
            self._inventories_due.update(
                dict.fromkeys(volume for volume in self._volumes if self._log.take_inventory_request(volume))
            )
            for volume in list(self._inventories_due):
                yield from self._inventory(volume)
                del self._inventories_due[volume]
            for check in self._checks.lost():
                yield from self._lost_blocks(check)
                self._checks.sent(check.token, self._sent.sequence)
                if not self._sent.unacknowledged:
                    self._checks.acknowledged(self._sent.sequence)
            if not self._round:
                self._round.extend(self._log.take(BATCH_EVENTS))
            while self._round:
                taken = self._round.popleft()
                yield self._message(taken.volume, taken.stored, b"".join(taken.removed)), taken.events
            if not any(self._log.behind(volume) for volume in self._volumes):
                if not self._log.waiting() and not self._sent.unacknowledged:
                    self._health.publish_caught_up()
                yield None, 0

    def _inventory(self, volume: VolumeId) -> Iterator[tuple[metadata_pb2.PublishRequest, int]]:
        """Return the messages with all blocks of a volume. Concurrent changes are in the log, which is sent afterwards."""
        held = self._table.held_by(volume)
        log.info("inventory sent: volume %s (blocks=%d)", volume, len(held))
        self._counters.add(node_metrics.INVENTORIES_SENT)
        yield from self._stores(volume, held)
        yield self._message(volume, [], sync_end=True), 0

    def _lost_blocks(self, check: RequestedCheck) -> Iterator[tuple[metadata_pb2.PublishRequest, int]]:
        """Return the messages with all blocks of ranges that the index lost."""
        for volume in self._volumes:
            held = [block for block in self._table.held_by(volume) if key_range(block.key) in check.ranges]
            log.info("blocks of lost index ranges sent: volume %s (blocks=%d, ranges=%d)", volume, len(held), len(check.ranges))
            self._counters.add(node_metrics.LOST_RANGE_BLOCKS_SENT, len(held))
            yield from self._stores(volume, held)

    def _stores(self, volume: VolumeId, blocks: Sequence[ChainedBlock]) -> Iterator[tuple[metadata_pb2.PublishRequest, int]]:
        held = in_chains(sorted(blocks, key=lambda block: block.depth))  # parents before children
        for at in range(0, len(held), BATCH_EVENTS):
            yield self._message(volume, runs_of(held[at : at + BATCH_EVENTS])), 0

    def _message(
        self, volume: VolumeId, stored: Sequence[BlockRun], removed: bytes = b"", *, sync_end: bool = False
    ) -> metadata_pb2.PublishRequest:
        return metadata_pb2.PublishRequest(
            node_id=self._node.node_id,
            boot_id=self._boot_id,
            volume_id=volume,
            stored=[run_to_proto(run) for run in stored],
            removed=removed,
            sync_end=sync_end,
        )

    def _set_connected(self, *, connected: bool) -> None:
        """Note whether the metadata server accepts this node's heartbeats."""
        if connected != self.connected:
            self.connected = connected
            self._on_connected(connected)

    # ---------------------------------------------------------------- heartbeats
    def _heartbeat_loop(self) -> None:
        while not self._stopping.wait(self._heartbeat_s):
            if not self._registered.is_set() or self._leaving.is_set():
                continue
            try:
                self._set_connected(connected=self._beat())
            except KVStoreError as error:
                self._set_connected(connected=False)
                self._counters.add(node_metrics.HEARTBEATS_FAILED)
                if isinstance(error, _ACCESS_ERRORS):
                    self._limited.warning("heartbeat refused: %s", self._diagnoser.explain(error))
                else:
                    log.debug("heartbeat failed: %s", error)
            except Exception:  # thread edge: without heartbeats, lookups would hide the node
                self._counters.add(node_metrics.HEARTBEAT_BUGS)
                log.exception("heartbeat failed: unexpected error, trying again")

    # ---------------------------------------------------------------- anti-entropy
    def _anti_entropy_loop(self) -> None:
        next_s = time.monotonic() + self._anti_entropy_interval_s
        while not self._stopping.is_set():
            check = self._checks.wait_for_suspects(max(0.0, next_s - time.monotonic()))
            if self._stopping.is_set():
                return
            if check is None:
                next_s = time.monotonic() + self._anti_entropy_interval_s
            if not self._registered.is_set():
                self._stopping.wait(RETRY_FIRST_S)
                continue
            try:
                if check is None:
                    self._health.different_indexes = self._server_indexes.check()
                    self._compare(self._anti_entropy_interval_s)
                    continue
                if self._compare_suspects(check):
                    continue
            except KVStoreError as error:
                self._counters.add(node_metrics.ANTI_ENTROPY_FAILED)
                log.warning("anti-entropy failed: %s", error)
            except Exception:  # thread edge: as above
                self._counters.add(node_metrics.ANTI_ENTROPY_BUGS)
                log.exception("anti-entropy failed: unexpected error, trying again")
            if check is not None:  # until it succeeds, or the server no longer asks
                self._stopping.wait(RETRY_MOST_S)

    def _compare_suspects(self, check: RequestedCheck) -> bool:
        """Compare ranges whose last changes the index may have lost. Returns whether none is left."""
        left: Collection[int] = check.ranges
        try:
            with self._comparing:
                repairs = self._anti_entropy.compare_suspects(self._boot_id, check.ranges)
            left = repairs.left
        finally:
            self._checks.compared(check.token, left)
        counts = len(check.ranges), repairs.repaired, len(left)
        log.info("suspect index ranges compared (ranges=%d, repaired=%d, left=%d)", *counts)
        repairs.raise_failure()
        return not left

    def _log_quota_skips(self) -> None:
        """Log blocks that quotas kept out: engines get no error for them."""
        over_quota = sum(map(self._counters.get, _OVER_QUOTA))
        if over_quota != self._over_quota:
            self._over_quota = over_quota
            self._limited.warning(
                "tenants at their quotas: blocks not stored or not made durable (total=%d); see kvstore tenants", over_quota
            )

    def _beat(self) -> bool:
        """Send a heartbeat. Returns whether the metadata server knows this node; if not, the node registers again."""
        self._log_quota_skips()
        volumes: list[tuple[PublishedVolume, NodeVolume | None]] = [(self._table.memory_volume, None)]
        volumes += [(node_volume.volume, node_volume) for node_volume in self._table.node_volumes]
        usages = []
        for volume, node_volume in volumes:
            usage = volume.usage()
            usages.append(
                metadata_pb2.VolumeUsage(
                    volume_id=volume.volume_id,
                    used_bytes=usage.used_bytes,
                    blocks=usage.blocks,
                    read_only=self._health.why_not_writable(node_volume) if node_volume is not None else "",
                )
            )
        self._heartbeats += 1
        request = metadata_pb2.HeartbeatRequest(
            node_id=self._node.node_id,
            boot_id=self._boot_id,
            sequence=self._heartbeats,
            usages=usages,
            findings=[one.to_proto() for one in self._health.findings()],
            unix_ms=round(time.time() * 1000),
            read_bytes_per_s=int(self._read_rate() or 0),
        )
        for listener in self._listeners:
            listener.report(request)
        response: metadata_pb2.HeartbeatResponse = call(self._stub.Heartbeat, request, RPC_TIMEOUT_S)
        if response.register_again or (self._epoch and response.index_epoch != self._epoch):
            reason = "the server does not know this boot" if response.register_again else "the server has a new index"
            self._limited.warning("registration lost: node %s (reason=%s); registering again", self._node.node_id, reason)
            self._counters.add(node_metrics.REGISTERED_AGAIN)
            self._again.set()
            self._log.wake()
            return False
        for listener in self._listeners:
            listener.on_heartbeat(response)
        return True
