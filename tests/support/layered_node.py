"""A node that serves loads in layer groups, and storage nodes to load from, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.core.checksum import layer_checksums
from kvstore.core.clock import MonotonicClock
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, BlockRun, NodeId, Outcome, StoreOutcome, Tier
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.loads.layered import LayeredLoader
from kvstore.node.loads.peers import PeerAddress
from kvstore.node.loads.prompt_wait import PromptWaits
from kvstore.node.loads.provider import NodeProvider
from kvstore.node.loads.runs import LoadedRun, Runs, SourceRange
from kvstore.node.state.model import Block
from kvstore.testing.memory_provider import MemoryProvider, block_key, block_payload
from kvstore.transport.tcp.server import TcpServer
from support.node_harness import MIB, NODE_ID, NodeHarness

SPEC = CacheSpec(model="m", block_tokens=16, layers=5, layer_block_bytes=4096)
SHAPE = SPEC.shape
WAIT_S = 10.0

Layers = dict[int, list[tuple[int, int]]]
"""Per block: (first layer, number of layers) of each run that delivered some."""


def keys(count: int) -> list[BlockKey]:
    """Return the keys of the first test blocks: one chain."""
    return [block_key(number) for number in range(count)]


class StorageNode:
    """A storage node: blocks in memory, served by a real data plane."""

    def __init__(self, name: str, blocks: Sequence[int] = ()) -> None:
        self.provider = MemoryProvider()
        self.provider.declare(SPEC.namespace, SHAPE)
        self.provider.put(SPEC.namespace, blocks)
        self.server = TcpServer(self.provider)
        self.server.start()
        self.address = PeerAddress(NodeId(name), "127.0.0.1:1", self.server.address)

    def source(self, start: int, count: int) -> SourceRange:
        return SourceRange(start, count, self.address)


class LayeredNode(NodeHarness):
    """A node with a prefill buffer and no volumes."""

    def __init__(self, *, arena_bytes: int = 4 * MIB, buffer_bytes: int = 2 * MIB, cache_loads: bool = True) -> None:
        super().__init__(specs=[SPEC], arena_bytes=arena_bytes, clock=MonotonicClock(), cache_loads=cache_loads)
        self.budget = BufferBudget("prefill_buffer", buffer_bytes, self.clock, self.counters)
        self.layered = LayeredLoader(
            NODE_ID, self.table, self.peers, self.loader, self.budget, self.counters, self.clock,
            window_bytes=8 * SHAPE.layer_block_bytes, threads=4,
        )  # fmt: skip
        self._closers.append(self.layered.close)
        self.provider = NodeProvider(self.registry, self.table, self.gate, self.loader, self.layered, self.clock)

    def prompt_waits(self) -> PromptWaits:
        return PromptWaits(NODE_ID, self.table, self.loader, self.budget, self.counters)

    def load(
        self,
        count: int,
        sources: Sequence[SourceRange],
        layer_group: int,
        first_layer: int = 0,
        *,
        wait_s: float = WAIT_S,
    ) -> Runs:
        """Begin to load the first blocks: in layer groups, or whole (0)."""
        options = {"sources": sources, "layer_group": layer_group, "first_layer": first_layer}
        request = self.request(keys(count), wait_s, **options)
        return self.layered.load(request) if layer_group else self.loader.load(request)

    def store_blocks(self, first: int, count: int, *, tail: bool = False) -> None:
        """Store test blocks as a prefill engine does. ``tail``: the last one is the prompt's last."""
        of_chain = keys(first + count)
        run = BlockRun(SPEC.namespace, of_chain[first - 1] if first else None, first, tuple(of_chain[first:]))
        grant = self.table.prepare(self.namespace, run, self.clock.now_s() + WAIT_S)
        if tail:
            grant.tail = run.keys[-1]
        checksums = []
        for number, (key, slot) in enumerate(grant.slots.items(), start=first):
            assert key == of_chain[number]
            payload = block_payload(number, SHAPE)
            self.arena.view(slot, SHAPE.block_bytes)[:] = payload
            checksums.append(layer_checksums(memoryview(payload), SHAPE))
        assert set(self.table.complete(grant, list(run.keys), checksums)) == {StoreOutcome.STORED}

    def pinned_blocks(self, count: int) -> list[Block]:
        """Store blocks and pin them, so that they are not evicted."""
        of_chain = keys(64)[-count:]
        grant = self.table.prepare(self.namespace, BlockRun(SPEC.namespace, None, 0, tuple(of_chain)), self.clock.now_s())
        self.table.complete(grant, of_chain, [bytes(8 * SHAPE.layers)] * count)
        return [block for block in self.table.pin_resident(self.namespace, of_chain) if block is not None]

    def are_layers_right(self, block: Block, first: int, count: int) -> bool:
        """Return whether some layers of a resident block have their bytes."""
        assert block.dram is not None
        view = self.arena.view(block.dram, SHAPE.block_bytes)
        layers = slice(first * SHAPE.layer_block_bytes, (first + count) * SHAPE.layer_block_bytes)
        return bytes(view[layers]) == block_payload(int.from_bytes(block.key, "big"), SHAPE)[layers]

    def drive(self, runs: Iterator[LoadedRun], *, keep_pins: bool = False) -> tuple[Layers, dict[int, Outcome], list[Block]]:
        """Run a load to its end and check its bytes.

        Returns:
            Layers per delivered block, outcomes of the other blocks, and the pins if they are kept.
        """
        layers: Layers = {}
        failed: dict[int, Outcome] = {}
        pins: list[Block] = []
        for run in runs:
            for index, (outcome, block) in enumerate(zip(run.outcomes, run.blocks, strict=True), start=run.first):
                if outcome is not Outcome.HIT:
                    failed[index] = outcome
                    continue
                assert block is not None
                assert index not in failed, "layers of a block that was lost"
                first, count = (run.first_layer, run.layer_count) if run.layer_count else (0, SHAPE.layers)
                assert self.are_layers_right(block, first, count), "WRONG BYTES"
                layers.setdefault(index, []).append((first, count))
            if keep_pins:
                pins += run.pinned()
            else:
                self.table.unpin(run.pinned())
            self.table.validate()
        return layers, failed, pins

    def check_empty(self) -> None:
        """Check that nothing is pinned, admitted or claimed."""
        self.table.validate()
        assert self.budget.used_bytes == 0
        evict_tier(self.table, Tier.DRAM)
        assert self.arena.usage().blocks == 0, "a slot leaked"
        claim = self.table.claim(self.namespace, keys(64))
        assert claim.busy == []
        self.table.unclaim([keys(64)[index] for index in claim.claimed_absent], ())
