"""Brings blocks into the arena, from wherever they lie, and hands them over pinned, part by part.

One load is a stream of *parts*: consecutive keys with one fate each. What lies in DRAM is pinned at once and comes first; then
this node's NVMe, volumes that it mounts, and other nodes, in windows, as many in flight as the read-ahead allows, so that the
disk or the wire works on while the caller copies what came before. Windows that a disk reads are small: it starts at once, and
never runs dry because a window must be complete; those that have come by the time the caller asks go out as one part. A window
takes its slots all or none, and takes none while it waits for them; one that has come is not kept for one before it that takes
its time, perhaps for room; a caller gives back each part by itself, also the last: what is to come may wait for its room, for
the ancestors of what is held stay too. So loads larger than the arena flow through it, and at once. What others bring in
at the time is waited for by half of the threads at most, and else by the caller's own, at the end of its load: whoever writes a
block and never ends it, and asks for it again and again, stops no other load.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from kvstore.core.buffers import ScatteredBlocks
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, NodeId, Outcome, Tier
from kvstore.node.base.cancellation import ending, over
from kvstore.node.base.volume_guard import VolumeStalled
from kvstore.node.eviction.on_demand import quarantine
from kvstore.node.loads.mount_reader import MountLoads
from kvstore.node.loads.mounts import Mount, Mounts
from kvstore.node.loads.peer_waits import waiting_for
from kvstore.node.loads.peers import PeerAddress, Peers
from kvstore.node.state.grants import LoadClaim
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe import tracing
from kvstore.observe.counters import Counters
from kvstore.tiers.contract import Slot
from kvstore.transport.contract import Checksums, ReadControl, ReadRequest

log = logging.getLogger(__name__)

ARENA_SHARE = 4
"""What one load reads ahead takes at most this fraction (1/n) of the arena."""
DISK_WINDOWS = 16
"""A window that a disk reads is this fraction (1/n) of the read-ahead."""
PEER_WINDOWS = 2
"""A window that a peer sends is this fraction of it: each is a request over all connections to that peer."""
PATIENCE_S = 0.01
"""So long what has come waits for what lies before it, so that parts come in order and are few."""
STALL_POLL_S = 0.1
"""A load that waits for windows looks so often whether their volumes are stalled."""
AWAIT_POLL_S = 0.25
"""A load that waits for a block of another load looks so often whether its volume is stalled."""
TRIES = 3
"""A block that others were to bring, and that is not there when they are done, is claimed so often in all."""


@dataclass(frozen=True, slots=True)
class Source:
    """Keys ``[start, start + count)`` are said to lie at a peer."""

    start: int
    count: int
    peer: PeerAddress
    volume_id: str = ""
    """Which of its volumes; empty: not known."""


@dataclass(slots=True)
class Part:
    """Consecutive keys from ``first`` on. ``blocks[i]`` is pinned where the outcome is HIT, else None."""

    first: int
    outcomes: list[Outcome]
    blocks: list[Block | None]
    tier: Tier
    """Where the bytes lay before this load."""
    node: NodeId
    """Whose they were."""
    first_layer: int = 0
    layer_count: int = 0
    """Which layers are ready; 0: all."""
    sums: Checksums | None = None
    """Where only some layers are ready: their checksums, ``[hits, layer_count]``."""
    awaited: Sequence[int] = ()
    """Of a window: indices of blocks that others bring, and that are not answered yet."""

    def pinned(self) -> list[Block]:
        """The blocks to give back."""
        return [block for block in self.blocks if block is not None]

    def extend(self, following: Part) -> bool:
        """Takes over the keys of another part where they follow and came from the same place. False: it is left as it was."""
        if following.first != self.first + len(self.blocks) or (following.tier, following.node) != (self.tier, self.node):
            return False
        if self.awaited or following.awaited:
            return False
        self.outcomes += following.outcomes
        self.blocks += following.blocks
        return True

    def cut(self) -> tuple[list[Part], list[Part]]:
        """Its stretches as parts, with its pins: those that are answered, and those that are awaited as a whole."""
        answered: list[Part] = []
        left: list[Part] = []
        awaited = set(self.awaited)
        start = 0
        for others, stretch in groupby(range(len(self.blocks)), key=awaited.__contains__):
            end = start + len(list(stretch))
            part = Part(self.first + start, self.outcomes[start:end], self.blocks[start:end], self.tier, self.node)
            part.awaited = range(end - start) if others else ()
            (left if others else answered).append(part)
            start = end
        return answered, left


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive keys of a load, fetched together."""

    first: int
    count: int
    nbytes: int
    run: Callable[[NodeVolume | None], Part]
    """Fetches them, in a reader thread of the volume given, or in a thread of the loader (None)."""
    sources: tuple[Source, ...]
    node_volume: NodeVolume | None
    """The volume of its first block, as far as is known."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A window on its way."""

    window: _Window
    future: Future[Part]
    node_volume: NodeVolume | None
    """The volume whose thread brings it."""

    @property
    def stalled(self) -> bool:
        """Whether its volume is stalled and it has not ended."""
        return self.node_volume is not None and not self.future.done() and self.node_volume.guard.stalled


