"""Cache of the depths at which runs of a chain ended: guesses that save a lookup most of its probes.

An agent's next request continues the chain of its last request, so a run very likely ends at the same depth as a moment ago.
The cache learns from lookups and from the batches that this process publishes. A guess only decides where a lookup probes
first; the answer rests on the records that were read (``kvstore.index.prefix``). A wrong guess costs one or two probes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.core import limits
from kvstore.core.types import BlockKey, BlockRun

MAX_CHAINS: Final = 16_384
"""Maximum number of cached chains: about ten megabytes. The chain that was updated longest ago is dropped first."""
MAX_ENDS: Final = 6
"""Maximum number of run ends per chain; the deepest are kept."""

Ends = tuple[int, ...]


class RunEndCache:
    """Run ends by the head key of a chain. Thread-safe."""

    def __init__(self, max_chains: int = MAX_CHAINS) -> None:
        self._max_chains = max_chains
        self._lock = threading.Lock()
        self._ends: dict[BlockKey, Ends] = {}
        self._heads: dict[BlockKey, BlockKey] = {}  # last key of a published run -> head of its chain

    def of(self, head: BlockKey, ends: Sequence[int] = ()) -> Ends:
        """Numbers of leading blocks after which a run of this chain may end.

        Args:
            head: first key of the chain.
            ends: guesses of the caller, for its own chain: they come first.
        """
        known = self._ends.get(head, ())
        return tuple(dict.fromkeys((*ends, *known)))[: limits.MAX_LOOKUP_ENDS] if ends else known

    def record_lookup(self, head: BlockKey, key_count: int, ends: Ends) -> None:
        """Replace the ends that a lookup of ``key_count`` blocks could see; deeper ends stay."""
        known = self._ends.get(head, ())
        updated = {end for end in ends if end < key_count}
        if known:
            if updated == set(known):
                return
            updated.update([end for end in known if end >= key_count])
        if updated != set(known):
            self._put(head, updated)

    def record_stored(self, runs: Iterable[BlockRun]) -> None:
        """Add the ends of stored runs. A run whose head is not cached is ignored."""
        for run in runs:
            if not run.keys:
                continue
            head = run.keys[0] if run.parent is None else self._heads.get(run.parent)
            if head is None:
                continue
            end = run.depth + len(run.keys)
            with self._lock:
                self._heads[run.keys[-1]] = head
                _drop_oldest(self._heads, 2 * self._max_chains)
            # the old ends stay: another volume's run may still end there, or this volume's if the run was a middle part
            self._put(head, {end, *self._ends.get(head, ())})

    def _put(self, head: BlockKey, ends: set[int]) -> None:
        with self._lock:
            self._ends.pop(head, None)  # reinserted below, as the newest entry
            if ends:
                self._ends[head] = tuple(sorted(ends)[-MAX_ENDS:])
                _drop_oldest(self._ends, self._max_chains)


def _drop_oldest(entries: dict[BlockKey, Ends] | dict[BlockKey, BlockKey], limit: int) -> None:
    if len(entries) > limit:
        del entries[next(iter(entries))]
