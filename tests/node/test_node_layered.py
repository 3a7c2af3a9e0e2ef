"""Loads in layer groups over real sockets: runs are valid, blocks with holes are never returned, and every slot is freed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.core.types import Outcome
from kvstore.node.loads.runs import LoadedRun
from kvstore.testing.memory_provider import ProviderGate, block_payload
from kvstore.transport.contract import ReadRequest
from support.layered_node import SHAPE, SPEC, WAIT_S, LayeredNode, Layers, StorageNode, keys
from support.wait import wait_until

MakeStorage = Callable[..., StorageNode]


@pytest.fixture
def storage() -> Iterator[MakeStorage]:
    made: list[StorageNode] = []

    def make(name: str = "s") -> StorageNode:
        made.append(StorageNode(name))
        return made[-1]

    yield make
    for one in made:
        one.server.stop()


@pytest.fixture
def node() -> Iterator[LayeredNode]:
    made = LayeredNode()
    yield made
    made.check_empty()
    made.close()


@pytest.mark.parametrize("layer_group", [1, 2, 3, 4, 5, 9])
def test_layered_load_returns_groups_in_order(node: LayeredNode, storage: MakeStorage, layer_group: int) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(20))
    order: list[int] = []
    runs = node.load(20, [s.source(0, 20)], layer_group)

    def watched() -> Iterator[LoadedRun]:
        for run in runs:
            order.append(run.first_layer)
            yield run

    layers, failed, _ = node.drive(watched())
    assert failed == {}
    assert order == sorted(order)
    expected = [(at, min(layer_group, 5 - at)) for at in range(0, 5, layer_group)]
    assert layers == dict.fromkeys(range(20), expected)
    assert None not in node.table.find(node.namespace, keys(20)), "complete blocks stay in DRAM"


def test_layered_load_that_reads_stops_reads_ahead(node: LayeredNode, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(4))
    runs = node.load(4, [s.source(0, 4)], 1)
    first = next(runs)
    assert not node.loader.reads.wait_none(node.clock.now_s())
    node.table.unpin(first.pinned())
    node.drive(runs)
    assert node.loader.reads.wait_none(node.clock.now_s() + WAIT_S)


def test_layered_load_missing_blocks_are_misses(node: LayeredNode, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, [0, 1, 2, 4, 5])
    layers, failed, _ = node.drive(node.load(8, [s.source(0, 6)], 2))
    assert sorted(layers) == [0, 1, 2, 4, 5]
    assert failed == {3: Outcome.MISS, 6: Outcome.MISS, 7: Outcome.MISS}


def test_layered_load_corrupt_layer_loses_its_block(node: LayeredNode, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(6))
    s.provider.flip(SPEC.namespace, 3, 2 * SHAPE.layer_block_bytes + 7)
    layers, failed, _ = node.drive(node.load(6, [s.source(0, 6)], 1))
    assert failed == {3: Outcome.CORRUPT}
    assert layers[3] == [(0, 1), (1, 1)]
    assert [block is not None for block in node.table.find(node.namespace, keys(6))] == [True, True, True, False, True, True]


def test_layered_load_failed_first_group_drops_the_second(node: LayeredNode, storage: MakeStorage) -> None:
    """Two reads are in flight: the first fails late, the second succeeds. The blocks have a hole: they are not returned."""
    s = storage()
    s.provider.put(SPEC.namespace, range(2))
    gate = threading.Event()
    first = threading.Event()

    def before(_: int) -> None:
        if s.provider.requests[-1].first_layer == 0 and not first.is_set():
            first.set()
            assert gate.wait(WAIT_S)
            s.provider.blocks.clear()

    s.provider.before_part = before
    second = threading.Thread(target=lambda: (first.wait(WAIT_S), wait_until(lambda: len(s.provider.requests) >= 2), gate.set()))
    second.start()
    layers, failed, _ = node.drive(node.load(2, [s.source(0, 2)], 3))
    second.join()
    assert layers == {}
    assert sorted(failed) == [0, 1]
    assert node.table.find(node.namespace, keys(2)) == [None] * 2


def test_layered_load_layers_with_a_hole_are_not_ready(node: LayeredNode, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(2))
    gate = ProviderGate()
    held = threading.Event()

    def before(_: int) -> None:
        if s.provider.requests[-1].first_layer == 0 and not held.is_set():
            held.set()
            gate(0)

    s.provider.before_part = before
    results: list[object] = []
    loading = threading.Thread(target=lambda: results.append(node.drive(node.load(2, [s.source(0, 2)], 3))))
    loading.start()
    gate.wait_reached()
    wait_until(lambda: any(one.first_layer == 3 for one in s.provider.requests))
    wait_until(lambda: node.counters.get("staged_bytes_total") > 0)  # the second group is ready, the first is not
    for first_layer, count in ((0, 5), (0, 1), (3, 2), (0, 4)):
        assert node.layered.read_ready(node.namespace, keys(2), first_layer, count) is None
    gate.open.set()
    loading.join(WAIT_S)
    assert len(results) == 1


def test_layered_load_reads_missing_blocks_from_next_source(node: LayeredNode, storage: MakeStorage) -> None:
    poor, rich = storage("poor"), storage("rich")
    poor.provider.put(SPEC.namespace, [0, 1, 2])
    rich.provider.put(SPEC.namespace, range(10))
    dead = storage("dead")
    dead.server.stop()
    sources = [dead.source(0, 4), poor.source(0, 10), rich.source(0, 10)]
    for layer_group in (1, 2, 5):
        layers, failed, _ = node.drive(node.load(10, sources, layer_group))
        assert failed == {}
        assert sorted(layers) == list(range(10))
        node.check_empty()
    assert node.counters.get("staged_blocks_from_second_source_total") > 0


def test_layered_load_dead_source_replaced_for_missing_layers(node: LayeredNode, storage: MakeStorage) -> None:
    one, other = storage("one"), storage("other")
    for s in (one, other):
        s.provider.put(SPEC.namespace, range(6))

    def before(_: int) -> None:
        if one.provider.requests[-1].first_layer >= 2:
            one.provider.blocks.clear()

    one.provider.before_part = before
    layers, failed, _ = node.drive(node.load(6, [one.source(0, 6), other.source(0, 6)], 1))
    assert failed == {}
    assert all(of_block == [(layer, 1) for layer in range(5)] for of_block in layers.values())
    assert min(request.first_layer for request in other.provider.requests) >= 1, "a layer was read twice"


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_layered_load_stopped_early_releases_everything(node: LayeredNode, storage: MakeStorage, stop_after: int) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(20))
    runs = node.load(20, [s.source(0, 20)], 1)
    for _ in range(stop_after):
        node.table.unpin(next(runs).pinned())
    runs.close()
    node.check_empty()


def test_layered_load_of_later_layers_is_served_while_pinned(node: LayeredNode, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(6))
    layers, failed, pins = node.drive(node.load(6, [s.source(0, 6)], 2, first_layer=3), keep_pins=True)
    assert failed == {}
    assert set(map(tuple, layers.values())) == {((3, 2),)}
    assert {request.first_layer for request in s.provider.requests} == {3}
    assert node.table.find(node.namespace, keys(6)) == [None] * 6, "incomplete blocks are not in the table"
    # the load has ended, but the leases of its runs have not: the engine of another host still reads them
    (part,) = node.provider.read(ReadRequest(SPEC.namespace, keys(6), 3, 2, 0, node.clock.now_s() + 1))
    assert list(part.outcomes) == [Outcome.HIT] * 6
    part.release()
    assert node.layered.read_ready(node.namespace, keys(6), 2, 3) is None
    node.table.unpin(pins)
    assert node.layered.read_ready(node.namespace, keys(6), 3, 2) is None
    assert node.arena.usage().blocks == 0


def test_layered_load_serves_ready_layers_to_other_hosts(node: LayeredNode, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(4))
    runs = node.load(4, [s.source(0, 4)], 1)
    for layer in range(5):
        run = next(runs)
        assert (run.first_layer, run.layer_count) == (layer, 1)
        (read,) = node.provider.read(ReadRequest(SPEC.namespace, keys(4), 0, layer + 1, 0, node.clock.now_s() + WAIT_S))
        size = (layer + 1) * SHAPE.layer_block_bytes
        assert [bytes(view[:size]) for view in read.views] == [block_payload(number, SHAPE)[:size] for number in range(4)]
        assert read.checksums.shape == (4, 5)
        read.release()
        node.table.unpin(run.pinned())
    assert next(runs, None) is None


def test_layered_loads_of_the_same_blocks_read_once(node: LayeredNode, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(16))
    results: list[tuple[Layers, dict[int, Outcome], object]] = []
    threads = [
        threading.Thread(target=lambda group=group: results.append(node.drive(node.load(16, [s.source(0, 16)], group))))  # type: ignore[misc]
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


def test_layered_load_continues_if_the_other_load_stops(node: LayeredNode, storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(4))
    other = node.load(4, [s.source(0, 4)], 1)
    node.table.unpin(next(other).pinned())  # the other load has claimed the blocks
    results: list[dict[int, Outcome]] = []
    waiting = threading.Thread(target=lambda: results.append(node.drive(node.load(4, [s.source(0, 4)], 1))[1]))
    waiting.start()
    wait_until(lambda: node.budget.used_bytes == 4 * SHAPE.block_bytes and not node.budget.waiting)
    other.close()
    waiting.join(30)
    assert results == [{}]


def test_layered_load_larger_than_buffer_loads_whole_blocks(storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(40))
    node = LayeredNode(arena_bytes=64 * SHAPE.block_bytes, buffer_bytes=10 * SHAPE.block_bytes)
    layers, failed, _ = node.drive(node.load(40, [s.source(0, 40)], 1))
    assert failed == {}
    assert sorted(layers) == list(range(40))
    assert node.counters.get("staged_loads_too_large_total") == 1
    node.check_empty()
    node.close()


def test_layered_load_arena_full_of_pins_has_no_space(storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(30))
    node = LayeredNode(arena_bytes=20 * SHAPE.block_bytes, buffer_bytes=20 * SHAPE.block_bytes)
    _, failed, pins = node.drive(node.load(10, [s.source(0, 10)], 5), keep_pins=True)
    assert failed == {}
    _, failed, _ = node.drive(node.load(30, [s.source(0, 30)], 5, wait_s=0.2))
    assert set(failed.values()) <= {Outcome.NO_SPACE, Outcome.TIMEOUT, Outcome.UNAVAILABLE}
    node.table.unpin(pins)
    node.check_empty()
    node.close()


def test_layered_loads_with_few_slots_all_complete(storage: MakeStorage) -> None:
    s = storage()
    s.provider.put(SPEC.namespace, range(64))
    node = LayeredNode(arena_bytes=40 * SHAPE.block_bytes, buffer_bytes=12 * SHAPE.block_bytes, cache_loads=False)
    results: list[dict[int, Outcome]] = []

    def work(seed: int) -> None:
        dice = np.random.default_rng(seed)
        for _ in range(6):
            runs = node.load(int(dice.integers(1, 13)), [s.source(0, 64)], int(dice.integers(1, 6)), wait_s=30.0)
            results.append(node.drive(runs)[1])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a load hangs"
    assert len(results) == 48
    assert all(failed == {} for failed in results)
    node.check_empty()
    node.close()
