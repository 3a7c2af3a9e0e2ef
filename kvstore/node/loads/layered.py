"""Loads in layer groups: the first layers of all blocks are read first, so that the engine computes while later ones are read.

Theory of operation.

1. A load is admitted to the prefill buffer with all its blocks, and takes all their slots at once. Then it reads group by group.
2. While a block is *filling* it is not in the table: no lookup by key finds an incomplete block. Two readers may use the layers
   that are ready: the engine on this host, which receives offsets and layers in runs; and, through the data plane, the engine of
   another host for which this node reads (decode path, relay). The table inserts a block when its last layer is ready.
3. Pins keep a slot alive. The load holds one until it ends, and each run that it returned holds another. So bytes that arrive
   after the caller has gone are written to slots that are still reserved, and a returned run is valid as long as its lease, even
   if the block never becomes complete.
4. Reads end in any order, and each may fail. A layer is ready only if all requested layers below it are. So a block with a hole
   is never returned, never served to others and never inserted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import ScatteredBlocks
from kvstore.core.cancel_scope import current
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, NodeId, Outcome, Tier
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.loads.loader import Loader
from kvstore.node.loads.peers import Peers
from kvstore.node.loads.runs import BlockRequest, LoadedRun, Runs, SourceRange
from kvstore.node.loads.timings import waiting_for
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.process.threads.submission import submit
from kvstore.rpc.auth.interceptor import tenant
from kvstore.tiers.contract import Slot
from kvstore.transport.contract import Checksums, LateBytes, ReadControl, ReadRequest

log = logging.getLogger(__name__)

READS_IN_FLIGHT = 2
"""Reads of one load at once: the next one is requested while the current one arrives."""
MAX_ATTEMPTS = 3
"""How often a block that another load was to bring, and did not, is requested again."""


class _Fill:
    """One block that is being filled. Guarded by the loader's lock.

    Args:
        block: the block, pinned in its slot.
        first: the first requested layer.
        sources: peers that hold the block, best first.

    Attributes:
        tier: the slowest tier that a layer came from. A peer that has just read a block from NVMe serves later layers from DRAM.
    """

    __slots__ = ("_sources", "_written", "block", "checksums", "first", "ready", "tier")

    def __init__(self, block: Block, first: int, sources: Sequence[SourceRange]) -> None:
        layers = block.namespace.shape.layers
        self.block = block
        self.first = first
        self.tier = Tier.DRAM
        self.ready = first
        """Layers ``[first, ready)`` are in the slot."""
        self.checksums: npt.NDArray[np.uint64] = np.zeros(layers, np.uint64)
        self._written = np.zeros(layers, bool)
        self._sources = deque(sources)

    def written(self, layers: slice, checksums: npt.NDArray[np.uint64], tier: Tier) -> None:
        """Note that some layers are in the slot, from a tier of the peer."""
        self.tier = max(self.tier, tier)
        self.checksums[layers] = checksums
        self._written[layers] = True
        missing = np.flatnonzero(~self._written[self.ready :])
        self.ready = self.ready + int(missing[0]) if len(missing) else len(self._written)

    @property
    def source(self) -> SourceRange | None:
        """The source to read from; None: all have failed."""
        return self._sources[0] if self._sources else None

    def failed(self, source: SourceRange) -> None:
        """Note that a source did not deliver: the next one serves the layers that are missing."""
        if self._sources and self._sources[0] == source:
            self._sources.popleft()


@dataclass(frozen=True, slots=True)
class _Step:
    """One read: layers ``[first_layer, first_layer + layer_count)`` of some blocks, from one source."""

    indices: Sequence[int]
    first_layer: int
    layer_count: int
    source: SourceRange


@dataclass(slots=True)
class _LayeredLoad:
    """One load in layer groups."""

    request: BlockRequest
    fills: dict[int, _Fill]
    """Blocks that this load fills, by their index in the request."""
    lost: set[int] = field(default_factory=set)
    """Blocks that have a final outcome because a layer of them could not be read."""
    unsafe: set[int] = field(default_factory=set)
    """Blocks in which late bytes of a failed read may arrive. They are not read again."""

    def by_source(self, indices: Sequence[int]) -> list[tuple[SourceRange, list[int]]]:
        """Group blocks by the source to read them from. Blocks without a source are left out."""
        found: dict[SourceRange, list[int]] = {}
        for index in indices:
            source = self.fills[index].source
            if source is not None:
                found.setdefault(source, []).append(index)
        return list(found.items())


class LayeredLoader:
    """Serves loads in layer groups. Thread-safe; any thread may iterate a load.

    Args:
        node_id: this node.
        table: its blocks.
        peers: other nodes.
        loader: loads whole blocks: from DRAM and own volumes, and those that another load brings.
        budget: admission.
        counters: metrics.
        clock: time.
        window_bytes: maximum size of one read.
        threads: reads at once, of all loads.
    """

    def __init__(
        self,
        node_id: NodeId,
        table: BlockTable,
        peers: Peers,
        loader: Loader,
        budget: BufferBudget,
        counters: Counters,
        clock: Clock,
        *,
        window_bytes: int,
        threads: int,
    ) -> None:
        self._node_id = node_id
        self._table = table
        self._peers = peers
        self._loader = loader
        self._budget = budget
        self._counters = counters
        self._clock = clock
        self._window_bytes = window_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-layered")
        self._lock = threading.Lock()
        self._filling: dict[BlockKey, _Fill] = {}
        self._leased: dict[BlockKey, _Fill] = {}
        """Incomplete blocks whose loads have ended. Leases may still pin them."""

    def close(self) -> None:
        """Wait for reads in flight. Their deadlines bound them."""
        self._pool.shutdown(cancel_futures=True)

    # ---------------------------------------------------------------- for the data plane
    def read_ready(
        self, namespace: NodeNamespace, keys: Sequence[BlockKey], first_layer: int, layer_count: int
    ) -> tuple[list[Block], Checksums] | None:
        """Pin filling blocks if layers ``[first_layer, first_layer + layer_count)`` of all are ready.

        Returns:
            The blocks and their checksums; None if the layers of some block are not ready: it is in the table, or not here.
        """
        with self._lock:
            fills: list[_Fill] = []
            for key in keys:
                fill = self._filling.get(key) or self._leased.get(key)
                if (
                    fill is None
                    or fill.block.namespace is not namespace
                    or first_layer < fill.first
                    or first_layer + layer_count > fill.ready
                ):
                    return None
                fills.append(fill)
            if not fills:
                return None
            blocks = [fill.block for fill in fills]
            if not self._table.pin_again(blocks):
                return None
            return blocks, np.stack([fill.checksums for fill in fills])

    # ---------------------------------------------------------------- loads
    def load(self, request: BlockRequest) -> Runs:
        """Load blocks layer group by layer group, as the request says."""
        layered, stretches = self._split(request)
        if len(layered) * request.namespace.shape.block_bytes > self._budget.limit_bytes(tenant()):
            self._counters.add(node_metrics.STAGED_LOADS_TOO_LARGE)
            log.info("load not layer-wise: larger than the prefill buffer or the tenant's part of it (blocks=%d)", len(layered))
            layered, stretches = [], [(0, len(request.chain))]
        for start, stop in stretches:
            with closing(self._loader.load(request.part(start, stop))) as runs:
                for run in runs:
                    run.first += start
                    yield run
        if layered:
            yield from self._load_layered(request, layered)

    def _split(self, request: BlockRequest) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the blocks to load in layer groups, and the rest as (start, stop): held here, or without a source."""
        held = np.array([block is not None for block in self._table.find(request.namespace, request.chain.keys)], bool)
        offered = np.zeros(len(request.chain), bool)
        for source in request.sources:
            if not self._loader.is_mounted(source):  # a mounted volume is read in whole slots
                offered[max(0, source.start) : max(0, source.start + source.count)] = True
        layered = offered & ~held
        stretches: list[tuple[int, int]] = []
        for index in np.flatnonzero(~layered).tolist():
            if stretches and stretches[-1][1] == index:
                stretches[-1] = (stretches[-1][0], index + 1)
            else:
                stretches.append((index, index + 1))
        return np.flatnonzero(layered).tolist(), stretches

    def _load_layered(self, request: BlockRequest, indices: Sequence[int]) -> Runs:
        table, shape = self._table, request.namespace.shape
        size = len(indices) * shape.block_bytes
        with self._budget.admission(size, request.deadline_s, tenant()) as admitted:
            slots = table.reserve(shape, len(indices), request.deadline_s, request.namespace) if admitted else None
            if slots is None:
                yield from self._failed_runs(indices, Outcome.NO_SPACE)
                return
            claim = table.claim(request.namespace, [request.chain.key(index) for index in indices])
            mine = [indices[number] for number in claim.claimed_absent]
            others = sorted(set(indices) - set(mine))  # loaded while this load waited, or another load brings them now
            table.unclaim([block.key for block in claim.durable.values()], claim.durable.values())
            table.unpin(claim.resident.values())
            table.unreserve(slots[len(mine) :])
            load = self._begin_fills(request, mine, slots[: len(mine)])
            try:
                with self._loader.reads:  # reads ahead wait
                    yield from self._fill(load)
            finally:
                self._end_fills(load)
        sources = request.sources_by_block() if others else []
        for index in others:
            yield self._load_whole(request, index, sources[index])

    def _load_whole(self, request: BlockRequest, index: int, sources: Sequence[SourceRange]) -> LoadedRun:
        """Wait for a block that another load brings. If that load gives up, load the block here."""
        alone = [replace(source, start=0, count=1) for source in sources]
        single = replace(request, chain=request.chain.part(index, index + 1), sources=alone)
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            cancelled = LoadedRun(0, [Outcome.UNAVAILABLE], [None], Tier.NVME, self._node_id)
            run = next(self._loader.load(single), cancelled)
            if run.outcomes[0] is not Outcome.TIMEOUT or self._clock.now_s() >= request.deadline_s or not attempts_left:
                break
        run.first += index
        return run

    def _begin_fills(self, request: BlockRequest, indices: Sequence[int], slots: Sequence[Slot]) -> _LayeredLoad:
        load = _LayeredLoad(request, {})
        sources = request.sources_by_block()
        with self._lock:
            for index, slot in zip(indices, slots, strict=True):
                block = self._table.begin_fill(request.new_block(index), slot)
                fill = _Fill(block, request.first_layer, sources[index])
                load.fills[index] = self._filling[block.key] = fill
        return load

    def _end_fills(self, load: _LayeredLoad) -> None:
        """Give up the claims on incomplete blocks. Their slots are freed with their last pins."""
        with self._lock:
            for fill in load.fills.values():
                if self._filling.get(fill.block.key) is fill:
                    del self._filling[fill.block.key]
                if fill.block.filling and fill.ready > fill.first:
                    self._leased[fill.block.key] = fill
        self._table.unclaim([fill.block.key for fill in load.fills.values() if fill.block.filling], ())
        self._table.unpin([fill.block for fill in load.fills.values()])
        with self._lock:
            for key in [key for key, fill in self._leased.items() if fill.block.dram is None]:
                del self._leased[key]

    # ---------------------------------------------------------------- reads
    def _fill(self, load: _LayeredLoad) -> Runs:
        """Read group after group, a few reads ahead, and return the runs in order."""
        steps = deque(self._steps(load))
        in_flight: deque[tuple[_Step, Future[LoadedRun]]] = deque()
        try:
            while steps or in_flight:
                while steps and len(in_flight) < READS_IN_FLIGHT:
                    planned = steps.popleft()
                    for source, indices in load.by_source([index for index in planned.indices if index not in load.lost]):
                        step = replace(planned, indices=indices, source=source)
                        in_flight.append((step, self._submit(load, step)))
                if not in_flight:
                    break
                step, future = in_flight[0]
                read = current().result(future)
                in_flight.popleft()
                for final_step, final_read in self._retried(load, step, read):
                    for run in self._runs_of(load, final_step, final_read):
                        load.lost.update(run.first + at for at, outcome in enumerate(run.outcomes) if outcome is not Outcome.HIT)
                        yield run
        except CancelledError:
            return  # the load ended before a read began
        finally:
            for _, future in in_flight:  # the caller stopped early, but these reads still write to the slots
                if not future.cancel():
                    wait((future,))

    def _steps(self, load: _LayeredLoad) -> Iterator[_Step]:
        """Return all reads of a load: by layer group, then by source, then in windows."""
        request, shape = load.request, load.request.namespace.shape
        by_source = load.by_source(sorted(load.fills))
        layer_group = min(request.layer_group, shape.layers)
        for layer in range(request.first_layer, shape.layers, layer_group):
            layers = min(layer_group, shape.layers - layer)
            max_blocks = max(1, self._window_bytes // (layers * shape.layer_block_bytes))
            for source, indices in by_source:
                windows = -(-len(indices) // max_blocks)
                size = -(-len(indices) // windows)  # equal sizes: a small last read would not fill the link
                for at in range(0, len(indices), size):
                    yield _Step(indices[at : at + size], layer, layers, source)

    def _retried(self, load: _LayeredLoad, step: _Step, read: LoadedRun) -> Iterator[tuple[_Step, LoadedRun]]:
        """Read from further sources what a read did not deliver. Layers are returned in order, so this comes before its runs."""
        failed = [index for index, outcome in zip(step.indices, read.outcomes, strict=True) if outcome is not Outcome.HIT]
        with self._lock:
            for index in failed:
                load.fills[index].failed(step.source)
        in_time = self._clock.now_s() < load.request.deadline_s and not current().cancelled
        retries = load.by_source([index for index in failed if index not in load.unsafe]) if in_time else []
        if not retries:
            yield step, read
            return
        retried = {index for _, indices in retries for index in indices}
        kept = [number for number, index in enumerate(step.indices) if index not in retried]
        if kept:
            yield replace(step, indices=[step.indices[number] for number in kept]), _selected(read, kept)
        for source, indices in retries:
            self._counters.add(node_metrics.STAGED_BLOCKS_FROM_SECOND_SOURCE, len(indices))
            retry = replace(step, indices=indices, source=source)
            yield from self._retried(load, retry, current().result(self._submit(load, retry)))

    def _submit(self, load: _LayeredLoad, step: _Step) -> Future[LoadedRun]:
        return submit(self._pool, copy_context().run, self._read, load, step)

    def _read(self, load: _LayeredLoad, step: _Step) -> LoadedRun:
        """Do one read, in a pool thread. The run has one outcome per block of the step; its ``first`` is not set."""
        request, shape = load.request, load.request.namespace.shape
        fills = [load.fills[index] for index in step.indices]
        blocks = [fill.block for fill in fills]
        view = self._table.dram.view
        destination = ScatteredBlocks([view(block.dram, shape.block_bytes) for block in blocks if block.dram is not None], shape)
        keys = [block.key for block in blocks]
        read = ReadRequest(request.namespace.namespace_id, keys, step.first_layer, step.layer_count, 0, request.deadline_s)
        control = ReadControl()
        run = LoadedRun(0, [Outcome.UNAVAILABLE] * len(blocks), list(blocks), Tier.NVME, step.source.peer.node_id)
        try:
            peer = self._peers.peer(step.source.peer, request.namespace)  # may wait for the metadata server, not for that node
            with current().on_cancel(control.cancel), waiting_for(step.source.peer.node_id, control) as answered:
                answer = peer.read(read, destination, control=control)
                answered(answer.outcomes)
        except KVStoreError as error:
            self._counters.add(node_metrics.STAGED_READS_FAILED)
            log.warning("layer-wise read failed: node %s (blocks=%d, error=%s)", step.source.peer.node_id, len(blocks), error)
            if isinstance(error, LateBytes):
                self._table.pin_again(blocks)  # until this process ends, so that the slots are not used again
                self._counters.add(node_metrics.ARENA_SLOTS_LOST, len(blocks))
                with self._lock:
                    load.unsafe.update(step.indices)
            return run
        run.outcomes = answer.outcomes
        run.tier = answer.tiers[0]
        run.checksums = answer.checksums
        layers = slice(step.first_layer, step.first_layer + step.layer_count)
        with self._lock:
            for number, fill in enumerate(fills):
                if answer.checksums is not None and answer.outcomes[number] is Outcome.HIT:
                    fill.written(layers, answer.checksums[number], run.tier)
        self._counters.add(node_metrics.STAGED_BYTES, answer.bytes_received)
        return run

    def _runs_of(self, load: _LayeredLoad, step: _Step, read: LoadedRun) -> Iterator[LoadedRun]:
        """Insert complete blocks into the table, and cut a read into runs of consecutive blocks, each with its own pins.

        Blocks that lost an earlier layer have their outcome already: later layers of theirs are dropped.
        """
        kept = [number for number, index in enumerate(step.indices) if index not in load.lost]
        indices, read = [step.indices[number] for number in kept], _selected(read, kept)
        ready = step.first_layer + step.layer_count
        is_last = ready == load.request.namespace.shape.layers
        for number, index in enumerate(indices):
            fill = load.fills[index]
            if read.outcomes[number] is Outcome.HIT:
                assert fill.ready >= ready, "layers are returned in order"
            if is_last and read.outcomes[number] is Outcome.HIT and fill.first == 0:
                fill.block.checksums = fill.checksums.astype("<u8", copy=False).tobytes()
                self._table.finish_fill(fill.block)
        for start, stop in _consecutive(indices):
            outcomes = list(read.outcomes[start:stop])
            is_hit = [outcome is Outcome.HIT for outcome in outcomes]
            blocks = [block if hit else None for block, hit in zip(read.blocks[start:stop], is_hit, strict=True)]
            checksums = None if read.checksums is None else read.checksums[start:stop][is_hit]
            tier = max(load.fills[index].tier for index in indices[start:stop]) if any(is_hit) else read.tier
            run = LoadedRun(indices[start], outcomes, blocks, tier, read.node, step.first_layer, step.layer_count, checksums)
            self._table.pin_again(run.pinned())
            yield run

    def _failed_runs(self, indices: Sequence[int], outcome: Outcome) -> Iterator[LoadedRun]:
        for start, stop in _consecutive(indices):
            count = stop - start
            yield LoadedRun(indices[start], [outcome] * count, [None] * count, Tier.NVME, self._node_id)


def _consecutive(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return (start, stop) of each stretch of consecutive numbers."""
    start = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield start, at
            start = at


def _selected(read: LoadedRun, numbers: Sequence[int]) -> LoadedRun:
    """Return some blocks of a read. Its checksums have one row per block, hit or not."""
    return LoadedRun(
        read.first,
        [read.outcomes[number] for number in numbers],
        [read.blocks[number] for number in numbers],
        read.tier,
        read.node,
        checksums=None if read.checksums is None else read.checksums[list(numbers)],
    )
