"""Memory of the nodes that lookups named for a chain, so that hints about its session reach them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from kvclient.results import NodeRef, Run
from kvstore.core.types import BlockKey, Tier

_Name = TypeVar("_Name", BlockKey, str)

MAX_CHAINS: Final = 4_096
"""Chains and sessions that are remembered, each; the least recently used one is dropped first."""
MAX_SEARCH: Final = 8_192
"""Keys at the end of a chain that are looked for."""


class ChainNodes:
    """Nodes of chains, by the last key that a lookup found. Thread-safe.

    The next turn of a session continues its chain. So ``of`` returns the nodes of the longest remembered prefix of a chain.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chains: OrderedDict[BlockKey, tuple[NodeRef, ...]] = OrderedDict()
        self._sessions: OrderedDict[str, tuple[NodeRef, ...]] = OrderedDict()

    def record(self, keys: Sequence[BlockKey], hit_blocks: int, runs: Iterable[Run], own: str, max_nodes: int) -> None:
        """Remember which nodes hold blocks of a chain: those with most blocks on volumes first, then those with most in DRAM.

        Args:
            keys: of the lookup.
            hit_blocks: leading keys that it found.
            runs: their replicas.
            own: id of the node of this host, which is left out.
            max_nodes: nodes to remember; 0: nothing is remembered.
        """
        if not max_nodes or not hit_blocks:
            return
        on_volumes: Counter[NodeRef] = Counter()
        in_dram: Counter[NodeRef] = Counter()
        for run in runs:
            if run.node_id != own and run.tier in (Tier.NVME, Tier.DRAM):
                (on_volumes if run.tier is Tier.NVME else in_dram)[run.node] += run.count
        nodes = sorted({*on_volumes, *in_dram}, key=lambda node: (-on_volumes[node], -in_dram[node], node.node_id))
        last = keys[hit_blocks - 1]
        with self._lock:
            if nodes or last in self._chains:
                _put(self._chains, last, tuple(nodes[:max_nodes]))

    def of(self, session: str, keys: Sequence[BlockKey]) -> tuple[NodeRef, ...]:
        """Return the nodes of a session's chain, and remember them for a hint about the session without keys."""
        with self._lock:
            for position in range(len(keys) - 1, max(-1, len(keys) - 1 - MAX_SEARCH), -1):
                if (found := self._chains.get(keys[position])) is not None:
                    _put(self._sessions, session, found)
                    return found
            return self._sessions.get(session, ())

    def forget(self, session: str) -> None:
        """Forget the nodes of a session that has ended."""
        with self._lock:
            self._sessions.pop(session, None)


def _put(memory: OrderedDict[_Name, tuple[NodeRef, ...]], name: _Name, nodes: tuple[NodeRef, ...]) -> None:
    memory[name] = nodes
    memory.move_to_end(name)
    if len(memory) > MAX_CHAINS:
        memory.popitem(last=False)
