"""Where chains ended when they were last seen: guesses that spare a lookup most of its probes.

An agent's next request continues the chain of its last one, so where a volume's run ended a moment ago is very nearly where it
ends now. Guesses are learnt from lookups and from what is published in this process, and only say where to look first: every
answer still rests on records that were read (``kvstore.index.prefix``), so a wrong guess costs a probe or two and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from kvstore.core.types import BlockKey, BlockRun

MAX_CHAINS: Final = 16_384
"""Chains remembered: about ten megabytes. The one learnt of longest ago goes first."""
MAX_ENDS: Final = 6
"""Ends remembered of one chain, the newest."""

Ends = tuple[int, ...]


class ChainEnds:
    """Guesses by the head of a chain. Thread-safe."""

    def __init__(self, max_chains: int = MAX_CHAINS) -> None:
        self._max_chains = max_chains
        self._lock = threading.Lock()
        self._ends: dict[BlockKey, Ends] = {}
        self._heads: dict[BlockKey, BlockKey] = {}  # last key of a published run -> head of its chain

    def of(self, head: BlockKey) -> Ends:
        """Numbers of blocks after which some volume's run of this chain may end."""
        return self._ends.get(head, ())

    def found(self, head: BlockKey, asked: int, ends: Ends) -> None:
        """A lookup of ``asked`` blocks has found where runs end. What it could not see, beyond its keys, stays."""
        known = self._ends.get(head, ())
        now = {end for end in ends if end < asked}
        if known:
            if now == set(known):
                return
            now.update([end for end in known if end >= asked])
        if now != set(known):
            self._remember(head, now)

    def published(self, runs: Iterable[BlockRun]) -> None:
        """Runs were stored: chains end further out. Those whose beginning was not seen here are left alone."""
        for run in runs:
            if not run.keys:
                continue
            head = run.keys[0] if run.parent is None else self._heads.get(run.parent)
            if head is None:
                continue
            end = run.depth + len(run.keys)
            with self._lock:
                self._heads[run.keys[-1]] = head
                _bound(self._heads, 2 * self._max_chains)
            # where it ended before is where another volume's run may still end, or this one's if it was a middle part
            self._remember(head, {end, *self._ends.get(head, ())})

    def _remember(self, head: BlockKey, ends: set[int]) -> None:
        with self._lock:
            self._ends.pop(head, None)  # so that it becomes the newest
            if ends:
                self._ends[head] = tuple(sorted(ends)[-MAX_ENDS:])
                _bound(self._ends, self._max_chains)


def _bound(entries: dict[BlockKey, Ends] | dict[BlockKey, BlockKey], most: int) -> None:
    if len(entries) > most:
        del entries[next(iter(entries))]
