"""Cluster events of the last 24 hours, in a small file beside the index, so that they survive a restart.

The file has a line of JSON per event, after a line with its version. Events are only appended. A line that is torn by a crash or
cannot be read is skipped. A file of another version is neither read nor changed: events then stay in memory. A file that is too
large is replaced by one with the newest events. If that fails, nothing is appended and events stay in memory. Several servers
of one host share the file: a lock is held during each write.

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

from kvstore.core.errors import Unsupported
from kvstore.core.limits import MAX_REASON
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.process.atomic_file import only_writer, open_private, write_atomically

logger = logging.getLogger(__name__)

VERSION: Final = 1
KEEP_S: Final = 86_400.0
MAX_EVENTS: Final = 4_000
MAX_FILE_BYTES: Final = 4 << 20
"""Limit of a read. The file is replaced at half of it, by events of at most a quarter of it."""
_MAX_ID: Final = (1 << 63) - 1
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
    """The events and their file. Thread-safe.

    Args:
        path: the file; created with the first event.
        counters: counts events that were dropped and failed accesses to the file.
        wall_s: Unix time.
    """

    def __init__(self, path: Path, counters: Counters, *, wall_s: Callable[[], float] = time.time) -> None:
        self.path = path
        self.problem = ""
        """Why queued events could not be written; empty: they were."""
        self._log = LimitedLog(logger, counters=counters)
        self._wall_s = wall_s
        self._queue = threading.Lock()
        self._queued: deque[ClusterEvent] = deque()
        self._last_id = 0
        self._io = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._events: list[ClusterEvent] = []

    def record(self, kind: str, subject: str, text: str, *, code: str = "", who: str = "") -> None:
        """Queue an event. While the file cannot be written, the oldest queued events are dropped at ``_MAX_QUEUED``."""
        with self._queue:
            self._last_id = max(self._last_id + 1, int(self._wall_s() * 1e6))
            self._queued.append(ClusterEvent(self._last_id, kind, subject, text[:MAX_REASON], code, who))
            dropped = len(self._queued) > _MAX_QUEUED
            if dropped:
                self._queued.popleft()
        if dropped:
            self._log.report(metadata_metrics.CLUSTER_EVENTS_DROPPED, f"cluster event dropped, unwritten: {self.path}")

    def flush(self) -> None:
        """Write queued events to the file. Events stay queued if it cannot be written."""
        with self._io:
            taken = self._waiting()
            if not taken:
                return
            try:
                self._write(taken)
            except (OSError, Unsupported) as error:
                self.problem = str(error)
                self._log.report(metadata_metrics.CLUSTER_EVENT_FILE_FAILURES, "cannot write cluster events", error)
                return
            self.problem = ""
            with self._queue:
                while self._queued and self._queued[0].id <= taken[-1].id:
                    self._queued.popleft()

    def read(self) -> list[ClusterEvent]:
        """Return the events of the last 24 hours in order, at most ``MAX_EVENTS``."""
        self.flush()
        with self._io:
            try:
                found = self.path.stat()
                seen = (found.st_ino, found.st_size, found.st_mtime_ns)
                if seen != self._seen:
                    self._events = self._load()
                    self._seen = seen
            except FileNotFoundError:
                self._events, self._seen = [], None
            except (OSError, Unsupported) as error:
                self._log.report(metadata_metrics.CLUSTER_EVENT_FILE_FAILURES, "cannot read cluster events", error)
            return self._kept([*self._events, *self._waiting()])

    def _waiting(self) -> list[ClusterEvent]:
        with self._queue:
            return list(self._queued)

    def _kept(self, events: list[ClusterEvent]) -> list[ClusterEvent]:
        """Drop old events, and copies of events that were written again after a torn write."""
        oldest_s = self._wall_s() - KEEP_S
        return sorted((one for one in dict.fromkeys(events) if one.at_s >= oldest_s), key=lambda one: one.id)[-MAX_EVENTS:]

    def _write(self, events: list[ClusterEvent]) -> None:
        """Append events, or replace a file that is too large by its newest events and these.

        Raises:
            OSError: the file cannot be written. It may contain some of the events.
            Unsupported: the file has another version.
        """
        with only_writer(self.path), open(self.path, "a+b", opener=open_private) as file:
            file.seek(0)
            self._check_version(head := file.read(len(_HEADER)))
            if head != _HEADER:
                file.truncate(0)  # empty, or torn in the first line
            size = file.seek(0, os.SEEK_END)
            if size > MAX_FILE_BYTES // 2:
                kept = self._kept([*self._load(), *events])[-MAX_EVENTS // 2 :]
                write_atomically(self.path, _HEADER + _newest_lines(kept, MAX_FILE_BYTES // 4))
                return
            file.seek(max(size - 1, 0))
            start = b"" if file.read(1) == b"\n" else b"\n"
            file.write((start if size else _HEADER) + encode_lines(events))

    def _load(self) -> list[ClusterEvent]:
        """Read the events of the last ``MAX_FILE_BYTES`` of the file."""
        with self.path.open("rb") as file:
            self._check_version(file.read(len(_HEADER)))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_FILE_BYTES))
            return _decode(file.read(MAX_FILE_BYTES))

    def _check_version(self, head: bytes) -> None:
        if not _HEADER.startswith(head):
            raise Unsupported("not a file of cluster events of this version: move it away", path=self.path, version=VERSION)


def encode_lines(events: list[ClusterEvent]) -> bytes:
    """Encode events as lines of the file."""
    return b"".join(json.dumps(asdict(one)).encode() + b"\n" for one in events)


def _newest_lines(events: list[ClusterEvent], limit_bytes: int) -> bytes:
    """Encode the newest events that fit."""
    lines: list[bytes] = []
    for event in reversed(events):
        line = encode_lines([event])
        limit_bytes -= len(line)
        if limit_bytes < 0:
            break
        lines.append(line)
    return b"".join(reversed(lines))


def _decode(raw: bytes) -> list[ClusterEvent]:
    """Decode the lines that are events; any other line is skipped."""
    found = []
    for line in raw.splitlines():
        try:
            entry = json.loads(line)
            event = ClusterEvent(**entry)
        except (ValueError, TypeError, RecursionError):
            continue
        texts = (event.kind, event.subject, event.text, event.code, event.who)
        if isinstance(event.id, int) and 0 < event.id <= _MAX_ID and all(isinstance(text, str) for text in texts):
            found.append(event)
    return found
