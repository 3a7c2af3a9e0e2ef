"""What is not durable when a node ends gets another chance: whoever did not take it may do so by now.

Write-behind gives a batch up where its target fails: a storage node that is being restarted, a disk that is full for a moment.
Such blocks stay in DRAM and are not tried again while the node runs; and what is used in DRAM all the time is cold on its volume
and leaves that first. Both would end with the node. So at the end they are sent once more, until all are durable or their part
of the time is over. While a target fails, one block alone goes out and the others wait for its fate: each try sums the bytes
of what it sends, and an arena takes long to sum.

Where DRAM holds more than the volumes can take, what is hottest *in DRAM* is to be on them in the end: their own order never
heard of hits there. ``kvstore.node.durability.shutdown_selection`` says what that is. It does not leave the volumes while the
rest of it comes, hottest first, a batch at a time. How much finds room is known only roughly (slots have sizes); once a batch
finds none, as much of the coldest may leave after all, or is not sent. What is not to stay, or leaves, is given up at once:
sending it would have no end. But where a volume fails meanwhile, that may still go there, should it take changes again in time.

Nobody here knows the room of a storage node: what comes first leaves it first. So it gets all, chain after chain, the hottest
last, parents before their children. Where time does not suffice, it is then the hottest that is lost: rather so than always.

Planning takes a part of the time at most, and the table's lock for a moment at a time: what it does not come to follows what
it did, uncounted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import maxsize

import numpy as np

from kvstore.core.clock import Clock
from kvstore.core.types import BlockKey
from kvstore.node.control.migration_plan import slot_space
from kvstore.node.durability.shutdown_selection import what_stays
from kvstore.node.durability.writeback import BATCH_BLOCKS, BATCH_BYTES
from kvstore.node.state.change_log import in_chains
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable

log = logging.getLogger(__name__)

PAUSE_S = 0.25
"""Between tries while nothing is taken. Write-behind leaves a target that failed alone for longer: most of these cost nothing."""
PLAN_PART = 4
"""Planning takes up to this fraction (1/n) of the time."""
LOOK = 4096
"""Blocks looked at between two looks at the clock, or under one hold of the table's lock."""
WRITE_BACK_PART = 4
"""What is sent again at once takes at most this fraction (1/n) of the arena."""
HAND_OVER_S = 1e-5
"""Between two holds: whoever waits for the lock gets it then."""


def by_namespace(blocks: Iterable[Block]) -> list[tuple[NodeNamespace, list[BlockKey]]]:
    """Keys of blocks, namespace by namespace, each in the order given."""
    found: dict[NodeNamespace, list[BlockKey]] = {}  # one object a namespace
    for block in blocks:
        found.setdefault(block.namespace, []).append(block.key)
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
    node_volumes = [
        node_volume for node_volume in table.node_volumes if node_volume.volume.read_only is None
    ] or table.node_volumes
    now_s = clock.now_s()
    until_s = now_s + (deadline_s - now_s) / PLAN_PART
    stays = _what_stays(table, node_volumes, clock, until_s)
    order = list(stays.values())
    if not node_volumes:  # chain after chain, unless there is no time for it
        order = in_chains(order[::-1]) if clock.now_s() < until_s else sorted(order, key=lambda block: block.depth)
    table.spare(stays)
    try:
        return _send(table, node_volumes, stays, order, clock, deadline_s, sleep)
    finally:
        table.spare(())


def write_back(table: BlockTable) -> int:
    """Send blocks that lie in DRAM only to write-behind again, after a volume did not answer.

    At most a part of the arena at a time, so that new stores find room in the queue.

    Returns:
        How many such blocks there were.
    """
    node_volumes = table.node_volumes
    dirty = [
        block for block in table.snapshot() if _can_be_saved(block) and not block.pending and _fits(block.namespace, node_volumes)
    ]
    left = deque(in_chains(sorted(dirty, key=lambda block: block.depth)))
    most_bytes = table.dram.usage().capacity_bytes // WRITE_BACK_PART
    _write_again(table, _next(left, lambda _: True, maxsize, most_bytes))
    return len(dirty)


def _send(
    table: BlockTable,
    node_volumes: Sequence[NodeVolume],
    stays: dict[BlockKey, Block],
    order: Sequence[Block],
    clock: Clock,
    deadline_s: float,
    sleep: Callable[[float], None],
) -> tuple[bool, int]:
    """Sends what is to stay and is not durable, in an order; where no room is left, the coldest of ``stays`` no longer do."""
    won, stuck = 0, False
    left = deque(order)
    back: deque[Block] = deque()  # only what fails now may take them
    most = (BATCH_BLOCKS, BATCH_BYTES) if node_volumes else (maxsize, maxsize)
    while clock.now_s() < deadline_s:
        most_now = (1, maxsize) if stuck else most
        tried = _next(left, lambda block: block.key in stays and _can_be_saved(block), *most_now)
        from_back = not tried
        if from_back:
            tried = _next(back, _can_be_saved, *most_now)
        if not tried:
            return True, won
        if stuck:
            sleep(min(PAUSE_S, max(0.0, deadline_s - clock.now_s())))
        _write_again(table, tried)
        if not table.wait_written(deadline_s):
            return False, won
        taken = sum(block.durable for block in tried)
        won += taken
        refused = [block for block in tried if _can_be_saved(block)]
        now_s = clock.now_s()
        working = [node_volume for node_volume in node_volumes if node_volume.takes_changes(now_s)]
        fails = not working or any(
            node_volume.volume.read_only is None for node_volume in node_volumes if not node_volume.takes_changes(now_s)
        )
        stuck = fails and not taken and (from_back or not working)
        if from_back:
            back.extendleft(reversed(refused) if taken or fails else ())
        elif taken or not working:
            left.extendleft(reversed(refused))
        else:
            fit = [block for block in refused if _fits(block.namespace, working)]
            left.extendleft(reversed(fit))
            gone = [block for block in refused if not _fits(block.namespace, working)]
            gone += _give_way(stays, sum(slot_space(block.nbytes) for block in fit), working)
            back.extend(gone if fails else ())
    return False, won


