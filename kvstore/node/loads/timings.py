"""Times of a load as its node sees them: the source of each block, the time waited for each source, and why the load was slow."""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.node.loads.peer_waits import PeerWaits
from kvstore.node.loads.runs import LoadedRun
from kvstore.observe import tracing
from kvstore.observe.context import request_id
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.metrics import Event
from kvstore.observe.slow_loads import LoadRecord, RecentLoads

limited = LimitedLog(logging.getLogger(__name__), interval_s=1.0)

_MIN_SHARE: Final = 0.5
"""A node without an answer is the reason if the wait for it takes this share of the unexplained time."""
_MISSING: Final = "blocks that were not loaded"
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
        clock: time.
    """

    def __init__(self, node_id: NodeId, slow_s: float, counters: Counters, recent: RecentLoads, clock: Clock) -> None:
        self.node_id = node_id
        self.slow_s = slow_s
        self.counters = counters
        self.recent = recent
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
        self._waited_s = dict.fromkeys(_REACHES, 0.0)
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
        self._waited_s[reach] += self._ready_s - self._delivered_s

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
            tracing.note(blocks=self._blocks, hit_blocks=sum(self._hits.values()), reason=self._reason(seconds))
        if seconds > timings.slow_s:
            timings.counters.add(node_metrics.SLOW_LOADS)
            record = make_record()
            limited.warning(
                "slow load: %.3f s, %d of %d blocks; %s; %s",
                seconds,
                record.hit_blocks,
                self._blocks,
                record.reason,
                record.parts,
            )

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
        hits = sum(self._hits.values())
        return LoadRecord(name, round(seconds, 6), self._blocks, hits, self._reason(seconds), parts)

    def _reason(self, seconds: float) -> str:
        """Return what took most of the time; unexplained time counts as one of the candidates."""
        waits = {
            "DRAM and its table": self._waited_s["dram"],
            "this node's volumes": self._waited_s["nvme"],
            "other nodes": self._waited_s["peer"],
            _MISSING: self._waited_s["none"],
            "the engine and its connection": self._engine_s,
        }
        rest_s = max(0.0, seconds - sum(waits.values()))
        longest = max(waits, key=lambda name: waits[name])
        longest_s = waits[longest]
        # the wait for a node that does not answer ends without a run, or in runs of blocks that were not loaded
        unexplained_s = rest_s + waits[_MISSING]
        explained_s = max(waited for name, waited in waits.items() if name != _MISSING)
        peer = self.peers.slowest()
        if peer is not None and unexplained_s > explained_s and peer[1] >= unexplained_s * _MIN_SHARE:
            text = _waited(min(peer[1], seconds), seconds, f"node {peer[0]}, which did not answer")
        elif rest_s > longest_s:
            text = f"{rest_s:.3f} of {seconds:.3f} s not attributed to a tier, peer or engine"
        else:
            text = _waited(longest_s, seconds, longest)
        missing = ", ".join(f"{count} {outcome.name.lower()}" for outcome, count in self._misses.items())
        return f"{text}; not loaded: {missing}" if missing else text


def _waited(for_s: float, of_s: float, what: str) -> str:
    return f"waited {for_s:.3f} of {of_s:.3f} s for {what}"
