"""Tells the metadata server what this node holds: registration, heartbeats, the stream of changes, anti-entropy.

Three threads. The *publisher* registers, sends inventories where the server lacks them, then streams the ``ReplicaChangeLog`` in
numbered batches, a few unacknowledged at a time; after a broken stream it sends again what was not acknowledged, and the server
ignores what it has seen. The *heart* beats, and notices a server that forgot this node or made its index anew: then everything
begins again with a registration. The third is ``antientropy``: it compares digests with the index and repairs what differs.

Nothing here is on the path of a load or store: a server that is away costs remote hits, never a wait.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import grpc

from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Conflict, KVStoreError, PermissionDenied, Unauthenticated, Unavailable
from kvstore.core.types import BlockRun, BootId, VolumeId
from kvstore.node.control.drain import Drainer
from kvstore.node.control.retention import Retainer
from kvstore.node.publish.anti_entropy import AntiEntropy, held_by
from kvstore.node.publish.health import Troubles
from kvstore.node.state.change_log import ReplicaChangeLog, Taken, in_chains, runs_of
from kvstore.node.state.model import NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.failure_tracker import FailureTracker
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import RetryPolicy, call, connect
from kvstore.rpc.codec import run_to_proto
from kvstore.rpc.diagnosis import Diagnoser, Target
from kvstore.rpc.errors import from_rpc_error
from kvstore.tiers.contract import Volume

log = logging.getLogger(__name__)
limited = LimitedLog(log)

BATCH_EVENTS = 4096
BATCHES_IN_FLIGHT = 8
_BEYOND_QUOTA = ("store_skipped_quota_blocks_total", "write_behind_beyond_quota_blocks_total")
RPC_TIMEOUT_S = 5.0
ACK_TIMEOUT_S = 30.0
"""A stream on which nothing is acknowledged for so long is given up for a new one."""
JOIN_S = 10.0
_NOT_LET_IN = (Unauthenticated, PermissionDenied)
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 2.0


class Publisher:
    """Keeps the index true to this node. ``start`` and ``stop`` once each."""

    def __init__(
        self,
        address: str,
        node: common_pb2.NodeInfo,
        table: BlockTable,
        replica_log: ReplicaChangeLog,
        counters: Counters,
        *,
        tls: TlsConfig | None,
        token: TokenSource | None = None,
        anti_entropy_interval_s: float,
        troubles: Troubles | None = None,
        drainer: Drainer | None = None,
        retainer: Retainer | None = None,
        read_rate: Callable[[], float | None] = lambda: None,
        on_heard: Callable[[bool], None] = lambda _heard: None,
    ) -> None:
        self._read_rate = read_rate
        self._node = node
        self._troubles = troubles or Troubles(table, replica_log, MonotonicClock(), FailureTracker())
        self._drainer = drainer
        self._retainer = retainer
        self._beyond_quota = 0
        self._boot_id = BootId(node.boot_id)
        self._table = table
        self._log = replica_log
        self._counters = counters
        self._anti_entropy_interval_s = anti_entropy_interval_s
        self._channel = connect(address, tls=tls, token=token, node_id=node.node_id)
        self._diagnoser = Diagnoser(
            Target("the metadata server", address, tls, token, "[node.tls]", "node.token_file")  # its name
        )
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._anti_entropy = AntiEntropy(self._stub, node.node_id, table, replica_log, counters)
        self._comparing = threading.Lock()
        self._volumes = [VolumeId(volume.volume_id) for volume in node.volumes]
        self._stopping = threading.Event()
        self._leaving = threading.Event()
        self._registering = threading.Lock()
        self._again = threading.Event()
        self._registered = threading.Event()
        self.heard = False
        """Whether the metadata server took the last heartbeat, or a registration since."""
        self._on_heard = on_heard
        self.refused: Conflict | None = None
        """Why the metadata server does not take this node; None: it does, or has not answered."""
        self._epoch = b""
        self._heartbeat_s = 0.5
        self._sequence = 0
        self._unacknowledged: deque[tuple[metadata_pb2.PublishRequest, int]] = deque()
        # What a stream that broke left unsent, for the next one.
        self._inventories_due: dict[VolumeId, None] = {}
        self._round: deque[Taken] = deque()
        self._threads = [
            threading.Thread(target=self._publish_for_ever, name="kvstore-publish", daemon=True),
            threading.Thread(target=self._beat_for_ever, name="kvstore-heart", daemon=True),
            threading.Thread(target=self._compare_for_ever, name="kvstore-anti-entropy", daemon=True),
        ]

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def wait_registered(self, timeout_s: float) -> bool:
        """Waits for the first registration."""
        return self._registered.wait(timeout_s)

    def compare_now(self) -> int:
        """A round of anti-entropy, at once. Returns how many ranges of key space differed and were mended.

        Raises:
            Unavailable: the metadata server does not know this node now.
            KVStoreError: it does not answer.
        """
        if not self._registered.is_set() or not self.heard:
            raise Unavailable("the metadata server does not answer this node now", node_id=self._node.node_id)
        return self._compare()

    def _compare(self) -> int:
        with self._comparing:
            return self._anti_entropy.compare(self._boot_id)

    def leave(self, timeout_s: float) -> bool:
        """Tells the metadata server that this node ends: lookups stop naming it. What changes is published until ``stop``.

        Returns:
            Whether it was told; if not, the node is hidden once it has been silent for long.
        """
        self._leaving.set()
        if not self._registered.is_set():
            return False
        if self._registering.acquire(timeout=timeout_s):  # a registration that came in later would bring the node back
            self._registering.release()
        operation = secrets.token_bytes(16)
        request = metadata_pb2.UnregisterNodeRequest(operation_id=operation, node_id=self._node.node_id, boot_id=self._boot_id)
        try:
            answer: metadata_pb2.UnregisterNodeResponse = call(self._stub.UnregisterNode, request, timeout_s, RetryPolicy())
        except KVStoreError as error:
            self._counters.add("unregister_failed_total")
            log.warning("cannot tell the metadata server that this node ends: %s", error)
            return False
        return answer.known

    def stop(self, timeout_s: float) -> None:
        """Ends the threads."""
        self._stopping.set()
        self._again.set()
        self._log.wake()
        self._channel.close()
        for thread in self._threads:
            thread.join(timeout_s)

    # ---------------------------------------------------------------- publishing
    def _publish_for_ever(self) -> None:
        pause_s = RETRY_FIRST_S
        while not (self._stopping.is_set() or self._leaving.is_set()):
            try:
                try:
                    needed = self._register()
                except Conflict as refused:  # another node has our id or a volume: until somebody does something about it
                    self.refused = refused
                    self._counters.add("registrations_refused_total")
                    limited.warning("the metadata server refuses this node, trying again: %s", refused)
                    self._stopping.wait(pause_s)
                    pause_s = min(RETRY_MOST_S, pause_s * 2)
                    continue
                self._again.clear()
                self.refused = None
                self._registered.set()
                self._hear(heard=True)
                self._diagnoser.answered()
                pause_s = RETRY_FIRST_S
                self._stream(needed)
            except KVStoreError as failed:
                error = self._diagnoser.explain(failed)
                self._counters.add("publish_interrupted_total")
                self._troubles.interrupted(error)
                limited.warning("publishing interrupted, trying again: %s", error)
                # a token that is refused now may be taken later, and says nothing about what was published
                if not error.retryable and not isinstance(
                    error, _NOT_LET_IN
                ):  # sequence numbers no longer match the server's: begin as if booted anew
                    self._boot_id = BootId(secrets.token_bytes(16))
                    self._node.boot_id = self._boot_id
                    self._epoch = b""
            except Exception:  # process edge: a bug must not end publishing for good
                self._counters.add("publish_bugs_total")
                self._troubles.interrupted("a bug: the node's log has it")
                log.exception("publishing failed, trying again")
            self._stopping.wait(pause_s)
            pause_s = min(RETRY_MOST_S, pause_s * 2)

    def _register(self) -> list[VolumeId]:
        request = metadata_pb2.RegisterNodeRequest(operation_id=secrets.token_bytes(16), node=self._node)
        with self._registering:
            if self._leaving.is_set():
                raise Unavailable("this node ends")
            response: metadata_pb2.RegisterNodeResponse = call(self._stub.RegisterNode, request, RPC_TIMEOUT_S)
        self._heartbeat_s = max(0.01, response.heartbeat_interval_ms / 1000)
        needed = [VolumeId(need.volume_id) for need in response.volume_needs if need.inventory_needed]
        self._take_order(response.index_epoch, response.drain if response.HasField("drain") else None)
        if response.index_epoch != self._epoch:
            self._epoch = response.index_epoch
            self._sequence = 0
            for request_sent, events in self._unacknowledged:  # the inventories cover them
                self._log.acknowledge(VolumeId(request_sent.volume_id), events)
            self._unacknowledged.clear()
            needed = list(self._volumes)
        return needed

    def _take_order(self, epoch: bytes, order: common_pb2.DrainOrder | None) -> None:
        """What the server says that this node is to do. One whose index was made anew has forgotten the order: it is told."""
        if self._drainer is None:
            return
        had = self._drainer.order
        if order is None and had is not None and self._epoch and epoch != self._epoch:
            request = metadata_pb2.DrainNodeRequest(operation_id=had.operation_id, node_id=self._node.node_id, move=had.move)
            call(self._stub.DrainNode, request, RPC_TIMEOUT_S)
            return
        self._drainer.told(order)

    def _stream(self, inventories: Sequence[VolumeId]) -> None:
        """Publishes until the stream breaks, the server wants a registration, or ``stop``."""
        outbox: queue.Queue[metadata_pb2.PublishRequest | None] = queue.Queue(BATCHES_IN_FLIGHT + 1)
        slots = threading.Semaphore(BATCHES_IN_FLIGHT)
        lock = threading.Lock()
        broken: list[grpc.RpcError] = []
        ended = threading.Event()
        heard_s = time.monotonic()  # when something was acknowledged last, or when the wait for it began

        def outgoing() -> Iterator[metadata_pb2.PublishRequest]:
            while (message := outbox.get()) is not None:
                yield message

        responses = self._stub.Publish(outgoing())

        def receive() -> None:
            nonlocal heard_s
            try:
                for response in responses:
                    self._troubles.acknowledged()
                    with lock:
                        heard_s = time.monotonic()
                        while self._unacknowledged and self._unacknowledged[0][0].sequence <= response.sequence:
                            message, events = self._unacknowledged.popleft()
                            self._log.acknowledge(VolumeId(message.volume_id), events)
                            slots.release()
            except grpc.RpcError as error:
                broken.append(error)
            ended.set()
            self._log.wake()

        receiver = threading.Thread(target=receive, name="kvstore-publish-acks", daemon=True)
        receiver.start()

        def over() -> bool:
            return ended.is_set() or self._again.is_set() or silent()

        def silent() -> bool:
            with lock:
                return bool(self._unacknowledged) and time.monotonic() - heard_s > ACK_TIMEOUT_S

        def send(message: metadata_pb2.PublishRequest) -> bool:
            while not slots.acquire(timeout=0.1):
                if over():
                    return False
            outbox.put(message)
            return True

        try:
            with lock:
                resend = [message for message, _ in self._unacknowledged]
            alive = all(send(message) for message in resend)
            batches = self._batches(inventories)
            while alive and not over():
                message, events = next(batches)
                if message is None:
                    self._log.wait(0.2)
                    continue
                with lock:
                    if not self._unacknowledged:
                        heard_s = time.monotonic()
                    self._sequence += 1
                    message.sequence = self._sequence
                    self._unacknowledged.append((message, events))
                alive = send(message)
        finally:
            while True:  # the outbox is bounded: make sure that the end gets in
                try:
                    outbox.put_nowait(None)
                    break
                except queue.Full:
                    outbox.get_nowait()
            responses.cancel()
            receiver.join(JOIN_S)
        if not self._stopping.is_set() and not self._again.is_set() and silent():
            raise Unavailable("what is published is not acknowledged", seconds=ACK_TIMEOUT_S)
        if broken and not self._stopping.is_set() and not self._again.is_set():
            raise from_rpc_error(broken[0])

    def _batches(self, inventories: Sequence[VolumeId]) -> Iterator[tuple[metadata_pb2.PublishRequest | None, int]]:
        """What to send, one batch after the other: inventories first, then the log; (None, 0) where more is to be waited for."""
        self._inventories_due.update(dict.fromkeys(inventories))
        while True:
            self._inventories_due.update(dict.fromkeys(volume for volume in self._volumes if self._log.needs_inventory(volume)))
            for volume in list(self._inventories_due):
                yield from self._inventory(volume)
                del self._inventories_due[volume]
            if not self._round:
                self._round.extend(self._log.take(BATCH_EVENTS))
            while self._round:
                taken = self._round.popleft()
                yield self._message(taken.volume, taken.stored, b"".join(taken.removed)), taken.events
            if not any(self._log.behind(volume) for volume in self._volumes):
                if not self._log.waiting() and not self._unacknowledged:
                    self._troubles.caught_up()
                yield None, 0

    def _inventory(self, volume: VolumeId) -> Iterator[tuple[metadata_pb2.PublishRequest, int]]:
        """Everything a volume holds. What changes meanwhile is in the log, which is sent after it."""
        held = held_by(self._table, volume)
        held.sort(key=lambda block: block.depth)  # parents before children
        held = in_chains(held)
        log.info("sending the inventory of %s: %d blocks", volume, len(held))
        self._counters.add("inventories_sent_total")
        for at in range(0, len(held), BATCH_EVENTS):
            yield self._message(volume, runs_of(held[at : at + BATCH_EVENTS])), 0
        yield self._message(volume, [], sync_end=True), 0

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

    def _hear(self, *, heard: bool) -> None:
        """Note whether the metadata server takes what this node tells it."""
        if heard != self.heard:
            self.heard = heard
            self._on_heard(heard)

    # ---------------------------------------------------------------- heart
    def _beat_for_ever(self) -> None:
        while not self._stopping.wait(self._heartbeat_s):
            if not self._registered.is_set() or self._leaving.is_set():
                continue
            try:
                self._beat()
                self._hear(heard=True)
            except KVStoreError as error:
                self._hear(heard=False)
                self._counters.add("heartbeats_failed_total")
                if isinstance(error, _NOT_LET_IN):
                    limited.warning("heartbeat refused: %s", self._diagnoser.explain(error))
                else:
                    log.debug("heartbeat failed: %s", error)
            except Exception:  # process edge: a node whose heart stops is hidden from lookups
                self._counters.add("heartbeat_bugs_total")
                log.exception("heartbeat failed, trying again")

    # ---------------------------------------------------------------- anti-entropy
    def _compare_for_ever(self) -> None:
        while not self._stopping.wait(self._anti_entropy_interval_s):
            if not self._registered.is_set():
                continue
            try:
                self._compare()
            except KVStoreError as error:
                self._counters.add("anti_entropy_failed_total")
                log.warning("anti-entropy interrupted: %s", error)
            except Exception:  # process edge, as above
                self._counters.add("anti_entropy_bugs_total")
                log.exception("anti-entropy failed, trying again")

    def _tell_of_quotas(self) -> None:
        """An engine sees no error of them: the log says why its blocks are not there."""
        beyond = sum(map(self._counters.get, _BEYOND_QUOTA))
        if beyond != self._beyond_quota:
            self._beyond_quota = beyond
            limited.warning(
                "%d blocks until now were not stored, or not made durable, as their tenants are at their quotas: kvstore tenants"
                " shows them",
                beyond,
            )

    def _beat(self) -> None:
        self._tell_of_quotas()
        usages = []
        places: list[tuple[Volume, NodeVolume | None]] = [
            (node_volume.volume, node_volume) for node_volume in self._table.node_volumes
        ]
        for volume, node_volume in [(self._table.dram, None), *places]:
            usage = volume.usage()
            usages.append(
                metadata_pb2.VolumeUsage(
                    volume_id=volume.volume_id,
                    used_bytes=usage.used_bytes,
                    blocks=usage.blocks,
                    read_only=self._troubles.why_no_blocks(node_volume) if node_volume is not None else "",
                )
            )
        drain = self._drainer.progress() if self._drainer is not None else None
        request = metadata_pb2.HeartbeatRequest(
            node_id=self._node.node_id,
            boot_id=self._boot_id,
            usages=usages,
            drain=drain,
            problems=self._troubles.told(),
            read_bytes_per_s=int(self._read_rate() or 0),
        )
        if self._retainer is not None:
            self._retainer.report(request)
        response: metadata_pb2.HeartbeatResponse = call(self._stub.Heartbeat, request, RPC_TIMEOUT_S)
        if self._retainer is not None and response.HasField("retention"):  # a server that knows no such rules says nothing
            self._retainer.told(response.retention)
        if response.register_again or (self._epoch and response.index_epoch != self._epoch):
            limited.warning("the metadata server has a new index, or forgot or removed this node: registering again")
            self._counters.add("registered_again_total")
            self._again.set()
            self._log.wake()
        elif self._drainer is not None:
            self._drainer.told(response.drain if response.HasField("drain") else None)
