"""One stream of published batches to the metadata server, with its acknowledgements.

Theory of operation.

1. The publisher sends a batch (``BatchStream.send``): the batch gets the next number, waits for one of ``BATCHES_IN_FLIGHT``
   slots, and goes into the outbox. A thread of gRPC sends the outbox.
2. The receiver thread removes acknowledged batches from ``SentBatches`` and frees their slots.
3. The stream is over if the server or the network ended it, if an acknowledgement is late, or if the publisher needs it to end.
4. ``SentBatches`` outlives the stream. The next stream first sends again what was not acknowledged (``BatchStream.resend``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.errors import Unavailable
from kvstore.core.types import VolumeId
from kvstore.node.publish.health import HealthReporter
from kvstore.node.publish.range_checks import RequestedChecks
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.rpc.errors import from_rpc_error
from kvstore.rpc.failover.channel import FailoverStream

BATCHES_IN_FLIGHT = 8
ACK_TIMEOUT_S = 30.0
"""A stream without an acknowledgement for this long is replaced by a new one. It is far above the limits of other calls: if many
nodes send their inventories at once, a batch waits for those of all others."""
JOIN_S = 10.0
_SLOT_WAIT_S = 0.1


@dataclass(slots=True)
class SentBatches:
    """Batches of this node that were sent, over all streams.

    Attributes:
        sequence: number of the last batch.
        acknowledged: number of the last acknowledged batch.
        unacknowledged: batches that the server has not acknowledged, oldest first, each with its number of events.
    """

    sequence: int = 0
    acknowledged: int = 0
    unacknowledged: deque[tuple[metadata_pb2.PublishRequest, int]] = field(default_factory=deque)


class BatchStream:
    """A context manager: one call of ``Publish``, which ends with the block. One thread sends.

    Args:
        stub: the metadata server.
        sent: batches of earlier streams and of this one.
        replica_log: notes which events are acknowledged.
        health: notes that the server acknowledges.
        checks: range checks that are done once their batches are acknowledged.
        must_end: whether the publisher stops or must register again.
    """

    def __init__(
        self,
        stub: metadata_pb2_grpc.MetadataStub,
        sent: SentBatches,
        replica_log: ReplicaChangeLog,
        health: HealthReporter,
        checks: RequestedChecks,
        must_end: Callable[[], bool],
    ) -> None:
        self._stub = stub
        self._sent = sent
        self._log = replica_log
        self._health = health
        self._checks = checks
        self._must_end = must_end
        self._outbox: queue.SimpleQueue[metadata_pb2.PublishRequest | None] = queue.SimpleQueue()  # ``_slots`` bounds it
        self._slots = threading.Semaphore(BATCHES_IN_FLIGHT)
        self._lock = threading.Lock()
        """Guards ``_sent`` and ``_acknowledged_s``."""
        self._acknowledged_s = time.monotonic()
        """Time of the last acknowledgement, or when the wait for it began."""
        self._ended = threading.Event()
        self._error: grpc.RpcError | None = None

    def __enter__(self) -> Self:
        self._responses = self._stub.Publish(self._requests())
        self._receiver = threading.Thread(target=self._receive, name="kvstore-publish-acks", daemon=True)
        self._receiver.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._outbox.put(None)
        self._responses.cancel()
        self._receiver.join(JOIN_S)

    def resend(self) -> bool:
        """Send all unacknowledged batches again, under their numbers. Returns False if the stream is over."""
        with self._lock:
            messages = [message for message, _ in self._sent.unacknowledged]
        return all(self._enqueue(message) for message in messages)

    def send(self, message: metadata_pb2.PublishRequest, events: int) -> bool:
        """Number a batch and send it. Returns False if the stream is over: the next one sends the batch again.

        Args:
            message: the batch.
            events: number of its events in the change log.
        """
        with self._lock:
            if not self._sent.unacknowledged:
                self._acknowledged_s = time.monotonic()
            self._sent.sequence += 1
            message.sequence = self._sent.sequence
            self._sent.unacknowledged.append((message, events))
        return self._enqueue(message)

    def is_over(self) -> bool:
        """Whether nothing more can or should be sent."""
        return self._ended.is_set() or self._must_end() or self._is_silent()

    def raise_failure(self) -> None:
        """Raise why the stream broke, after its end. Without a failure, do nothing.

        If the server does not acknowledge, and there are several, calls go to another one from now on. Answers to heartbeats do
        not show this failure.

        Raises:
            Unavailable: the server does not acknowledge.
            KVStoreError: the error of the call.
        """
        if self._is_silent():
            if isinstance(self._responses, FailoverStream):
                self._responses.stalled()
            raise Unavailable("published changes are not acknowledged", seconds=ACK_TIMEOUT_S)
        if self._error is not None:
            raise from_rpc_error(self._error)

    def _enqueue(self, message: metadata_pb2.PublishRequest) -> bool:
        """Put a message into the outbox as soon as fewer than ``BATCHES_IN_FLIGHT`` wait for an acknowledgement."""
        while not self._slots.acquire(timeout=_SLOT_WAIT_S):
            if self.is_over():
                return False
        self._outbox.put(message)
        return True

    def _requests(self) -> Iterator[metadata_pb2.PublishRequest]:
        """Yield the outbox, in a thread of gRPC, up to the end of the stream."""
        while (message := self._outbox.get()) is not None:
            yield message

    def _receive(self) -> None:
        """Receive acknowledgements until the call ends. Runs in the receiver thread."""
        try:
            for response in self._responses:
                self._health.publish_acknowledged()
                self._acknowledge(response.sequence)
                self._checks.acknowledged(response.sequence)
        except grpc.RpcError as error:
            self._error = error
        self._ended.set()
        self._log.wake()

    def _acknowledge(self, sequence: int) -> None:
        """Remove the batches up to this number and free their slots."""
        unacknowledged = self._sent.unacknowledged
        with self._lock:
            self._acknowledged_s = time.monotonic()
            self._sent.acknowledged = sequence
            while unacknowledged and unacknowledged[0][0].sequence <= sequence:
                message, events = unacknowledged.popleft()
                self._log.acknowledge(VolumeId(message.volume_id), events)
                self._slots.release()

    def _is_silent(self) -> bool:
        """Whether the acknowledgement of a batch is late."""
        with self._lock:
            return bool(self._sent.unacknowledged) and time.monotonic() - self._acknowledged_s > ACK_TIMEOUT_S
