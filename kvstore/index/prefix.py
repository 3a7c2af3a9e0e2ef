"""Find the longest servable prefix of a chain, and its replicas, from as few records as possible. Pure.

A *probe* reads one position of the chain and returns ``{volume epoch: run_start}`` of the visible volume epochs that hold it;
empty: the block is absent.

1. **Hit length**: bisection between the head and the last requested key.
2. **Cover**: between two neighbouring probed positions ``low < high``, each volume epoch at ``high`` with start ``s`` is
   trusted to hold ``[max(s, low + 1), high]``. A position that no volume epoch is trusted to hold is probed. Either the probe
   finds volume epochs whose claims cover more positions, or it is a gap, the hit ends there, and the bisection continues below
   it.
3. **Discover**: a volume epoch at ``low`` that is not known to reach ``high`` ends somewhere between: bisect until its last
   block is probed. So a volume that holds only the first 40 of 100 blocks is found, from its record at the head.

If the caller guesses the ends of runs (``kvstore.index.run_end_cache``), all guesses are probed first: the last block of each
run and the block after it. Guesses are nearly always right. Then these probes satisfy 1 to 3 without any search; otherwise the
search continues from them, and bisections probe near the guesses first. Guesses only decide where to probe, never the answer.

Guarantees, whatever the index contains:

* each block of ``[0, blocks)`` is covered by a run. Each run is true at its last block, and no run covers a probed position whose
  record lacks its volume epoch;
* a claim is trusted down to the next probed position only, so a probe within a stale claim reveals it;
* if the union of the visible records is prefix-closed, ``blocks`` is exact. If the claims of a volume epoch are true, so are
  its runs.

Not guaranteed: a run of a further volume that begins and ends between two neighbouring probes is not found (the hit does not
depend on it). Discovery is bounded, so in a chain that is scattered over very many volumes some runs are reported too short.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvstore.index.contract import PrefixHit, ReplicaRun, VolumeEpoch
from kvstore.index.record import Replicas

MAX_DISCOVERY_PROBES = 256
MAX_GUESSES = 8
"""With more guesses, probing all of them costs more than a search that starts without them."""
NO_HIT = PrefixHit(0, ())


def longest_prefix(count: int, probe: Callable[[int], Replicas], ends: Sequence[int] = ()) -> PrefixHit:
    """Find the longest prefix of a chain.

    Args:
        count: number of requested blocks.
        probe: reads one position.
        ends: guesses: numbers of leading blocks after which a run may end.
    """
    if not count:
        return NO_HIT
    seen: dict[int, Replicas] = {}
    if len(ends) <= MAX_GUESSES:
        hit = _as_guessed(count, probe, ends, seen)
        if hit is not None:
            return PrefixHit(hit, _runs(seen, hit))
    search = _Search(probe, ends, seen)
    if not search.at(0):
        return NO_HIT
    search.at(count - 1)
    hit = count
    hole = min((position for position, holders in seen.items() if not holders), default=None) or search.cover(hit)
    while hole is not None:
        hit = search.bisect(max(position for position, holders in seen.items() if holders and position < hole), hole)
        hole = search.cover(hit)
    return PrefixHit(hit, _runs(seen, hit))


def _as_guessed(count: int, probe: Callable[[int], Replicas], ends: Sequence[int], seen: dict[int, Replicas]) -> int | None:
    """The hit length, if probes at the head, the last block and the guessed ends leave nothing to search; else None.

    Args:
        count: number of requested blocks.
        probe: reads one position.
        ends: guesses.
        seen: gets the probed positions, in order.
    """
    positions = {0, count - 1}
    for end in ends:
        if 0 < end < count:
            positions.add(end - 1)
            positions.add(end)
    low = -1
    below: Replicas = {}
    for high in sorted(positions):
        above = seen[high] = probe(high)
        if not above:
            return high if high - low == 1 else None
        if high - low > 1:
            known = low + 1
            for claimed in above.values():
                if claimed <= known:
                    break
            else:
                return None  # no volume epoch is trusted to hold the blocks right below
            for volume_epoch in below:
                if above.get(volume_epoch, high) > known:
                    return None  # its run ends between the two
        low, below = high, above
    return count


class _Search:
    """State of one lookup: the positions that were probed."""

    def __init__(self, probe: Callable[[int], Replicas], ends: Sequence[int], seen: dict[int, Replicas]) -> None:
        self._probe = probe
        self._guesses = sorted({position for end in ends for position in (end - 1, end)})
        self.seen = seen
        self._discovery_left = MAX_DISCOVERY_PROBES

    def at(self, position: int) -> Replicas:
        holders = self.seen.get(position)
        if holders is None:
            holders = self.seen[position] = self._probe(position)
        return holders

    def bisect(self, low: int, high: int) -> int:
        """Find the first absent position between ``low``, which is held, and ``high``, which is absent."""
        while high - low > 1:
            middle = self._middle(low, high)
            if self.at(middle):
                low = middle
            else:
                high = middle
        return high

    def cover(self, hit: int) -> int | None:
        """Probe until claims cover ``[0, hit)`` and run ends are known. Returns a gap if it finds one, else None."""
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
        """The next position to probe between two held positions; None: no further probe is needed."""
        above = self.seen[high]
        first_covered = min(above.values())
        if first_covered > low + 1:
            return first_covered - 1
        for volume_epoch in self.seen[low]:
            if above.get(volume_epoch, high) > low + 1:  # its run ends between the two
                if not self._discovery_left:
                    return None
                self._discovery_left -= 1
                return self._middle(low, high)
        return None

    def _middle(self, low: int, high: int) -> int:
        """The position between ``low`` and ``high`` to probe next: the median guess, else the middle."""
        guesses = self._guesses
        first, beyond = bisect_right(guesses, low), bisect_left(guesses, high)
        return guesses[(first + beyond) // 2] if first < beyond else (low + high) // 2


def _runs(seen: dict[int, Replicas], hit: int) -> tuple[ReplicaRun, ...]:
    """Runs within ``[0, hit)`` according to the probes; adjacent parts are joined."""
    joined: list[ReplicaRun] = []
    current: dict[VolumeEpoch, tuple[int, int]] = {}
    beyond = 0  # end of the previous probe
    for position in sorted(seen):
        if position >= hit:
            break
        end = position + 1
        for volume_epoch, claimed in seen[position].items():
            start = max(claimed, beyond)
            run = current.get(volume_epoch)
            if run is not None:
                if run[1] == start:
                    start = run[0]
                else:
                    joined.append(ReplicaRun(run[0], run[1] - run[0], volume_epoch))
            current[volume_epoch] = (start, end)
        beyond = end
    joined += [ReplicaRun(start, end - start, volume_epoch) for volume_epoch, (start, end) in current.items()]
    if len(joined) > 1:
        joined.sort(key=_run_order)
    return tuple(joined)


def _run_order(run: ReplicaRun) -> tuple[int, int, int]:
    return run.start, -run.count, run.volume_epoch
