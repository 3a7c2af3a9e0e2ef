"""Loads in layer groups: the first layers of all blocks come first, so that the engine may compute while storage is still read.

A staged load takes room for all its blocks at once, in the prefill buffer, and fills them group by group. While they arrive,
blocks are not in the table: nobody finds half a block by its key. Two may use what is there already: the engine on this host,
which is told offsets and layers as they come, and, through the data plane, the engine of another host on whose behalf this
node reads (the decode path, and relays). A block whose layers have all arrived is adopted by the table like any fetched block.

A slot lives by its pins: the load itself holds one until it ends, each part handed out holds another. So bytes that arrive late,
after the caller has gone, land in memory that is still theirs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import ScatteredBlocks
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, NodeId, Outcome, Tier
from kvstore.node.block import Block
from kvstore.node.buffers import StagingBuffer
from kvstore.node.domain import Domain
from kvstore.node.loader import Loader, Part, Source
from kvstore.node.peers import Peers
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.contract import Slot
from kvstore.transport.contract import Checksums, ReadRequest

log = logging.getLogger(__name__)

READS_IN_FLIGHT = 2
"""Of one load: the next read is asked for while this one still comes."""


@dataclass(slots=True)
class _Arrival:
    """One block on its way: layers below ``ready`` are in its slot, their checksums in ``sums``."""

    block: Block
    sums: npt.NDArray[np.uint64]
    first: int
    """Layers below were not asked for: they are not there."""
    ready: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One read: layers ``[first_layer, first_layer + layer_count)`` of some positions, from one source."""

    positions: Sequence[int]
    first_layer: int
    layer_count: int
    source: Source


