"""Evicting on demand: a volume down to a fill, a namespace, or everything of it for good.

Whoever asks for room gets it from the table by itself; this is what people ask for. The rules are the table's: nothing that is in
use leaves, children leave before their parents, and what leaves a durable volume leaves its catalog first. To *evict* keeps what
is in DRAM and not durable yet. To *invalidate* does not: it is asked for where the blocks are wrong.

Of one durable volume asked for by name only its own blocks leave: children on others stay, for their parents may come again.
The table's lock is held for ``BATCH`` blocks at a time, so that loads and stores go on meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey
from kvstore.node.base.cancellation import over
from kvstore.node.base.volume_guard import VolumeStalled, ignore
from kvstore.node.state.model import Block, Home
from kvstore.node.state.namespaces import Domain
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.contract import Slot

log = logging.getLogger(__name__)

BATCH = 1_024
BATCHES_AMONG_SEVERAL = 64
"""At a time, of one of several durable volumes: each search passes by what is colder on the others."""


class Evicted(NamedTuple):
    """What became of it: replicas that left, and those that were meant and stay."""

    blocks: int
    kept: int


def evict_down_to(table: BlockTable, home: Home | None, down_to_bytes: int) -> Evicted:
    """Evicts the coldest blocks of the arena (``home`` None) or a durable volume until it has no more than that in use.

    Raises:
        OSError: the volume's catalog could not be changed; those blocks stay.
        KVStoreError: likewise.
    """
    volume = table.dram if home is None else home.volume
    batch = BATCH if home is None or len(table.homes) == 1 else BATCHES_AMONG_SEVERAL * BATCH
    evicted = 0
    while (excess := volume.usage().used_bytes - down_to_bytes) > 0 and not over():  # others may store as fast as this evicts
        with table._lock:
            victims = []
            for key, slot in islice(table._arena.coldest() if home is None else table._durable.coldest(home, table._idle), batch):
                if excess <= 0:
                    break
                victims.append(table._blocks[key])
                excess -= slot.size
            _leave_dram(table, victims) if home is None else _mark(victims)
        if not victims:
            return Evicted(evicted, volume.usage().blocks)
        if home is not None:
            leave_nvme(table, home, victims)
        evicted += len(victims)
    return Evicted(evicted, volume.usage().blocks if excess > 0 else 0)


def evict_namespace(table: BlockTable, domain: Domain, only: Home | None, *, dram: bool, nvme: bool) -> Evicted:
    """Evicts a namespace's blocks from the tiers named: from DRAM first, while their durable copies let them leave.

    Args:
        table: the blocks.
        domain: the namespace.
        only: of durable volumes only this one; None: all.
        dram: from the arena.
        nvme: from durable volumes.

    Raises:
        OSError: a volume's catalog could not be changed; those blocks stay.
        KVStoreError: likewise.
    """
    mine = _of(table, domain)
    places: list[Home | None] = [None] if dram else []
    places += [home for home in table.homes if nvme and (only is None or home is only)]
    parts = [_evict_each(table, [block for block in mine if _lies_in(block, place)], place) for place in places]
    return Evicted(sum(part.blocks for part in parts), sum(part.kept for part in parts))


def invalidate(table: BlockTable, domain: Domain, deadline_s: float) -> Evicted:
    """Drops all blocks of a namespace that are there now, from all tiers, durable or not.

    Those in use, or on their way to a durable volume, are waited for until the deadline. What is stored meanwhile stays.

    Raises:
        OSError: a volume's catalog could not be changed; those blocks stay.
        KVStoreError: likewise.
    """
    doomed = _of(table, domain)
    dropped = 0
    while doomed:
        for first in range(0, len(doomed), BATCH):
            batch = doomed[first : first + BATCH]
            for home in table.homes:
                with table._lock:
                    victims = [block for block in batch if block.nvme_home is home and table._idle(block)]
                    _mark(victims)
                leave_nvme(table, home, victims)
            with table._lock:
                idle = [block for block in batch if block.nvme is None and block.dram is not None and table._idle(block)]
                for block in idle:
                    block.elsewhere = False  # the storage node drops its own
                _leave_dram(table, idle)
        with table._lock:
            left = [block for block in doomed if table._blocks.get(block.key) is block]
            dropped += len(doomed) - len(left)
            doomed = left
            if doomed and not any(table._idle(block) for block in doomed) and not table._wait(table._changed, deadline_s):
                break
    return Evicted(dropped, len(doomed))


def leave_nvme(table: BlockTable, home: Home, victims: Sequence[Block]) -> None:
    """Blocks that were marked as leaving do leave a durable volume.

    Raises:
        VolumeStalled: it does not answer; they leave or stay once its catalog has ended the commit.
        OSError: its catalog could not be changed; they stay.
        KVStoreError: likewise.
    """
    if not victims:
        return

    def settle(error: BaseException | None) -> None:
        if error is None:
            table.evicted_nvme(home, victims)
        else:
            table.stay_on_nvme(victims)

    keys = [block.key for block in victims]
    try:
        home.guard.change(lambda: home.volume.commit([], keys), settle)
    except VolumeStalled:
        raise  # settled once the commit has ended; until then the victims are on their way out
    except (OSError, KVStoreError) as error:
        settle(error)
        raise
    settle(None)


def quarantine(table: BlockTable, home: Home, block: Block, slot: Slot, counters: Counters) -> None:
    """Forgets a replica that proved bad in ``slot``, unless somebody has, or is about to.

    The slot rests until the next start, which does not find it in the catalog any more. The catalog forgets it first: once the
    table has, a good copy may be committed under the same key, and would be forgotten in its place.
    """
    with table._lock:
        if block.nvme != slot or block.nvme_home is not home or block.leaving:
            return
        block.leave()
    counters.add("quarantined_blocks_total")
    try:
        home.guard.change(lambda: home.volume.commit([], [block.key]), ignore)
    except (OSError, KVStoreError) as error:
        log.warning("the catalog of %s still names the bad block %s: %s", home.volume.volume_id, block.key.hex(), error)
    finally:
        with table._lock:
            block.stay()
            home.quarantined += 1
            table._durable.remove(block, home)
            table._log.removed(home.volume.volume_id, block.key)
            block.unsettle()
            table._drop_if_nowhere(block)
            table._changed.notify_all()


def evict_all_nvme(table: BlockTable) -> int:
    """Evicts all that may leave from the durable volumes. Returns how many replicas.

    Raises:
        OSError: a volume's catalog could not be changed; those blocks stay.
        KVStoreError: likewise.
    """
    evicted = 0
    for home in table.homes:
        victims = table.nvme_victims(home)
        leave_nvme(table, home, victims)
        evicted += len(victims)
    return evicted


def _of(table: BlockTable, domain: Domain) -> list[Block]:
    """A namespace's blocks, children before their parents."""
    return sorted((block for block in table.snapshot() if block.domain is domain), key=lambda block: -block.depth)


