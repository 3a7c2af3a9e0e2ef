"""Loads in layer groups over real sockets: what is told is there, holes are never told, and every slot comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, NodeId, Outcome, VolumeId
from kvstore.node.base import admission_gate as node_gate
from kvstore.node.loads.layered import Stager
from kvstore.node.loads.loader import Loader, Part, Source
from kvstore.node.loads.mounts import make_mounts
from kvstore.node.loads.peers import PeerAddress, Peers
from kvstore.node.loads.provider import NodeProvider
from kvstore.node.loads.staging_budget import StagingBudget
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.testing.memory_provider import MemoryProvider, ProviderGate, block_key, block_payload
from kvstore.tiers.arena import DramArena
from kvstore.tiers.eviction.policy import make_policy
from kvstore.transport.contract import ReadRequest
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer
from support.wait import wait_until

SPEC = CacheSpec(model="m", block_tokens=16, layers=5, layer_block_bytes=4096)
SHAPE = SPEC.shape
DRAM = VolumeId("n/dram")
WAIT_S = 10.0


Taken = tuple[dict[int, list[tuple[int, int]]], dict[int, Outcome], list[Block]]


class Storage:
    """A storage node: blocks in memory behind a real data plane."""

    def __init__(self, name: str) -> None:
        self.provider = MemoryProvider()
        self.provider.declare(SPEC.namespace, SHAPE)
        self.server = TcpServer(self.provider)
        self.server.start()
        self.address = PeerAddress(NodeId(name), "127.0.0.1:1", self.server.address)

    def source(self, start: int, count: int) -> Source:
        return Source(start, count, self.address)


class Node:
    """A node without its daemon: table, arena, loader and stager."""

    def __init__(self, *, arena_bytes: int = 4 << 20, buffer_bytes: int = 2 << 20, keep: bool = True) -> None:
        self.counters, self.clock = Counters(), MonotonicClock()
        self.arena = DramArena(volume_id=DRAM, capacity_bytes=arena_bytes)
        log = ReplicaChangeLog([DRAM], self.counters, self.clock, keep=False)
        self.table = BlockTable(
            self.arena, make_policy("lru"), [], log, self.counters, self.clock, writes_behind=False, keep_loaded=keep
        )
        self.namespaces = NamespaceRegistry()
        self.namespace: NodeNamespace = self.namespaces.of_spec(SPEC)
        self.peers = Peers(lambda address, _: TcpPeer(address.data_address, breaker_failures=1000))
        name = NodeId("n")
        mounts = make_mounts((), io_threads=1, counters=self.counters, clock=self.clock)
        self.loader = Loader(name, self.table, self.peers, mounts, self.counters, self.clock, window_bytes=1 << 20, threads=4)
        self.buffer = StagingBudget("prefill_buffer", buffer_bytes, self.clock, self.counters)
        self.stager = Stager(
            name, self.table, self.peers, self.loader, self.buffer, self.counters, self.clock,
            window_bytes=8 * SHAPE.layer_block_bytes, threads=4,
        )  # fmt: skip
        gate = node_gate.Gate(self.table, self.counters)
        self.provider = NodeProvider(self.namespaces, self.table, gate, self.loader, self.stager, self.clock)

    def load(
        self, count: int, sources: Sequence[Source], layer_group: int, first_layer: int = 0, *, wait_s: float = WAIT_S
    ) -> Iterator[Part]:
        return self.stager.load(
            self.namespace,
            keys(count),
            self.clock.now_s() + wait_s,
            parent=None,
            depth=0,
            sources=sources,
            layer_group=layer_group,
            first_layer=first_layer,
        )

    def layers_right(self, block: Block, first: int, count: int) -> bool:
        assert block.dram is not None
        view = self.arena.view(block.dram, SHAPE.block_bytes)
        part = slice(first * SHAPE.layer_block_bytes, (first + count) * SHAPE.layer_block_bytes)
        return bytes(view[part]) == block_payload(int.from_bytes(block.key, "big"), SHAPE)[part]

    def take(self, parts: Iterator[Part], *, keep: bool = False) -> Taken:
        """Drives a load: layers told a position, final outcomes of the others, and the pins that are kept."""
        layers: dict[int, list[tuple[int, int]]] = {}
        failed: dict[int, Outcome] = {}
        pins: list[Block] = []
        for part in parts:
            for at, (outcome, block) in enumerate(zip(part.outcomes, part.blocks, strict=True)):
                if outcome is not Outcome.HIT:
                    failed[part.first + at] = outcome
                    continue
                assert block is not None
                assert part.first + at not in failed, "a block comes after it was said to be lost"
                first, count = (part.first_layer, part.layer_count) if part.layer_count else (0, SHAPE.layers)
                assert self.layers_right(block, first, count), "told before it was there"
                layers.setdefault(part.first + at, []).append((first, count))
            if keep:
                pins += part.pinned()
            else:
                self.table.unpin(part.pinned())
            self.table.validate()
        return layers, failed, pins

    def empty(self) -> None:
        """Nothing is pinned, admitted or claimed any more."""
        self.table.validate()
        assert self.buffer.used_bytes == 0
        self.table.evict_dram()
        assert self.arena.usage().blocks == 0, "a slot leaks"
        claim = self.table.claim(self.namespace, keys(64))
        assert claim.busy == []
        self.table.unclaim([keys(64)[at] for at in claim.claimed_absent], ())

    def close(self) -> None:
        self.table.close()
        self.stager.close()
        self.loader.close()
        self.peers.close()
        self.arena.close()


def keys(count: int) -> list[BlockKey]:
    return [block_key(number) for number in range(count)]


@pytest.fixture
def storage() -> Iterator[Callable[[str], Storage]]:
    made: list[Storage] = []

    def make(name: str = "s") -> Storage:
        made.append(Storage(name))
        return made[-1]

    yield make
    for one in made:
        one.server.stop()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.empty()
    made.close()


MakeStorage = Callable[..., Storage]


@pytest.mark.parametrize("layer_group", [1, 2, 3, 4, 5, 9])
def test_all_first_layers_come_before_any_second(node: Node, storage: MakeStorage, layer_group: int) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(20))
    order: list[int] = []
    parts = node.load(20, [s.source(0, 20)], layer_group)

    def watched() -> Iterator[Part]:
        for part in parts:
            order.append(part.first_layer)
            yield part

    layers, failed, _ = node.take(watched())
    assert failed == {}
    assert order == sorted(order)
    expected = [(at, min(layer_group, 5 - at)) for at in range(0, 5, layer_group)]
    assert layers == dict.fromkeys(range(20), expected)
    assert all(node.table.held(node.namespace, keys(20))), "what came whole is kept"


def test_what_storage_does_not_have_is_missed_and_the_rest_comes(node: Node, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, [0, 1, 2, 4, 5])
    layers, failed, _ = node.take(node.load(8, [s.source(0, 6)], 2))
    assert sorted(layers) == [0, 1, 2, 4, 5]
    assert failed == {3: Outcome.MISS, 6: Outcome.MISS, 7: Outcome.MISS}


def test_a_corrupt_layer_costs_its_block_and_is_never_adopted(node: Node, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(6))
    s.provider.flip(SPEC.namespace, 3, 2 * SHAPE.layer_block_bytes + 7)
    layers, failed, _ = node.take(node.load(6, [s.source(0, 6)], 1))
    assert failed == {3: Outcome.CORRUPT}
    assert layers[3] == [(0, 1), (1, 1)]
    assert node.table.held(node.namespace, keys(6)) == [True, True, True, False, True, True]


def test_a_block_whose_first_read_failed_is_not_made_whole_by_its_second(node: Node, storage: MakeStorage) -> None:
    """Two reads are in flight: the first fails late, the second succeeds. What has a hole must not be told nor adopted."""
    s = storage()
    s.provider.put(SPEC.namespace, range(2))
    gate = threading.Event()
    first = threading.Event()

    def before(_: int) -> None:
        if s.provider.requests[-1].first_layer == 0 and not first.is_set():
            first.set()
            assert gate.wait(WAIT_S)
            s.provider._blocks.clear()

    s.provider.before_part = before
    second = threading.Thread(target=lambda: (first.wait(WAIT_S), wait_until(lambda: len(s.provider.requests) >= 2), gate.set()))
    second.start()
    layers, failed, _ = node.take(node.load(2, [s.source(0, 2)], 3))
    second.join()
    assert layers == {}
    assert sorted(failed) == [0, 1]
    assert node.table.held(node.namespace, keys(2)) == [False] * 2


def test_layers_out_of_order_are_not_ready_for_others(node: Node, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(2))
    gate = ProviderGate()
    held = threading.Event()

    def before(_: int) -> None:
        if s.provider.requests[-1].first_layer == 0 and not held.is_set():
            held.set()
            gate(0)

    s.provider.before_part = before
    told: list[object] = []
    loading = threading.Thread(target=lambda: told.append(node.take(node.load(2, [s.source(0, 2)], 3))))
    loading.start()
    gate.wait_reached()
    wait_until(lambda: any(one.first_layer == 3 for one in s.provider.requests))
    wait_until(lambda: node.counters.get("staged_bytes_total") > 0)  # the second group is here, the first is not
    for first_layer, count in ((0, 5), (0, 1), (3, 2), (0, 4)):
        assert node.stager.ready(node.namespace, keys(2), first_layer, count) is None
    gate.open.set()
    loading.join(WAIT_S)
    assert len(told) == 1


def test_the_next_source_is_asked_for_what_one_did_not_bring(node: Node, storage: MakeStorage) -> None:
    poor, rich = storage("poor"), storage("rich")
    poor.provider.put(SPEC.namespace, [0, 1, 2])
    rich.provider.put(SPEC.namespace, range(10))
    dead = storage("dead")
    dead.server.stop()
    sources = [dead.source(0, 4), poor.source(0, 10), rich.source(0, 10)]
    for layer_group in (1, 2, 5):
        layers, failed, _ = node.take(node.load(10, sources, layer_group))
        assert failed == {}
        assert sorted(layers) == list(range(10))
        node.empty()
    assert node.counters.get("staged_blocks_from_second_source_total") > 0


def test_a_source_that_dies_in_the_middle_is_replaced_for_the_layers_that_are_missing(node: Node, storage: MakeStorage) -> None:
    one, other = storage("one"), storage("other")
    for s in (one, other):
        s.provider.put(SPEC.namespace, range(6))

    def before(_: int) -> None:
        if one.provider.requests[-1].first_layer >= 2:
            one.provider._blocks.clear()

    one.provider.before_part = before
    layers, failed, _ = node.take(node.load(6, [one.source(0, 6), other.source(0, 6)], 1))
    assert failed == {}
    assert all(told == [(layer, 1) for layer in range(5)] for told in layers.values())
    assert min(request.first_layer for request in other.provider.requests) >= 1, "what had arrived was read again"


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_a_caller_that_stops_early_leaves_nothing_behind(node: Node, storage: MakeStorage, stop_after: int) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(20))
    parts = node.load(20, [s.source(0, 20)], 1)
    for _ in range(stop_after):
        node.table.unpin(next(parts).pinned())
    parts.close()  # type: ignore[attr-defined]
    node.empty()


def test_later_layers_alone_are_read_told_and_served_as_long_as_they_are_pinned(node: Node, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(6))
    layers, failed, pins = node.take(node.load(6, [s.source(0, 6)], 2, first_layer=3), keep=True)
    assert failed == {}
    assert set(map(tuple, layers.values())) == {((3, 2),)}
    assert {request.first_layer for request in s.provider.requests} == {3}
    assert node.table.held(node.namespace, keys(6)) == [False] * 6, "half a block is no block"
    # the load has ended; its leases have not: another host's engine still reads what it was told
    (part,) = node.provider.read(ReadRequest(SPEC.namespace, keys(6), 3, 2, 0, node.clock.now_s() + 1))
    assert list(part.outcomes) == [Outcome.HIT] * 6
    part.release()
    assert node.stager.ready(node.namespace, keys(6), 2, 3) is None
    node.table.unpin(pins)
    assert node.stager.ready(node.namespace, keys(6), 3, 2) is None
    assert node.arena.usage().blocks == 0


def test_what_is_on_its_way_is_served_layer_by_layer(node: Node, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(4))
    parts = node.load(4, [s.source(0, 4)], 1)
    for layer in range(5):
        part = next(parts)
        assert (part.first_layer, part.layer_count) == (layer, 1)
        (read,) = node.provider.read(ReadRequest(SPEC.namespace, keys(4), 0, layer + 1, 0, node.clock.now_s() + WAIT_S))
        size = (layer + 1) * SHAPE.layer_block_bytes
        assert [bytes(view[:size]) for view in read.views] == [block_payload(number, SHAPE)[:size] for number in range(4)]
        assert read.checksums.shape == (4, 5)
        read.release()
        node.table.unpin(part.pinned())
    assert next(parts, None) is None


def test_two_loads_of_the_same_blocks_read_them_once(node: Node, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(16))
    results: list[Taken] = []
    threads = [
        threading.Thread(target=lambda group=group: results.append(node.take(node.load(16, [s.source(0, 16)], group))))  # type: ignore[misc]
        for group in (1, 2, 5, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for layers, failed, _ in results:
        assert failed == {}
        assert sorted(layers) == list(range(16))
    assert node.counters.get("staged_bytes_total") == 16 * SHAPE.block_bytes


def test_a_load_whose_twin_gives_up_fetches_for_itself(node: Node, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(4))
    twin = node.load(4, [s.source(0, 4)], 1)
    node.table.unpin(next(twin).pinned())  # it has claimed the blocks
    results: list[dict[int, Outcome]] = []
    waiting = threading.Thread(target=lambda: results.append(node.take(node.load(4, [s.source(0, 4)], 1))[1]))
    waiting.start()
    wait_until(lambda: node.buffer.used_bytes == 4 * SHAPE.block_bytes and not node.buffer.waiting)
    twin.close()  # type: ignore[attr-defined]
    waiting.join(30)
    assert results == [{}]


def test_a_load_larger_than_the_buffer_comes_block_by_block(storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(40))
    node = Node(arena_bytes=64 * SHAPE.block_bytes, buffer_bytes=10 * SHAPE.block_bytes)
    layers, failed, _ = node.take(node.load(40, [s.source(0, 40)], 1))
    assert failed == {}
    assert sorted(layers) == list(range(40))
    assert node.counters.get("staged_loads_too_large_total") == 1
    node.empty()
    node.close()


def test_an_arena_full_of_pins_is_no_room_in_time(storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(30))
    node = Node(arena_bytes=20 * SHAPE.block_bytes, buffer_bytes=20 * SHAPE.block_bytes)
    _, failed, pins = node.take(node.load(10, [s.source(0, 10)], 5), keep=True)
    assert failed == {}
    _, failed, _ = node.take(node.load(30, [s.source(0, 30)], 5, wait_s=0.2))
    assert set(failed.values()) <= {Outcome.NO_ROOM, Outcome.TIMEOUT, Outcome.UNAVAILABLE}
    node.table.unpin(pins)
    node.empty()
    node.close()


def test_many_loads_with_little_room_all_end(storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(64))
    node = Node(arena_bytes=40 * SHAPE.block_bytes, buffer_bytes=12 * SHAPE.block_bytes, keep=False)
    results: list[dict[int, Outcome]] = []

    def work(seed: int) -> None:
        dice = np.random.default_rng(seed)
        for _ in range(6):
            parts = node.load(int(dice.integers(1, 13)), [s.source(0, 64)], int(dice.integers(1, 6)), wait_s=30.0)
            results.append(node.take(parts)[1])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a load waits for ever"
    assert len(results) == 48
    assert all(failed == {} for failed in results)
    node.empty()
    node.close()
