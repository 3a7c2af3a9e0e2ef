"""Heartbeats that several servers receive: each server shares those that arrived at it, and reads those of the others.

Theory of operation.

1. At each tick, a server writes the records (``Beat``) of all heartbeats that arrived since the last one: a few dozen bytes per
   node, in one batch. Then it reads all records.
2. The contents of a heartbeat are written as a note (``BootReport``) before the record, and only if they differ from those of
   the last heartbeat. The record names the heartbeat with which they changed.
3. A server reads the report of a node on demand, and only if the record names another one than it knows.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvstore.core.clock import Clock
from kvstore.core.errors import Unavailable
from kvstore.core.types import BootId, NodeId
from kvstore.index.contract import Beat, PrefixIndex
from kvstore.metadata.membership.records import REPORT_PREFIX, BootReport, report_note

_MOST_SINGLE_READS: Final = 16
"""If more reports are to be read, all are read at once."""
MAX_BEAT_AGE_S: Final = 1.0
"""Heartbeats that were taken longer ago are not written. They would replace newer ones, and make silent nodes look alive."""
_COUNTER_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class UnsharedBeats:
    """Records of heartbeats, and changed reports, that other servers do not know yet.

    Attributes:
        beats: the records.
        reports: the reports.
        taken_s: ``time.monotonic()`` when they were taken for writing.
    """

    beats: dict[NodeId, Beat] = field(default_factory=dict)
    reports: dict[NodeId, BootReport] = field(default_factory=dict)
    taken_s: float = field(default_factory=time.monotonic)

    def write(self, index: PrefixIndex) -> None:
        """Write all to the index: reports first, so that no record names a report that cannot be read.

        Raises:
            Unavailable: the index does not answer, or the records have become too old meanwhile.
        """
        if self.reports:
            notes = {report_note(node_id): report.encode() for node_id, report in self.reports.items()}
            index.put_notes(notes, announce=False)
        if self.beats:
            if (waited_s := time.monotonic() - self.taken_s) > MAX_BEAT_AGE_S:
                raise Unavailable("heartbeats not shared: they have waited too long", waited_s=round(waited_s, 1))
            index.put_beats(self.beats)


class HeartbeatExchange:
    """Heartbeats of all nodes, as far as this server knows. It does not judge which nodes are alive.

    Args:
        index: the index.
        clock: a monotonic clock of this host.
    """

    def __init__(self, index: PrefixIndex, clock: Clock) -> None:
        self._index = index
        self._clock = clock
        self._reports: dict[NodeId, BootReport] = {}
        self._beats: dict[NodeId, Beat] = {}
        """Last known record of each node."""
        self._written: dict[NodeId, Beat] = {}
        """Records that this server wrote or tried to write, and that no other server has replaced since."""
        self._unshared: dict[NodeId, Beat] = {}
        self._changed: set[NodeId] = set()
        """Nodes in ``_unshared`` whose report is to be written."""
        self._unread: dict[NodeId, float] = {}
        """Nodes whose record names another report than the known one, and since when."""

    def arrived(self, heartbeat: HeartbeatRequest, host: str, *, counter: int = 0) -> None:
        """A heartbeat of a registered boot arrived.

        Args:
            heartbeat: the heartbeat.
            host: host that sent it; empty: unknown.
            counter: its number; 0: one more than the last one of this boot.
        """
        node_id, boot_id = NodeId(heartbeat.node_id), BootId(heartbeat.boot_id)
        last, known = self._beats.get(node_id), self._reports.get(node_id)
        counter = counter or (1 if last is None or last.boot_id != boot_id else (last.counter + 1) & _COUNTER_MASK)
        number = counter
        if known is not None and known.host == host and node_id in self._written and _has_contents_of(heartbeat, known.heartbeat):
            number = known.number
        else:
            self._changed.add(node_id)
        self._reports[node_id] = BootReport(heartbeat, number, host)
        self._unread.pop(node_id, None)
        self._beats[node_id] = self._unshared[node_id] = Beat(boot_id, counter, number)

    # ---- other servers ----
    def take_unshared(self) -> UnsharedBeats:
        """Heartbeats that arrived since the last call, to be written."""
        beats, self._unshared = self._unshared, {}
        reports = {node_id: self._reports[node_id] for node_id in self._changed}
        self._changed = set()
        self._written.update(beats)
        return UnsharedBeats(beats, reports)

    def write_failed(self, unshared: UnsharedBeats) -> None:
        """Write these reports with the next heartbeats. Until then, older reports in the index do not replace them."""
        self._changed.update(unshared.reports.keys() & self._reports.keys())  # a node may have been forgotten since

    def drop_unshared(self) -> None:
        """This server was paused: shared now, its heartbeats of before would make silent nodes look alive to the others."""
        for node_id in self._unshared.keys() | self._changed:
            self._written.pop(node_id, None)
        self._unshared.clear()
        self._changed.clear()

    def read_others(self) -> dict[NodeId, Beat]:
        """Read the records that other servers wrote.

        Raises:
            Unavailable: the index does not answer.
        """
        others, now_s = {}, self._clock.now_s()
        for node_id, beat in self._index.beats().items():
            if _is_own(beat, self._written.get(node_id)):
                continue
            others[node_id] = beat
            if node_id in self._unshared:
                continue  # this server has heard more recently
            self._written.pop(node_id, None)
            self._beats[node_id] = beat
            known = self._reports.get(node_id)
            if known is None or known.boot_id != beat.boot_id or known.number != beat.report:
                self._unread.setdefault(node_id, now_s)
        return others

    # ---- reports ----
    def report(self, node_id: NodeId, boot_id: BootId, max_unread_s: float = 0.0) -> BootReport | None:
        """The last known report of a boot; None: there is none.

        Args:
            node_id: the node.
            boot_id: the boot.
            max_unread_s: how long a newer report may stay unread.
        """
        since_s, known = self._unread.get(node_id), self._reports.get(node_id)
        if since_s is not None and (known is None or self._clock.now_s() - since_s >= max_unread_s):
            self._keep_read(node_id, self._index.note(report_note(node_id)))
            known = self._reports.get(node_id)
        return known if known is not None and known.boot_id == boot_id else None

    def read_reports(self) -> None:
        """Read all reports that changed, for a caller that needs many."""
        if len(self._unread) <= _MOST_SINGLE_READS:
            return
        notes = self._index.notes(REPORT_PREFIX)
        for node_id in list(self._unread):
            self._keep_read(node_id, notes.get(report_note(node_id)))

    def _keep_read(self, node_id: NodeId, note: bytes | None) -> None:
        del self._unread[node_id]
        report = None if note is None else BootReport.decode(note)
        if report is not None:
            self._reports[node_id] = report

    def forget_others(self, known: Collection[NodeId]) -> None:
        """Forget all nodes but the known ones."""
        for by_node in (self._reports, self._beats, self._written, self._unshared, self._unread):
            for node_id in by_node.keys() - known:
                del by_node[node_id]
        self._changed.intersection_update(known)


def _is_own(beat: Beat, written: Beat | None) -> bool:
    """Whether a record is the last one that this server wrote, or an earlier one: what is read may be older than that."""
    return written is not None and beat.boot_id == written.boot_id and beat.counter <= written.counter


def _has_contents_of(heartbeat: HeartbeatRequest, last: HeartbeatRequest) -> bool:
    """Whether a heartbeat differs from the last one at most in its number."""
    number, heartbeat.sequence = heartbeat.sequence, last.sequence
    same = heartbeat == last
    heartbeat.sequence = number
    return same
