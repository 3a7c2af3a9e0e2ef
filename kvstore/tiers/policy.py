"""Eviction policies: which blocks are cold. Pure: no locks, no clock, no I/O; a replay can run them by themselves.

What all share (``_TreePolicy``): blocks form trees by their parents, and only a *leaf* (a block without children in the volume)
can leave. So only leaves are queued: a heap holds them by their position in the policy's order, and an inner block enters it when
its last child has left, at the position it has earned by then. Nothing is ever scanned for what cannot leave, and a touch
is one store: heap entries whose block has moved since are put right when they come up.

* ``LruPolicy``: by last use. A chain is used as a whole, so among equally old blocks the deeper leave first.
* ``S3FifoPolicy``: two queues in order of arrival, a small one (a tenth) for newcomers, a main one for what was used again,
  and a ghost list that remembers keys of newcomers that left (Yang et al., SOSP 2023). Resists scans. Two departures, both
  because inner blocks are not queued: a newcomer moves to the main queue at its second use, not when its turn comes; and inner
  blocks age only once they are leaves.
* ``GapPolicy``: by how long a block is expected to stay unused: the longer of the time since its last use and of the gap
  before that. A newcomer is taken to be used like its parent, for a chain is used as a whole; one that was here before is known
  by its ghost. Sessions that come back often thus keep their room while those that come back seldom pass through: what a cache
  needs that is too small for all of them. With room for most it does as LRU does.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.core.errors import Internal, InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.tiers.contract import EvictionPolicy


class _Node:
    """One block, or the place of an absent parent whose children are here (``present`` is False)."""

    __slots__ = ("after", "before", "children", "entry", "first", "key", "main", "parent", "position", "present", "uses")

    def __init__(self, key: BlockKey) -> None:
        self.key = key
        self.parent: _Node | None = None
        self.present = False
        self.children = 0  # in the volume: ``first``, the one ``after`` it, and so on
        self.first: _Node | None = None
        self.before: _Node | None = None
        self.after: _Node | None = None
        self.position = 0
        self.entry = 0  # number of its one entry in a heap that counts; 0: none
        self.main = False
        self.uses = 0


_Entry = tuple[int, int, _Node]  # position, number of the entry, block
_SPARE_ENTRIES = 1024


class _TreePolicy(ABC):
    """The tree, and the iteration over leaves. Subclasses say where a block stands, and take it from their heaps."""

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._count = 0
        self._ticks = 0
        self._entries = 0
        self._taken: list[_Node] = []  # taken from the heaps by the last iteration, not yet put back

    def __len__(self) -> int:
        return self._count

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(key)
        elif node.present:
            raise Internal("a block came in twice", key=key.hex())
        if parent is not None and not (parent == key or (node.children and self._is_above(node, parent))):
            above = self._nodes.get(parent)
            if above is None:
                above = self._nodes[parent] = _Node(parent)
            above.children += 1
            node.parent = above
            node.after, above.first = above.first, node
            if node.after is not None:
                node.after.before = node
        node.present = True
        node.uses = 0
        self._count += 1
        self._ticks += 1
        self._arrived(node)
        if not node.children and not node.entry:
            self._queue(node)

    def _is_above(self, node: _Node, key: BlockKey) -> bool:
        """Whether a block stands above its parent to be. Keys are their makers'; and in a ring nothing could leave."""
        above = self._nodes.get(key)
        while above is not None and above is not node:
            above = above.parent
        return above is node

    def remove(self, key: BlockKey) -> None:
        node = self._nodes.get(key)
        if node is None or not node.present:
            return
        node.present = False
        node.entry = 0
        self._count -= 1
        self._left(node)
        above, node.parent = node.parent, None
        if not node.children:
            del self._nodes[key]
        if above is not None:
            above.children -= 1
            before, after, node.before, node.after = node.before, node.after, None, None
            if after is not None:
                after.before = before
            if before is not None:
                before.after = after
            else:
                above.first = after
            if not above.children:
                if not above.present:
                    del self._nodes[above.key]
                elif not above.entry:
                    self._queue(above)

    def is_parent(self, key: BlockKey) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.children > 0

    def warmth(self, keys: Sequence[BlockKey]) -> list[int]:
        find, of = self._nodes.get, self._warmth
        return [0 if (node := find(key)) is None or not node.present else of(node) for key in keys]

    def with_descendants(self, keys: Iterable[BlockKey], evictable: Callable[[BlockKey], bool]) -> list[BlockKey] | None:
        found: list[BlockKey] = []
        seen: set[BlockKey] = set()
        for key in keys:
            below: list[BlockKey] = []  # each after its parent
            waiting = [self._nodes[key]]
            while waiting:
                node = waiting.pop()
                if node.key in seen:
                    continue  # and so is all below it
                seen.add(node.key)
                if not evictable(node.key):
                    return None
                below.append(node.key)
                child = node.first
                while child is not None:
                    waiting.append(child)
                    child = child.after
            found += reversed(below)
        return found

    def restore(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            node = self._nodes.get(key)
            if node is not None and node.present and not node.children and not node.entry:
                self._queue(node)

    def coldest(self, evictable: Callable[[BlockKey], bool | None]) -> Iterator[BlockKey]:
        for node in self._taken:
            node.entry = 0
            if node.present and not node.children:
                self._queue(node)
        taken = self._taken = []
        self._begin()
        waiting: dict[_Node, int] = {}  # parents met in this iteration -> children not yet yielded
        while (coldest := self._pop(waiting)) is not None:
            may_leave = evictable(coldest.key)
            if may_leave is None:
                coldest.entry = 0  # in no heap before it is restored, or has children again and they leave
                continue
            taken.append(coldest)
            if not may_leave:
                continue
            yield coldest.key
            above = coldest.parent
            if above is not None and above.present:
                left = waiting.get(above, above.children) - 1
                waiting[above] = left
                if not left and not above.entry:
                    self._queue(above)

    def _push(self, heap: list[_Entry], node: _Node) -> None:
        self._entries += 1
        node.entry = self._entries
        heapq.heappush(heap, (node.position, self._entries, node))
        self._trim(heap)

    def _trim(self, heap: list[_Entry]) -> None:
        if len(heap) > 2 * self._count + _SPARE_ENTRIES:  # entries of blocks that left from the warm end
            heap[:] = [entry for entry in heap if entry[2].present and entry[2].entry == entry[1]]
            heapq.heapify(heap)

    def _take(self, heap: list[_Entry], waiting: dict[_Node, int]) -> _Node | None:
        """The first block of a heap that may leave now, by its true position, left in its place.

        Entries that do not hold any more are dropped or moved on the way.
        """
        while heap:
            position, number, node = heap[0]
            if number != node.entry or not node.present or waiting.get(node, node.children):
                heapq.heappop(heap)
                if number == node.entry:
                    node.entry = 0
            elif node.position != position:
                self._entries += 1
                node.entry = self._entries
                heapq.heapreplace(heap, (node.position, self._entries, node))
            else:
                return node
        return None

    @abstractmethod
    def _begin(self) -> None:
        """An iteration begins."""

    @abstractmethod
    def touch(self, keys: Sequence[BlockKey]) -> None: ...

    @abstractmethod
    def _arrived(self, node: _Node) -> None:
        """Gives a newcomer its place."""

    @abstractmethod
    def _left(self, node: _Node) -> None:
        """A block left."""

    def _warmth(self, node: _Node) -> int:
        """As ``warmth``."""
        return node.position

    @abstractmethod
    def _queue(self, node: _Node) -> None:
        """Enters a block that is (or is about to be) a leaf into its heap."""

    @abstractmethod
    def _pop(self, waiting: dict[_Node, int]) -> _Node | None:
        """Takes the coldest leaf out. Its ``entry`` stays set until it is put back."""


class LruPolicy(_TreePolicy):
    """Least recently used leaf first."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[_Entry] = []

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._ticks += 1
        tick = self._ticks
        find = self._nodes.get
        for key in keys:
            node = find(key)
            if node is not None:
                node.position = tick

    def _arrived(self, node: _Node) -> None:
        node.position = self._ticks

    def _left(self, node: _Node) -> None:
        pass

    def _begin(self) -> None:
        pass

    def _queue(self, node: _Node) -> None:
        self._push(self._heap, node)

    def _pop(self, waiting: dict[_Node, int]) -> _Node | None:
        node = self._take(self._heap, waiting)
        if node is not None:
            heapq.heappop(self._heap)
        return node


class S3FifoPolicy(_TreePolicy):
    """Small queue, main queue, ghosts.

    Args:
        small_share: of all blocks, how many the small queue may hold before it gives way first.
    """

    MOST_USES = 3
    """Uses counted: turns that a block of the main queue is spared."""
    _USES_BIT, _MAIN_BIT = 59, 61

    def __init__(self, small_share: float = 0.1) -> None:
        super().__init__()
        if not 0 < small_share < 1:
            raise InvalidArgument("a share lies between 0 and 1", small_share=small_share)
        self._small_share = small_share
        self._small: list[_Entry] = []
        self._main: list[_Entry] = []
        self._small_count = 0
        self._popped = 0
        self._popped_small = 0
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        find = self._nodes.get
        most = self.MOST_USES
        for key in keys:
            node = find(key)
            if node is None or not node.present:
                continue
            if node.uses < most:
                node.uses += 1
            if not node.main and node.uses >= 2:
                node.main = True
                node.uses = 0
                self._small_count -= 1
                self._ticks += 1
                node.position = self._ticks
                if node.entry:  # its entry is in the other heap
                    node.entry = 0
                    if not node.children:
                        self._push(self._main, node)

    def _arrived(self, node: _Node) -> None:
        node.position = self._ticks
        node.main = node.key in self._ghosts
        if node.main:
            del self._ghosts[node.key]
        else:
            self._small_count += 1

    def _left(self, node: _Node) -> None:
        if node.main:
            return
        self._small_count -= 1
        self._ghosts[node.key] = None
        if len(self._ghosts) > max(self._count, 1):
            self._ghosts.popitem(last=False)

    def _warmth(self, node: _Node) -> int:
        return node.position | node.uses << self._USES_BIT | node.main << self._MAIN_BIT

    def _queue(self, node: _Node) -> None:
        self._push(self._main if node.main else self._small, node)

    def _begin(self) -> None:
        self._popped = self._popped_small = 0

    def _pop(self, waiting: dict[_Node, int]) -> _Node | None:
        # what this iteration has yielded counts as gone, for its owner is about to remove it
        small = self._take(self._small, waiting)
        crowded = self._small_count - self._popped_small > self._small_share * (self._count - self._popped)
        node = None if small is not None and crowded else self._pop_main(waiting)
        self._popped += 1
        if node is None and small is not None:
            self._popped_small += 1
            heapq.heappop(self._small)
            return small
        return node

    def _pop_main(self, waiting: dict[_Node, int]) -> _Node | None:
        while (node := self._take(self._main, waiting)) is not None:
            heapq.heappop(self._main)
            if not node.uses:
                return node
            node.uses -= 1
            self._ticks += 1
            node.position = self._ticks
            self._push(self._main, node)
        return None


class GapPolicy(_TreePolicy):
    """Longest expected gap first. Time is counted in blocks used; ``uses`` of a node is the gap before its last use.

    Args:
        ghosts: keys remembered after their block left, for each block that is here (about 150 bytes a key).
    """

    def __init__(self, ghosts: float = 4.0) -> None:
        super().__init__()
        if ghosts < 0:
            raise InvalidArgument("ghosts are 0 or more", ghosts=ghosts)
        self._ghosts_a_block = ghosts
        self._ghosts: OrderedDict[BlockKey, int] = OrderedDict()  # key -> last use
        self._by_age: list[_Entry] = []
        self._by_gap: list[_Entry] = []

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._ticks += len(keys)
        now = self._ticks
        find = self._nodes.get
        for key in keys:
            node = find(key)
            if node is not None:
                node.uses = now - node.position
                node.position = now

    def _arrived(self, node: _Node) -> None:
        node.position = self._ticks
        last = self._ghosts.pop(node.key, None)
        if last is not None:
            node.uses = self._ticks - last
        elif node.parent is not None and node.parent.present:
            node.uses = node.parent.uses

    def _left(self, node: _Node) -> None:
        self._ghosts[node.key] = node.position
        if len(self._ghosts) > self._ghosts_a_block * max(self._count, 1):
            self._ghosts.popitem(last=False)

    def _begin(self) -> None:
        pass

    def _warmth(self, node: _Node) -> int:
        return min(node.position, self._ticks - node.uses)  # the gap expected, counted back from now

    def _queue(self, node: _Node) -> None:
        self._push(self._by_age, node)
        heapq.heappush(self._by_gap, (-node.uses, node.entry, node))
        self._trim(self._by_gap)

    def _pop(self, waiting: dict[_Node, int]) -> _Node | None:
        self._top(self._by_age, waiting)  # puts right what moved, in both heaps, before they are compared
        widest = self._top(self._by_gap, waiting)
        oldest = self._top(self._by_age, waiting)
        if widest is None or oldest is None:
            return None
        node = oldest if self._ticks - oldest.position >= widest.uses else widest
        self._entries += 1
        node.entry = self._entries  # neither heap's entry counts any more
        return node

    def _top(self, heap: list[_Entry], waiting: dict[_Node, int]) -> _Node | None:
        """As ``_take``, for a block that stands in both heaps with one number."""
        while heap:
            place, number, node = heap[0]
            if number != node.entry or not node.present or waiting.get(node, node.children):
                heapq.heappop(heap)
                if number == node.entry:
                    node.entry = 0
            elif place != (node.position if heap is self._by_age else -node.uses):
                heapq.heappop(heap)
                self._queue(node)
            else:
                return node
        return None


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "s3-fifo": S3FifoPolicy, "gap": GapPolicy}

POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str) -> EvictionPolicy:
    """A new policy by name (``POLICY_NAMES``).

    Raises:
        InvalidArgument: there is none of this name.
    """
    maker = _POLICIES.get(name)
    if maker is None:
        raise InvalidArgument("no such eviction policy", name=name, known=", ".join(POLICY_NAMES))
    return maker()
