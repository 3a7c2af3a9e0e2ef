"""Finding the longest servable prefix of a chain, and who holds which part of it, from as few records as possible. Pure.

A *probe* looks at one position of the chain and answers ``{life: run_start}`` of the visible lives that hold it; empty: nobody.

1. **Hit length**: bisection between the head and the last key asked for.
2. **Cover**: between two neighbouring probed positions ``low < high``, each life at ``high`` with start ``s`` is trusted to hold
   ``[max(s, low + 1), high]``. A position that nobody is trusted to hold is probed itself: either it brings lives whose claims
   cover more, or it is a hole and the hit ends there (bisect again below it).
3. **Discover**: a life at ``low`` that is not known to reach ``high`` ends somewhere between: bisect until its last block is
   probed. So a volume that holds just the first 40 of 100 blocks is found, from its record at the head.

A bisection looks first around the ends that the caller guesses (``kvstore.index.ends``): a right guess is confirmed by two
probes, the last block of the run and the one after it. Guesses choose where to look, never what to answer.

What holds, whatever the index contains:

* every block of ``[0, blocks)`` is covered by a run; every run is true at its last block, and no run covers a probed position
  whose record lacks its life;
* a claim is trusted down to the next probed position only, so a stale claim is found wherever a probe falls on it;
* where the union of the visible records is prefix-closed, ``blocks`` is exact; where each life's claims are true, so is each run.

What does not: a run of a further volume that begins and ends strictly between two neighbouring probes is not seen (the hit
does not depend on it); discovery is bounded, so in a chain scattered over very many volumes some ends come out too short.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvstore.index.contract import Life, PrefixHit, ReplicaRun
from kvstore.index.record import Replicas

MAX_DISCOVERY_PROBES = 256
NO_HIT = PrefixHit(0, ())


def longest_prefix(count: int, probe: Callable[[int], Replicas], ends: Sequence[int] = ()) -> PrefixHit:
    """Longest prefix of a chain.

    Args:
        count: blocks asked for.
        probe: see the module.
        ends: guesses: numbers of blocks after which some volume's run may end.
    """
    if not count:
        return NO_HIT
    search = _Search(probe, ends)
    if not search.at(0):
        return NO_HIT
    hit = count if search.at(count - 1) else search.bisect(0, count - 1)
    while (hole := search.cover(hit)) is not None:
        hit = search.bisect(max(position for position, holders in search.seen.items() if holders and position < hole), hole)
    return PrefixHit(hit, search.runs(hit))


class _Search:
    """One lookup: what was probed so far."""

    def __init__(self, probe: Callable[[int], Replicas], ends: Sequence[int]) -> None:
        self._probe = probe
        self._guesses = sorted({position for end in ends for position in (end - 1, end)})
        self.seen: dict[int, Replicas] = {}
        self._discovery_left = MAX_DISCOVERY_PROBES

    def at(self, position: int) -> Replicas:
        holders = self.seen.get(position)
        if holders is None:
            holders = self.seen[position] = self._probe(position)
        return holders

    def bisect(self, low: int, high: int) -> int:
        """First absent position, where ``low`` is held and ``high`` is not (as far as the probes see)."""
        while high - low > 1:
            middle = self._middle(low, high)
            if self.at(middle):
                low = middle
            else:
                high = middle
        return high

    def cover(self, hit: int) -> int | None:
        """Probes until claims cover ``[0, hit)`` and run ends are known. Answers a hole if it meets one."""
        stack = list(pairwise(sorted(position for position in self.seen if position < hit)))
        while stack:
            low, high = stack.pop()
            if high - low == 1:
                continue
            middle = self._next_probe(low, high)
            if middle is None:
                continue
            if not self.at(middle):
                return middle
            stack += ((low, middle), (middle, high))
        return None

    def _next_probe(self, low: int, high: int) -> int | None:
        """Where between two probed, held positions to look next; None: all that matters is known."""
        above = self.seen[high]
        first_covered = min(above.values())
        if first_covered > low + 1:
            return first_covered - 1
        for life in self.seen[low]:
            if above.get(life, high) > low + 1:  # its end lies between
                if not self._discovery_left:
                    return None
                self._discovery_left -= 1
                return self._middle(low, high)
        return None

    def _middle(self, low: int, high: int) -> int:
        """Where strictly between to look next: the middle one of the guesses there, else the middle."""
        guesses = self._guesses
        first, beyond = bisect_right(guesses, low), bisect_left(guesses, high)
        return guesses[(first + beyond) // 2] if first < beyond else (low + high) // 2

    def runs(self, hit: int) -> tuple[ReplicaRun, ...]:
        """All that the probes say of ``[0, hit)``, neighbouring parts joined."""
        joined: list[ReplicaRun] = []
        current: dict[Life, tuple[int, int]] = {}
        previous = -1
        for position in sorted(position for position in self.seen if position < hit):
            for life, claimed in self.seen[position].items():
                start = max(claimed, previous + 1)
                run = current.get(life)
                if run is not None and run[1] == start:
                    start = run[0]
                elif run is not None:
                    joined.append(ReplicaRun(run[0], run[1] - run[0], life))
                current[life] = (start, position + 1)
            previous = position
        joined += [ReplicaRun(start, end - start, life) for life, (start, end) in current.items()]
        joined.sort(key=_run_order)
        return tuple(joined)


def _run_order(run: ReplicaRun) -> tuple[int, int, int]:
    return run.start, -run.count, run.life
