"""Loads of whole blocks into the arena, from any tier and node. Runs of blocks are returned pinned.

Theory of operation.

1. Blocks in DRAM are pinned at once and returned first.
2. The other blocks are cut into *windows*: consecutive blocks with the same sources. Several windows are in flight, up to the
   read-ahead, so that the disk or the network works while the caller copies earlier runs.
3. A window claims its blocks, so that two loads do not read the same block twice. It takes its slots all or none, and holds none
   while it waits for them. Then it reads from this node's volumes, mounted volumes and peers.
4. Windows of disks are small, so that the first read starts at once and the disk never idles until a window is complete.
   Neighbouring windows that are complete are returned as one run.
5. A window that is complete does not wait for an earlier one that is slow, e.g. one that waits for slots. The caller unpins each
   run separately, because later windows may need the space. So a load larger than the arena passes through it.
6. A block that another load or store brings is awaited by at most half of the loader's threads. If those are busy, the caller's
   thread waits at the end of its load. So a writer that never completes its block delays no other load.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import closing, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial

from kvstore.core.buffers import ScatteredBlocks
from kvstore.core.cancel_scope import current
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import BlockKey, NodeId, Outcome, Tier
from kvstore.node.ahead.reads import UnaskedKeys, WaitedReads
from kvstore.node.base.volume_guard import VolumeStalled
from kvstore.node.eviction.volume_commits import quarantine
from kvstore.node.loads.mount_reader import MountReader
from kvstore.node.loads.mounts import Mount, Mounts
from kvstore.node.loads.peers import Peers
from kvstore.node.loads.runs import BlockRequest, LoadedRun, Runs, SourceRange, equal_stretches
from kvstore.node.loads.timings import add_received_bytes, waiting_for
from kvstore.node.state.grants import LoadClaim
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe import tracing
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.process.threads.submission import submit
from kvstore.tiers.contract import Slot
from kvstore.transport.contract import LateBytes, ReadControl, ReadRequest

log = logging.getLogger(__name__)
limited = LimitedLog(log)

ARENA_SHARE = 4
"""The read-ahead of one load is at most this fraction (1/n) of the arena."""
DISK_WINDOWS = 8
"""A window of a disk is this fraction (1/n) of the read-ahead."""
PEER_WINDOWS = 2
"""A window of a peer is this fraction (1/n): each is one request over all connections to that peer."""
PATIENCE_S = 0.01
"""A complete window waits this long for earlier ones, so that runs are in order and few."""
STALL_POLL_S = 0.1
"""A load that waits for windows checks this often whether their volumes are stalled."""
AWAIT_POLL_S = 0.25
"""A load that waits for a block of another load checks this often whether its volume is stalled."""
MAX_ATTEMPTS = 3
"""How often a load waits for a block that others bring. If they give up, the load claims the block."""


_VolumeRead = tuple[int, Block, Slot]
"""Offset of a block in its run, the block, and the slot of the arena that it is read into."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive blocks of a load that are fetched together."""

    first: int
    count: int
    nbytes: int
    sources: tuple[SourceRange, ...]
    node_volume: NodeVolume | None
    """The volume of the first block, if it has one."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A window that is being fetched."""

    window: _Window
    future: Future[LoadedRun]
    node_volume: NodeVolume | None
    """The volume whose reader thread fetches it."""

    @property
    def stalled(self) -> bool:
        """Whether the volume is stalled and the window has not ended."""
        return self.node_volume is not None and not self.future.done() and self.node_volume.guard.stalled


