"""The stop of a node: slots of ended sessions keep their bytes, as engines may still copy out of them or into them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient.memory.arena import open_arena
from kvstore.config.node import NodeConfig
from kvstore.core.types import BlockKey, NamespaceId, OperationId, Outcome, SessionId, StoreOutcome
from kvstore.node.base.buffer_budget import BufferBudget
from kvstore.node.daemon import NodeDaemon
from kvstore.node.loads.layered import LayeredLoader
from kvstore.node.loads.provider import NodeProvider
from kvstore.node.rpc.sessions import Session, Sessions
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NamespaceRegistry
from kvstore.tiers.contract import Slot
from kvstore.transport.contract import ReadRequest
from support.callers import CancellableCall
from support.layered_node import LayeredNode, StorageNode
from support.node_harness import MIB, NODE_ID, SHAPE
from support.slow_slab import WAIT_S, SlowNode

BLOCKS = 60
BLOCK = SHAPE.block_bytes


class StoppingNode(SlowNode):
    """A node with two chains on its volume, an engine's session, and the data plane's view of its blocks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, BLOCKS, ("hot", "cold"))
        (self.cold,) = self.others
        self.sessions = Sessions(self.table, self.gate, self.counters, self.clock, lease_s=WAIT_S, prepare_ttl_s=WAIT_S)
        self.engine: Session = self.sessions.open(self.namespace, "engine")
        assert self.sessions.connect(self.engine.session_id)
        buffer = BufferBudget("prefill_buffer", MIB, self.clock, self.counters)
        layered = LayeredLoader(
            NODE_ID, self.table, self.peers, self.loader, buffer, self.counters, self.clock, window_bytes=MIB, threads=1
        )
        self._closers.append(layered.close)
        self.provider = NodeProvider(self.registry, self.table, self.gate, self.loader, layered, self.clock)

    def lease_hot(self) -> list[Block]:
        """Load a chain for the engine, which copies it out of the arena."""
        runs = list(self.loader.load(self.request(self.chain, WAIT_S)))
        blocks = [block for run in runs for block in run.pinned()]
        self.sessions.lease(self.engine, blocks)
        return blocks

    def fill_arena(self) -> list[Slot]:
        """Reserve all free slots."""
        usage = self.arena.usage()
        slots = self.table.reserve(SHAPE, (usage.capacity_bytes - usage.used_bytes) // BLOCK, self.clock.now_s())
        assert slots is not None
        return slots

    def end_sessions(self) -> None:
        """Do what a stop does to sessions, in its order."""
        self.gate.stop()
        self.table.close()
        self.sessions.end(self.engine.session_id)

    def peer_reads(self, keys: list[BlockKey]) -> Counter[Outcome]:
        """Serve a read of a peer whose connection has not ended."""
        request = ReadRequest(self.namespace.namespace_id, keys, 0, SHAPE.layers, 0, self.clock.now_s() + WAIT_S)
        found: Counter[Outcome] = Counter()
        for part in self.provider.read(request):
            found.update(part.outcomes)
            part.release()
        return found

    def bytes_at(self, slots: list[Slot]) -> list[bytes]:
        return [bytes(self.arena.view(slot, BLOCK)) for slot in slots]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoppingNode]:
    made = StoppingNode(tmp_path / "node")
    yield made
    made.close()


def test_stop_leased_blocks_keep_their_bytes(node: StoppingNode) -> None:
    slots = [block.dram for block in node.lease_hot() if block.dram is not None]
    assert len(slots) == BLOCKS
    node.fill_arena()
    before = node.bytes_at(slots)
    node.end_sessions()
    assert node.peer_reads(node.cold) == {Outcome.NO_SPACE: BLOCKS}
    assert node.bytes_at(slots) == before


def test_stop_slots_being_written_are_not_reused(node: StoppingNode, tmp_path: Path) -> None:
    run = node.run("new", 0, BLOCKS)
    node.sessions.prepare(node.engine, OperationId(bytes(16)), run, node.clock.now_s())
    node.fill_arena()
    node.end_sessions()
    assert node.peer_reads(node.cold) == {Outcome.NO_SPACE: BLOCKS}
    assert node.prepare("awaited", 0, 2).outcomes == [StoreOutcome.SKIPPED] * 2, "a write that the gate lets through"
    assert set(node.cold) <= node.after_restart(0, tmp_path).keys()


def test_stop_waiting_load_gets_no_freed_slot(node: StoppingNode) -> None:
    blocks = node.lease_hot()
    node.fill_arena()
    later_s = node.clock.now_s() + WAIT_S
    call = CancellableCall(lambda: node.table.reserve(SHAPE, 1, later_s)).waiting()
    node.end_sessions()
    assert call.answer.result(WAIT_S) is None
    assert all(block.dram is not None and block.pins == 0 for block in blocks), "there was space"


def test_stop_layers_of_a_part_keep_their_bytes() -> None:
    node, storage = LayeredNode(), StorageNode("s", range(4))
    with contextlib.closing(node), contextlib.ExitStack() as stack:
        stack.callback(storage.server.stop)
        runs = node.load(4, [storage.source(0, 4)], layer_group=1)
        leased = next(runs).pinned()
        slots = [block.dram for block in leased if block.dram is not None]
        node.table.close()
        runs.close()
        node.table.unpin(leased)
        assert [block.dram for block in leased] == [None] * len(slots), "incomplete blocks leave with their last pin"
        assert node.table.reserve(leased[0].namespace.shape, 1, node.clock.now_s() + WAIT_S) is None


async def test_stop_sessions_end_after_the_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[bool, list[str]]] = []
    end = Sessions.end

    def end_observed(sessions: Sessions, session_id: SessionId) -> None:
        readers = [one.name for one in threading.enumerate() if one.name.startswith(("data-", "kvstore-load"))]
        ended.append((daemon.table.residency.closed, readers))
        end(sessions, session_id)

    monkeypatch.setattr(Sessions, "end", end_observed)
    address = "127.0.0.1:0"
    config = NodeConfig(node_id="a", run_dir=tmp_path, dram_bytes=MIB, metadata=None, listen=address, data_listen=address)
    daemon = NodeDaemon(config)
    await daemon.start()
    session = daemon.sessions.open(NamespaceRegistry().of_shape(NamespaceId(bytes(16)), SHAPE), "engine")
    with contextlib.closing(open_arena(tmp_path / "a.arena", session.session_id, WAIT_S)):
        await daemon.stop()
    assert ended == [(True, [])]
    assert daemon.sessions.count() == 0
