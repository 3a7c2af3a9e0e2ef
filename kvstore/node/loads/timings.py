"""The account of a load as its node sees it: what came from where, what was waited for, and whether that was slow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from kvstore.core.clock import Clock
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.node.loads.loader import Part
from kvstore.node.loads.peer_waits import PeersAsked
from kvstore.observe import tracing
from kvstore.observe.context import request_id
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.slow_loads import LoadRecord, RecentLoads

limited = LimitedLog(logging.getLogger(__name__), interval_s=1.0)

Standstill = Callable[[float, float], float]
_REAL_SHARE: Final = 0.25
"""Of a load's time, that a standstill takes before it is the reason."""
_MOST_SHARE: Final = 0.5
"""Of time that nothing else explains, that a node without an answer was waited for before that node is the reason."""
_NOT_COME: Final = "blocks that did not come"
_REACHES: Final = ("none", "dram", "nvme", "peer")
"""Nearest first."""
_SECONDS: Final = {reach: node_metrics.LOAD_SECONDS[reach] for reach in _REACHES}
_BYTES: Final = {reach: node_metrics.LOADED_BYTES[reach] for reach in _REACHES[1:]}
_MISSED: Final[dict[Outcome, str]] = {
    outcome: node_metrics.LOAD_MISSED_BLOCKS[outcome.name.lower()] for outcome in Outcome if outcome is not Outcome.HIT
}
_ABANDONED: Final = node_metrics.LOAD_MISSED_BLOCKS["abandoned"]
_DRAINING: Final = node_metrics.LOAD_MISSED_BLOCKS["draining"]


class LoadAccounts:
    """Accounts of one node's loads.

    Args:
        node_id: the node.
        slow_s: a load that takes longer is logged.
        counters: where times are counted.
        recent: where the last loads are kept.
        clock: where time comes from.
        standstill: for how much of a time on that clock the process did not run.
    """

    def __init__(
        self, node_id: NodeId, slow_s: float, counters: Counters, recent: RecentLoads, clock: Clock, standstill: Standstill
    ) -> None:
        self.standstill = standstill
        self.node_id = node_id
        self.slow_s = slow_s
        self.counters = counters
        self.recent = recent
        self.clock = clock

    def open(self, blocks: int, block_bytes: int, *, first_layer: int = 0, draining: bool = False) -> LoadAccount:
        """Begin the account of a load.

        Args:
            blocks: how many the caller asks for.
            block_bytes: size of each.
            first_layer: in layer groups, the first that is wanted.
            draining: the node drains or ends: it brings nothing that lies elsewhere, and the caller asks other nodes.
        """
        return LoadAccount(self, blocks, block_bytes, first_layer, draining=draining)


