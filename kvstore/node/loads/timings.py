"""Times of a load as its node sees them: the source of each block, the time waited for each source, and why the load was slow.

A load's reads at other nodes are recorded apart (``PeerWaits``), because a node that does not answer delivers no run to time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.node.base.load_causes import MOUNT, Cause, find_cause
from kvstore.node.base.slow_sources import SlowSources
from kvstore.node.loads.runs import LoadedRun
from kvstore.observe import tracing
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.metrics import Event
from kvstore.observe.slow_loads import LoadRecord, RecentLoads
from kvstore.observe.tracing import request_id
from kvstore.transport.contract import ReadControl

MAX_NODES: Final = 64
"""Nodes that are remembered per load."""
Answered = Callable[[Iterable[Outcome]], None]
_UNANSWERED: Final = frozenset({Outcome.TIMEOUT, Outcome.UNAVAILABLE})


class PeerWaits:
    """Reads of one load at other nodes, and the bytes that they receive. Thread-safe.

    Args:
        clock: time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._received_bytes = 0
        """Bytes of reads that have ended."""
        self._outstanding: dict[ReadControl, tuple[NodeId, float]] = {}
        """Reads that have not ended: the node, and when the read began."""
        self._unanswered_s: dict[NodeId, float] = {}
        """Nodes that did not answer, and the longest wait for each."""

    def record_in_context(self) -> None:
        """Record reads that begin in the current context from now on."""
        _current.set(self)

    @property
    def received_bytes(self) -> int:
        """Bytes that have arrived for this load."""
        with self._lock:
            return self._received_bytes + sum(control.bytes_received for control in self._outstanding)

    def add_bytes(self, size: int) -> None:
        """Count bytes that arrived for this load in reads of others."""
        with self._lock:
            self._received_bytes += size

    def slowest(self) -> tuple[NodeId, float] | None:
        """Return the unanswering node with the longest wait, and that wait in seconds. None: all nodes answered."""
        now_s = self._clock.now_s()
        with self._lock:
            waits, outstanding = dict(self._unanswered_s), list(self._outstanding.values())
        for node_id, began_s in outstanding:
            waits[node_id] = max(waits.get(node_id, 0.0), now_s - began_s)
        return max(waits.items(), key=lambda entry: entry[1]) if waits else None

    @contextmanager
    def record(self, node_id: NodeId, control: ReadControl) -> Iterator[Answered]:
        """Record one read: see ``waiting_for``."""
        began_s = self._clock.now_s()
        with self._lock:
            self._outstanding[control] = node_id, began_s
        all_answered = False

        def answered(outcomes: Iterable[Outcome]) -> None:
            nonlocal all_answered
            all_answered = not _UNANSWERED.intersection(outcomes)

        try:
            yield answered
        finally:
            with self._lock:
                del self._outstanding[control]
                self._received_bytes += control.bytes_received
                if not all_answered and (node_id in self._unanswered_s or len(self._unanswered_s) < MAX_NODES):
                    self._unanswered_s[node_id] = max(self._unanswered_s.get(node_id, 0.0), self._clock.now_s() - began_s)


_current: ContextVar[PeerWaits | None] = ContextVar("kvstore_peer_waits", default=None)


@contextmanager
def waiting_for(node_id: NodeId, control: ReadControl) -> Iterator[Answered]:
    """Inside, the load of the current context waits for a node.

    Args:
        node_id: the node.
        control: of the read at that node.

    Yields:
        A function to be called with the outcomes of the node's answer.
    """
    waits = _current.get()
    if waits is None:
        yield _ignore
        return
    with waits.record(node_id, control) as answered:
        yield answered


def add_received_bytes(size: int) -> None:
    """Count bytes for the load of the current context that arrived in reads of others."""
    if (waits := _current.get()) is not None:
        waits.add_bytes(size)


def _ignore(_outcomes: Iterable[Outcome]) -> None:
    """Record nothing: the work belongs to no load."""


limited = LimitedLog(logging.getLogger(__name__), interval_s=1.0)

_REACHES: Final = ("none", "dram", "nvme", "peer")
"""Nearest first."""
_SECONDS: Final = {reach: node_metrics.LOAD_SECONDS[reach] for reach in _REACHES}
_BYTES: Final = {reach: node_metrics.LOADED_BYTES[reach] for reach in _REACHES[1:]}
_MISSED: Final[dict[Outcome, Event]] = {
    outcome: node_metrics.LOAD_MISSED_BLOCKS[outcome.name.lower()] for outcome in Outcome if outcome is not Outcome.HIT
}
_ABANDONED: Final = node_metrics.LOAD_MISSED_BLOCKS["abandoned"]
_DRAINING: Final = node_metrics.LOAD_MISSED_BLOCKS["draining"]


class LoadTimings:
    """Timers of the loads of one node.

    Args:
        node_id: the node.
        slow_s: a load that takes longer is logged.
        counters: metrics.
        recent: keeps the last loads.
        sources: keeps what slow loads waited for.
        clock: time.
    """

    def __init__(
        self, node_id: NodeId, slow_s: float, counters: Counters, recent: RecentLoads, sources: SlowSources, clock: Clock
    ) -> None:
        self.node_id = node_id
        self.slow_s = slow_s
        self.counters = counters
        self.recent = recent
        self.sources = sources
        self.clock = clock

    def begin(self, blocks: int, block_bytes: int, *, first_layer: int = 0, draining: bool = False) -> LoadTimer:
        """Begin to time a load.

        Args:
            blocks: number of requested blocks.
            block_bytes: size of each.
            first_layer: the first requested layer, if the load is in layer groups.
            draining: the node drains or stops, and reads no blocks of other nodes.
        """
        return LoadTimer(self, blocks, block_bytes, first_layer, draining=draining)


