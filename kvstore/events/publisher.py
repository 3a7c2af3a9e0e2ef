"""The two sockets of vLLM's format: PUB for events, ROUTER for replays of missed events.

Batches are numbered from 0, or from the clock's microseconds (``events.numbers``). A number that is lower than the last one tells
a subscriber that the publisher began again: it drops its state and requests a replay from 0.

A replay request is that of vLLM's own publisher: an empty frame, and the number of the first requested batch in 8 bytes. The
answer is one message per batch, with consecutive numbers up to the last published one, and an empty message with number -1. If
the requested batch is no longer kept, vLLM's publisher sends the remaining batches and leaves a gap. This publisher sends the
whole state instead, with the requested numbers: all stored blocks, and then empty batches. If the subscriber has a state, which a
request for another number than 0 shows, the first batch begins with ``AllBlocksCleared``. That event is never published live.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Final

import zmq

from kvstore.config.events import EventsConfig
from kvstore.core import limits
from kvstore.core.errors import Unavailable
from kvstore.events.wire import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
    encode,
    number,
)
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import events as events_metrics

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)  # any peer of the socket can cause these lines

_POLL_MS: Final = 100
_SEND_MS: Final = 2_000
"""How long a replay waits for space in the queue of its peer."""
_REPLAY_S: Final = 30.0
"""Maximum duration of one replay, because other replays wait for it."""
_MOST_REQUEST_BYTES: Final = 64
_MOST_SNAPSHOT_BATCHES: Final = 1_000
_MOST_NUMBERS: Final = 1 << 20
"""After this many batches, numbers begin again."""
_CLOSE_S: Final = 5.0


class EventPublisher:
    """Publishes batches of events. One thread calls ``publish``, any thread ``heartbeat``; replays run in their own thread.

    Args:
        config: endpoints, topic, numbers, and memory for replays.
        everything: returns the whole published state, in at most the given number of batches.
        counters: counts what is published.

    Raises:
        Unavailable: an endpoint cannot be bound.
    """

    def __init__(self, config: EventsConfig, everything: Callable[[int], list[list[Event]]], counters: Counters) -> None:
        self._config = config
        self._everything = everything
        self._counters = counters
        self._topic = config.frame.encode()
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._first = self._next = self._first_number()
        self._published_s = 0.0
        self._stopped = threading.Event()
        self.published = threading.Event()
        """Set when all blocks of the start are published; see ``heartbeat``."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread: threading.Thread | None = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(config.high_water)
            self._pub.set(zmq.MAXMSGSIZE, limits.MAX_NAME_BYTES + 1)  # peers only send subscriptions to topics
            self.endpoint = self._open(self._pub, config.zmq, connect=config.connect)
            """Endpoint of the PUB socket, with its real port."""
            self.replay_endpoint = ""
            """Endpoint of the ROUTER socket, with its real port; empty: no replays."""
            if config.replay is not None:
                router = self._context.socket(zmq.ROUTER)
                router.set(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
                router.set(zmq.ROUTER_MANDATORY, 1)  # wait if the peer's queue is full, instead of dropping silently
                router.set(zmq.SNDTIMEO, _SEND_MS)
                self.replay_endpoint = self._open(router, config.replay, connect=False)
                self._thread = threading.Thread(target=self._serve_replays, args=(router,), name="kvstore-replays", daemon=True)
                self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @staticmethod
    def _open(socket: zmq.Socket[bytes], endpoint: str, *, connect: bool) -> str:
        try:
            if connect:
                socket.connect(endpoint)
                return endpoint
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise Unavailable("cannot open the endpoint", endpoint=endpoint, reason=error) from error
        return str(socket.get_string(zmq.LAST_ENDPOINT))

    def publish(self, translate: Callable[[], list[list[Event]]]) -> None:
        """Publish batches.

        Args:
            translate: changes the state that ``everything`` returns, and returns batches of these changes.
        """
        with self._lock:
            if self._next - self._first >= _MOST_NUMBERS:
                self._begin_again()
            for events in translate():
                self._publish(events)

    def heartbeat(self) -> None:
        """Publish an empty batch if none was published for ``heartbeat_s``. Call it several times per interval."""
        with self._lock:
            if self.published.is_set() and time.monotonic() - self._published_s >= self._config.heartbeat_ms / 1000:
                self._publish([])

    def close(self) -> None:
        """Close the sockets. Do not call ``publish`` after this."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
        self._context.destroy(linger=0)

    def _first_number(self) -> int:
        return 0 if self._config.numbers == "zero" else time.time_ns() // 1_000

    def _begin_again(self) -> None:
        """Begin with the first number and the whole state again, since a replay from 0 would have too many batches."""
        self._kept.clear()
        self._kept_bytes = 0
        self._first = self._next = self._first_number()
        for events in self._everything(_MOST_SNAPSHOT_BATCHES) or [[]]:
            self._publish(events)

    def _publish(self, events: list[Event]) -> None:
        payload = self._encode(events)
        self._pub.send_multipart((self._topic, number(self._next), payload))
        self._kept.append((self._next, payload))
        self._kept_bytes += len(payload)
        self._next += 1
        self._published_s = time.monotonic()
        while len(self._kept) > self._config.replay_batches or self._kept_bytes > self._config.replay_memory_bytes:
            self._kept_bytes -= len(self._kept.popleft()[1])
        stored = removed = 0
        for event in events:
            if isinstance(event, BlockStored):
                stored += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                removed += len(event.block_hashes)
        self._counters.add_all(
            (events_metrics.BATCHES, events_metrics.STORED_BLOCKS, events_metrics.REMOVED_BLOCKS), (1, stored, removed)
        )

    def _encode(self, events: list[Event]) -> bytes:
        return encode(KVEventBatch(time.time(), events, self._config.rank))

    # ---- replays, in their thread ----
    def _serve_replays(self, router: zmq.Socket[bytes]) -> None:
        while not self._stopped.is_set():
            try:
                if router.poll(_POLL_MS):
                    self._serve(router)
            except zmq.ZMQError as error:
                # the peer disconnected or reads too slowly; it may request another replay
                self._counters.add(events_metrics.REPLAYS_FAILED)
                limited.warning("replay cancelled: %s", error)
            except Exception:  # the edge of the thread: other subscribers must still get replays
                self._counters.add(events_metrics.REPLAYS_FAILED)
                logger.exception("replay failed")
        router.close(linger=0)

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            self._counters.add(events_metrics.REPLAYS_REFUSED)
            limited.warning("malformed replay request: expected an empty frame and a number of 8 bytes")
            return
        deadline_s = time.monotonic() + _REPLAY_S
        self._counters.add(events_metrics.REPLAYS)
        for sequence, payload in self._since(int.from_bytes(frames[2], "big")):
            if self._stopped.is_set() or time.monotonic() > deadline_s:
                raise zmq.Again(msg="the peer reads too slowly")
            router.send_multipart((frames[0], b"", self._topic, number(sequence), payload))
        router.send_multipart((frames[0], b"", b"", END_OF_REPLAY, b""))

    def _since(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield numbered batches that bring a subscriber with all batches before ``first`` up to date."""
        with self._lock:
            begin = max(first, self._first)
            oldest = self._kept[0][0] if self._kept else self._next
            knows_earlier = 0 < first <= self._first
            if oldest <= begin and not knows_earlier:
                return iter([kept for kept in self._kept if kept[0] >= begin])
            if begin >= self._next:
                return iter(())
            self._counters.add(events_metrics.REPLAY_SNAPSHOTS)
            batches = self._everything(min(self._next - begin, _MOST_SNAPSHOT_BATCHES))
            if first > 0:
                self._counters.add(events_metrics.CLEARED)
                batches = [[AllBlocksCleared(), *(batches[0] if batches else [])], *batches[1:]]
            payloads = chain(map(self._encode, batches), repeat(self._encode([])))
            return zip(range(begin, self._next), payloads, strict=False)
