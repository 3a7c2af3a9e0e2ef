"""Prefixes whose blocks were labelled a short time ago. Pure."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from kvclient.events.label_writer import REWRITE_S
from kvstore.core.types import BlockKey

MOST_PER_CALL: Final = 1_024
"""Blocks that are labelled per lookup: about half a millisecond of vLLM's scheduler. Later lookups label the rest."""
_MOST: Final = 262_144


class RecentPrefixes:
    """Says which blocks of a prefix have to be labelled again, so that a lookup costs the scheduler little.

    A key depends on all blocks before it. So if a key was labelled recently, those before it were too, and the first other one is
    found by bisection. A block takes over the time of the one before it: the whole prefix expires with its oldest block.

    Args:
        most: keys that are remembered.
        clock: monotonic seconds.
    """

    def __init__(self, most: int = _MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._labelled_s: OrderedDict[BlockKey, float] = OrderedDict()

    def next_part(self, keys: Sequence[BlockKey]) -> range:
        """Return the positions of a prefix that have to be labelled now; see ``labelled``."""
        oldest_s = self._clock() - REWRITE_S
        first, stop = 0, len(keys)
        while first < stop:
            middle = (first + stop) // 2
            if self._labelled_s.get(keys[middle], oldest_s) > oldest_s:
                first = middle + 1
            else:
                stop = middle
        return range(first, min(first + MOST_PER_CALL, len(keys)))

    def labelled(self, keys: Sequence[BlockKey], part: range) -> None:
        """Remember that these positions of a prefix were labelled."""
        now_s = self._clock()
        labelled_s = self._labelled_s.get(keys[part.start - 1], now_s) if part.start else now_s
        for at in part:
            self._labelled_s[keys[at]] = labelled_s
            self._labelled_s.move_to_end(keys[at])
        while len(self._labelled_s) > self._most:
            self._labelled_s.popitem(last=False)
