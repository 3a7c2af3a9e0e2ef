"""Cluster events of the last 24 hours, in a small file beside the index, so that they survive a restart.

The file has a line of JSON per event, after a line with its version. Events are only appended. A line that a crash has cut off or
that cannot be read, is skipped. A file that has become too large is replaced by one with the events that are kept. With several
workers, each appends its own events, and worker 0 replaces the file.

``record`` only queues an event; ``flush`` and ``read`` do the I/O, so call them from another thread than the event loop's.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvstore.core.limits import MAX_REASON
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.atomic_file import write_atomically

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

VERSION: Final = 1
KEEP_S: Final = 86_400.0
MAX_EVENTS: Final = 4_000
MAX_FILE_BYTES: Final = 4 << 20
_MAX_QUEUED: Final = 1_000
_HEADER: Final = json.dumps({"kvstore_cluster_events": VERSION}).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that happened to the cluster.

    Attributes:
        id: ascending; Unix time in microseconds, made unique.
        kind: kind of event, e.g. ``"node_registered"``.
        subject: node, volume, tenant or namespace; empty: the metadata server.
        text: one sentence.
        code: health code, if a finding was raised or cleared.
        who: name of the caller's token, if an operator gave an order.
    """

    id: int
    kind: str
    subject: str
    text: str
    code: str = ""
    who: str = ""

    @property
    def at_s(self) -> float:
        """When it happened, as Unix time."""
        return self.id / 1e6


class EventJournal:
    """The events and their file.

    Args:
        path: the file; created with the first event.
        replaces: whether this process replaces a file that is too large; one of several workers does.
        wall_s: Unix time.
    """

    def __init__(self, path: Path, *, replaces: bool = True, wall_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._replaces = replaces
        self._wall_s = wall_s
        self._queued: deque[ClusterEvent] = deque(maxlen=_MAX_QUEUED)
        self._last_id = 0
        self._io = threading.Lock()
        self._state: tuple[int, int] | None = None
        self._events: list[ClusterEvent] = []

    def record(self, kind: str, subject: str, text: str, *, code: str = "", who: str = "") -> None:
        """Queue an event. Without a disk that accepts it, the oldest queued events are dropped."""
        self._last_id = max(self._last_id + 1, int(self._wall_s() * 1e6))
        self._queued.append(ClusterEvent(self._last_id, kind, subject, text[:MAX_REASON], code, who))

    def flush(self) -> None:
        """Append queued events to the file. Events stay queued if it cannot be written."""
        with self._io:
            taken = list(self._queued)
            if not taken:
                return
            try:
                self._append(b"".join(json.dumps(asdict(one)).encode() + b"\n" for one in taken))
            except OSError as error:
                limited.warning("cannot write cluster events: %s (%s)", self._path, error)
                return
            for _ in taken:
                self._queued.popleft()

    def read(self) -> list[ClusterEvent]:
        """Return the events of the last 24 hours in order, at most ``MAX_EVENTS``."""
        self.flush()
        with self._io:
            try:
                found = self._path.stat()
                if (found.st_ino, found.st_size) != self._state:
                    self._events = _decode(self._path.read_bytes()[-MAX_FILE_BYTES:])
                    self._state = (found.st_ino, found.st_size)
            except FileNotFoundError:
                self._events, self._state = [], None
            except OSError as error:
                limited.warning("cannot read cluster events: %s (%s)", self._path, error)
            return self._kept([*self._events, *self._queued])

    def _kept(self, events: list[ClusterEvent]) -> list[ClusterEvent]:
        oldest_s = self._wall_s() - KEEP_S
        return sorted((one for one in events if one.at_s >= oldest_s), key=lambda one: one.id)[-MAX_EVENTS:]

    def _append(self, lines: bytes) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, (_HEADER if not size else b"\n" if torn else b"") + lines)
        finally:
            os.close(descriptor)
        if self._replaces and size > MAX_FILE_BYTES // 2:
            kept = self._kept(_decode(self._path.read_bytes()))[-MAX_EVENTS // 2 :]
            write_atomically(self._path, _HEADER + b"".join(json.dumps(asdict(one)).encode() + b"\n" for one in kept))


def _decode(raw: bytes) -> list[ClusterEvent]:
    """Decode the lines that are events; a line of another version or a torn line is skipped."""
    found = []
    for line in raw.splitlines():
        try:
            entry = json.loads(line)
            event = ClusterEvent(**entry)
        except (ValueError, TypeError, RecursionError):
            continue
        texts = (event.kind, event.subject, event.text, event.code, event.who)
        if isinstance(event.id, int) and event.id > 0 and all(isinstance(text, str) for text in texts):
            found.append(event)
    return found
