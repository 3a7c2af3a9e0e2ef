"""Requests of loads, and the runs of blocks that loads return."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from kvstore.core.chain import ChainSlice
from kvstore.core.limits import MAX_SOURCES_PER_BLOCK
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.node.loads.peers import PeerAddress
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.transport.contract import Checksums


@dataclass(frozen=True, slots=True)
class SourceRange:
    """A peer that holds blocks ``[start, start + count)`` of a request, according to the caller."""

    start: int
    count: int
    peer: PeerAddress
    volume_id: str = ""
    """The peer's volume; empty: not known."""


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """The blocks of one load."""

    namespace: NodeNamespace
    chain: ChainSlice
    deadline_s: float
    sources: Sequence[SourceRange] = ()
    """Peers that hold blocks of the request, best first. Empty if the keys of ``chain`` are not neighbours: blocks from peers get
    their parent and depth from the chain."""
    layer_group: int = 0
    """Number of layers per group; 0: whole blocks."""
    first_layer: int = 0
    """In layer groups: lower layers are not requested."""

    def part(self, start: int, stop: int) -> BlockRequest:
        """Return the request for blocks ``[start, stop)``."""
        sources = [
            replace(source, start=source.start - start)
            for source in self.sources
            if source.start < stop and start < source.start + source.count
        ]
        return replace(self, chain=self.chain.part(start, stop), sources=sources)

    def sources_by_block(self) -> list[tuple[SourceRange, ...]]:
        """Return the sources of each block, best first: at most ``MAX_SOURCES_PER_BLOCK``.

        The work is proportional to the result and to the number of sources, not to the blocks that sources cover in common:
        a caller chooses the sources.
        """
        found: list[tuple[SourceRange, ...]] = [()] * len(self.chain)
        following: dict[int, int] = {}  # of a block with all its sources: a later block; those between have all theirs, too

        def next_with_room(index: int) -> int:
            end = index
            while end in following:
                end = following[end]
            while index != end:
                following[index], index = end, following[index]
            return end

        for source in self.sources:
            index, end = max(0, source.start), min(len(found), source.start + source.count)
            while index < end:
                if index in following:
                    index = next_with_room(index)
                    continue
                found[index] = (*found[index], source)
                if len(found[index]) == MAX_SOURCES_PER_BLOCK:
                    following[index] = index + 1
                index += 1
        return found

    def sources_ignored(self) -> int:
        """Return how many sources blocks have beyond their ``MAX_SOURCES_PER_BLOCK`` best ones, in all."""
        if len(self.sources) <= MAX_SOURCES_PER_BLOCK:
            return 0
        count = len(self.chain)
        changes = [0] * (count + 1)  # of the number of sources, from block to block
        for source in self.sources:
            start, end = max(0, source.start), min(count, source.start + source.count)
            if start < end:
                changes[start] += 1
                changes[end] -= 1
        return sum(max(0, sources - MAX_SOURCES_PER_BLOCK) for sources in accumulate(changes))

    def new_block(self, index: int, checksums: bytes = b"") -> Block:
        """Return a block object for block ``index``, which is in no tier of this node yet."""
        chain = self.chain
        return Block(self.namespace, chain.key(index), chain.parent_of(index), chain.depth_of(index), checksums)


@dataclass(slots=True)
class LoadedRun:
    """Consecutive blocks of a request. ``blocks[i]`` is pinned if its outcome is HIT, else None."""

    first: int
    """Index of the first block in the request."""
    outcomes: list[Outcome]
    blocks: list[Block | None]
    tier: Tier
    """The tier that held the bytes before this load."""
    node: NodeId
    """The node that held them."""
    first_layer: int = 0
    layer_count: int = 0
    """The layers that are ready; 0: all."""
    checksums: Checksums | None = None
    """If only some layers are ready: their checksums, ``[hits, layer_count]``."""
    awaited: Sequence[int] = ()
    """Indices within the run of blocks that another load or store brings: their outcome is not known yet."""
    mounted: bool = False
    """Whether the bytes were read from a mounted volume, which is none of the node's own."""

    def pinned(self) -> list[Block]:
        """Return the blocks that the receiver of the run must unpin."""
        return [block for block in self.blocks if block is not None]

    def extend(self, following: LoadedRun) -> bool:
        """Append a run, if it follows this one and came from the same place. Returns whether it did."""
        if following.first != self.first + len(self.blocks):
            return False
        if (following.tier, following.node, following.mounted) != (self.tier, self.node, self.mounted):
            return False
        if self.awaited or following.awaited:
            return False
        self.outcomes += following.outcomes
        self.blocks += following.blocks
        return True

    def split_awaited(self) -> tuple[list[LoadedRun], list[LoadedRun]]:
        """Split into runs whose blocks all have an outcome, and runs whose blocks are all awaited. The pins move along."""
        complete: list[LoadedRun] = []
        waiting: list[LoadedRun] = []
        awaited = set(self.awaited)
        start = 0
        for is_awaited, stretch in groupby(range(len(self.blocks)), key=awaited.__contains__):
            end = start + len(list(stretch))
            outcomes, blocks = self.outcomes[start:end], self.blocks[start:end]
            run = LoadedRun(self.first + start, outcomes, blocks, self.tier, self.node, mounted=self.mounted)
            run.awaited = range(end - start) if is_awaited else ()
            (waiting if is_awaited else complete).append(run)
            start = end
        return complete, waiting


Runs = Generator[LoadedRun, None, None]
"""Yields runs until every block (in layer groups: every layer of every block) has an outcome, or the load is cancelled.

The receiver must unpin the blocks of each run, and close the generator if it stops early."""


def equal_stretches(values: Sequence[object]) -> Generator[tuple[int, int], None, None]:
    """Yield (start, end) of each stretch of identical values."""
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] is not values[start]:
            yield start, index
            start = index
