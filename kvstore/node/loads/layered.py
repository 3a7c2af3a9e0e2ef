"""Loads in layer groups: the first layers of all blocks come first, so that the engine may compute while storage is still read.

A staged load takes room for all its blocks at once, in the prefill buffer, and fills them group by group. While they arrive,
blocks are not in the table: nobody finds half a block by its key. Two may use what is there already: the engine on this host,
which is told offsets and layers as they come, and, through the data plane, the engine of another host on whose behalf this
node reads (the decode path, and relays). A block whose layers have all arrived is adopted by the table like any fetched block.

A slot lives by its pins: the load itself holds one until it ends, each part handed out holds another. So bytes that arrive late,
after the caller has gone, land in memory that is still theirs; and what was told can be read for as long as its lease lasts,
also where the block never becomes whole here.

Reads may end in any order and fail one by one. A layer counts only when all wanted layers below it are there: so a block with a
hole is never told, never read by others, never adopted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvstore.core.buffers import ScatteredBlocks
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, NodeId, Outcome, Tier
from kvstore.node.base.cancellation import ending, over, result
from kvstore.node.loads.loader import Loader, Part, Source
from kvstore.node.loads.peer_waits import waiting_for
from kvstore.node.loads.peers import Peers
from kvstore.node.loads.staging_budget import StagingBudget
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.rpc.auth.interceptor import tenant
from kvstore.tiers.contract import Slot
from kvstore.transport.contract import Checksums, ReadControl, ReadRequest

log = logging.getLogger(__name__)

READS_IN_FLIGHT = 2
"""Of one load: the next read is asked for while this one still comes."""
TRIES_AT_OTHERS = 3
"""How often a block that another load was to bring, and did not, is asked for again."""


class _Arrival:
    """One block on its way. Guarded by the stager's lock.

    Args:
        block: the block, pinned in its slot.
        first: layers below were not asked for: they are not there.
        sources: who is said to have it, best first.
    """

    __slots__ = ("_have", "_sources", "block", "first", "ready", "sums")

    def __init__(self, block: Block, first: int, sources: Sequence[Source]) -> None:
        layers = block.namespace.shape.layers
        self.block = block
        self.first = first
        self.ready = first
        """Layers from ``first`` up to here are in the slot, without a hole."""
        self.sums: npt.NDArray[np.uint64] = np.zeros(layers, np.uint64)
        self._have = np.zeros(layers, bool)
        self._sources = deque(sources)

    def have(self, layers: slice, sums: npt.NDArray[np.uint64]) -> None:
        """Some layers are in the slot."""
        self.sums[layers] = sums
        self._have[layers] = True
        left = np.flatnonzero(~self._have[self.ready :])
        self.ready = self.ready + int(left[0]) if len(left) else len(self._have)

    @property
    def source(self) -> Source | None:
        """Whom to ask; None: nobody is left."""
        return self._sources[0] if self._sources else None

    def failed(self, source: Source) -> None:
        """A source did not deliver: the next is asked for whatever is missing."""
        if self._sources and self._sources[0] == source:
            self._sources.popleft()


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
        buffer: StagingBudget,
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
        self._left_over: dict[BlockKey, _Arrival] = {}  # their loads have ended, leases of theirs perhaps have not

    def close(self) -> None:
        """Waits for reads under way (bounded by their deadlines)."""
        self._pool.shutdown(cancel_futures=True)

    # ---------------------------------------------------------------- for the data plane
    def ready(
        self, namespace: NodeNamespace, keys: Sequence[BlockKey], first_layer: int, layer_count: int
    ) -> tuple[list[Block], Checksums] | None:
        """Blocks on their way that have all of layers ``[first_layer, first_layer + layer_count)``, pinned; and their checksums.

        None where that is not so of every key: then the blocks are in the table, or nowhere.
        """
        with self._lock:
            found: list[_Arrival] = []
            for key in keys:
                one = self._arriving.get(key) or self._left_over.get(key)
                if (
                    one is None
                    or one.block.namespace is not namespace
                    or first_layer < one.first
                    or first_layer + layer_count > one.ready
                ):
                    return None
                found.append(one)
            if not found:
                return None
            blocks = [one.block for one in found]
            if not self._table.pin_if_pinned(blocks):
                return None
            return blocks, np.stack([one.sums for one in found])

    # ---------------------------------------------------------------- loads
    def load(
        self,
        namespace: NodeNamespace,
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
            namespace: whose blocks.
            keys: consecutive keys of a chain.
            deadline_s: when to stop.
            parent: key before the first.
            depth: position of the first.
            sources: who is said to hold what.
            layer_group: layers a group, at least 1.
            first_layer: layers below are not wanted.
        """
        staged, rest = self._split(namespace, keys, sources)
        if len(staged) * namespace.shape.block_bytes > self._buffer.limit_bytes(tenant()):
            self._counters.add("staged_loads_too_large_total")
            log.info(
                "a load of %d blocks is larger than the prefill buffer, or its tenant's share of it: block by block instead of"
                " layer by layer",
                len(staged),
            )
            staged, rest = [], [(0, len(keys))]
        for start, count in rest:
            moved = [replace(one, start=one.start - start) for one in sources]
            place = (keys[start - 1] if start else parent, depth + start)
            for part in self._loader.load(
                namespace, keys[start : start + count], deadline_s, parent=place[0], depth=place[1], sources=moved
            ):
                part.first += start
                yield part
        if staged:
            yield from self._stage(_Chain(namespace, keys, parent, depth, deadline_s), staged, sources, layer_group, first_layer)

    def _split(
        self, namespace: NodeNamespace, keys: Sequence[BlockKey], sources: Sequence[Source]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Positions to stage, and the rest as (start, count): what is here already, or is said to be nowhere else."""
        here = self._table.held(namespace, keys)
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
        table, shape = self._table, chain.namespace.shape
        size = len(positions) * shape.block_bytes
        others: list[int] = []
        with self._buffer.admission(size, chain.deadline_s, tenant()) as admitted:
            slots = table.reserve(shape, len(positions), chain.deadline_s, chain.namespace) if admitted else None
            if slots is None:
                yield from self._answers(positions, Outcome.NO_ROOM)
                return
            claim = table.claim(chain.namespace, [chain.keys[position] for position in positions])
            mine = [positions[index] for index in claim.claimed_absent]
            others = sorted(set(positions) - set(mine))  # they came while we waited, or somebody else brings them in now
            table.unclaim([block.key for block in claim.durable.values()], claim.durable.values())
            table.unpin(claim.resident.values())
            table.unreserve(slots[len(mine) :])
            arrivals = self._begin(chain, mine, slots[: len(mine)], sources, first_layer)
            try:
                yield from self._fill(chain, arrivals, layer_group, first_layer)
            finally:
                self._end(arrivals)
        for position in others:
            yield self._from_others(chain, position, sources)

    def _from_others(self, chain: _Chain, position: int, sources: Sequence[Source]) -> Part:
        """A block that somebody else brings in; where they give it up, it is fetched here."""
        parent = chain.keys[position - 1] if position else chain.parent
        holding = [replace(one, start=0, count=1) for one in sources if one.start <= position < one.start + one.count]
        for left in reversed(range(TRIES_AT_OTHERS)):
            place = {"parent": parent, "depth": chain.depth + position, "sources": holding}
            parts = self._loader.load(chain.namespace, [chain.keys[position]], chain.deadline_s, **place)  # type: ignore[arg-type]
            part = next(parts, Part(0, [Outcome.UNAVAILABLE], [None], Tier.NVME, self._node_id))  # none: nobody wants it any more
            if part.outcomes[0] is not Outcome.TIMEOUT or self._clock.now_s() >= chain.deadline_s or not left:
                break
        part.first += position
        return part

    def _begin(
        self, chain: _Chain, mine: Sequence[int], slots: Sequence[Slot], sources: Sequence[Source], first_layer: int
    ) -> dict[int, _Arrival]:
        arrivals: dict[int, _Arrival] = {}
        holding: dict[int, list[Source]] = {position: [] for position in mine}
        for source in sources:
            for position in range(max(0, source.start), min(len(chain.keys), source.start + source.count)):
                if position in holding:
                    holding[position].append(source)
        with self._lock:
            for position, slot in zip(mine, slots, strict=True):
                key = chain.keys[position]
                parent = chain.keys[position - 1] if position else chain.parent
                block = self._table.begin_fill(Block(chain.namespace, key, parent, chain.depth + position, b""), slot)
                arrival = _Arrival(block, first_layer, holding[position])
                arrivals[position] = self._arriving[key] = arrival
        return arrivals

    def _end(self, arrivals: dict[int, _Arrival]) -> None:
        """What came whole stays; of the rest the claims are given up and, with the last pin, the slots."""
        with self._lock:
            for one in arrivals.values():
                if self._arriving.get(one.block.key) is one:
                    del self._arriving[one.block.key]
                if one.block.filling and one.ready > one.first:
                    self._left_over[one.block.key] = one
        self._table.unclaim([one.block.key for one in arrivals.values() if one.block.filling], ())
        self._table.unpin([one.block for one in arrivals.values()])
        with self._lock:
            for key in [key for key, one in self._left_over.items() if one.block.dram is None]:
                del self._left_over[key]

    def _fill(self, chain: _Chain, arrivals: dict[int, _Arrival], layer_group: int, first_layer: int) -> Iterator[Part]:
        """Reads group after group, a few reads ahead, and answers them in order."""
        steps = deque(self._steps(chain, arrivals, layer_group, first_layer))
        in_flight: deque[tuple[_Step, Future[Part]]] = deque()
        lost: set[int] = set()
        try:
            while steps or in_flight:
                while steps and len(in_flight) < READS_IN_FLIGHT:
                    step = steps.popleft()
                    for source, left in _by_source(arrivals, [at for at in step.positions if at not in lost]):
                        step = _Step(left, step.first_layer, step.layer_count, source)
                        in_flight.append((step, self._submit(chain, arrivals, step)))
                if not in_flight:
                    break
                step, future = in_flight[0]
                first = result(future)
                in_flight.popleft()
                for settled, read in self._settled(chain, arrivals, step, first):
                    for part in self._answer(settled, read, arrivals, chain.namespace.shape.layers, lost):
                        lost.update(part.first + at for at, outcome in enumerate(part.outcomes) if outcome is not Outcome.HIT)
                        yield part
        except CancelledError:
            return  # a read that had not begun, and nobody waits for it any more
        finally:
            for _, future in in_flight:  # the caller stopped early, but these still write into our slots
                if not future.cancel():
                    wait((future,))

    def _steps(self, chain: _Chain, arrivals: dict[int, _Arrival], layer_group: int, first_layer: int) -> Iterator[_Step]:
        """All reads of a load, in order: by layer group, then by source, then in windows."""
        shape = chain.namespace.shape
        by_source = _by_source(arrivals, sorted(arrivals))
        for layer in range(first_layer, shape.layers, layer_group):
            layers = min(layer_group, shape.layers - layer)
            most = max(1, self._window_bytes // (layers * shape.layer_block_bytes))
            for source, chosen in by_source:
                windows = -(-len(chosen) // most)
                size = -(-len(chosen) // windows)  # alike: a small rest would take the place of a read that fills the link
                for at in range(0, len(chosen), size):
                    yield _Step(chosen[at : at + size], layer, layers, source)

    def _settled(self, chain: _Chain, arrivals: dict[int, _Arrival], step: _Step, read: Part) -> Iterator[tuple[_Step, Part]]:
        """A read, and those of other sources for what its own did not bring: before it is answered, for layers come in order."""
        failed = [at for at, outcome in zip(step.positions, read.outcomes, strict=True) if outcome is not Outcome.HIT]
        with self._lock:
            for position in failed:
                arrivals[position].failed(step.source)
        again = _by_source(arrivals, failed) if self._clock.now_s() < chain.deadline_s and not over() else []
        if not again:
            yield step, read
            return
        elsewhere = {position for _, positions in again for position in positions}
        kept = [index for index, position in enumerate(step.positions) if position not in elsewhere]
        if kept:
            yield replace(step, positions=[step.positions[index] for index in kept]), _picked(read, kept)
        for source, positions in again:
            self._counters.add("staged_blocks_from_second_source_total", len(positions))
            retry = _Step(positions, step.first_layer, step.layer_count, source)
            yield from self._settled(chain, arrivals, retry, result(self._submit(chain, arrivals, retry)))

    def _submit(self, chain: _Chain, arrivals: dict[int, _Arrival], step: _Step) -> Future[Part]:
        return self._pool.submit(copy_context().run, self._read, chain, arrivals, step)

    def _read(self, chain: _Chain, arrivals: dict[int, _Arrival], step: _Step) -> Part:
        """One read, in a pool thread. The part has one outcome a position of the step (``first`` has no meaning yet)."""
        shape = chain.namespace.shape
        blocks = [arrivals[position].block for position in step.positions]
        view = self._table.dram.view
        destination = ScatteredBlocks([view(block.dram, shape.block_bytes) for block in blocks if block.dram is not None], shape)
        request = ReadRequest(
            chain.namespace.namespace_id,
            [block.key for block in blocks],
            step.first_layer,
            step.layer_count,
            0,
            chain.deadline_s,
        )
        control = ReadControl()
        part = Part(0, [Outcome.UNAVAILABLE] * len(blocks), list(blocks), Tier.NVME, step.source.peer.node_id)
        try:
            with ending(control.cancel), waiting_for(step.source.peer.node_id) as answered:
                answer = self._peers.peer(step.source.peer, chain.namespace).read(request, destination, control=control)
                answered(answer.outcomes)
        except KVStoreError as error:
            self._counters.add("staged_reads_failed_total")
            log.warning("cannot stage %d blocks from %s: %s", len(blocks), step.source.peer.node_id, error)
            return part
        part.outcomes = answer.outcomes
        part.tier = answer.tiers[0]
        part.sums = answer.checksums
        layers = slice(step.first_layer, step.first_layer + step.layer_count)
        with self._lock:
            for index, position in enumerate(step.positions):
                if answer.checksums is None or answer.outcomes[index] is not Outcome.HIT:
                    continue
                arrivals[position].have(layers, answer.checksums[index])
        self._counters.add("staged_bytes_total", answer.bytes_received)
        return part

    def _answer(self, step: _Step, read: Part, arrivals: dict[int, _Arrival], layers: int, lost: set[int]) -> Iterator[Part]:
        """Adopts what is whole, and cuts a step's answer into parts of consecutive positions, each with pins of its own.

        Blocks of which an earlier layer was lost were answered then; a later one that was on its way by then does not count.
        """
        kept = [index for index, position in enumerate(step.positions) if position not in lost]
        step, read = replace(step, positions=[step.positions[index] for index in kept]), _picked(read, kept)
        whole = step.first_layer + step.layer_count == layers
        for index, position in enumerate(step.positions):
            one = arrivals[position]
            if read.outcomes[index] is Outcome.HIT:
                assert one.ready >= step.first_layer + step.layer_count, "layers are answered in order"
            if whole and read.outcomes[index] is Outcome.HIT and one.first == 0:
                one.block.checksums = one.sums.astype("<u8", copy=False).tobytes()
                self._table.finish_fill(one.block)
        start = 0
        for at in range(1, len(step.positions) + 1 if step.positions else 0):
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
        start = 0
        for at in range(1, len(positions) + 1):
            if at == len(positions) or positions[at] != positions[at - 1] + 1:
                count = at - start
                yield Part(positions[start], [outcome] * count, [None] * count, Tier.NVME, self._node_id)
                start = at


@dataclass(frozen=True, slots=True)
class _Chain:
    """The keys of one load and their place in their chain."""

    namespace: NodeNamespace
    keys: Sequence[BlockKey]
    parent: BlockKey | None
    depth: int
    deadline_s: float


def _by_source(arrivals: dict[int, _Arrival], positions: Sequence[int]) -> list[tuple[Source, list[int]]]:
    """Positions by whom to ask for them; those that nobody is left for are left out."""
    found: dict[Source, list[int]] = {}
    for position in positions:
        source = arrivals[position].source
        if source is not None:
            found.setdefault(source, []).append(position)
    return list(found.items())


def _picked(read: Part, indices: Sequence[int]) -> Part:
    """Some of a read's blocks; its checksums are one row a block, hit or not."""
    return Part(
        read.first,
        [read.outcomes[index] for index in indices],
        [read.blocks[index] for index in indices],
        read.tier,
        read.node,
        sums=None if read.sums is None else read.sums[list(indices)],
    )
