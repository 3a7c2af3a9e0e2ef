"""One connection of the data-plane server: authenticates the client, then answers its requests in order from a provider.

Each part of a read is released as soon as its bytes have been passed to the kernel, and each grant of a write is committed or
aborted, exactly once and however the connection ends. An error between two frames is reported to the peer, and the connection
stays open. After an error within a frame the two sides are out of step, and the connection is closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KVStoreError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unsupported,
)
from kvstore.core.types import BlockShape, NamespaceId, Outcome, Tier
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.transport.contract import BlockProvider, Checksums, ReadPart, ReadRequest, WriteGrant, WriteRequest
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.frames import FrameKind, ReadFrame, WriteFrame
from kvstore.transport.tcp.one_sided import OneSidedFactory, OneSidedFailed, SendPart
from kvstore.transport.tcp.receive import receive_and_hash
from kvstore.transport.tickets import TicketAuthority, TicketScope
from kvstore.transport.wire import Piece, PlainWire, Wire

log = logging.getLogger(__name__)
limited = LimitedLog(log)

T = TypeVar("T")

_GRACE_S = 1.0
"""Answers are sent up to this long after the deadline, because the peer waits a little longer than its budget says."""


@dataclass(frozen=True, slots=True)
class ServerTimeouts:
    """Timeouts of a server connection, in seconds."""

    handshake_s: float
    """Timeout for TLS and HELLO of a new connection."""
    idle_s: float
    """Maximum time between two requests."""
    stall_s: float
    """Maximum time without progress during a request."""
    request_s: float
    """Maximum time of one request, even if its deadline is later."""


class ServerConnection:
    """Serves one wire, in one thread.

    Args:
        wire: the connection.
        provider: source and destination of blocks.
        authority: verifies the ticket; None: every client may access every namespace.
        timeouts: limits for the peer.
        counters: counts events.
        one_sided: makes the responder for one-sided transfers; None: ATTACH is refused.
    """

    def __init__(
        self,
        wire: Wire,
        provider: BlockProvider,
        authority: TicketAuthority | None,
        timeouts: ServerTimeouts,
        counters: Counters,
        one_sided: OneSidedFactory | None = None,
    ) -> None:
        self._wire = wire
        self._provider = provider
        self._authority = authority
        self._timeouts = timeouts
        self._counters = counters
        self._scope: TicketScope | None = None
        # one-sided payload would bypass TLS and the cap, so only plain wires have it
        self._one_sided = one_sided(wire, counters) if one_sided is not None and isinstance(wire, PlainWire) else None
        self.authenticated = False
        """Whether the peer has sent a valid HELLO. Other threads may read this."""
        self.idle_since_s: float | None = None
        """Since when the connection waits for a request; None: it is busy. Other threads may read this."""

    def run(self) -> None:
        """Serve until the peer disconnects, violates the protocol or is idle for too long.

        Raises:
            KVStoreError: the wire broke or stalled during a request.
        """
        try:
            if self._greet():
                while self._serve_one():
                    pass
        except frames.BadFrame as error:
            self._counters.add(transport_metrics.BAD_FRAMES)
            limited.warning("data connection closed: %s", error)
            self._answer(frames.encode_error(0, error), self._now_s() + self._timeouts.stall_s)
        finally:
            if self._one_sided is not None:
                self._one_sided.close()

    def _greet(self) -> bool:
        """Exchange HELLO and WELCOME. Return False if the ticket was refused."""
        deadline_s = self._now_s() + self._timeouts.handshake_s
        head = frames.decode_head(self._wire.receive(frames.HEAD_BYTES, deadline_s))
        if head.kind is not FrameKind.HELLO:
            raise frames.BadFrame("the first frame must be a HELLO", kind=head.kind.name)
        ticket = frames.decode_hello(bytes(self._wire.receive(head.header_bytes, deadline_s)))
        if self._authority is not None:
            try:
                self._scope = self._authority.verify(ticket)
            except Unauthenticated as error:
                self._counters.add(transport_metrics.UNAUTHENTICATED)
                self._answer(frames.encode_error(0, error), deadline_s)
                return False
        self.authenticated = True
        self._answer(frames.encode_head(FrameKind.WELCOME, 0), deadline_s)
        return True

    def _serve_one(self) -> bool:
        """Answer one request. Return False if the peer has been idle for too long."""
        self._wire.stall_s = None
        self.idle_since_s = self._now_s()
        try:
            data = self._wire.receive(frames.HEAD_BYTES, self.idle_since_s + self._timeouts.idle_s)
        except DeadlineExceeded:
            self._counters.add(transport_metrics.IDLE_CONNECTIONS_CLOSED)
            return False
        self.idle_since_s = None
        head = frames.decode_head(data)
        self._wire.stall_s = self._timeouts.stall_s
        header = bytes(self._wire.receive(head.header_bytes, self._now_s() + self._timeouts.request_s))
        if head.kind is FrameKind.READ:
            self._serve_read(head.request_id, frames.decode_read(header), self._send_part)
        elif head.kind is FrameKind.ATTACH:
            self._serve_attach(head.request_id, header)
        elif head.kind is FrameKind.FETCH and self._one_sided is not None:
            self._serve_read(head.request_id, *self._one_sided.fetch(header))
        elif head.kind is FrameKind.WRITE:
            self._serve_write(head.request_id, frames.decode_write(header))
        elif head.kind is FrameKind.PING:
            self._answer(frames.encode_head(FrameKind.PONG, head.request_id), self._now_s() + self._timeouts.request_s)
        else:
            raise frames.BadFrame("not a request", kind=head.kind.name)
        return True

    # ---------------------------------------------------------------- reads

    def _serve_attach(self, request_id: int, header: bytes) -> None:
        deadline_s = self._now_s() + self._timeouts.request_s
        refusal: KVStoreError = Unsupported("one-sided transfers are not available on this connection")
        if self._one_sided is not None:
            try:
                self._answer(self._one_sided.attach(request_id, header), deadline_s)
            except Unsupported as error:
                refusal = error
            else:
                return
        self._counters.add(transport_metrics.NIXL_REFUSED)
        log.info("one-sided transfers refused: %s", refusal)
        self._answer(frames.encode_error(request_id, refusal), deadline_s)

    def _serve_read(self, request_id: int, frame: ReadFrame, send_part: SendPart) -> None:
        self._counters.add(transport_metrics.READS)
        deadline_s = self._deadline_s(frame.budget_ms)
        parts: Iterator[ReadPart] | None = None
        try:
            if self._known_shape(frame.namespace, frame.shape) is None:
                self._send_misses(request_id, frame, deadline_s)
            else:
                request = ReadRequest(
                    frame.namespace, frame.keys, frame.first_layer, frame.layer_count, frame.layer_group, deadline_s
                )  # fmt: skip
                parts = self._call_provider(lambda: self._provider.read(request))
                while (part := self._call_provider(lambda: next(parts, None))) is not None:
                    try:
                        send_part(request_id, frame, part, deadline_s + _GRACE_S)
                    except OneSidedFailed as error:
                        self._counters.add(transport_metrics.NIXL_FAILURES)
                        limited.warning("one-sided transfer failed: %s", error)
                        raise _RequestError(error) from error
                    finally:
                        part.release()
        except _RequestError as failed:
            self._answer(frames.encode_error(request_id, failed.error), self._now_s() + self._timeouts.stall_s)
            return
        finally:
            close = getattr(parts, "close", None)  # only generators have a close method
            if close is not None:
                close()
        self._answer(frames.encode_head(FrameKind.READ_END, request_id), deadline_s + _GRACE_S)

    def _send_misses(self, request_id: int, frame: ReadFrame, deadline_s: float) -> None:
        """Answer a read of an unknown namespace: all keys are misses."""
        outcomes = bytes((Outcome.MISS,)) * len(frame.keys)
        none = np.empty((0, frame.layer_count), np.uint64)
        data = frames.DataFrame(0, outcomes, 0, frame.first_layer, frame.layer_count, Tier.DRAM, none)
        self._answer(frames.encode_data(request_id, data, 0), deadline_s)

    def _send_part(self, request_id: int, frame: ReadFrame, part: ReadPart, deadline_s: float) -> None:
        """Send one part as one DATA frame, or as several frames for layer groups and very many checksums."""
        shape, views = frame.shape, part.views
        outcomes = bytes(part.outcomes)
        if (
            outcomes.count(Outcome.HIT) != len(views)
            or part.checksums.shape != (len(views), shape.layers)
            or any(view.nbytes != shape.block_bytes for view in views)
        ):
            raise _RequestError(Internal("the provider returned an inconsistent part", keys=len(outcomes), views=len(views)))
        group = frame.layer_group or frame.layer_count
        keys_at_once = max(1, frames.MAX_CHECKSUMS_PER_DATA // group)
        hits_before = [0, *accumulate(outcome == Outcome.HIT for outcome in outcomes)] if len(outcomes) > keys_at_once else None
        end = frame.first_layer + frame.layer_count
        for layer in range(frame.first_layer, end, group):
            layers = min(group, end - layer)
            low, high = layer * shape.layer_block_bytes, (layer + layers) * shape.layer_block_bytes
            for key in range(0, len(outcomes), keys_at_once):
                keys = outcomes[key : key + keys_at_once]
                chosen = slice(None) if hits_before is None else slice(hits_before[key], hits_before[key + len(keys)])
                pieces: list[Piece] = [view[low:high] for view in views[chosen]] if layers < shape.layers else list(views[chosen])
                checksums = part.checksums[chosen, layer : layer + layers]
                payload_bytes = len(pieces) * (high - low)
                data = frames.DataFrame(part.first + key, keys, len(pieces), layer, layers, part.tier, checksums)
                self._wire.send([frames.encode_data(request_id, data, payload_bytes), *pieces], deadline_s)
                self._counters.add(transport_metrics.BYTES_SENT, payload_bytes)

    # ---------------------------------------------------------------- writes

    def _serve_write(self, request_id: int, frame: WriteFrame) -> None:
        self._counters.add(transport_metrics.WRITES)
        deadline_s = self._deadline_s(frame.budget_ms)
        request = WriteRequest(frame.run, frame.shape, frame.durable, deadline_s, frame.tail)
        grant: WriteGrant | None = None  # None after the commit
        try:
            if self._known_shape(frame.run.namespace, frame.shape) is None:
                unknown = NotFound("unknown namespace; request a ticket from the node first")
                self._answer(frames.encode_error(request_id, unknown), deadline_s)
                return
            grant = self._call_provider(lambda: self._provider.write(request))
            self._answer(frames.encode_store_outcomes(FrameKind.GRANT, request_id, grant.outcomes), deadline_s)
            if not grant.views:
                return
            receive = self._receive_layers if frame.layerwise else self._receive_payload
            checksums, good = receive(request_id, grant, frame.shape, deadline_s)
            granted, grant = grant, None
            outcomes = self._call_provider(lambda: granted.commit(checksums, good))
            self._answer(frames.encode_store_outcomes(FrameKind.WRITTEN, request_id, outcomes), deadline_s + _GRACE_S)
        except _RequestError as failed:
            self._answer(frames.encode_error(request_id, failed.error), self._now_s() + self._timeouts.stall_s)
        finally:
            if grant is not None:
                if grant.views:
                    self._counters.add(transport_metrics.WRITES_ABORTED)
                grant.abort()

    def _receive_payload(
        self, request_id: int, grant: WriteGrant, shape: BlockShape, deadline_s: float
    ) -> tuple[Checksums, list[bool]]:
        """Receive the granted blocks into their slots; return the peer's checksums, and which blocks match them."""
        head = frames.decode_head(self._wire.receive(frames.HEAD_BYTES, deadline_s))
        expected = len(grant.views) * shape.block_bytes
        if (head.kind, head.request_id, head.payload_bytes) != (FrameKind.PAYLOAD, request_id, expected):
            raise frames.BadFrame(
                "GRANT must be answered by a PAYLOAD of the granted size", kind=head.kind.name, payload_bytes=head.payload_bytes
            )
        found = receive_and_hash(self._wire, grant.views, shape.layer_block_bytes, deadline_s)
        self._counters.add(transport_metrics.BYTES_RECEIVED, expected)
        checksums = self._receive_checksums(request_id, len(grant.views), shape.layers, deadline_s)
        return checksums, self._count_corrupt((found.reshape(checksums.shape) == checksums).all(axis=1))

    def _receive_layers(
        self, request_id: int, grant: WriteGrant, shape: BlockShape, deadline_s: float
    ) -> tuple[Checksums, list[bool]]:
        """As ``_receive_payload``, from LAYERS frames. Between the frames the peer may compute until its deadline."""
        count, size = len(grant.views), shape.layer_block_bytes
        checksums = np.zeros((count, shape.layers), np.uint64)
        left, good = np.ones(shape.layers, bool), np.ones(count, bool)
        while left.any():
            self._wire.stall_s = None
            head = frames.decode_head(self._wire.receive(frames.HEAD_BYTES, deadline_s))
            self._wire.stall_s = self._timeouts.stall_s
            if (head.kind, head.request_id) != (FrameKind.LAYERS, request_id):
                raise frames.BadFrame("a layer-wise write must continue with LAYERS", kind=head.kind.name)
            first, layers = frames.decode_layers(bytes(self._wire.receive(head.header_bytes, deadline_s)), shape.layers)
            span = slice(first, first + layers)
            if head.payload_bytes != count * layers * size or not left[span].all():
                raise frames.BadFrame("LAYERS of a wrong size, or sent before", first=first, bytes=head.payload_bytes)
            pieces = [view[first * size : (first + layers) * size] for view in grant.views]
            found = receive_and_hash(self._wire, pieces, size, deadline_s).reshape(count, layers)
            self._counters.add(transport_metrics.BYTES_RECEIVED, head.payload_bytes)
            checksums[:, span] = self._receive_checksums(request_id, count, layers, deadline_s)
            good &= (found == checksums[:, span]).all(axis=1)
            left[span] = False
        return checksums, self._count_corrupt(good)

    def _receive_checksums(self, request_id: int, blocks: int, layers: int, deadline_s: float) -> Checksums:
        head = frames.decode_head(self._wire.receive(frames.HEAD_BYTES, deadline_s))
        if (head.kind, head.request_id, head.header_bytes) != (FrameKind.CHECKSUMS, request_id, blocks * layers * 8):
            raise frames.BadFrame("bytes must be followed by CHECKSUMS", kind=head.kind.name, bytes=head.header_bytes)
        return frames.decode_checksums(bytes(self._wire.receive(head.header_bytes, deadline_s)), blocks, layers)

    def _count_corrupt(self, good: npt.NDArray[np.bool_]) -> list[bool]:
        if corrupt := len(good) - int(good.sum()):
            self._counters.add(transport_metrics.CORRUPT_BLOCKS, corrupt)
            limited.warning("corrupt blocks received in a write: %d (of=%d)", corrupt, len(good))
        return [bool(matched) for matched in good]

    # ---------------------------------------------------------------- helpers

    def _known_shape(self, namespace: NamespaceId, shape: BlockShape) -> BlockShape | None:
        """Return the shape of a namespace, which must equal the peer's; None: the namespace is unknown here."""
        if self._authority is not None and self._scope is not None:
            try:
                self._authority.check(self._scope, namespace)
            except PermissionDenied as error:
                self._counters.add(transport_metrics.PERMISSION_DENIED)
                raise _RequestError(error) from error
            except Unauthenticated as error:
                self._counters.add(transport_metrics.UNAUTHENTICATED)
                raise _RequestError(error) from error
        known = self._call_provider(lambda: self._provider.shape(namespace))
        if known is not None and known != shape:
            raise _RequestError(InvalidArgument("the namespace has another block shape", known=known, requested=shape))
        return known

    def _call_provider(self, call: Callable[[], T]) -> T:
        """Call the provider between two frames. Its errors are reported to the peer, and the connection stays open."""
        try:
            return call()
        except KVStoreError as error:
            raise _RequestError(error) from error

    def _answer(self, frame: bytes, deadline_s: float) -> None:
        self._wire.send((frame,), deadline_s)

    def _deadline_s(self, budget_ms: int) -> float:
        return self._now_s() + min(budget_ms / 1000, self._timeouts.request_s)

    @staticmethod
    def _now_s() -> float:
        return time.monotonic()


class _RequestError(Exception):
    """An error of one request, to be reported to the peer while both sides are in step."""

    def __init__(self, error: KVStoreError) -> None:
        super().__init__(str(error))
        self.error = error