class LoadTimer:
    """Timer of one load. One thread at a time may use it. ``close`` once."""

    def __init__(self, timings: LoadTimings, blocks: int, block_bytes: int, first_layer: int, *, draining: bool) -> None:
        self._timings = timings
        self._first_layer = first_layer
        self._draining = draining
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._began_s = self._delivered_s = timings.clock.now_s()
        self._hits = dict.fromkeys(_REACHES, 0)
        self._waited_s = dict.fromkeys((*_REACHES, MOUNT), 0.0)
        self._by_peer_s: dict[NodeId, float] = {}
        """Seconds waited for each other node that delivered blocks."""
        self._misses: dict[Outcome, int] = {}
        self._engine_s = 0.0
        self._ready_s: float | None = None
        """When the run that is being delivered became ready."""
        self.peers = PeerWaits(timings.clock)

    def ready(self, run: LoadedRun) -> None:
        """Count a run that is ready. The time since the last delivery was spent waiting for it."""
        reach = "none"
        counts = not run.layer_count or run.first_layer == self._first_layer  # each layer group lists the block again
        for outcome in set(run.outcomes):
            count = run.outcomes.count(outcome)
            if outcome is Outcome.HIT:
                reach = "peer" if run.node != self._timings.node_id else "nvme" if run.tier is Tier.NVME else "dram"
                self._hits[reach] += count if counts else 0
            elif counts:
                self._misses[outcome] = self._misses.get(outcome, 0) + count
        self._ready_s = self._timings.clock.now_s()
        waited_s = self._ready_s - self._delivered_s
        self._waited_s[MOUNT if reach == "nvme" and run.mounted else reach] += waited_s
        if reach == "peer":
            self._by_peer_s[run.node] = self._by_peer_s.get(run.node, 0.0) + waited_s

    def delivered(self, since_s: float) -> None:
        """Note that the engine took a run whose delivery began at ``since_s``."""
        self._delivered_s = self._timings.clock.now_s()
        self._engine_s += self._delivered_s - since_s
        self._ready_s = None

    def close(self) -> None:
        """End the load: count it, keep its record, and log it if it was slow."""
        timings = self._timings
        now_s = timings.clock.now_s()
        seconds = now_s - self._began_s
        if self._ready_s is not None:  # the last run: its delivery is not reported
            self._engine_s += now_s - self._ready_s
        reach = next((reach for reach in reversed(_REACHES) if self._hits[reach]), "none")
        timings.counters.observe(_SECONDS[reach], seconds)
        self._count()
        make_record = partial(self._record, request_id.get(), seconds)
        timings.recent.add(seconds, make_record)
        if tracing.on():
            tracing.note(blocks=self._blocks, hit_blocks=sum(self._hits.values()), reason=self._reason(self._cause(seconds)))
        if seconds > timings.slow_s:
            timings.counters.add(node_metrics.SLOW_LOADS)
            record = make_record()
            limited.warning(
                "load slow: %s (seconds=%.3f, blocks=%d, of=%d, reason=%s, action=%s, parts=%s)",
                record.request_id,
                seconds,
                record.hit_blocks,
                self._blocks,
                record.reason,
                record.action or "none",
                record.parts,
            )
            source = self._cause(seconds).source
            if source is not None:
                timings.sources.record(source, seconds, record.hit_blocks * self._block_bytes)

    def _count(self) -> None:
        """Count blocks and bytes of the load. A block without an outcome is abandoned: the load ended before."""
        names, amounts = [node_metrics.LOAD_BLOCKS], [self._blocks]
        for reach, name in _BYTES.items():
            if self._hits[reach]:
                names.append(name)
                amounts.append(self._hits[reach] * self._block_bytes)
        for outcome, count in self._misses.items():
            names.append(_DRAINING if self._draining and outcome is Outcome.UNAVAILABLE else _MISSED[outcome])
            amounts.append(count)
        abandoned = self._blocks - sum(self._hits.values()) - sum(self._misses.values())
        if abandoned > 0:
            names.append(_ABANDONED)
            amounts.append(abandoned)
        self._timings.counters.add_all(names, amounts)

    def _record(self, name: str, seconds: float) -> LoadRecord:
        parts: dict[str, object] = {
            **{f"{reach}_blocks": count for reach, count in self._hits.items() if count},
            **{f"{reach}_wait_s": round(waited, 6) for reach, waited in self._waited_s.items() if waited > 0},
            **{f"{outcome.name.lower()}_blocks": count for outcome, count in self._misses.items()},
            "engine_s": round(self._engine_s, 6),
            "other_s": round(max(0.0, seconds - sum(self._waited_s.values()) - self._engine_s), 6),
        }
        hits, cause = sum(self._hits.values()), self._cause(seconds)
        return LoadRecord(name, round(seconds, 6), self._blocks, hits, self._reason(cause), parts, action=cause.action)

    def _cause(self, seconds: float) -> Cause:
        waited_s = {**self._waited_s, "engine": self._engine_s}
        return find_cause(seconds, waited_s, self._by_peer_s, self.peers.slowest(), self._timings.node_id)

    def _reason(self, cause: Cause) -> str:
        """Return the cause, and the blocks that were not loaded."""
        missing = ", ".join(f"{count} {outcome.name.lower()}" for outcome, count in self._misses.items())
        return f"{cause.reason}; not loaded: {missing}" if missing else cause.reason
