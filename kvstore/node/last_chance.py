"""What is not durable when a node ends gets another chance: whoever did not take it may do so by now.

Write-behind gives a batch up where its target fails: a storage node that is being restarted, a disk that is full for a moment.
Such blocks stay in DRAM and are not tried again while the node runs; and what is used in DRAM all the time is cold on its volume
and leaves that first. Both would end with the node. So at the end they are sent once more, until all are durable or their part
of the time is over. While a target fails, one block alone goes out and the others wait for its fate: each try sums the bytes
of what it sends, and an arena takes long to sum.

Where DRAM holds more than the volumes can take, what is hottest *in DRAM* is to be on them in the end: their own order never
heard of hits there. ``what_stays`` says what that is. It does not leave the volumes while the rest of it comes, hottest first,
a batch at a time. How much finds room is known only roughly (slots have sizes); once a batch finds none, as much of the coldest
may leave after all, or is not sent. What is not to stay, or leaves, is given up at once: sending it would have no end.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.node.block import Block, Home
from kvstore.node.domain import Domain
from kvstore.node.moving import room_of
from kvstore.node.table import BlockTable
from kvstore.node.tenants import PIN_PART, Account, durable_share
from kvstore.node.writebehind import BATCH_BLOCKS, BATCH_BYTES

log = logging.getLogger(__name__)

PAUSE_S = 0.25
"""Between tries while nothing is taken. Write-behind leaves a target that failed alone for longer: most of these cost nothing."""


def by_domain(blocks: Iterable[Block]) -> list[tuple[Domain, list[BlockKey]]]:
    """Keys of blocks, namespace by namespace, each in the order given."""
    found: dict[Domain, list[BlockKey]] = {}  # one object a namespace
    for block in blocks:
        found.setdefault(block.domain, []).append(block.key)
    return list(found.items())


def make_durable(
    table: BlockTable, clock: Clock, deadline_s: float, sleep: Callable[[float], None] = time.sleep
) -> tuple[bool, int]:
    """Waits until what was stored is durable; what was given up is sent again, as much of it as finds room.

    Args:
        table: what the node holds; it writes behind.
        clock: time.
        deadline_s: when it is over.
        sleep: pauses.

    Returns:
        Whether all was written or given up in time, and how many blocks were sent again and became durable.
    """
    if not table.wait_written(deadline_s):
        return False, 0
    meant = sum(map(_can_be_saved, table.snapshot()))
    if not meant:
        return True, 0
    log.warning("%d blocks lie in DRAM only, given up before or gone from their volume: what finds room is sent again", meant)
    homes = [home for home in table.homes if home.volume.read_only is None] or table.homes
    stays = _what_stays(table, homes) if homes else {block.key: block for block in table.hottest()}
    table.spare(stays)
    try:
        return _send(table, homes, stays, clock, deadline_s, sleep)
    finally:
        table.spare(())


def _send(
    table: BlockTable,
    homes: Sequence[Home],
    stays: dict[BlockKey, Block],
    clock: Clock,
    deadline_s: float,
    sleep: Callable[[float], None],
) -> tuple[bool, int]:
    """Sends what is to stay and is not durable, hottest first; where no room is left, the coldest of ``stays`` no longer do."""
    won, stuck = 0, False
    left = deque(stays.values())
    while clock.now_s() < deadline_s:
        tried: list[Block] = []
        nbytes = 0
        while left and not (stuck and tried) and not (homes and (len(tried) == BATCH_BLOCKS or nbytes >= BATCH_BYTES)):
            block = left.popleft()
            if block.key in stays and _can_be_saved(block):
                tried.append(block)
                nbytes += block.nbytes
        if not tried:
            break
        if stuck:
            sleep(min(PAUSE_S, max(0.0, deadline_s - clock.now_s())))
        for domain, keys in by_domain(tried):
            table.write_again(domain, keys)
        if not table.wait_written(deadline_s):
            return False, won
        taken = sum(block.durable for block in tried)
        refused = [block for block in tried if _can_be_saved(block)]
        left.extendleft(reversed(refused))
        won += taken
        fails = not homes or not all(home.takes_changes(clock.now_s()) for home in homes)
        stuck = fails and not taken
        if not fails and not taken:
            _give_way(stays, sum(room_of(block.nbytes) for block in refused), homes)
    return True, won


def what_stays(
    hottest: Iterable[Block],
    above: Callable[[Block], Block | None],
    room_bytes: int,
    room_for: Callable[[Block], int],
    share_of: Callable[[Domain], int | None] = durable_share,
) -> dict[BlockKey, Block]:
    """Which blocks are to be on the volumes in the end: the hottest, with all that is above them, as far as there is room. Pure.

    Args:
        hottest: what lies in DRAM, pinned first, then from the hottest to the coldest; parents before their children.
        above: the parent of a block, in whatever tier; None where it is not here.
        room_bytes: of all volumes.
        room_for: bytes of it that a block takes.
        share_of: bytes of payload that a namespace's tenant may hold on volumes; None: any.

    Returns:
        Them, by key, in that order: parents before their children. Pins count up to their part of the room; what is pinned
        beyond it comes last.
    """
    stays: dict[BlockKey, Block] = {}
    out: set[BlockKey] = set()
    beyond: list[Block] = []  # of pins
    left, left_for_pins = room_bytes, room_bytes // PIN_PART
    shares: dict[Account | None, int] = {}
    for late, blocks in ((False, hottest), (True, beyond)):
        for block in blocks:
            new = _with_parents(block, above, stays, out)
            needed = sum(map(room_for, new))
            payload = sum(one.nbytes for one in new if room_for(one))
            share = share_of(block.domain)
            allowed = payload if share is None else shares.setdefault(block.domain.account, share)
            if not new or needed > left or payload > allowed:
                out.add(block.key)
                continue
            if block.domain.pinned and not late:
                if needed > left_for_pins:
                    beyond.append(block)
                    continue
                left_for_pins -= needed
            left -= needed
            if share is not None:
                shares[block.domain.account] -= payload
            stays.update((one.key, one) for one in new)
    return stays


def _with_parents(
    block: Block, above: Callable[[Block], Block | None], stays: Container[BlockKey], out: Container[BlockKey]
) -> list[Block]:
    """A block and those above it that are not among what stays yet, parents first; none where one of them does not."""
    new: list[Block] = []
    one: Block | None = block
    while one is not None and one.key not in stays:
        if one.key in out:
            return []
        new.append(one)
        one = above(one)
    return new[::-1]


def _what_stays(table: BlockTable, homes: Sequence[Home]) -> dict[BlockKey, Block]:
    """As ``what_stays``, of a node with volumes."""
    blocks = {block.key: block for block in table.snapshot()}
    return what_stays(
        (one for one in table.hottest() if one.nvme is not None or any(home.volume.fits(one.domain.shape) for home in homes)),
        lambda block: None if block.parent is None else blocks.get(block.parent),
        sum(home.volume.usage().capacity_bytes for home in homes),
        lambda block: _room_for(block, homes),
    )


def _room_for(block: Block, homes: Sequence[Home]) -> int:
    """Bytes that a block takes of some volumes, or would; none where it lies elsewhere, or nobody here owes it to be durable."""
    takes = block.ours if block.nvme_home is None else any(block.nvme_home is home for home in homes)
    return room_of(block.nbytes) if takes else 0


def _give_way(stays: dict[BlockKey, Block], needed: int, homes: Sequence[Home]) -> None:
    """The coldest of what stays no longer do, until it is smaller by the bytes needed."""
    while stays and needed > 0:
        needed -= _room_for(stays.popitem()[1], homes)


def _can_be_saved(block: Block) -> bool:
    """Whether it would be lost with this process, and write-behind takes it."""
    return block.ours and not block.durable and block.dram is not None and block.nvme is None
