"""Find the longest servable prefix of a chain, and its replicas, from as few records as possible. Pure: callers read.

A *probe* reads one position of the chain. Its answer is one of three:

* *held*: ``{volume epoch: run_start}`` of the visible volume epochs that hold the position;
* *absent*: an empty dictionary;
* *unknown*: None. The shard of the position did not answer, or its range is under repair.

Probes are made in rounds (``PrefixSearch``). An index with several shards sends each round as one batch to all of them. An index
with cheap probes, such as LMDB, makes one probe per round (``longest_prefix``). Then each probe makes use of all before it, and
the search needs the fewest.

1. **First round**: the head, the last requested key, and the guessed ends of runs: the last block of each run and the block after
   it. Guesses come from the caller (``LookupRequest.ends``) and from ``kvstore.index.run_end_cache``. They are nearly always
   right, and then nothing is left to search.
2. **Hit length**: the interval between a held position and the absent position above it is divided until the two are neighbours.
3. **Cover**: between two neighbouring probed positions ``low < high``, each volume epoch at ``high`` with start ``s`` is
   trusted to hold ``[max(s, low + 1), high]``. A position that no volume epoch is trusted to hold is probed. Either the probe
   finds volume epochs whose claims cover more positions, or it is a gap, and the hit ends there or below.
4. **Discover**: a volume epoch at ``low`` that is not known to reach ``high`` ends somewhere between: the interval is divided
   until its last block is probed. So a volume that holds only the first 40 of 100 blocks is found, from its record at the head.

Guesses only decide where to probe, never the answer.

Guarantees for any contents of the index:

* each block of ``[0, blocks)`` is covered by a run. Each run is true at its last block, and no run covers a probed position whose
  record lacks its volume epoch;
* a claim is trusted down to the next probed position only, so a probe within a stale claim reveals it;
* if the union of the visible records is prefix-closed, ``blocks`` is exact. If the claims of a volume epoch are true, so are
  its runs.

Guarantees if some records are unknown:

* the first two above hold, and true claims make true runs. A block is in the hit only if a known record claims it. Claims are
  trusted over unknown positions, so an unknown position ends no hit that a known record above it claims;
* if the union of the visible records is prefix-closed and all claims are true, ``blocks`` is the largest number that the known
  records claim, also those that were not probed. The search finds them beside unknown positions: neighbours are on other shards
  with high probability. If one of S shards does not answer, a hit of one run loses 1/(S - 1) blocks on average. A hit of several
  runs ends below the last block of a run if the record of that block is unknown and no other run holds it;
* if no probed record is known, the result is an error, not a miss.

Not guaranteed: a run of a further volume that begins and ends between two neighbouring probes is not found (the hit does not
depend on it). Discovery is bounded, so in a chain that is scattered over very many volumes some runs are reported too short. A
search that meets ``MAX_UNKNOWN`` unknown records ends early.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from kvstore.core.errors import Unavailable
from kvstore.core.limits import MAX_LOOKUP_ENDS
from kvstore.index.contract import PrefixHit, ReplicaRun, VolumeEpoch
from kvstore.index.record import Replicas

ROUND_WIDTH: Final = 16
"""Positions that one round of a batched search probes in an interval. Three rounds find the end among 4,000 keys."""
MAX_INTERVALS: Final = 4
"""Intervals that one round of a batched search divides."""
MAX_DISCOVERY_PROBES: Final = 256
MAX_UNKNOWN: Final = 128
"""Unknown answers after which a search ends, with a hit that the known records claim."""
MAX_SILENT: Final = 16
"""Unknown answers after which a search without any other answer ends: no shard answers."""

Found = dict[int, Replicas | None]
"""Probed position -> its answer."""


def longest_prefix(count: int, probe: Callable[[int], Replicas | None], ends: Sequence[int] = (), revision: int = 0) -> PrefixHit:
    """Find the longest prefix of a chain, with one probe at a time.

    Args:
        count: number of requested blocks.
        probe: reads one position.
        ends: guesses: numbers of leading blocks after which a run may end.
        revision: see ``PrefixHit``.

    Raises:
        Unavailable: no probed position is known.
    """
    if not count:
        return PrefixHit(0, (), revision)
    found: Found = {}
    blocks = _as_guessed(count, _guessed_positions(count, ends), probe, found)
    if blocks is not None:
        return PrefixHit(blocks, _runs(found, blocks), revision)
    search = PrefixSearch(count, ends, width=1, found=found)
    for positions in search:
        for position in positions:
            found[position] = probe(position)
    return search.hit(revision)


class PrefixSearch:
    """One lookup, in rounds of probes. The caller reads the positions of each round, and leaves out unknown ones.

    Example::

        search = PrefixSearch(count, ends)
        for positions in search:
            search.found.update(read(positions))
        hit = search.hit(revision)

    Args:
        count: number of requested blocks.
        ends: guesses: numbers of leading blocks after which a run may end.
        width: number of positions that a round probes in one interval. With 1, a round after the first is one position.
        found: answers of a first round that the caller has made.
    """

    def __init__(self, count: int, ends: Sequence[int] = (), *, width: int = ROUND_WIDTH, found: Found | None = None) -> None:
        self.found: Found = {} if found is None else found
        self._count = count
        self._ends = ends
        self._width = width
        self._guesses = sorted({position for end in ends for position in (end - 1, end)})
        self._unknown: set[int] = set()
        self._hole = count  # lowest known absent position
        self._discovery_left = MAX_DISCOVERY_PROBES

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Yield the positions of each round.

        1. The first round probes the guesses. If they are right, the search ends.
        2. The intervals between known positions are put on a stack, the highest on top. The search takes the top interval, asks
           ``_next_probe`` whether one of its positions matters, and replaces it by its parts (``_divide``).
        3. It ends when the stack is empty, or if too many answers are unknown.
        """
        if not self._count:
            return
        if not self.found:
            first = self._first_round()
            yield first
            self.found.update({at: self.found.get(at) for at in first})
            blocks = _as_guessed(self._count, first, self.found.__getitem__, self.found)
            if blocks is not None:
                self._hole = blocks
                return
        stack = self._known_intervals()
        if self._width == 1:
            yield from self._single_probes(stack)
        yield from self._batched_rounds(stack)

    def _single_probes(self, stack: list[tuple[int, int]]) -> Iterator[Sequence[int]]:
        """Probe one position per round, up to the first unknown answer. The stack keeps what is left to search.

        The loop is short because a probe of LMDB costs as much as a few calls.
        """
        found, unknown, next_probe = self.found, self._unknown, self._next_probe
        while stack and not unknown:
            low, high = stack.pop()
            if high - low > 1 and (position := next_probe(low, high)) is not None:
                yield (position,)
                if found.get(position):
                    stack.append((low, position))
                    stack.append((position, high))
                else:
                    self._divide(low, high, (position,), stack)

    def _batched_rounds(self, stack: list[tuple[int, int]]) -> Iterator[Sequence[int]]:
        """Probe the positions of up to ``MAX_INTERVALS`` intervals per round; if the width is 1, one position of one interval."""
        most = 1 if self._width == 1 else MAX_INTERVALS
        asked: list[tuple[int, int, Sequence[int]]] = []
        unknown, next_probe = self._unknown, self._next_probe
        while stack and not (unknown and self._gives_up()):
            low, high = stack.pop()
            position = next_probe(low, high) if high - low > 1 else None
            if position is not None and (batch := self._batch(position, low, high)):
                asked.append((low, high, batch))
            if asked and (not stack or len(asked) == most):
                yield [position for _, _, part in asked for position in part]
                while asked and self._divide(*asked.pop(), stack):  # the lowest first, up to an absent position
                    pass
                asked.clear()

    def hit(self, revision: int = 0) -> PrefixHit:
        """Return the result, after the last round.

        Args:
            revision: see ``PrefixHit``.

        Raises:
            Unavailable: no probed position is known.
        """
        blocks = self._hole
        if self._unknown:
            if len(self._unknown) == len(self.found):
                raise Unavailable("no shard of the index answered", probes=len(self._unknown))
            blocks = _claimed(self.found)
        return PrefixHit(blocks, _runs(self.found, blocks), revision, len(self._unknown))

    def _first_round(self) -> list[int]:
        """The guessed positions. Without guesses, the search begins at once."""
        positions = _guessed_positions(self._count, self._ends)
        if self._ends:
            return positions
        return sorted({*positions, *_evenly(0, self._count - 1, self._width - 2)})

    def _known_intervals(self) -> list[tuple[int, int]]:
        """Intervals between known positions up to the lowest absent one. -1 and ``count`` are the bounds of the chain."""
        intervals: list[tuple[int, int]] = []
        low = -1
        for position, holders in sorted(self.found.items()):
            if holders is None:
                self._unknown.add(position)
                continue
            intervals.append((low, position))
            if not holders:
                self._hole = position
                return intervals
            low = position
        intervals.append((low, self._count))
        return intervals

    def _divide(self, low: int, high: int, positions: Sequence[int], stack: list[tuple[int, int]]) -> bool:
        """Put the parts of a probed interval on the stack, from its low end up to an absent position.

        Returns:
            False if it has an absent position. Then intervals above it need no search.
        """
        found = self.found
        for position in positions:
            holders = found.get(position)
            if holders:
                stack.append((low, position))
                low = position
            elif holders is None:
                found[position] = None
                self._unknown.add(position)
            else:
                stack.append((low, position))
                self._hole = position
                return False
        stack.append((low, high))
        return True

    def _gives_up(self) -> bool:
        """Whether too many answers are unknown."""
        unknown = len(self._unknown)
        return unknown >= MAX_SILENT and (unknown >= MAX_UNKNOWN or unknown == len(self.found))

    def _next_probe(self, low: int, high: int) -> int | None:
        """The position between two known ones whose answer matters most; None: no further probe is needed."""
        above = self.found.get(high)
        if above:
            first_covered = min(above.values())
            if first_covered > low + 1:
                return first_covered - 1
            for volume_epoch in self.found.get(low) or ():
                if above.get(volume_epoch, high) > low + 1:  # its run ends between the two
                    break
            else:
                return None
            if self._discovery_left <= 0:
                return None
            self._discovery_left -= 1
        elif above is None and high - 1 not in self.found:
            return high - 1  # the last position
        guesses = self._guesses
        if guesses:
            first, beyond = bisect_right(guesses, low), bisect_left(guesses, high)
            if first < beyond:
                return guesses[(first + beyond) // 2]
        return (low + high) // 2

    def _batch(self, position: int, low: int, high: int) -> list[int]:
        """The positions to probe in one interval, ascending; empty: all of its positions are unknown.

        Args:
            position: the one whose answer matters most.
            low: known position below.
            high: known position above.
        """
        unknown, width = self._unknown, self._width
        above = self.found.get(high)
        is_gap = position == min(above.values()) - 1 if above else False
        pivot: int | None = None
        if unknown:
            if position in unknown and (is_gap or position in self._guesses):
                pivot = position
            else:
                pivot = next((end for end in (0, self._count - 1) if low < end < high and end in unknown), None)
        if pivot is not None:
            wanted = self._around(pivot, low, high)
        else:
            higher = 0 if is_gap else width // 2
            wanted = [
                *_evenly(low, position, width - 1 - higher),
                position,
                *_evenly(position, high, higher),
            ]
            if unknown:
                wanted = self._unprobed(wanted, low, high)
        if above and not is_gap:
            self._discovery_left -= len(wanted) - 1
        return wanted

    def _around(self, pivot: int, low: int, high: int) -> list[int]:
        """The unprobed positions nearest to an unknown one where a run is likely to end, on both sides."""
        left = (position for position in range(pivot - 1, low, -1) if position not in self._unknown)
        right = (position for position in range(pivot + 1, high) if position not in self._unknown)
        if self._width == 1:
            return list(islice(chain(left, right), 1))
        side = self._width // 2
        return sorted([*islice(left, side), *islice(right, side)])

    def _unprobed(self, positions: Sequence[int], low: int, high: int) -> list[int]:
        """The positions, each unknown one replaced by the nearest unprobed one, if possible on its left."""
        taken = {*self._unknown, *positions}
        unprobed: list[int] = []
        for position in positions:
            if position not in self._unknown:
                unprobed.append(position)
                continue
            for neighbour in chain(range(position - 1, low, -1), range(position + 1, high)):
                if neighbour not in taken:
                    taken.add(neighbour)
                    unprobed.append(neighbour)
                    break
        return sorted(unprobed)


def _guessed_positions(count: int, ends: Sequence[int]) -> list[int]:
    """The head, the last position, and on both sides of each guessed end, ascending."""
    positions = {0, count - 1}
    if len(ends) <= MAX_LOOKUP_ENDS:
        for end in ends:
            if 0 < end < count:
                positions.add(end - 1)
                positions.add(end)
    return sorted(positions)


def _as_guessed(count: int, positions: Sequence[int], probe: Callable[[int], Replicas | None], found: Found) -> int | None:
    """The hit length, if probes at the guessed positions leave nothing to search; else None.

    Args:
        count: number of requested blocks.
        positions: the guessed positions.
        probe: reads one position.
        found: gets the probed positions.
    """
    low = -1
    below: Replicas = {}
    for high in positions:
        above = found[high] = probe(high)
        if not above:
            return high if high - low == 1 and above is not None else None
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


def _evenly(low: int, high: int, most: int) -> Sequence[int]:
    """Up to ``most`` positions that divide the interval between ``low`` and ``high`` into equal parts."""
    if high - low - 1 <= most:
        return range(low + 1, high)
    return [low + (high - low) * part // (most + 1) for part in range(1, most + 1)]


def _claimed(found: Found) -> int:
    """The number of leading blocks that known records claim."""
    end = 0
    for position, holders in sorted(found.items()):
        if holders is None:
            continue
        if not holders or min(holders.values()) > end:
            break
        end = position + 1
    return end


def _runs(found: Found, hit: int) -> tuple[ReplicaRun, ...]:
    """Runs within ``[0, hit)`` according to the known records; adjacent parts are joined."""
    joined: list[ReplicaRun] = []
    current: dict[VolumeEpoch, tuple[int, int]] = {}
    beyond = 0  # end of the previous known position
    for position in sorted(found):
        if position >= hit:
            break
        holders = found[position]
        if holders is None:
            continue
        end = position + 1
        for volume_epoch, claimed in holders.items():
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
