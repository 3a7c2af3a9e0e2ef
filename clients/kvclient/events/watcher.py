"""A mirror of what the store holds, kept up to date by the metadata server's block events: for routers, schedulers, dashboards.

    from kvclient.events import BlockWatcher

    with BlockWatcher("127.0.0.1:7400", namespaces=[spec.namespace]) as watcher:
        watcher.wait_complete(10.0)
        where = watcher.holders(key)       # volumes that hold the block and can be read, nearest tier first

``BlockMirror`` is the pure part: messages in, who holds what out. ``BlockWatcher`` feeds one from a thread of its own; after a
lost connection it goes on where it left off, or begins anew where the server says so. The mirror is a hint, as the index is.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, Protocol, Self, cast

import grpc

from kvclient.events.mirror import BlockMirror, Change, Volume
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.core.errors import DeadlineExceeded, Internal, KVStoreError, Unavailable
from kvstore.core.types import BlockKey, NamespaceId, NodeId, Tier
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import connect
from kvstore.rpc.codec import tier_to_proto
from kvstore.rpc.errors import FailedCall, from_rpc_error

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S: Final = 0.05
_MOST_BACKOFF_S: Final = 2.0
_CLOSE_S: Final = 10.0


class Stream(Protocol):
    """A call under way, as gRPC answers it."""

    def __iter__(self) -> Iterator[pb.WatchBlocksResponse]:
        """Its messages."""

    def cancel(self) -> object:
        """Ends it."""


class BlockWatcher:
    """Keeps a mirror of a running store, from a thread of its own.

    Args:
        address: of the metadata server.
        namespaces: of these alone; none: of all.
        nodes: volumes of these nodes alone; none: of all.
        tiers: volumes of these tiers alone; none: of all.
        tls: as for every channel of a client.
        token: what the server is shown (``ClientOptions.shown_token``); with a tenant's, ``namespaces`` takes its own, by name.
        on_change: called after each message, in the watcher's thread, with the mirror and what may have changed. While it runs
            the mirror stands still; if it is slower than changes come, the server makes the mirror begin anew.

    Attributes:
        counters: what happened to the stream.
    """

    def __init__(
        self,
        address: str,
        *,
        namespaces: Sequence[NamespaceId] = (),
        nodes: Sequence[NodeId] = (),
        tiers: Sequence[Tier] = (),
        tls: TlsConfig | None = None,
        token: TokenSource | None = None,
        on_change: Callable[[BlockMirror, Change], None] | None = None,
    ) -> None:
        self.counters = Counters()
        self._filter = pb.WatchBlocksRequest(
            namespace_ids=namespaces, node_ids=nodes, tiers=[tier_to_proto(tier) for tier in tiers]
        )
        self._mirror = BlockMirror()
        self._on_change = on_change
        self._lock = threading.Condition()
        self._life = threading.Lock()  # of the stream; its own, for ``on_change`` may hang in a pipe and hold the other
        self._stopped = threading.Event()
        self._refused: KVStoreError | None = None
        self._stream: Stream | None = None
        self._channel = connect(address, tls=tls, token=token, own_connection=True)
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- what is known ----
    def holders(self, key: BlockKey) -> list[Volume]:
        """As ``BlockMirror.holders``."""
        with self._lock:
            return self._mirror.holders(key)

    def read(self, look: Callable[[BlockMirror], None]) -> None:
        """Calls a function with the mirror while that stands still; to be left soon."""
        with self._lock:
            look(self._mirror)

    def wait_complete(self, timeout_s: float) -> None:
        """Until the mirror is complete.

        Raises:
            DeadlineExceeded: it was not in time.
            KVStoreError: the server refuses to tell, and will go on doing so.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._mirror.complete or self._refused is not None, timeout_s)
            self.check()
            if not self._mirror.complete:
                raise DeadlineExceeded("the mirror of the store is not complete", timeout_s=timeout_s, blocks=len(self._mirror))

    def check(self) -> None:
        """Whether there is still something to wait for.

        Raises:
            KVStoreError: the server refuses to tell, and will go on doing so.
        """
        if self._refused is not None:
            raise self._refused

    def close(self) -> bool:
        """Ends the stream and the thread. Idempotent. False: ``on_change`` hangs, and the thread with it."""
        with self._life:
            self._stopped.set()
            stream = self._stream
        if stream is not None:
            stream.cancel()
        self._thread.join(_CLOSE_S)
        self._channel.close()
        return not self._thread.is_alive()

    # ---- the thread ----
    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopped.is_set():
            error: KVStoreError
            begun = False
            try:
                for message in self._open():
                    begun = True
                    self._take(message)
                error = Unavailable("the server ended the stream")
            except grpc.RpcError as failed:
                error = from_rpc_error(cast("FailedCall", failed))
            except KVStoreError as malformed:
                error = malformed
                with self._lock:
                    self._mirror.clear()
            except Exception as bug:  # noqa: BLE001  # the thread's edge: whoever waits for the mirror must hear of it
                _log.exception("a watcher of block events failed")
                error, begun = Internal(f"a watcher of block events failed: {bug!r}"), False
            if self._stopped.is_set():
                return
            self.counters.add(client_metrics.EVENTS_FAILURES)
            if not error.retryable and not begun:
                _log.error("block events are refused: %s", error)
                with self._lock:
                    self._refused = error
                    self._lock.notify_all()
                return
            _log.warning("block events broke off, and are asked for again: %s", error)
            backoff_s = _FIRST_BACKOFF_S if begun else min(2 * backoff_s, _MOST_BACKOFF_S)
            self._stopped.wait(backoff_s * random.uniform(0.5, 1.5))  # noqa: S311  # spreads load, guards nothing

    def _open(self) -> Iterable[pb.WatchBlocksResponse]:
        request = pb.WatchBlocksRequest()
        request.CopyFrom(self._filter)
        with self._lock:
            if self._mirror.complete:
                request.feed_id, request.sequence = self._mirror.feed_id, self._mirror.sequence
        with self._life:
            if self._stopped.is_set():
                return ()
            self._stream = stream = cast("Stream", self._stub.WatchBlocks(request))
        return stream

    def _take(self, message: pb.WatchBlocksResponse) -> None:
        with self._lock:
            change = self._mirror.apply(message)
            if message.WhichOneof("what") == "resync":
                self.counters.add(client_metrics.EVENTS_RESYNCS)
            if self._on_change is not None:
                self._on_change(self._mirror, change)
            if change.whole:
                self._lock.notify_all()