class Stager:
    """Serves loads in layer groups. Thread-safe; ``load`` may be driven from any thread.

    Args:
        node_id: this node.
        table: its blocks.
        peers: other nodes.
        loader: for whatever has no layers to wait for (DRAM, own NVMe, blocks that others bring in).
        buffer: admission.
        counters: events.
        clock: time.
        window_bytes: the most that one read asks for: progress is told in such steps.
        threads: reads under way at once, over all loads.
    """

    def __init__(
        self,
        node_id: NodeId,
        table: BlockTable,
        peers: Peers,
        loader: Loader,
        buffer: StagingBuffer,
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
        self._buffer = buffer
        self._counters = counters
        self._clock = clock
        self._window_bytes = window_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-stage")
        self._lock = threading.Lock()
        self._arriving: dict[BlockKey, _Arrival] = {}

    def close(self) -> None:
        """Waits for reads under way (bounded by their deadlines)."""
        self._pool.shutdown(cancel_futures=True)

    # ---------------------------------------------------------------- for the data plane
    def ready(
        self, domain: Domain, keys: Sequence[BlockKey], first_layer: int, layer_count: int
    ) -> tuple[list[Block], Checksums] | None:
        """Blocks on their way that have all of layers ``[first_layer, first_layer + layer_count)``, pinned; and their checksums.

        None where that is not so of every key: then the blocks are in the table, or nowhere.
        """
        with self._lock:
            found: list[_Arrival] = []
            for key in keys:
                one = self._arriving.get(key)
                if (
                    one is None
                    or one.block.domain is not domain
                    or first_layer < one.first
                    or first_layer + layer_count > one.ready
                ):
                    return None
                found.append(one)
            if not found:
                return None
            blocks = [one.block for one in found]
            self._table.pin_again(blocks)  # within the lock: the load's own pin is still there
            return blocks, np.stack([one.sums for one in found])

    # ---------------------------------------------------------------- loads
    def load(
        self,
        domain: Domain,
        keys: Sequence[BlockKey],
        deadline_s: float,
        *,
        parent: BlockKey | None,
        depth: int,
        sources: Sequence[Source],
        layer_group: int,
        first_layer: int,
    ) -> Iterator[Part]:
        """Yields parts until every wanted layer of every key is answered. Pins in a yielded part are the caller's to give back.

        Args:
            domain: whose blocks.
            keys: consecutive keys of a chain.
            deadline_s: when to stop.
            parent: key before the first.
            depth: position of the first.
            sources: who is said to hold what.
            layer_group: layers a group, at least 1.
            first_layer: layers below are not wanted.
        """
        staged, rest = self._split(domain, keys, sources)
        for start, count in rest:
            moved = [replace(one, start=one.start - start) for one in sources]
            place = (keys[start - 1] if start else parent, depth + start)
            for part in self._loader.load(
                domain, keys[start : start + count], deadline_s, parent=place[0], depth=place[1], sources=moved
            ):
                part.first += start
                yield part
        if staged:
            yield from self._stage(_Chain(domain, keys, parent, depth, deadline_s), staged, sources, layer_group, first_layer)

    def _split(
        self, domain: Domain, keys: Sequence[BlockKey], sources: Sequence[Source]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Positions to stage, and the rest as (start, count): what is here already, or is said to be nowhere else."""
        here = self._table.held(domain, keys)
        offered = np.zeros(len(keys), bool)
        for source in sources:
            if self._loader.reads_directly(source):
                continue  # whole slots, without a peer: not layer by layer
            offered[max(0, source.start) : max(0, source.start + source.count)] = True
        stage = offered & ~np.array(here, bool)
        rest: list[tuple[int, int]] = []
        for position in np.flatnonzero(~stage).tolist():
            if rest and sum(rest[-1]) == position:
                rest[-1] = (rest[-1][0], rest[-1][1] + 1)
            else:
                rest.append((position, 1))
        return np.flatnonzero(stage).tolist(), rest

    def _stage(
        self, chain: _Chain, positions: Sequence[int], sources: Sequence[Source], layer_group: int, first_layer: int
    ) -> Iterator[Part]:
        table, shape = self._table, chain.domain.shape
        size = len(positions) * shape.block_bytes
        with self._buffer.room(size, chain.deadline_s) as admitted:
            slots = table.reserve(shape, len(positions), chain.deadline_s) if admitted else None
            if slots is None:
                yield from self._answers(positions, Outcome.NO_ROOM)
                return
            claim = table.claim(chain.domain, [chain.keys[position] for position in positions])
            mine = [positions[index] for index in claim.claimed_absent]
            others = sorted(set(positions) - set(mine))  # they came while we waited, or somebody else brings them in now
            table.unclaim([block.key for block in claim.durable.values()], claim.durable.values())
            table.unpin(claim.resident.values())
            table.unreserve(slots[len(mine) :])
            arrivals = self._begin(chain, mine, slots[: len(mine)], first_layer)
            try:
                yield from self._fill(chain, arrivals, sources, layer_group, first_layer)
            finally:
                self._end(arrivals)
        for position in others:
            for part in self._loader.load(chain.domain, [chain.keys[position]], chain.deadline_s):
                part.first += position
                yield part

    def _begin(self, chain: _Chain, mine: Sequence[int], slots: Sequence[Slot], first_layer: int) -> dict[int, _Arrival]:
        arrivals: dict[int, _Arrival] = {}
        with self._lock:
            for position, slot in zip(mine, slots, strict=True):
                key = chain.keys[position]
                parent = chain.keys[position - 1] if position else chain.parent
                block = self._table.arriving(Block(chain.domain, key, parent, chain.depth + position, b""), slot)
                arrival = _Arrival(block, np.zeros(chain.domain.shape.layers, np.uint64), first_layer, first_layer)
                arrivals[position] = self._arriving[key] = arrival
        return arrivals

    def _end(self, arrivals: dict[int, _Arrival]) -> None:
        """What came whole stays; of the rest the claims are given up and, with the last pin, the slots."""
        with self._lock:
            for one in arrivals.values():
                if self._arriving.get(one.block.key) is one:
                    del self._arriving[one.block.key]
        self._table.unclaim([one.block.key for one in arrivals.values() if one.block.arriving], ())
        self._table.unpin([one.block for one in arrivals.values()])

    def _fill(
        self, chain: _Chain, arrivals: dict[int, _Arrival], sources: Sequence[Source], layer_group: int, first_layer: int
    ) -> Iterator[Part]:
        """Reads group after group, a few reads ahead, and answers them in order."""
        steps = deque(self._steps(chain, sorted(arrivals), sources, layer_group, first_layer))
        in_flight: deque[tuple[_Step, Future[Part]]] = deque()
        lost: set[int] = set()
        try:
            while steps or in_flight:
                while steps and len(in_flight) < READS_IN_FLIGHT:
                    step = steps.popleft()
                    left = [position for position in step.positions if position not in lost]
                    if left:
                        step = _Step(left, step.first_layer, step.layer_count, step.source)
                        in_flight.append((step, self._pool.submit(self._read, chain, arrivals, step)))
                if not in_flight:
                    break
                step, future = in_flight[0]
                wait((future,))
                in_flight.popleft()
                for part in self._answer(step, future.result(), arrivals, chain.domain.shape.layers):
                    lost.update(part.first + at for at, outcome in enumerate(part.outcomes) if outcome is not Outcome.HIT)
                    yield part
        finally:
            for _, future in in_flight:  # the caller stopped early, but these still write into our slots
                if not future.cancel():
                    wait((future,))

    def _steps(
        self, chain: _Chain, mine: Sequence[int], sources: Sequence[Source], layer_group: int, first_layer: int
    ) -> Iterator[_Step]:
        """All reads of a load, in order: by layer group, then by source, then in windows."""
        shape = chain.domain.shape
        by_source: list[tuple[Source, list[int]]] = []
        taken: set[int] = set()
        for source in sources:
            chosen = [p for p in mine if source.start <= p < source.start + source.count and p not in taken]
            taken.update(chosen)
            if chosen:
                by_source.append((source, chosen))
        for layer in range(first_layer, shape.layers, layer_group):
            layers = min(layer_group, shape.layers - layer)
            most = max(1, self._window_bytes // (layers * shape.layer_block_bytes))
            for source, chosen in by_source:
                for at in range(0, len(chosen), most):
                    yield _Step(chosen[at : at + most], layer, layers, source)

    def _read(self, chain: _Chain, arrivals: dict[int, _Arrival], step: _Step) -> Part:
        """One read, in a pool thread. The part has one outcome a position of the step (``first`` has no meaning yet)."""
        shape = chain.domain.shape
        blocks = [arrivals[position].block for position in step.positions]
        view = self._table.dram.view
        destination = ScatteredBlocks([view(block.dram, shape.block_bytes) for block in blocks if block.dram is not None], shape)
        request = ReadRequest(
            chain.domain.namespace,
            [block.key for block in blocks],
            step.first_layer,
            step.layer_count,
            0,
            chain.deadline_s,
        )
        part = Part(0, [Outcome.UNAVAILABLE] * len(blocks), list(blocks), Tier.NVME, step.source.peer.node_id)
        try:
            result = self._peers.peer(step.source.peer, chain.domain).read(request, destination)
        except KVStoreError as error:
            self._counters.add("staged_reads_failed_total")
            log.warning("cannot stage %d blocks from %s: %s", len(blocks), step.source.peer.node_id, error)
            return part
        part.outcomes = result.outcomes
        part.tier = result.tiers[0]
        part.sums = result.checksums
        layers = slice(step.first_layer, step.first_layer + step.layer_count)
        with self._lock:
            for index, position in enumerate(step.positions):
                if result.checksums is None or result.outcomes[index] is not Outcome.HIT:
                    continue
                arrivals[position].sums[layers] = result.checksums[index]
                arrivals[position].ready = layers.stop
        self._counters.add("staged_bytes_total", result.bytes_received)
        return part

    def _answer(self, step: _Step, read: Part, arrivals: dict[int, _Arrival], layers: int) -> Iterator[Part]:
        """Adopts what is whole, and cuts a step's answer into parts of consecutive positions, each with pins of its own."""
        whole = step.first_layer + step.layer_count == layers
        for index, position in enumerate(step.positions):
            one = arrivals[position]
            if whole and read.outcomes[index] is Outcome.HIT and one.first == 0:
                one.block.checksums = one.sums.astype("<u8", copy=False).tobytes()
                self._table.arrived(one.block)
        start = 0
        for at in range(1, len(step.positions) + 1):
            if at < len(step.positions) and step.positions[at] == step.positions[at - 1] + 1:
                continue
            outcomes = list(read.outcomes[start:at])
            blocks = [
                block if outcome is Outcome.HIT else None for block, outcome in zip(read.blocks[start:at], outcomes, strict=True)
            ]
            sums = None if read.sums is None else read.sums[start:at][[outcome is Outcome.HIT for outcome in outcomes]]
            part = Part(step.positions[start], outcomes, blocks, read.tier, read.node, step.first_layer, step.layer_count, sums)
            self._table.pin_again(part.pinned())
            yield part
            start = at

    def _answers(self, positions: Sequence[int], outcome: Outcome) -> Iterator[Part]:
        for position in positions:
            yield Part(position, [outcome], [None], Tier.NVME, self._node_id)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The keys of one load and their place in their chain."""

    domain: Domain
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    depth: int
    deadline_s: float
