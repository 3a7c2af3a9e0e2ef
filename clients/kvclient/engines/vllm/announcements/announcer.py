"""Which blocks an engine has announced, and which changes it has to announce. No vLLM types, no connection.

An engine announces blocks that it stored itself. The store's events say when they move between tiers and when they are evicted.
Those events arrive a moment after the store has succeeded. Until then, the blocks count as being in DRAM; if no event confirms it
in time, they are retracted: another engine had stored them before, and announces them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvclient.engines.vllm.announcements.engine_run import EngineRun
from kvclient.events import BlockMirror, Change
from kvclient.events.block_groups import BlockGroup, GroupBlockId
from kvstore.core.types import BlockKey, NamespaceId, Tier

_DRAM: Final = 1 << Tier.DRAM
_CONFIRM_S: Final = 10.0
_CHUNK: Final = 1_024
"""Blocks that are refreshed under one hold of the lock, for which the engine may wait."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A change of one block.

    Attributes:
        run: the run that contains it.
        at: its position in the run.
        stored: tiers that hold it now, as bits.
        removed: tiers that no longer hold it, as bits.
    """

    run: EngineRun
    at: int
    stored: int
    removed: int


def ordered_parts(announcements: Iterable[Announcement]) -> Iterator[list[Announcement]]:
    """Divide announcements into parts in which no hash is stored in a tier after its removal from it.

    In a part, all stored blocks may be published before all removed ones: a router then ends with the right state. The same hash
    can be removed and stored in one step, after a block was retracted and stored again, or in a new weights epoch.
    """
    part: list[Announcement] = []
    removed: dict[bytes, int] = {}
    for one in announcements:
        block_hash = one.run.hashes[one.at]
        if one.stored & removed.get(block_hash, 0):
            yield part
            part, removed = [], {}
        part.append(one)
        if one.removed:
            removed[block_hash] = removed.get(block_hash, 0) | one.removed
    if part:
        yield part


@dataclass(slots=True)
class _Block:
    run: EngineRun
    at: int
    held: int = 0
    told: int = 0
    assumed: bool = False
    """``held`` is not confirmed by an event."""


class Announcer:
    """The announced blocks of one group of namespaces. Thread-safe; no method waits.

    Args:
        group: the namespaces that hold the parts of a block.
        most: blocks that are followed. The oldest are retracted.
        retracted: called with the number of blocks that were retracted because too many were followed.
        unconfirmed: called with the number of blocks that were retracted because no event confirmed them in time.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        group: BlockGroup,
        most: int,
        retracted: Callable[[int], None] = lambda _count: None,
        unconfirmed: Callable[[int], None] = lambda _count: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group = group
        self._most = most
        self._retracted = retracted
        self._unconfirmed = unconfirmed
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: OrderedDict[GroupBlockId, _Block] = OrderedDict()
        self._changed: OrderedDict[GroupBlockId, None] = OrderedDict()
        self._gone: deque[Announcement] = deque()
        self._assumed: deque[tuple[float, EngineRun]] = deque()

    def __len__(self) -> int:
        return len(self._blocks)

    # ---- the engine ----
    def expect(self, run: EngineRun) -> None:
        """Follow blocks from now on, before they are stored: earlier events about them are lost."""
        with self._lock:
            for at, block in enumerate(run.ids):
                known = self._blocks.get(block)
                if known is None:
                    self._blocks[block] = _Block(run, at)
                else:
                    self._blocks.move_to_end(block)
            over = len(self._blocks) - self._most
            for _ in range(over):
                self._drop(*self._blocks.popitem(last=False))
        if over > 0:
            self._retracted(over)

    def stored(self, run: EngineRun) -> None:
        """Announce blocks that the store has accepted."""
        with self._lock:
            for block in run.ids:
                known = self._blocks.get(block)
                if known is not None and not known.held:
                    known.held, known.assumed = _DRAM, True
                    self._changed[block] = None
            self._assumed.append((self._clock() + _CONFIRM_S, run))

    def take(self, most: int) -> list[Announcement]:
        """Return changes since the last call, at most ``most``."""
        found: list[Announcement] = []
        with self._lock:
            unconfirmed = self._retract_unconfirmed()
            while self._gone and len(found) < most:
                found.append(self._gone.popleft())
            for block in list(islice(self._changed, most - len(found))):
                del self._changed[block]
                known = self._blocks.get(block)
                if known is not None and known.held != known.told:
                    found.append(Announcement(known.run, known.at, known.held & ~known.told, known.told & ~known.held))
                    known.told = known.held
                    if not known.held:
                        del self._blocks[block]
        if unconfirmed:
            self._unconfirmed(unconfirmed)
        return found

    def announce_again(self) -> None:
        """Announce all held blocks again, since vLLM has published a clear event."""
        with self._lock:
            for block, known in self._blocks.items():
                if known.told:
                    known.told = 0
                    self._changed[block] = None
            self._gone.clear()

    def retract_all(self) -> None:
        """Retract everything."""
        with self._lock:
            for block, known in self._blocks.items():
                self._drop(block, known)
            self._blocks.clear()
            self._changed.clear()
            self._assumed.clear()

    def _drop(self, _block: GroupBlockId, known: _Block) -> None:
        if known.told:
            self._gone.append(Announcement(known.run, known.at, 0, known.told))

    def _retract_unconfirmed(self) -> int:
        """Retract blocks that no event confirmed in time, and return their number."""
        now_s, count = self._clock(), 0
        while self._assumed and self._assumed[0][0] <= now_s:
            _, run = self._assumed.popleft()
            for block in run.ids:
                known = self._blocks.get(block)
                if known is not None and known.assumed:
                    known.held, known.assumed = 0, False
                    self._changed[block] = None
                    count += 1
        return count

    # ---- the watcher's thread ----
    def wanted(self, namespace: NamespaceId, key: BlockKey) -> bool:
        """Whether the mirror has to keep a block."""
        block = self.group.id_in(namespace, key)
        return block is not None and block in self._blocks

    def on_change(self, mirror: BlockMirror, change: Change) -> None:
        """Note what the store's events say. Nothing changes while the mirror is incomplete."""
        if not mirror.complete:
            return
        blocks = self._all() if change.whole else self._of(change)
        while chunk := list(islice(blocks, _CHUNK)):
            tiers = [self.group.held_tiers(mirror, block) for block in chunk]
            with self._lock:
                for block, bits in zip(chunk, tiers, strict=True):
                    known = self._blocks.get(block)
                    if known is None or known.held == bits or (known.assumed and not bits):
                        if known is not None and bits:
                            known.assumed = False
                        continue
                    known.held, known.assumed = bits, False
                    self._changed[block] = None

    def _all(self) -> Iterator[GroupBlockId]:
        with self._lock:
            return iter(list(self._blocks))

    def _of(self, change: Change) -> Iterator[GroupBlockId]:
        for run in change.runs:
            for key in run.keys:
                block = self.group.id_in(run.namespace, key)
                if block is not None and block in self._blocks:
                    yield block
        for key in change.keys:
            yield from (block for block in self.group.ids_of(key) if block in self._blocks)
