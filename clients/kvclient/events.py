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
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self, cast

import grpc

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvproto.v1.common_pb2 import BlockRun as BlockRunMessage
from kvstore.core.errors import DeadlineExceeded, Internal, InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.observe.counters import Counters
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import Shown
from kvstore.rpc.client import connect
from kvstore.rpc.codec import check_id, keys_from_packed, run_from_proto, tier_from_proto, tier_to_proto
from kvstore.rpc.errors import FailedCall, from_rpc_error

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S: Final = 0.05
_MOST_BACKOFF_S: Final = 2.0
_CLOSE_S: Final = 10.0

Place = tuple[NamespaceId, int]
"""Where a key lies: namespace and depth."""


class Stream(Protocol):
    """A call under way, as gRPC answers it."""

    def __iter__(self) -> Iterator[pb.WatchBlocksResponse]:
        """Its messages."""

    def cancel(self) -> object:
        """Ends it."""


@dataclass(frozen=True, slots=True)
class Volume:
    """One boot of one volume.

    Attributes:
        number: as events name it; never used twice within a feed.
        volume_id: the volume.
        node_id: whose it is.
        tier: where it lies.
        boot_id: the boot of the node.
        served: whether it can be read now: its node is heard of, or another mounts it.
    """

    number: int
    volume_id: VolumeId
    node_id: NodeId
    tier: Tier
    boot_id: BootId
    served: bool


@dataclass(slots=True)
class Change:
    """What one message may have changed.

    Attributes:
        runs: stored, with their parents.
        keys: of other blocks whose holders may be others now.
        whole: everything: the mirror began anew, or is complete now.
    """

    runs: list[BlockRun] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    whole: bool = False


class BlockMirror:
    """Who holds what, as far as messages told. Pure: no connection, no thread; not thread-safe."""

    def __init__(self) -> None:
        self.feed_id = b""
        """The server's count that ``sequence`` belongs to; empty before the first message."""
        self.sequence = 0
        """The last change that was taken in, while the mirror is complete."""
        self.complete = False
        """Whether it is the truth as of ``sequence``; not so before the first snapshot has ended, or the next after a resync."""
        self._volumes: dict[int, Volume] = {}
        self._held: dict[int, set[BlockKey]] = {}
        self._blocks: dict[BlockKey, tuple[Place, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    @property
    def volumes(self) -> list[Volume]:
        """All volumes known, those that cannot be read now among them."""
        return list(self._volumes.values())

    def place(self, key: BlockKey) -> Place | None:
        """Namespace and depth of a block; None where nobody holds it."""
        found = self._blocks.get(key)
        return None if found is None else found[0]

    def replicas(self, key: BlockKey) -> list[Volume]:
        """Volumes that hold a block, also those that cannot be read now."""
        found = self._blocks.get(key)
        return [] if found is None else [self._volumes[number] for number in found[1]]

    def holders(self, key: BlockKey) -> list[Volume]:
        """Volumes that hold a block and can be read, nearest tier first."""
        return sorted((volume for volume in self.replicas(key) if volume.served), key=lambda volume: volume.tier)

    def apply(self, message: pb.WatchBlocksResponse) -> Change:
        """Takes one message in. Messages of one stream, in order.

        Raises:
            InvalidArgument: a malformed message: begin anew with :meth:`clear`.
        """
        change = Change()
        match message.WhichOneof("what"):
            case "resync":
                self.clear()
                self.feed_id = check_id(message.resync.feed_id, "feed_id")
                change.whole = True
            case "resumed":
                if message.resumed.feed_id != self.feed_id or not self.complete:
                    raise InvalidArgument("the server resumed what was not begun")
            case "snapshot_end":
                self.sequence = message.snapshot_end.sequence
                self.complete = change.whole = True
            case "events":
                for event in message.events.events:
                    self._apply(event, change)
                if message.events.sequence:
                    self.sequence = message.events.sequence
        return change

    def clear(self) -> None:
        """Forgets everything."""
        self.feed_id = b""
        self.sequence = 0
        self.complete = False
        self._volumes.clear()
        self._held.clear()
        self._blocks.clear()

    def _apply(self, event: pb.BlockEvent, change: Change) -> None:
        match event.WhichOneof("what"):
            case "stored":
                self._store_runs(event.stored.volume, event.stored.runs, change)
            case "removed":
                keys = keys_from_packed(event.removed.keys)
                self._remove(event.removed.volume, keys)
                change.keys += keys
            case "held":
                held = event.held
                keys = keys_from_packed(held.keys)
                if len(keys) != len(held.depths):
                    raise InvalidArgument("a depth a key", keys=len(keys), depths=len(held.depths))
                namespace = NamespaceId(check_id(held.namespace_id, "namespace_id"))
                self._store(held.volume, namespace, zip(keys, held.depths, strict=True))
                change.keys += keys
            case "opened":
                opened = event.opened
                before = self._volumes.get(opened.volume)
                self._volumes[opened.volume] = now = Volume(
                    opened.volume,
                    VolumeId(opened.volume_id),
                    NodeId(opened.node_id),
                    tier_from_proto(opened.tier),
                    BootId(opened.boot_id),
                    opened.served,
                )
                held_there = self._held.setdefault(opened.volume, set())
                if before is not None and before != now:
                    change.keys += held_there
            case "closed":
                gone = list(self._held.get(event.closed.volume, ()))
                self._remove(event.closed.volume, gone)
                self._held.pop(event.closed.volume, None)
                self._volumes.pop(event.closed.volume, None)
                change.keys += gone
            case "served":
                volume = self._volumes.get(event.served.volume)
                if volume is not None and volume.served != event.served.served:
                    told = Volume(
                        volume.number, volume.volume_id, volume.node_id, volume.tier, volume.boot_id, event.served.served
                    )
                    self._volumes[volume.number] = told
                    change.keys += self._held[volume.number]

    def _store_runs(self, number: int, runs: Iterable[BlockRunMessage], change: Change) -> None:
        for message in runs:
            run = run_from_proto(message)
            self._store(number, run.namespace, zip(run.keys, range(run.depth, run.depth + len(run.keys)), strict=True))
            change.runs.append(run)

    def _store(self, number: int, namespace: NamespaceId, blocks: Iterable[tuple[BlockKey, int]]) -> None:
        """A volume holds blocks. Stored at another place than it was known at, a key's older replicas are void."""
        mine = self._held.get(number)
        if mine is None:
            return  # not meant for this mirror
        for key, depth in blocks:
            found = self._blocks.get(key)
            if found is None:
                self._blocks[key] = ((namespace, depth), (number,))
            elif found[0] == (namespace, depth):
                if number not in found[1]:
                    self._blocks[key] = (found[0], (*found[1], number))
            else:
                for other in found[1]:
                    self._held[other].discard(key)
                self._blocks[key] = ((namespace, depth), (number,))
            mine.add(key)

    def _remove(self, number: int, keys: Iterable[BlockKey]) -> None:
        mine = self._held.get(number)
        if mine is None:
            return
        for key in keys:
            if key not in mine:
                continue
            mine.discard(key)
            place, numbers = self._blocks[key]
            left = tuple(other for other in numbers if other != number)
            if left:
                self._blocks[key] = (place, left)
            else:
                del self._blocks[key]


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
        token: Shown | None = None,
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
            self.counters.add("client_events_failures_total")
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
                self.counters.add("client_events_resyncs_total")
            if self._on_change is not None:
                self._on_change(self._mirror, change)
            if change.whole:
                self._lock.notify_all()