def _evict_each(table: BlockTable, held: Sequence[Block], home: Home | None) -> Evicted:
    """Evicts blocks, given children first, from the arena or a durable volume; above one that stays, its parents stay too."""
    staying: set[BlockKey | None] = set()
    evicted = kept = 0
    for first in range(0, len(held), BATCH):
        with table._lock:
            victims = []
            for block in held[first : first + BATCH]:
                if not _lies_in(block, home):  # it left meanwhile
                    continue
                stays = block.key in staying or block.domain.pinned
                if stays or not table._idle(block) or (home is None and not block.expendable):
                    staying.add(block.parent)
                    kept += 1
                else:
                    victims.append(block)
            _leave_dram(table, victims) if home is None else _mark(victims)
        if home is not None:
            leave_nvme(table, home, victims)
        evicted += len(victims)
    return Evicted(evicted, kept)


def _lies_in(block: Block, home: Home | None) -> bool:
    """Whether a durable volume, or (None) the arena, holds it."""
    return block.dram is not None if home is None else block.nvme_home is home


def _mark(victims: Iterable[Block]) -> None:
    for block in victims:
        block.leave()


def _leave_dram(table: BlockTable, victims: Sequence[Block]) -> None:
    """Under the table's lock."""
    for block in victims:
        table._evict_dram(block)
    table._counters.add("evicted_dram_blocks_total", len(victims))
    table._changed.notify_all()
