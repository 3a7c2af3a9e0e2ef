"""A mirror of the blocks that the store holds, kept up to date by block events: for routers, schedulers, dashboards.

    from kvclient.events import BlockWatcher

    with BlockWatcher("127.0.0.1:7400", namespaces=[spec.namespace]) as watcher:
        watcher.wait_complete(10.0)
        where = watcher.holders(key)       # volumes that hold the block and can be read, nearest tier first

``BlockMirror`` is the pure part: it applies messages. ``BlockWatcher`` applies the messages of a subscription in a thread of its
own; after a lost connection it resumes, or starts again if the server requires it. The mirror is a hint, like the index.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, Protocol, Self, cast

import grpc

from kvclient.events.mirror import BlockMirror, Change, MirroredVolume
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvstore.core.errors import DeadlineExceeded, Internal, KVStoreError, Unavailable
from kvstore.core.types import BlockKey, NamespaceId, NodeId, Tier
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.codec import tier_to_proto
from kvstore.rpc.errors import FailedCall, from_rpc_error
from kvstore.rpc.failover.connect import connect_metadata

_log = logging.getLogger(__name__)
limited = LimitedLog(_log)

_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 2.0
_CLOSE_S: Final = 10.0
_BEGIN_AGAIN_S: Final = 600.0
_SPACE_SHARE: Final = 0.75


class Stream(Protocol):
    """A streaming call of gRPC."""

    def __iter__(self) -> Iterator[pb.WatchBlocksResponse]:
        """Iterate over its messages."""

    def cancel(self) -> object:
        """End the stream."""


class BlockWatcher:
    """Keeps a mirror of a running store up to date in a separate thread. A context manager.

    Args:
        address: of the metadata server, or of several.
        namespaces: only these; empty: all.
        nodes: only volumes of these nodes; empty: all.
        tiers: only volumes of these tiers; empty: all.
        tls: for the connection.
        token: presented to the server (``ClientOptions.shown_token``). A tenant's token requires ``namespaces``, all its own.
        wanted: which blocks the mirror keeps (see ``BlockMirror``), called in the watcher's thread; None: all.
        most_blocks: blocks that the mirror keeps; None: all. Further ones are ignored, counted and logged. Once a quarter is
            free, the mirror begins again with a snapshot that has them, at most every ten minutes.
        counters: receive the failures and resyncs of the stream; None: new ones.
        on_change: called after each message, in the watcher's thread, with the mirror and the change. The mirror does not
            change during the call. If the function is slower than the changes arrive, the server makes the mirror start again.

    Attributes:
        counters: failures and resyncs of the stream.
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
        wanted: Callable[[NamespaceId, BlockKey], bool] | None = None,
        most_blocks: int | None = None,
        counters: Counters | None = None,
        on_change: Callable[[BlockMirror, Change], None] | None = None,
    ) -> None:
        self.counters = counters if counters is not None else Counters()
        self._filter = pb.WatchBlocksRequest(
            namespace_ids=namespaces, node_ids=nodes, tiers=[tier_to_proto(tier) for tier in tiers]
        )
        self._mirror = BlockMirror(wanted, most_blocks=most_blocks)
        self._ignored = 0
        self._begun_s = time.monotonic()
        self._on_change = on_change
        self._lock = threading.Condition()
        self._life = threading.Lock()  # guards the stream; ``on_change`` may block and hold the other lock
        self._stopped = threading.Event()
        self._refused: KVStoreError | None = None
        self._stream: Stream | None = None
        self._channel = connect_metadata(address, tls=tls, token=token, own_connection=True, counters=self.counters)
        self._stub = metadata_pb2_grpc.MetadataStub(self._channel)
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- reading the mirror ----
    def holders(self, key: BlockKey) -> list[MirroredVolume]:
        """See ``BlockMirror.holders``.

        Example: ``watcher.holders(key)``
        """
        with self._lock:
            return self._mirror.holders(key)

    def read(self, look: Callable[[BlockMirror], None]) -> None:
        """Call a function with the mirror, which does not change during the call. The function must return soon.

        Example: ``watcher.read(lambda mirror: print(len(mirror)))``
        """
        with self._lock:
            look(self._mirror)

    def wait_complete(self, timeout_s: float) -> None:
        """Wait until the mirror is complete.

            watcher.wait_complete(10.0)

        Raises:
            DeadlineExceeded: it was not complete in time.
            KVStoreError: the server refuses the subscription for good.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._mirror.complete or self._refused is not None, timeout_s)
            self.check()
            if not self._mirror.complete:
                raise DeadlineExceeded("the mirror of the store is not complete", timeout_s=timeout_s, blocks=len(self._mirror))

    def check(self) -> None:
        """Raise the error of a refused subscription.

            watcher.check()

        Raises:
            KVStoreError: the server refuses the subscription for good.
        """
        if self._refused is not None:
            raise self._refused

    def close(self) -> bool:
        """End the stream and the thread. Idempotent. False: the thread still runs, because ``on_change`` does not return."""
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
            begun = malformed = False
            try:
                for message in self._open():
                    begun = True
                    self._take(message)
                error = Unavailable("the server ended the stream")
            except grpc.RpcError as failed:
                error = from_rpc_error(cast("FailedCall", failed))
            except KVStoreError as unusable:
                error, malformed = unusable, True  # or the mirror has space again: both begin with a snapshot
                with self._lock:
                    self._mirror.clear()
            except Exception as bug:  # noqa: BLE001  # edge of the thread: callers that wait for the mirror must see the error
                _log.exception("block event watcher failed")
                error, begun = Internal(f"the watcher of block events failed: {bug!r}"), False
            if self._stopped.is_set():
                return
            self.counters.add(client_metrics.EVENTS_FAILURES)
            if not error.retryable and not begun:
                _log.error("block event subscription refused: %s", error)
                with self._lock:
                    self._refused = error
                    self._lock.notify_all()
                return
            _log.warning("block event stream lost, retried: %s", error)
            backoff_s = _FIRST_BACKOFF_S if begun and not malformed else min(2 * backoff_s, _MAX_BACKOFF_S)
            self._stopped.wait(backoff_s * random.uniform(0.5, 1.5))  # noqa: S311  # spreads load, guards nothing

    def _open(self) -> Iterable[pb.WatchBlocksResponse]:
        request = pb.WatchBlocksRequest()
        request.CopyFrom(self._filter)
        with self._lock:
            if self._mirror.complete:
                mirror = self._mirror
                request.feed_id, request.sequence, request.position = mirror.feed_id, mirror.sequence, mirror.position
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
                self._ignored, self._begun_s = 0, time.monotonic()
            if self._mirror.ignored > self._ignored:
                self.counters.add(client_metrics.EVENTS_IGNORED_BLOCKS, self._mirror.ignored - self._ignored)
                self._ignored = self._mirror.ignored
                limited.warning("stored blocks ignored: the mirror of block events is full (limit=%s)", self._mirror.most_blocks)
            if self._on_change is not None:
                self._on_change(self._mirror, change)
            if change.whole:
                self._lock.notify_all()
            if self._has_space_again():
                raise Unavailable("the mirror of block events has space for ignored blocks: it begins again")  # and is cleared

    def _has_space_again(self) -> bool:
        mirror = self._mirror
        if not mirror.complete or not mirror.ignored or mirror.most_blocks is None:
            return False
        return len(mirror) <= _SPACE_SHARE * mirror.most_blocks and time.monotonic() - self._begun_s >= _BEGIN_AGAIN_S