def _next(queue: deque[Block], wanted: Callable[[Block], bool], most_blocks: int, most_bytes: int) -> list[Block]:
    """Takes the next of those that are wanted from a queue, and what is not wanted before them."""
    found: list[Block] = []
    nbytes = 0
    while queue and len(found) < most_blocks and nbytes < most_bytes:
        block = queue.popleft()
        if wanted(block):
            found.append(block)
            nbytes += block.nbytes
    return found


def _write_again(table: BlockTable, blocks: Sequence[Block]) -> None:
    """Sends blocks to write-behind, in their order but for what is of several namespaces within a batch."""
    for first in range(0, len(blocks), BATCH_BLOCKS):
        for namespace, keys in by_namespace(blocks[first : first + BATCH_BLOCKS]):
            table.write_again(namespace, keys)


def _what_stays(table: BlockTable, node_volumes: Sequence[NodeVolume], clock: Clock, until_s: float) -> dict[BlockKey, Block]:
    """As ``what_stays``; without volumes, all that lies in DRAM. What time does not suffice for comes at the end, uncounted."""
    blocks = {block.key: block for block in table.snapshot()}
    fits: dict[NodeNamespace, bool] = {}
    for block in blocks.values():
        if block.namespace not in fits:
            fits[block.namespace] = not node_volumes or _fits(block.namespace, node_volumes)
    here = [block for block in blocks.values() if block.dram is not None and (block.nvme is not None or fits[block.namespace])]
    order = iter(_hottest_first(table, here, clock, until_s))
    stays = what_stays(
        _until(order, clock, until_s),
        lambda block: _above(block, blocks),
        sum(node_volume.volume.usage().capacity_bytes for node_volume in node_volumes) if node_volumes else maxsize,
        lambda block: _room_for(block, node_volumes),
        may_lie_elsewhere=not node_volumes,
    )
    for block in order:
        stays.setdefault(block.key, block)
    return stays


def _hottest_first(table: BlockTable, blocks: Sequence[Block], clock: Clock, until_s: float) -> list[Block]:
    """Blocks in DRAM: pinned ones first, by depth, then from the hottest to the coldest; all by depth where time is short.

    Sorted by numpy, which lets other threads go on meanwhile.
    """
    warmth = np.zeros(len(blocks), np.int64)
    for first in range(0, len(blocks), LOOK):
        if clock.now_s() >= until_s:
            warmth[:] = 0
            break
        warmth[first : first + LOOK] = table.warmth([block.key for block in blocks[first : first + LOOK]])
        time.sleep(HAND_OVER_S)
    pinned = np.fromiter((block.namespace.pinned for block in blocks), np.bool_, len(blocks))
    depth = np.fromiter((block.depth for block in blocks), np.int64, len(blocks))
    warmth[pinned] = 0
    return [blocks[at] for at in np.lexsort((depth, -warmth, ~pinned)).tolist()]


def _until(order: Iterator[Block], clock: Clock, until_s: float) -> Iterator[Block]:
    """What comes of an order until time is over."""
    at = 0
    while at % LOOK or clock.now_s() < until_s:
        block = next(order, None)
        if block is None:
            return
        yield block
        at += 1


def _above(block: Block, blocks: Mapping[BlockKey, Block]) -> Block | None:
    """The parent of a block, if it is here; what lies in another namespace is none, for no lookup finds both."""
    found = None if block.parent is None else blocks.get(block.parent)
    return found if found is not None and found.namespace is block.namespace else None


def _fits(namespace: NodeNamespace, node_volumes: Iterable[NodeVolume]) -> bool:
    """Whether some volume can hold blocks of a namespace at all."""
    return any(node_volume.volume.fits(namespace.shape) for node_volume in node_volumes)


def _room_for(block: Block, node_volumes: Sequence[NodeVolume]) -> int:
    """Bytes that a block takes of some volumes, or would; none where it lies elsewhere, or nobody here owes it to be durable."""
    takes = block.ours if block.nvme_volume is None else any(block.nvme_volume is node_volume for node_volume in node_volumes)
    return slot_space(block.nbytes) if takes else 0


def _give_way(stays: dict[BlockKey, Block], needed: int, node_volumes: Sequence[NodeVolume]) -> list[Block]:
    """The coldest of what stays no longer do, until it is smaller by the bytes needed. Returns them, the warmest first."""
    gone: list[Block] = []
    while stays and needed > 0:
        gone.append(stays.popitem()[1])
        needed -= _room_for(gone[-1], node_volumes)
    return gone[::-1]


def _can_be_saved(block: Block) -> bool:
    """Whether it would be lost with this process, and write-behind takes it."""
    return block.ours and not block.durable and block.dram is not None and block.nvme is None
