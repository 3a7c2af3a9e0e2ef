"""What a client remembers of its lookups: run ends of chains, and the nodes that hold them.

``RunEndMemory`` has guesses of run ends, which a lookup sends with its keys (``LookupRequest.ends``).

The next request of an agent continues the chain of its last request. So its runs very likely end at the depths that the last
lookup found, or at the end of this client's last store. With right guesses, any metadata server answers after one round of
probes, also one that has just started. A guess decides only which records are read first, never the answer.

Many chains begin with the same blocks, for example a system prompt. So an end is not filed under the head of its chain alone,
but under the *anchor*: the last key of its first 1, 2, 4, 8 … blocks, as many as the end allows. A lookup looks under all its
anchors, and uses an end only if the key of its last block is in the chain.

``ChainNodes`` keeps the nodes that lookups named for a chain, so that hints about its session reach them.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from kvclient.results import NodeRef, Run
from kvstore.core.chain import ChainSlice
from kvstore.core.limits import MAX_LOOKUP_ENDS
from kvstore.core.types import BlockKey, Tier

MAX_ENDS: Final = 8_192
"""Maximum number of ends: about four megabytes. The end that was added longest ago is dropped first."""
MAX_ANCHOR_ENDS: Final = 64
"""Maximum number of ends per anchor, which bounds the time of a lookup."""


class _RunEnd(NamedTuple):
    depth: int
    anchor: BlockKey
    stored: bool
    """Whether a store of this client made it, which its next store may continue."""


class RunEndMemory:
    """Ends of replicas, of the chains of one namespace. Thread-safe."""

    def __init__(self, max_ends: int = MAX_ENDS, max_anchor_ends: int = MAX_ANCHOR_ENDS) -> None:
        self._max_ends = max_ends
        self._max_anchor_ends = max_anchor_ends
        self._lock = threading.Lock()
        self._ends: dict[BlockKey, _RunEnd] = {}  # by the last key of the run
        self._anchors: dict[BlockKey, dict[BlockKey, int]] = {}  # anchor -> last key of a run -> depth

    def of(self, chain: ChainSlice) -> list[int]:
        """Numbers of leading blocks of a chain after which a replica may end: the deepest, as many as a lookup may send."""
        with self._lock:
            return sorted(self._known(chain))[-MAX_LOOKUP_ENDS:]

    def record_lookup(self, chain: ChainSlice, ends: Iterable[int]) -> None:
        """Replace the ends within a chain by those that a lookup found. An end at the last key may be one of the request only."""
        found = {end for end in ends if 0 < end < len(chain)}
        with self._lock:
            known = self._known(chain)
            for end in known - found:
                self._drop(chain.key(end - 1))
            for end in found - known:
                self._add(chain.key(end - 1), _RunEnd(end, chain.key(_anchor(end) - 1), stored=False))

    def record_stored(self, chain: ChainSlice, held_blocks: int) -> None:
        """Add the end of a store: after the first ``held_blocks`` blocks. A chain whose beginning is unknown is ignored."""
        if not held_blocks:
            return
        end = chain.depth + held_blocks
        anchor = _anchor(end) - 1 - chain.depth
        with self._lock:
            parent = self._ends.get(chain.parent) if chain.parent is not None else None
            if anchor >= 0:
                key = chain.key(anchor)
            elif parent is not None:
                key = parent.anchor
            else:
                return
            if parent is not None and parent.stored and chain.parent is not None:
                self._drop(chain.parent)  # other replicas end there only if a lookup has seen it
            self._add(chain.key(held_blocks - 1), _RunEnd(end, key, stored=True))

    def _known(self, chain: ChainSlice) -> set[int]:
        count = len(chain)
        return {
            depth
            for anchor in _anchors(count)
            for last, depth in self._anchors.get(chain.key(anchor - 1), {}).items()
            if depth < count and chain.key(depth - 1) == last
        }

    def _add(self, last: BlockKey, end: _RunEnd) -> None:
        if last in self._ends:
            self._drop(last)  # added again as the newest
        of_anchor = self._anchors.setdefault(end.anchor, {})
        self._ends[last] = end
        of_anchor[last] = end.depth
        if len(of_anchor) > self._max_anchor_ends:
            self._drop(next(iter(of_anchor)))
        if len(self._ends) > self._max_ends:
            self._drop(next(iter(self._ends)))

    def _drop(self, last: BlockKey) -> None:
        anchor = self._ends.pop(last).anchor
        of_anchor = self._anchors[anchor]
        del of_anchor[last]
        if not of_anchor:
            del self._anchors[anchor]


def _anchor(end: int) -> int:
    """The largest power of two that is at most ``end``."""
    return 1 << (end.bit_length() - 1)


def _anchors(count: int) -> Iterator[int]:
    """All powers of two up to ``count``."""
    return (1 << bit for bit in range(count.bit_length()))


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