@dataclass(frozen=True, slots=True)
class _Chain:
    """The keys of one load and their place in their chain."""

    namespace: NodeNamespace
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    depth: int
    deadline_s: float


class Loader:
    """Serves all loads of a node. Thread-safe; ``load`` may be driven from any thread."""

    def __init__(
        self,
        node_id: NodeId,
        table: BlockTable,
        peers: Peers,
        mounts: Mounts,
        counters: Counters,
        clock: Clock,
        *,
        window_bytes: int,
        threads: int,
    ) -> None:
        self._node_id = node_id
        self._table = table
        self._peers = peers
        self._mounts = mounts
        self._mount_loads = MountLoads(table, counters, clock)
        self._counters = counters
        self._clock = clock
        self._ahead_bytes = min(window_bytes, table.dram.usage().capacity_bytes // ARENA_SHARE)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-load")
        self._waiters = threading.Semaphore(threads // 2)

    def close(self) -> None:
        """Waits for windows under way, except those of a stalled volume (other waits are bounded by their deadlines)."""
        self._pool.shutdown(cancel_futures=True)
        for node_volume in self._table.node_volumes:
            node_volume.guard.close()

    def reads_directly(self, source: Source) -> bool:
        """Whether the volume that a source names is mounted here."""
        return self._mounts.get(source.volume_id) is not None

    def resident(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> Part | None:
        """All keys as one pinned part where all lie in DRAM, else None. Never waits."""
        blocks = self._table.pin_resident(namespace, keys)
        part = Part(0, [Outcome.HIT] * len(keys), blocks, Tier.DRAM, self._node_id)
        if keys and None not in blocks:
            return part
        self._table.unpin(part.pinned())
        return None

    def load(
        self,
        namespace: NodeNamespace,
        keys: Sequence[BlockKey],
        deadline_s: float,
        *,
        parent: BlockKey | None = None,
        depth: int = 0,
        sources: Sequence[Source] = (),
    ) -> Iterator[Part]:
        """Yields parts until every key is answered once, or nobody wants them any more.

        Pins in a yielded part are the caller's to give back.
        """
        table = self._table
        chain = _Chain(namespace, keys, parent, depth, deadline_s)
        resident = table.pin_resident(namespace, keys)
        held = deque(self._resident_parts(resident))
        try:
            if len(held) == 1 and len(held[0].blocks) == len(keys):  # the common case: all in DRAM
                yield held.popleft()
                return
            windows = deque(self._windows(chain, [block is not None for block in resident], sources))
            in_flight: deque[_InFlight] = deque()
            awaited: deque[tuple[Part, tuple[Source, ...]]] = deque()
            ahead = 0
            try:
                while (held or windows or in_flight or awaited) and not over():
                    while windows and (not in_flight or ahead + windows[0].nbytes <= self._ahead_bytes):
                        in_flight.append(self._submit(windows.popleft()))
                        ahead += in_flight[-1].window.nbytes
                    if held:
                        yield held.popleft()
                        continue
                    if not in_flight:  # all else is handed over: nothing of it is held while the caller's own thread waits
                        held.append(awaited[0][0])
                        self._await(chain, *awaited.popleft())
                        continue
                    at = _come(in_flight)
                    try:
                        part = self._part_of(in_flight[at])
                    except CancelledError:  # nobody waits for it any more, and it had not begun
                        return
                    window = in_flight[at].window
                    ahead -= window.nbytes
                    del in_flight[at]
                    if part.awaited:
                        answered, left = part.cut()
                        held.extend(answered)
                        awaited.extend((one, window.sources) for one in left)
                        continue
                    while at < len(in_flight) and _is_there(in_flight[at].future) and part.extend(in_flight[at].future.result()):
                        ahead -= in_flight[at].window.nbytes
                        del in_flight[at]
                    yield part
            finally:
                for one in in_flight:  # the caller stopped early, or a window failed: what still comes is given back
                    if not one.future.cancel():
                        _come([one])
                        one.future.add_done_callback(self._give_back)
        finally:
            for part in held:
                table.unpin(part.pinned())

    def _submit(self, window: _Window) -> _InFlight:
        """Begin to fetch a window: in a reader thread of its volume if that answers, else in a thread of the loader."""
        node_volume = None if window.node_volume is None or window.node_volume.guard.stalled else window.node_volume
        submit = self._pool.submit if node_volume is None else node_volume.guard.submit
        return _InFlight(window, submit(partial(copy_context().run, window.run, node_volume)), node_volume)

    def _part_of(self, one: _InFlight) -> Part:
        """The answer of a window.

        A window that has not ended, because its volume is stalled, is left: its thread gives back pins and slots when it ends.

        Raises:
            CancelledError: the window had not begun, and the load has been cancelled.
        """
        if one.future.done():
            return one.future.result()
        if not one.future.cancel():
            one.future.add_done_callback(self._give_back)
        count = one.window.count
        part = Part(one.window.first, [Outcome.MISS] * count, [None] * count, Tier.NVME, self._node_id)
        self._not_read(part, range(count))
        return part

    def _give_back(self, future: Future[Part]) -> None:
        """Release the blocks of a window that its load has left."""
        if (bug := future.exception()) is None:
            self._table.unpin(future.result().pinned())
        else:
            self._counters.add("load_window_bugs_total")
            log.error("a window of a load failed", exc_info=bug)

    def _resident_parts(self, resident: Sequence[Block | None]) -> Iterator[Part]:
        start = 0
        while start < len(resident):
            if resident[start] is None:
                start += 1
                continue
            end = start
            while end < len(resident) and resident[end] is not None:
                end += 1
            yield Part(start, [Outcome.HIT] * (end - start), list(resident[start:end]), Tier.DRAM, self._node_id)
            start = end

    def _windows(self, chain: _Chain, done: Sequence[bool], sources: Sequence[Source]) -> Iterator[_Window]:
        """The rest of the load, cut by where it lies and by window size."""
        node_volumes = self._table.volumes_of(chain.namespace, chain.keys)
        durable = [node_volume is not None for node_volume in node_volumes]
        count = len(chain.keys)
        candidates: list[tuple[Source, ...]] = [()] * count
        for source in sources:
            for position in range(max(0, source.start), min(count, source.start + source.count)):
                if not done[position] and not durable[position]:
                    candidates[position] = (*candidates[position], source)
        block_bytes = chain.namespace.shape.block_bytes
        start = 0
        while start < count:
            if done[start]:
                start += 1
                continue
            most = self._blocks_of_window(block_bytes, durable=durable[start])
            end = start + 1
            while (
                end < count
                and end - start < most
                and not done[end]
                and (durable[end], candidates[end]) == (durable[start], candidates[start])
            ):
                end += 1
            run = partial(self._run, chain, start, end, candidates[start])
            yield _Window(start, end - start, (end - start) * block_bytes, run, candidates[start], node_volumes[start])
            start = end

    def _blocks_of_window(self, block_bytes: int, *, durable: bool) -> int:
        if not durable:
            return max(1, self._ahead_bytes // PEER_WINDOWS // block_bytes)
        blocks = self._ahead_bytes // DISK_WINDOWS // block_bytes
        if blocks < 2:  # two of them, where there is room: one is checked while the other is read
            blocks = min(2, self._ahead_bytes // (DISK_WINDOWS // 2) // block_bytes)
        return max(1, blocks)

    def _claim(self, chain: _Chain, start: int, end: int, sources: tuple[Source, ...], own: NodeVolume | None = None) -> Part:
        """Some keys, in whichever thread: claim, take room, read or fetch. What others bring is left awaited.

        ``own``: the calling thread is a reader thread of this volume.
        """
        keys = chain.keys[start:end]
        part = Part(start, [Outcome.MISS] * len(keys), [None] * len(keys), Tier.NVME, self._node_id)
        claim = self._table.claim(chain.namespace, keys)
        for position, block in claim.resident.items():
            part.blocks[position] = block
            part.outcomes[position] = Outcome.HIT
        try:
            if claim.durable:
                self._read_nvme(chain, claim, part, own)
            if claim.claimed_absent:
                self._fetch(chain, start, claim, part, sources)
        except BaseException:
            self._table.unpin(part.pinned())
            raise
        finally:  # what did not come is no longer claimed
            lost = {position: block for position, block in claim.durable.items() if part.blocks[position] is None}
            absent = [position for position in claim.claimed_absent if part.blocks[position] is None]
            self._table.unclaim((keys[position] for position in (*lost, *absent)), lost.values())
        part.awaited = claim.busy
        return part

    def _run(self, chain: _Chain, start: int, end: int, sources: tuple[Source, ...], own: NodeVolume | None) -> Part:
        """One window, in a reader thread of the volume ``own``, or in a thread of the loader (None).

        What others bring is awaited as well, if enough threads are left to work meanwhile.
        """
        part = self._claim(chain, start, end, sources, own)
        if part.awaited and self._waiters.acquire(blocking=False):
            try:
                self._await(chain, part, sources)
            except BaseException:
                self._table.unpin(part.pinned())
                raise
            finally:
                self._waiters.release()
        return part

    def _await(self, chain: _Chain, part: Part, sources: tuple[Source, ...]) -> None:
        """Waits for what others bring of a part. They may take their time, or be a writer that never ends."""
        awaited, part.awaited = part.awaited, ()
        for index in awaited:
            at = part.first + index
            part.outcomes[index] = Outcome.TIMEOUT
            for left in reversed(range(TRIES)):
                part.blocks[index], stalled = self._await_one(chain, chain.keys[at])
                if part.blocks[index] is not None:
                    part.outcomes[index] = Outcome.HIT
                    break
                if stalled:
                    self._not_read(part, (index,))
                    break
                if not left or self._clock.now_s() >= chain.deadline_s or over():
                    break
                # whoever brought it failed, or it was only passing through: now it is ours to bring
                again = self._claim(chain, at, at + 1, sources)
                if not again.awaited:
                    part.blocks[index], part.outcomes[index] = again.blocks[0], again.outcomes[0]
                    break

    def _await_one(self, chain: _Chain, key: BlockKey) -> tuple[Block | None, bool]:
        """Wait for a block that another load or store brings. Returns it, and whether its volume is stalled."""
        until_s = self._clock.now_s()  # the first look is at once: a window has many blocks
        while (block := self._table.await_resident(chain.namespace, key, until_s)) is None:
            (node_volume,) = self._table.volumes_of(chain.namespace, (key,))
            if node_volume is not None and node_volume.guard.stalled:
                return None, True
            now_s = self._clock.now_s()
            if now_s < until_s or now_s >= chain.deadline_s or over():
                return None, False
            until_s = min(chain.deadline_s, now_s + AWAIT_POLL_S)
        return block, False

    def _reserve(self, chain: _Chain, count: int) -> list[Slot] | None:
        if self._clock.now_s() >= chain.deadline_s or over():
            return None
        return self._table.reserve(chain.namespace.shape, count, chain.deadline_s, chain.namespace)

    def _read_nvme(self, chain: _Chain, claim: LoadClaim, part: Part, own: NodeVolume | None) -> None:
        """Reads claimed durable blocks into fresh slots, verified; those on the volume ``own`` in this thread."""
        table, shape = self._table, chain.namespace.shape
        todo = list(claim.durable.items())
        if stalled := [
            node_volume for node_volume in table.node_volumes if node_volume.guard.stalled
        ]:  # no room is made for what does not come
            self._not_read(part, [position for position, block in todo if block.nvme_volume in stalled])
            todo = [(position, block) for position, block in todo if block.nvme_volume not in stalled]
            if not todo:
                return
        slots = self._reserve(chain, len(todo))
        if slots is None:
            for position, _ in todo:
                part.outcomes[position] = Outcome.NO_ROOM
            return
        by_home: dict[int, list[int]] = {}
        for index, (_, block) in enumerate(todo):
            by_home.setdefault(id(block.nvme_volume), []).append(index)
        for indices in by_home.values():
            node_volume = todo[indices[0]][1].nvme_volume
            assert node_volume is not None
            items = []
            for index in indices:
                block = todo[index][1]
                assert block.nvme is not None  # pinned: it cannot leave
                items.append((block.nvme, block.record(), table.dram.view(slots[index], shape.block_bytes)))
            held = [slots[index] for index in indices]
            read = partial(node_volume.volume.read_with_checksums, items)
            try:
                with tracing.span(
                    "volume.read", {"volume": node_volume.volume_id, "blocks": len(items)} if tracing.on() else None
                ):
                    if node_volume is own:
                        answers = node_volume.guard.timed(read)
                    else:
                        answers = node_volume.guard.read(read, partial(self._read_late, held), chain.deadline_s)
            except VolumeStalled:
                self._not_read(part, [todo[index][0] for index in indices])
                continue
            for index, (outcome, checksums), (slot, _, _) in zip(indices, answers, items, strict=True):
                position, block = todo[index]
                part.outcomes[position] = outcome
                if outcome is Outcome.HIT:
                    table.finish_promotion(block, slots[index], checksums)
                    part.blocks[position] = block
                    continue
                self._counters.add(f"nvme_read_{outcome.name.lower()}_blocks_total")
                log.warning("block %s on %s: %s", block.key.hex(), node_volume.volume_id, outcome.name)
                table.unreserve((slots[index],))
                if outcome is Outcome.CORRUPT:
                    quarantine(table, node_volume, block, slot, self._counters)

    def _not_read(self, part: Part, positions: Sequence[int]) -> None:
        """Answer UNAVAILABLE for blocks of a stalled volume: the client reads them from another node, or misses them."""
        self._counters.add("volume_stall_refused_blocks_total", len(positions))
        for position in positions:
            part.outcomes[position] = Outcome.UNAVAILABLE

    def _read_late(self, slots: Sequence[Slot], _: BaseException | None) -> None:
        """Free the slots of a read that its load had left. The read has ended, so the kernel writes to them no more."""
        self._table.unreserve(slots)

    def _from_mount(self, chain: _Chain, start: int, wanted: list[int], part: Part, mount: Mount, *, read_on: bool) -> list[int]:
        """Brings what a mounted volume has of some claimed absent blocks; answers which of them it did not bring."""
        if not wanted:
            return wanted
        blocks = [
            Block(chain.namespace, chain.keys[at], chain.keys[at - 1] if at else chain.parent, chain.depth + at, b"")
            for at in (start + position for position in wanted)
        ]
        left: list[int] = []
        brought = self._mount_loads.bring(mount, blocks, chain.deadline_s, read_on=read_on)
        for position, block in zip(wanted, brought, strict=True):
            if block is None:
                left.append(position)
                continue
            part.blocks[position], part.outcomes[position] = block, Outcome.HIT
            part.tier, part.node = Tier.NVME, self._node_id
        return left

    def _fetch(self, chain: _Chain, start: int, claim: LoadClaim, part: Part, sources: tuple[Source, ...]) -> None:
        """Fetches claimed absent blocks from the first source that delivers each: directly, where its volume is mounted here."""
        table, shape = self._table, chain.namespace.shape
        left = list(claim.claimed_absent)
        part.tier = Tier.DRAM if sources and not claim.durable else part.tier
        named = {source.volume_id for source in sources}
        for mount in self._mounts:  # before any peer: the storage link is ours alone, and no other node works for it
            left = self._from_mount(chain, start, left, part, mount, read_on=mount.volume_id in named)
        for source in sources:
            if not left:
                break
            slots = self._reserve(chain, len(left))
            if slots is None:
                for position in left:
                    part.outcomes[position] = Outcome.NO_ROOM
                break
            destination = ScatteredBlocks([table.dram.view(slot, shape.block_bytes) for slot in slots], shape)
            keys = [chain.keys[start + position] for position in left]
            request = ReadRequest(chain.namespace.namespace_id, keys, 0, shape.layers, 0, chain.deadline_s)
            control = ReadControl()
            try:
                with (
                    tracing.span("peer.read", {"peer": source.peer.node_id, "blocks": len(keys)} if tracing.on() else None),
                    ending(control.cancel),
                    waiting_for(source.peer.node_id) as answered,
                ):
                    answer = self._peers.peer(source.peer, chain.namespace).read(request, destination, control=control)
                    answered(answer.outcomes)
            except KVStoreError as error:
                self._counters.add("peer_fetch_failed_total")
                log.warning("cannot fetch %d blocks from %s: %s", len(left), source.peer.node_id, error)
                table.unreserve(slots)
                for position in left:
                    part.outcomes[position] = Outcome.UNAVAILABLE
                continue
            missing: list[int] = []
            checksums = answer.checksums
            for index, position in enumerate(left):
                outcome = answer.outcomes[index]
                part.outcomes[position] = outcome
                if outcome is not Outcome.HIT or checksums is None:
                    table.unreserve((slots[index],))
                    missing.append(position)
                    continue
                at = start + position
                block = Block(
                    chain.namespace,
                    chain.keys[at],
                    chain.keys[at - 1] if at else chain.parent,
                    chain.depth + at,
                    checksums[index].astype("<u8", copy=False).tobytes(),
                )
                part.blocks[position] = table.insert_fetched(block, slots[index])
                part.tier, part.node = answer.tiers[index], source.peer.node_id
            self._counters.add("peer_fetched_blocks_total", len(left) - len(missing))
            left = missing
        for mount in self._mounts:
            if mount.volume_id not in named:
                left = self._from_mount(chain, start, left, part, mount, read_on=True)


def _come(in_flight: Sequence[_InFlight]) -> int:
    """Waits until one is done, or its volume is stalled, and says which: the first, where that does not take long.

    Where nobody waits for them any more, those that have not begun are cancelled.
    """
    futures = [one.future for one in in_flight]

    def give_up() -> None:
        for future in futures:
            future.cancel()

    with ending(give_up):
        if not futures[0].done() and not wait_for(futures[:1], PATIENCE_S).done:
            while not wait_for(futures, STALL_POLL_S, FIRST_COMPLETED).done:
                for at, one in enumerate(in_flight):
                    if one.stalled:
                        return at
    return next(at for at, future in enumerate(futures) if future.done())


def _is_there(future: Future[Part]) -> bool:
    """Whether it is done, and was neither cancelled nor failed: asking a cancelled one for its error raises."""
    return future.done() and not future.cancelled() and future.exception() is None


def offsets_of(blocks: Sequence[Block]) -> bytes:
    """Where pinned blocks lie in the arena: little-endian uint64 each."""
    return np.fromiter(
        (block.dram.offset for block in blocks if block.dram is not None), dtype="<u8", count=len(blocks)
    ).tobytes()
