"""Eviction policies: which blocks are cold. Pure: no locks, no clock, no I/O; a replay can run them alone.

Common part (``_TreePolicy``): blocks form trees by their parents, and only a *leaf* (a block without children in the volume)
can leave. So only leaves are queued, by their position in the policy's order, and an inner block enters the queue when its last
child has left, at the position it has earned by then. No scan passes blocks that cannot leave. A touch is one store:
an outdated entry is corrected when it reaches the front of its queue.

* ``LruPolicy``: by last use. A chain is used as a whole, so among equally old blocks the deeper leave first.
* ``S3FifoPolicy``: two queues in order of arrival, a small one (a tenth) for newcomers, a main one for blocks used again,
  and a ghost list that remembers keys of evicted newcomers (Yang et al., SOSP 2023). Resists scans. Two departures, both
  because inner blocks are not queued: a newcomer moves to the main queue at its second use, not when its turn comes; and inner
  blocks age only once they are leaves.
* ``ReuseDistancePolicy``: by the expected time to the next use: the longer of the time since the last use and the gap before it.
  A newcomer gets its parent's gap, because a chain is used as a whole; a block that was here before is known by its ghost. So
  the blocks of frequent sessions stay and those of rare sessions are evicted early, which helps a cache that is too small for
  all of them. With space for most sessions it behaves like LRU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.core.errors import Internal, InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.tiers.contract import Evictable, EvictionPolicy, Rows
from kvstore.tiers.eviction.policy_memory import EvictionQueue, GhostList

_NONE = 0
"""Row of no block."""
_DEMOTED = 1 << 40
"""Gap of a demoted block, longer than any measured one."""
_GHOSTS_PER_BLOCK = 4
"""Remembered keys of evicted blocks per present block, of about 26 bytes each."""
_SPARE_ENTRIES = 1024
_ROWS_AT_ONCE = 64
_TRIM_EVERY = 256
"""Entries after which a queue is looked at for those that do not count any more."""


class _TreePolicy(ABC):
    """The tree, and the iteration over leaves. Subclasses define the position of a block and remove it from their queues.

    A block is a *row* of columns, about 50 bytes, and no object. An absent parent whose children are
    in the volume has a row too (it is not present). Freed rows are used again.

    Args:
        rows: map from keys to rows; None: a new dict.
    """

    def __init__(self, rows: Rows | None = None) -> None:
        self._row_of: Rows = {} if rows is None else rows
        self._keys: list[BlockKey | None] = [None]
        self._present = bytearray(1)
        self._parents = array("I", (_NONE,))
        self._children = array("I", (_NONE,))  # in the volume; the first is in ``_first_child``
        self._first_child = array("I", (_NONE,))
        self._previous_sibling = array("I", (_NONE,))
        self._next_sibling = array("I", (_NONE,))
        self._positions = array("q", (0,))
        self._entry_numbers = array("q", (0,))  # number of its one entry in a queue that counts; 0: none
        self._used = 0  # the last row that was ever given out
        self._free = _NONE  # the first free row; the next is in its ``_next_sibling``
        self._count = 0
        self._ticks = 0
        self._entries = 0
        self._taken: dict[int, None] = {}  # taken from the queues by the last iteration, not yet put back

    def __len__(self) -> int:
        return self._count

    def _new_row(self, key: BlockKey) -> int:
        row = self._free
        if row:
            self._free = self._next_sibling[row]
            self._next_sibling[row] = _NONE
            self._keys[row] = key
        else:
            row = self._used = self._used + 1
            if row == len(self._keys):
                self._grow(_ROWS_AT_ONCE)
            self._keys[row] = key
        self._row_of[key] = row
        return row

    def _grow(self, rows: int) -> None:
        """Add rows to every column."""
        self._keys += [None] * rows
        self._present += bytes(rows)
        for column in (self._parents, self._children, self._first_child, self._previous_sibling, self._next_sibling):
            column.frombytes(bytes(4 * rows))
        for wide in (self._positions, self._entry_numbers):
            wide.frombytes(bytes(8 * rows))

    def _free_row(self, row: int) -> None:
        """Frees the row of a block that is neither present nor a parent."""
        key = self._keys[row]
        assert key is not None
        del self._row_of[key]
        self._keys[row] = None
        self._taken.pop(row, None)
        self._entry_numbers[row] = 0
        self._positions[row] = 0
        self._next_sibling[row] = self._free
        self._free = row

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        row = self._row_of.get(key, _NONE)
        if not row:
            row = self._new_row(key)
        elif self._present[row]:
            raise Internal("block inserted twice", key=key.hex())
        if parent is not None and not (parent == key or (self._children[row] and self._is_above(row, parent))):
            above = self._row_of.get(parent, _NONE) or self._new_row(parent)
            firsts = self._first_child
            self._children[above] += 1
            self._parents[row] = above
            first, firsts[above] = firsts[above], row
            self._next_sibling[row] = first
            if first:
                self._previous_sibling[first] = row
        self._present[row] = 1
        self._count += 1
        self._ticks += 1
        self._arrived(row)
        if not self._children[row] and not self._entry_numbers[row]:
            self._queue(row)

    def _is_above(self, row: int, key: BlockKey) -> bool:
        """Whether a block is an ancestor of its new parent. Clients choose keys; blocks in a cycle could never leave."""
        above = self._row_of.get(key, _NONE)
        while above and above != row:
            above = self._parents[above]
        return above == row

    def remove(self, key: BlockKey) -> None:
        row = self._row_of.get(key, _NONE)
        if not row or not self._present[row]:
            return
        self._present[row] = 0
        self._entry_numbers[row] = 0
        self._count -= 1
        self._left(row)
        above, self._parents[row] = self._parents[row], _NONE
        before, after, self._previous_sibling[row], self._next_sibling[row] = (
            self._previous_sibling[row],
            self._next_sibling[row],
            _NONE,
            _NONE,
        )
        if not self._children[row]:
            self._free_row(row)
        if above:
            self._children[above] -= 1
            if after:
                self._previous_sibling[after] = before
            if before:
                self._next_sibling[before] = after
            else:
                self._first_child[above] = after
            if not self._children[above]:
                if not self._present[above]:
                    self._free_row(above)
                elif not self._entry_numbers[above]:
                    self._queue(above)

    def children(self, key: BlockKey) -> int:
        return self._children[self._row_of.get(key, _NONE)]

    def with_descendants(self, keys: Iterable[BlockKey], evictable: Callable[[BlockKey], bool]) -> list[BlockKey] | None:
        found: list[BlockKey] = []
        seen: set[int] = set()
        for key in keys:
            below: list[BlockKey] = []  # each after its parent
            waiting = [self._row_of.get(key, _NONE)]
            while waiting:
                row = waiting.pop()
                if row in seen:
                    continue  # and so is all below it
                seen.add(row)
                each = self._key_of(row)
                if not evictable(each):
                    return None
                below.append(each)
                child = self._first_child[row]
                while child:
                    waiting.append(child)
                    child = self._next_sibling[child]
            found += reversed(below)
        return found

    def _key_of(self, row: int) -> BlockKey:
        key = self._keys[row]
        assert key is not None
        return key

    def restore(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            row = self._row_of.get(key, _NONE)
            if self._present[row] and not self._children[row] and not self._entry_numbers[row]:
                self._queue(row)

    def demote(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            row = self._row_of.get(key, _NONE)
            if self._present[row]:
                self._cool(row)
                self._entry_numbers[row] = 0  # its entry is too far behind
                if not self._children[row]:
                    self._queue(row)

    def coldest(self, evictable: Callable[[BlockKey], Evictable]) -> Iterator[BlockKey]:
        numbers, children = self._entry_numbers, self._children
        for row in self._taken:
            numbers[row] = 0
            if self._present[row] and not children[row]:
                self._queue(row)
        taken = self._taken = {}
        self._begin()
        waiting: dict[int, int] = {}  # parents met in this iteration -> children not yet yielded
        while (coldest := self._pop(waiting)) != _NONE:
            key = self._key_of(coldest)
            may_leave = evictable(key)
            if may_leave is None:
                numbers[coldest] = 0  # in no queue before it is restored, or has children again and they leave
                continue
            taken[coldest] = None
            if not may_leave:
                continue
            yield key
            above = self._parents[coldest]
            if above and self._present[above]:
                left = waiting.get(above, children[above]) - 1
                waiting[above] = left
                if not left and not numbers[above]:
                    self._queue(above)

    def _push(self, queue: EvictionQueue, place: int, row: int) -> None:
        self._entries += 1
        self._entry_numbers[row] = self._entries
        queue.push(place, self._entries, row)
        if not self._entries % _TRIM_EVERY:
            self._trim(queue)

    def _trim(self, queue: EvictionQueue) -> None:
        if queue.crowded or len(queue) > 2 * self._count + _SPARE_ENTRIES:  # entries of blocks that left from the warm end
            queue.keep(self._entry_numbers)

    def _take(self, queue: EvictionQueue, waiting: dict[int, int]) -> int:
        """The first block of a queue that may leave now, by its true position, left in its place.

        Entries that do not hold any more are dropped or moved on the way.
        """
        numbers, positions, children = self._entry_numbers, self._positions, self._children
        while (first := queue.first()) is not None:
            position, number, row = first
            if number != numbers[row]:
                queue.drop_first()
            elif waiting.get(row, children[row]):
                queue.drop_first()
                numbers[row] = 0
            elif positions[row] != position:
                queue.drop_first()
                self._entries += 1
                numbers[row] = self._entries
                queue.push(positions[row], self._entries, row)
            else:
                return row
        return _NONE

    @abstractmethod
    def _begin(self) -> None:
        """Start an iteration over leaves."""

    @abstractmethod
    def touch(self, keys: Sequence[BlockKey]) -> None: ...

    @abstractmethod
    def _arrived(self, row: int) -> None:
        """Order a block that was inserted."""

    @abstractmethod
    def _left(self, row: int) -> None:
        """Forget a block that was removed."""

    @abstractmethod
    def _cool(self, row: int) -> None:
        """Make a block the coldest until its next use."""

    @abstractmethod
    def _queue(self, row: int) -> None:
        """Queue a block that is a leaf, or is about to be one."""

    @abstractmethod
    def _pop(self, waiting: dict[int, int]) -> int:
        """Pop the coldest leaf; ``_NONE``: there is none. The number of its entry stays set until the leaf is queued again."""


class LruPolicy(_TreePolicy):
    """Least recently used leaf first."""

    def __init__(self, rows: Rows | None = None) -> None:
        super().__init__(rows)
        self._leaves = EvictionQueue()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._ticks += 1
        tick = self._ticks
        find, positions = self._row_of.get, self._positions
        for key in keys:
            positions[find(key, _NONE)] = tick  # also for row 0, which is never read

    def _arrived(self, row: int) -> None:
        self._positions[row] = self._ticks

    def _left(self, row: int) -> None:
        pass

    def _cool(self, row: int) -> None:
        self._positions[row] = 0

    def _begin(self) -> None:
        pass

    def _queue(self, row: int) -> None:
        self._push(self._leaves, self._positions[row], row)

    def _pop(self, waiting: dict[int, int]) -> int:
        row = self._take(self._leaves, waiting)
        if row:
            self._leaves.drop_first()
        return row


class S3FifoPolicy(_TreePolicy):
    """Small queue, main queue, ghosts.

    Args:
        rows: see ``make_policy``.
        small_share: fraction of all blocks above which the small queue is evicted from first.
    """

    MOST_USES = 3
    """Uses counted: turns that a block of the main queue is spared."""

    def __init__(self, rows: Rows | None = None, small_share: float = 0.1) -> None:
        super().__init__(rows)
        if not 0 < small_share < 1:
            raise InvalidArgument("small_share must be between 0 and 1", small_share=small_share)
        self._small_share = small_share
        self._uses = bytearray(1)
        self._in_main = bytearray(1)
        self._small = EvictionQueue()
        self._main = EvictionQueue()
        self._small_count = 0
        self._popped = 0
        self._popped_small = 0
        self._ghosts = GhostList()

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        self._uses += bytes(rows)
        self._in_main += bytes(rows)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        find, uses = self._row_of.get, self._uses
        most = self.MOST_USES
        for key in keys:
            row = find(key, _NONE)
            if not self._present[row]:
                continue
            if uses[row] < most:
                uses[row] += 1
            if not self._positions[row]:  # it was demoted
                self._ticks += 1
                self._positions[row] = self._ticks
            if not self._in_main[row] and uses[row] >= 2:
                self._in_main[row] = 1
                uses[row] = 0
                self._small_count -= 1
                self._ticks += 1
                self._positions[row] = self._ticks
                if self._entry_numbers[row]:  # its entry is in the other queue
                    self._entry_numbers[row] = 0
                    if not self._children[row]:
                        self._push(self._main, self._ticks, row)

    def _arrived(self, row: int) -> None:
        self._uses[row] = 0
        self._positions[row] = self._ticks
        self._in_main[row] = self._ghosts.pop(self._key_of(row)) is not None
        if not self._in_main[row]:
            self._small_count += 1

    def _left(self, row: int) -> None:
        if self._in_main[row]:
            return
        self._small_count -= 1
        self._ghosts.add(self._key_of(row), 0)
        if len(self._ghosts) > max(self._count, 1):
            self._ghosts.drop_oldest()

    def _cool(self, row: int) -> None:
        self._positions[row] = self._uses[row] = 0
        self._small_count += self._in_main[row]
        self._in_main[row] = 0

    def _queue(self, row: int) -> None:
        self._push(self._main if self._in_main[row] else self._small, self._positions[row], row)

    def _begin(self) -> None:
        self._popped = self._popped_small = 0

    def _pop(self, waiting: dict[int, int]) -> int:
        # what this iteration has yielded counts as gone, for its owner is about to remove it
        small = self._take(self._small, waiting)
        crowded = self._small_count - self._popped_small > self._small_share * (self._count - self._popped)
        demoted = small and not self._positions[small]
        row = _NONE if small and (crowded or demoted) else self._pop_main(waiting)
        self._popped += 1
        if not row and small:
            self._popped_small += 1
            self._small.drop_first()
            return small
        return row

    def _pop_main(self, waiting: dict[int, int]) -> int:
        while row := self._take(self._main, waiting):
            self._main.drop_first()
            if not self._uses[row]:
                return row
            self._uses[row] -= 1
            self._ticks += 1
            self._positions[row] = self._ticks
            self._push(self._main, self._ticks, row)
        return _NONE


class ReuseDistancePolicy(_TreePolicy):
    """Longest expected gap first. Time is counted in blocks used; the gap of a block is the one before its last use.

    Args:
        rows: see ``make_policy``.
    """

    def __init__(self, rows: Rows | None = None) -> None:
        super().__init__(rows)
        self._ghosts = GhostList()  # with their last use
        self._gaps = array("q", (0,))
        self._by_age = EvictionQueue()
        self._by_gap = EvictionQueue()

    def _grow(self, rows: int) -> None:
        super()._grow(rows)
        self._gaps.frombytes(bytes(8 * rows))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._ticks += len(keys)
        now = self._ticks
        find, gaps, positions = self._row_of.get, self._gaps, self._positions
        for key in keys:
            row = find(key, _NONE)
            gaps[row] = now - positions[row]  # also for row 0, which is never read
            positions[row] = now

    def _arrived(self, row: int) -> None:
        self._positions[row] = self._ticks
        last = self._ghosts.pop(self._key_of(row))
        above = self._parents[row]
        if last is not None:
            self._gaps[row] = self._ticks - last
        elif above and self._present[above]:
            self._gaps[row] = self._gaps[above] if self._gaps[above] != _DEMOTED else 0
        else:
            self._gaps[row] = 0

    def _left(self, row: int) -> None:
        self._ghosts.add(self._key_of(row), self._positions[row])
        if len(self._ghosts) > _GHOSTS_PER_BLOCK * max(self._count, 1):
            self._ghosts.drop_oldest()

    def _cool(self, row: int) -> None:
        self._gaps[row] = _DEMOTED

    def _begin(self) -> None:
        pass

    def _queue(self, row: int) -> None:
        self._push(self._by_age, self._positions[row], row)
        self._by_gap.push(-self._gaps[row], self._entry_numbers[row], row)
        if not self._entries % _TRIM_EVERY:
            self._trim(self._by_gap)

    def _pop(self, waiting: dict[int, int]) -> int:
        self._top(self._by_age, self._positions, 1, waiting)  # puts right what moved, in both, before they are compared
        widest = self._top(self._by_gap, self._gaps, -1, waiting)
        oldest = self._top(self._by_age, self._positions, 1, waiting)
        if not widest or not oldest:
            return _NONE
        row = oldest if self._ticks - self._positions[oldest] >= self._gaps[widest] else widest
        self._entries += 1
        self._entry_numbers[row] = self._entries  # neither queue's entry counts any more
        return row

    def _top(self, queue: EvictionQueue, places: array[int], sign: int, waiting: dict[int, int]) -> int:
        """As ``_take``, for a block that is in both queues with one number."""
        numbers, children = self._entry_numbers, self._children
        while (first := queue.first()) is not None:
            place, number, row = first
            if number != numbers[row]:
                queue.drop_first()
            elif waiting.get(row, children[row]):
                queue.drop_first()
                numbers[row] = 0
            elif place != sign * places[row]:
                queue.drop_first()
                self._queue(row)
            else:
                return row
        return _NONE


_POLICIES: dict[str, Callable[[Rows | None], EvictionPolicy]] = {
    "lru": LruPolicy,
    "s3-fifo": S3FifoPolicy,
    "reuse-distance": ReuseDistancePolicy,
}

POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str, rows: Rows | None = None) -> EvictionPolicy:
    """Create a policy by name (``POLICY_NAMES``).

    Args:
        name: of the policy.
        rows: map from keys to rows; None: a new dict.

    Raises:
        InvalidArgument: the name is unknown.
    """
    maker = _POLICIES.get(name)
    if maker is None:
        raise InvalidArgument("no such eviction policy", name=name, known=", ".join(POLICY_NAMES))
    return maker(rows)