class LoadAccount:
    """One load. Used by one thread at a time; ``close`` once."""

    def __init__(self, accounts: LoadAccounts, blocks: int, block_bytes: int, first_layer: int, *, draining: bool) -> None:
        self._accounts = accounts
        self._first_layer = first_layer
        self._draining = draining
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._began_s = self._told_s = accounts.clock.now_s()
        self._hits = dict.fromkeys(_REACHES, 0)
        self._waited_s = dict.fromkeys(_REACHES, 0.0)
        self._misses: dict[Outcome, int] = {}
        self._engine_s = 0.0
        self._handed_s: float | None = None
        self._stood_s = 0.0
        self.peers = PeersAsked(accounts.clock)

    def part(self, part: Part) -> None:
        """A part is there: the time since the last was told is what it was waited for."""
        reach = "none"
        counts = not part.layer_count or part.first_layer == self._first_layer  # in layer groups a block comes several times
        for outcome in set(part.outcomes):
            count = part.outcomes.count(outcome)
            if outcome is Outcome.HIT:
                reach = "peer" if part.node != self._accounts.node_id else "nvme" if part.tier is Tier.NVME else "dram"
                self._hits[reach] += count if counts else 0
            elif counts:
                self._misses[outcome] = self._misses.get(outcome, 0) + count
        self._handed_s = self._accounts.clock.now_s()
        self._waited_s[reach] += self._handed_s - self._told_s

    def told(self, since_s: float) -> None:
        """A part was taken by the engine, which was handed it at ``since_s``."""
        self._told_s = self._accounts.clock.now_s()
        self._engine_s += self._told_s - since_s
        self._handed_s = None

    def close(self) -> None:
        """The load is over."""
        accounts = self._accounts
        now_s = accounts.clock.now_s()
        seconds = now_s - self._began_s
        if self._handed_s is not None:  # the last part: nobody says when it was taken
            self._engine_s += now_s - self._handed_s
        self._stood_s = accounts.standstill(self._began_s, now_s)
        reach = next((one for one in reversed(_REACHES) if self._hits[one]), "none")
        accounts.counters.observe(_SECONDS[reach], seconds)
        self._count()
        make = partial(self._record, request_id.get(), seconds)
        accounts.recent.add(seconds, make)
        if tracing.on():
            tracing.note(blocks=self._blocks, hit_blocks=sum(self._hits.values()), reason=self._reason(seconds))
        if seconds > accounts.slow_s:
            accounts.counters.add("node_slow_loads_total")
            record = make()
            limited.warning(
                "slow load: %.3f s, %d of %d blocks; %s; %s",
                seconds,
                record.hit_blocks,
                self._blocks,
                record.reason,
                record.parts,
            )

    def _count(self) -> None:
        """Count blocks and bytes of the load. A block without an answer was abandoned: the load ended before."""
        names, amounts = ["node_load_blocks_total"], [self._blocks]
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
        self._accounts.counters.add_all(names, amounts)

    def _record(self, name: str, seconds: float) -> LoadRecord:
        parts: dict[str, object] = {
            **{f"{reach}_blocks": count for reach, count in self._hits.items() if count},
            **{f"{reach}_wait_s": round(waited, 6) for reach, waited in self._waited_s.items() if waited > 0},
            **{f"{outcome.name.lower()}_blocks": count for outcome, count in self._misses.items()},
            "engine_s": round(self._engine_s, 6),
            "other_s": round(max(0.0, seconds - sum(self._waited_s.values()) - self._engine_s), 6),
            **({"stood_still_s": round(self._stood_s, 6)} if self._stood_s else {}),
        }
        hits = sum(self._hits.values())
        return LoadRecord(name, round(seconds, 6), self._blocks, hits, self._reason(seconds), parts)

    def _reason(self, seconds: float) -> str:
        """What took the most, the rest that is nobody's among it; a process that stood still did so in the middle of any part."""
        waits = {
            "DRAM and its table": self._waited_s["dram"],
            "this node's volumes": self._waited_s["nvme"],
            "other nodes": self._waited_s["peer"],
            _NOT_COME: self._waited_s["none"],
            "the engine and the way to it": self._engine_s,
        }
        rest_s = max(0.0, seconds - sum(waits.values()))
        most = max(waits, key=lambda name: waits[name])
        most_s = waits[most]
        # the wait for a node that does not answer ends in no part at all, or in parts of blocks that did not come
        nobodys_s = rest_s + waits[_NOT_COME]
        others_s = max(waited for name, waited in waits.items() if name != _NOT_COME)
        lost = self.peers.slowest()
        if self._stood_s >= seconds * _REAL_SHARE:
            text = _waited(self._stood_s, seconds, "this node to run: its process or its host stood still, or was too busy")
        elif lost is not None and nobodys_s > others_s and lost[1] >= nobodys_s * _MOST_SHARE:
            text = _waited(min(lost[1], seconds), seconds, f"node {lost[0]}, which did not answer")
        elif rest_s > most_s:
            text = f"{rest_s:.3f} of {seconds:.3f} s not attributed to a tier, peer or engine"
        else:
            text = _waited(most_s, seconds, most)
        missing = ", ".join(f"{count} {outcome.name.lower()}" for outcome, count in self._misses.items())
        return f"{text}; not brought: {missing}" if missing else text


def _waited(for_s: float, of_s: float, what: str) -> str:
    return f"waited {for_s:.3f} of {of_s:.3f} s for {what}"