class Loader:
    """Serves all loads of a node. Thread-safe; any thread may iterate a load."""

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
        self.node_id = node_id
        self._table = table
        self._peers = peers
        self._mounts = mounts
        self._mount_reader = MountReader(table, counters, clock)
        self._counters = counters
        self._clock = clock
        self._ahead_bytes = min(window_bytes, table.dram.usage().capacity_bytes // ARENA_SHARE)
        self.reads = WaitedReads(counters, clock)
        """Loads that an engine waits for and that read from a volume or peer. Reads ahead wait for them."""
        self.unasked = UnaskedKeys()
        """Blocks that are read ahead."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-load")
        self._waiters = threading.Semaphore(threads // 2)

    def close(self) -> None:
        """Wait for windows in flight, except those of a stalled volume. Other waits end at their deadlines."""
        self._pool.shutdown(cancel_futures=True)
        for node_volume in self._table.node_volumes:
            node_volume.guard.close()

    def is_mounted(self, source: SourceRange) -> bool:
        """Return whether the volume of a source is mounted on this node."""
        return self._mounts.get(source.volume_id) is not None

    def load_resident(self, request: BlockRequest) -> LoadedRun | None:
        """Return all blocks as one run if all are in DRAM, else None. Does not wait."""
        keys = request.chain.keys
        blocks = self._table.pin_resident(request.namespace, keys)
        run = LoadedRun(0, [Outcome.HIT] * len(keys), blocks, Tier.DRAM, self.node_id)
        if keys and None not in blocks:
            if self.unasked:
                self.unasked.discard(keys)
            return run
        self._table.unpin(run.pinned())
        return None

    def load_local(self, request: BlockRequest) -> Runs:
        """Load blocks that this node holds or mounts. Others that a source holds are UNAVAILABLE: the client reads them there."""
        sources = request.sources_by_block()
        with closing(self.load(replace(request, sources=()))) as runs:
            for run in runs:
                for offset, outcome in enumerate(run.outcomes):
                    index = run.first + offset
                    if outcome is Outcome.MISS and sources[index]:
                        run.outcomes[offset] = Outcome.UNAVAILABLE
                        self._counters.add(node_metrics.LOAD_DEFERRED_TO_PEERS_BLOCKS)
                yield run

    def load(self, request: BlockRequest, *, ahead: bool = False) -> Runs:
        """Load whole blocks from any tier and source.

        Args:
            request: the blocks.
            ahead: no engine waits for them: one window at a time is read, when the caller asks for the next run.
        """
        table = self._table
        resident = table.pin_resident(request.namespace, request.chain.keys)
        if self.unasked and not ahead:
            self.unasked.discard(request.chain.keys)
        ready = deque(self._resident_runs(resident))
        try:
            if len(ready) == 1 and len(ready[0].blocks) == len(resident):  # the common case: all in DRAM
                yield ready.popleft()
                return
            with nullcontext() if ahead else self.reads:
                yield from self._read(request, resident, ready, 0 if ahead else self._ahead_bytes)
        finally:
            for run in ready:
                table.unpin(run.pinned())

    def _read(self, request: BlockRequest, resident: Sequence[Block | None], ready: deque[LoadedRun], most_bytes: int) -> Runs:
        """Yield the runs that are ``ready``, and those of the other blocks.

        Args:
            request: the load.
            resident: the blocks that are in DRAM.
            ready: their runs; those that are not yielded stay in it.
            most_bytes: how much is read at once; one window at least.
        """
        windows = deque(self._windows(request, [block is not None for block in resident]))
        in_flight: deque[_InFlight] = deque()
        awaited: deque[tuple[LoadedRun, tuple[SourceRange, ...]]] = deque()
        ahead_bytes = 0
        scope = current()
        try:
            while (ready or windows or in_flight or awaited) and not scope.cancelled:
                while windows and (not in_flight or ahead_bytes + windows[0].nbytes <= most_bytes):
                    in_flight.append(self._submit(request, windows.popleft()))
                    ahead_bytes += in_flight[-1].window.nbytes
                if ready:
                    yield ready.popleft()
                    continue
                if not in_flight:  # all other runs are returned: the load pins nothing while the caller's thread waits
                    ready.append(awaited[0][0])
                    self._await(request, *awaited.popleft())
                    continue
                at = _next_completed(in_flight)
                window = in_flight[at].window
                run: LoadedRun | None = None
                try:
                    run = self._run_of(in_flight[at])
                except CancelledError:  # before it began: the scope was cancelled, or the node has dropped its volume
                    windows.appendleft(window)
                ahead_bytes -= window.nbytes
                del in_flight[at]
                if run is None:
                    continue
                if run.awaited:
                    complete, waiting = run.split_awaited()
                    ready.extend(complete)
                    awaited.extend((one, window.sources) for one in waiting)
                    continue
                while at < len(in_flight) and _is_ready(in_flight[at].future) and run.extend(in_flight[at].future.result()):
                    ahead_bytes -= in_flight[at].window.nbytes
                    del in_flight[at]
                yield run
        finally:
            for one in in_flight:  # the caller stopped early, or a window failed: release what still arrives
                if not one.future.cancel():
                    _next_completed([one])
                    one.future.add_done_callback(self._release)

    # ---- windows
    def _resident_runs(self, resident: Sequence[Block | None]) -> Iterator[LoadedRun]:
        for start, end in equal_stretches([block is not None for block in resident]):
            if resident[start] is not None:
                yield LoadedRun(start, [Outcome.HIT] * (end - start), list(resident[start:end]), Tier.DRAM, self.node_id)

    def _windows(self, request: BlockRequest, done: Sequence[bool]) -> Iterator[_Window]:
        """Cut the blocks that are not ``done`` by their sources and by window size."""
        found = self._table.find(request.namespace, request.chain.keys)
        node_volumes = [block.nvme_volume if block is not None else None for block in found]
        durable = [node_volume is not None for node_volume in node_volumes]
        sources = [() if done[index] or durable[index] else of_block for index, of_block in enumerate(request.sources_by_block())]
        count = len(done)
        block_bytes = request.namespace.shape.block_bytes
        start = 0
        while start < count:
            if done[start]:
                start += 1
                continue
            max_blocks = self._blocks_per_window(block_bytes, durable=durable[start])
            end = start + 1
            while (
                end < count
                and end - start < max_blocks
                and not done[end]
                and (durable[end], sources[end]) == (durable[start], sources[start])
            ):
                end += 1
            yield _Window(start, end - start, (end - start) * block_bytes, sources[start], node_volumes[start])
            start = end

    def _blocks_per_window(self, block_bytes: int, *, durable: bool) -> int:
        if not durable:
            return max(1, self._ahead_bytes // PEER_WINDOWS // block_bytes)
        blocks = self._ahead_bytes // DISK_WINDOWS // block_bytes
        if blocks < 2:  # two blocks if they fit: one is verified while the other is read
            blocks = min(2, self._ahead_bytes // (DISK_WINDOWS // 2) // block_bytes)
        return max(1, blocks)

    def _submit(self, request: BlockRequest, window: _Window) -> _InFlight:
        """Begin to fetch a window: in a reader thread of its volume if that answers, else in a thread of the loader.

        If the node has dropped the volume meanwhile, the window is fetched from mounts and sources.
        """

        def fetch(node_volume: NodeVolume | None) -> Callable[[], LoadedRun]:
            return partial(copy_context().run, self._fetch_window, request, window, node_volume)

        node_volume = window.node_volume
        if node_volume is not None and not node_volume.guard.stalled:
            try:
                return _InFlight(window, node_volume.guard.submit(fetch(node_volume)), node_volume)
            except Unavailable:
                window = replace(window, sources=request.sources_by_block()[window.first], node_volume=None)
        return _InFlight(window, submit(self._pool, fetch(None)), None)

    def _run_of(self, one: _InFlight) -> LoadedRun:
        """Return the run of a window that has ended, or whose volume is stalled.

        A window of a stalled volume is abandoned: its thread releases pins and slots when it ends.

        Raises:
            CancelledError: the load was cancelled before the window began.
        """
        if one.future.done():
            return one.future.result()
        if not one.future.cancel():
            one.future.add_done_callback(self._release)
        count = one.window.count
        run = LoadedRun(one.window.first, [Outcome.MISS] * count, [None] * count, Tier.NVME, self.node_id)
        self._mark_unavailable(run, range(count))
        return run

    def _release(self, future: Future[LoadedRun]) -> None:
        """Unpin the blocks of a window that its load has abandoned."""
        if (error := future.exception()) is None:
            self._table.unpin(future.result().pinned())
        else:
            self._counters.add(node_metrics.LOAD_WINDOW_BUGS)
            log.error("load window failed: unexpected error", exc_info=error)

    def _fetch_window(self, request: BlockRequest, window: _Window, reader_volume: NodeVolume | None) -> LoadedRun:
        """Fetch one window, in a reader thread of the volume ``reader_volume``, or in a thread of the loader (None).

        Blocks that others bring are awaited too, if enough threads remain for other windows.
        """
        run = self._claim_and_fetch(request, window.first, window.first + window.count, window.sources, reader_volume)
        if run.awaited and self._waiters.acquire(blocking=False):
            try:
                self._await(request, run, window.sources)
            except BaseException:
                self._table.unpin(run.pinned())
                raise
            finally:
                self._waiters.release()
        return run

    def _claim_and_fetch(
        self,
        request: BlockRequest,
        start: int,
        end: int,
        sources: tuple[SourceRange, ...],
        reader_volume: NodeVolume | None = None,
    ) -> LoadedRun:
        """Claim some blocks, and read or fetch what was claimed. Blocks that others bring are in ``awaited`` of the run."""
        keys = request.chain.keys[start:end]
        run = LoadedRun(start, [Outcome.MISS] * len(keys), [None] * len(keys), Tier.NVME, self.node_id)
        claim = self._table.claim(request.namespace, keys)
        for offset, block in claim.resident.items():
            run.blocks[offset] = block
            run.outcomes[offset] = Outcome.HIT
        try:
            if claim.durable:
                self._read_volumes(request, claim, run, reader_volume)
            if claim.claimed_absent:
                self._fetch_absent(request, claim, run, sources)
        except BaseException:
            self._table.unpin(run.pinned())
            raise
        finally:  # release the claims on blocks that were not loaded
            not_read = {offset: block for offset, block in claim.durable.items() if run.blocks[offset] is None}
            absent = [offset for offset in claim.claimed_absent if run.blocks[offset] is None]
            self._table.unclaim((keys[offset] for offset in (*not_read, *absent)), not_read.values())
        run.awaited = claim.busy
        return run

    # ---- blocks of other loads and stores
    def _await(self, request: BlockRequest, run: LoadedRun, sources: tuple[SourceRange, ...]) -> None:
        """Wait for the blocks of a run that others bring. They may be slow, or a writer that never completes."""
        awaited, run.awaited = run.awaited, ()
        for offset in awaited:
            index = run.first + offset
            run.outcomes[offset] = Outcome.TIMEOUT
            for attempts_left in reversed(range(MAX_ATTEMPTS)):
                run.blocks[offset], stalled = self._await_one(request, request.chain.key(index))
                if run.blocks[offset] is not None:
                    run.outcomes[offset] = Outcome.HIT
                    break
                if stalled:
                    self._mark_unavailable(run, (offset,))
                    break
                if not attempts_left or self._clock.now_s() >= request.deadline_s or current().cancelled:
                    break
                # the other load failed, or its block was transient: fetch it here
                again = self._claim_and_fetch(request, index, index + 1, sources)
                if not again.awaited:
                    run.blocks[offset], run.outcomes[offset] = again.blocks[0], again.outcomes[0]
                    break

    def _await_one(self, request: BlockRequest, key: BlockKey) -> tuple[Block | None, bool]:
        """Wait for a block that another load or store brings. Returns it, and whether its volume is stalled.

        While another load brings the block, the bytes that this node receives show progress. Which of them are that load's is not
        known.
        """
        until_s = self._clock.now_s()  # the first attempt does not wait: a window has many blocks
        received = self._counters.get(transport_metrics.PEER_BYTES_RECEIVED)
        while (block := self._table.await_resident(request.namespace, key, until_s)) is None:
            (durable,) = self._table.find(request.namespace, (key,))
            if durable is not None and durable.nvme_volume is not None and durable.nvme_volume.guard.stalled:
                return None, True
            if self._table.is_loading(key):
                before, received = received, self._counters.get(transport_metrics.PEER_BYTES_RECEIVED)
                add_received_bytes(received - before)
            now_s = self._clock.now_s()
            if now_s < until_s or now_s >= request.deadline_s or current().cancelled:
                return None, False
            until_s = min(request.deadline_s, now_s + AWAIT_POLL_S)
        return block, False

    # ---- sources
    def _reserve(self, request: BlockRequest, count: int) -> list[Slot] | None:
        if self._clock.now_s() >= request.deadline_s or current().cancelled:
            return None
        return self._table.reserve(request.namespace.shape, count, request.deadline_s, request.namespace)

    def _read_volumes(self, request: BlockRequest, claim: LoadClaim, run: LoadedRun, reader_volume: NodeVolume | None) -> None:
        """Read claimed durable blocks into new slots and verify them; those on the volume ``reader_volume`` in this thread."""
        todo = list(claim.durable.items())
        stalled = [node_volume for node_volume in self._table.node_volumes if node_volume.guard.stalled]
        if stalled:  # their blocks get no slots
            self._mark_unavailable(run, [offset for offset, block in todo if block.nvme_volume in stalled])
            todo = [(offset, block) for offset, block in todo if block.nvme_volume not in stalled]
            if not todo:
                return
        slots = self._reserve(request, len(todo))
        if slots is None:
            for offset, _ in todo:
                run.outcomes[offset] = Outcome.NO_SPACE
            return
        by_volume: dict[int, list[_VolumeRead]] = {}
        for (offset, block), slot in zip(todo, slots, strict=True):
            by_volume.setdefault(id(block.nvme_volume), []).append((offset, block, slot))
        waiting = deque(by_volume.values())
        try:
            while waiting:
                reads = waiting.popleft()
                node_volume = reads[0][1].nvme_volume
                assert node_volume is not None
                self._read_one_volume(request, run, node_volume, reads, in_this_thread=node_volume is reader_volume)
        except BaseException:
            self._table.unreserve([slot for reads in waiting for _, _, slot in reads])
            raise

    def _read_one_volume(
        self,
        request: BlockRequest,
        run: LoadedRun,
        node_volume: NodeVolume,
        reads: Sequence[_VolumeRead],
        *,
        in_this_thread: bool,
    ) -> None:
        """Read blocks of one volume into their slots, and verify them. Slots of blocks that are not read are given back."""
        table, block_bytes = self._table, request.namespace.shape.block_bytes
        items = []
        for _, block, slot in reads:
            assert block.nvme is not None  # pinned: it cannot leave
            items.append((block.nvme, block.record(), table.dram.view(slot, block_bytes)))
        read = partial(node_volume.volume.read_with_checksums, items)
        try:
            with tracing.span("volume.read", {"volume": node_volume.volume_id, "blocks": len(items)} if tracing.on() else None):
                if in_this_thread:
                    answers = node_volume.guard.timed(read)
                else:
                    free = partial(self._free_late, [slot for _, _, slot in reads])
                    answers = node_volume.guard.read(read, free, request.deadline_s)
        except VolumeStalled:
            self._mark_unavailable(run, [offset for offset, _, _ in reads])
            return
        except (OSError, KVStoreError) as error:
            limited.warning("volume read failed: %s (blocks=%d, error=%s)", node_volume.volume_id, len(items), error)
            answers = [(Outcome.UNAVAILABLE, b"")] * len(items)
        except BaseException:  # a bug; the read has ended
            table.unreserve([slot for _, _, slot in reads])
            raise
        for (offset, block, slot), (outcome, checksums), (nvme_slot, _, _) in zip(reads, answers, items, strict=True):
            run.outcomes[offset] = outcome
            if outcome is Outcome.HIT:
                table.finish_promotion(block, slot, checksums)
                run.blocks[offset] = block
                continue
            self._counters.add(node_metrics.NVME_READ_FAILED_BLOCKS[outcome.name.lower()])
            log.warning(
                "block not read: %s (volume=%s, outcome=%s)", block.key.hex(), node_volume.volume_id, outcome.name.lower()
            )
            table.unreserve((slot,))
            if outcome is Outcome.CORRUPT:
                quarantine(table, node_volume, block, nvme_slot, self._counters)

    def _mark_unavailable(self, run: LoadedRun, offsets: Sequence[int]) -> None:
        """Answer UNAVAILABLE for blocks of a stalled volume: the client reads them from another node, or misses them."""
        self._counters.add(volumes_metrics.VOLUME_STALL_REFUSED_BLOCKS, len(offsets))
        for offset in offsets:
            run.outcomes[offset] = Outcome.UNAVAILABLE

    def _free_late(self, slots: Sequence[Slot], _: BaseException | None) -> None:
        """Free the slots of a read that its load abandoned. The read has ended, so the kernel no longer writes to them."""
        self._table.unreserve(slots)

    def _fetch_absent(self, request: BlockRequest, claim: LoadClaim, run: LoadedRun, sources: tuple[SourceRange, ...]) -> None:
        """Fetch claimed blocks that this node does not hold, from the first place that delivers each.

        1. Mounted volumes: they use this node's storage link alone. The catalogs of those that a source names are read again.
        2. The sources, which are other nodes.
        3. The other mounted volumes once more, after their catalogs were read again.
        """
        missing = list(claim.claimed_absent)
        run.tier = Tier.DRAM if sources and not claim.durable else run.tier
        named = {source.volume_id for source in sources}
        for mount in self._mounts.all:
            missing = self._read_mount(request, missing, run, mount, refresh=mount.volume_id in named)
        for source in sources:
            if not missing:
                break
            slots = self._reserve(request, len(missing))
            if slots is None:
                for offset in missing:
                    run.outcomes[offset] = Outcome.NO_SPACE
                break
            missing = self._read_peer(request, missing, slots, run, source)
        for mount in self._mounts.all:
            if mount.volume_id not in named:
                missing = self._read_mount(request, missing, run, mount, refresh=True)

    def _read_mount(self, request: BlockRequest, missing: list[int], run: LoadedRun, mount: Mount, *, refresh: bool) -> list[int]:
        """Read missing blocks from a mounted volume. Returns the blocks that it does not hold."""
        if not missing:
            return missing
        keys = [request.chain.key(run.first + offset) for offset in missing]
        loaded = self._mount_reader.read(mount, request.namespace, keys, request.deadline_s, refresh=refresh)
        still_missing: list[int] = []
        for offset, block in zip(missing, loaded, strict=True):
            if block is None:
                still_missing.append(offset)
                continue
            run.blocks[offset], run.outcomes[offset] = block, Outcome.HIT
            run.tier, run.node, run.mounted = Tier.NVME, self.node_id, True
        return still_missing

    def _read_peer(
        self, request: BlockRequest, missing: list[int], slots: Sequence[Slot], run: LoadedRun, source: SourceRange
    ) -> list[int]:
        """Read missing blocks from a peer into reserved slots. Returns the blocks that it did not deliver."""
        table, shape = self._table, request.namespace.shape
        destination = ScatteredBlocks([table.dram.view(slot, shape.block_bytes) for slot in slots], shape)
        keys = [request.chain.key(run.first + offset) for offset in missing]
        read = ReadRequest(request.namespace.namespace_id, keys, 0, shape.layers, 0, request.deadline_s)
        control = ReadControl()
        try:
            peer = self._peers.peer(source.peer, request.namespace)  # may wait for the metadata server, not for that node
            with (
                tracing.span("peer.read", {"peer": source.peer.node_id, "blocks": len(keys)} if tracing.on() else None),
                current().on_cancel(control.cancel),
                waiting_for(source.peer.node_id, control) as answered,
            ):
                answer = peer.read(read, destination, control=control)
                answered(answer.outcomes)
        except KVStoreError as error:
            self._counters.add(node_metrics.PEER_FETCH_FAILED)
            log.warning("fetch failed: node %s (blocks=%d, error=%s)", source.peer.node_id, len(missing), error)
            if isinstance(error, LateBytes):  # the slots stay reserved until this process ends
                self._counters.add(node_metrics.ARENA_SLOTS_LOST, len(slots))
            else:
                table.unreserve(slots)
            for offset in missing:
                run.outcomes[offset] = Outcome.UNAVAILABLE
            return missing
        still_missing: list[int] = []
        checksums = answer.checksums
        for number, offset in enumerate(missing):
            run.outcomes[offset] = outcome = answer.outcomes[number]
            if outcome is not Outcome.HIT or checksums is None:
                table.unreserve((slots[number],))
                still_missing.append(offset)
                continue
            block = request.new_block(run.first + offset, checksums[number].astype("<u8", copy=False).tobytes())
            run.blocks[offset] = table.insert_fetched(block, slots[number])
            run.tier, run.node, run.mounted = answer.tiers[number], source.peer.node_id, False
        self._counters.add(node_metrics.PEER_FETCHED_BLOCKS, len(missing) - len(still_missing))
        return still_missing


def _next_completed(in_flight: Sequence[_InFlight]) -> int:
    """Wait until a window has ended or its volume is stalled, and return its index: the first, if that is not slow.

    A cancellation of the scope cancels windows that have not begun.
    """
    futures = [one.future for one in in_flight]

    def cancel() -> None:
        for future in futures:
            future.cancel()

    with current().on_cancel(cancel):
        if not futures[0].done() and not wait_for(futures[:1], PATIENCE_S).done:
            while not wait_for(futures, STALL_POLL_S, FIRST_COMPLETED).done:
                for at, one in enumerate(in_flight):
                    if one.stalled or one.future.cancelled():  # a pool that shuts down cancels without waking ``wait_for``
                        return at
    return next(at for at, future in enumerate(futures) if future.done())


def _is_ready(future: Future[LoadedRun]) -> bool:
    """Return whether a window has ended well. ``exception()`` of a cancelled future would raise."""
    return future.done() and not future.cancelled() and future.exception() is None
