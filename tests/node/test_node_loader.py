"""Loads from a node's own volume: runs that are ready do not wait for slow ones."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from kvstore.config.node import MountSection
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Internal
from kvstore.core.types import NodeId, Outcome, Tier
from kvstore.node.base.volume_guard import READERS
from kvstore.node.durability.recovery import drop_blocks
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.loads.loader import Loader
from kvstore.node.loads.mounts import Mount, Mounts
from kvstore.node.loads.peers import PeerAddress
from kvstore.node.loads.runs import LoadedRun, SourceRange
from kvstore.node.loads.timings import PeerWaits
from kvstore.observe.metric_definitions import transport as transport_metrics
from support.callers import CancellableCall
from support.node_harness import MIB, NODE_ID, NodeHarness
from support.ports import free_ports
from support.slow_slab import WAIT_S, SlowNode
from support.wait import wait_until

BLOCKS = 32
"""Four windows: each is 1/8 of the read-ahead, which is 1/4 of the arena."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SlowNode]:
    made = SlowNode(tmp_path, BLOCKS)
    yield made
    made.close()


def test_load_resident_pins_all_blocks_or_none(node: SlowNode) -> None:
    request = node.request(node.chain[:4], WAIT_S)
    assert node.loader.load_resident(request) is None
    for run in node.loader.load(node.request(node.chain[:3], WAIT_S)):
        node.table.unpin(run.pinned())
    assert node.loader.load_resident(request) is None, "the last block is on the volume only"
    assert not any(block.pins for block in node.table.snapshot())
    for run in node.loader.load(request):
        node.table.unpin(run.pinned())
    run = node.loader.load_resident(request)
    assert run is not None
    assert [block.pins for block in run.pinned()] == [1] * 4
    node.table.unpin(run.pinned())


@pytest.mark.parametrize("slow", [0, 9, BLOCKS - 1])
def test_load_slow_window_does_not_delay_others(node: SlowNode, slow: int) -> None:
    node.slab.slow = frozenset((node.chain[slow],))
    runs = node.loader.load(node.request(node.chain, WAIT_S))
    window = range(slow // 8 * 8, slow // 8 * 8 + 8)
    loaded: set[int] = set()
    while len(loaded) < BLOCKS - len(window):
        run = next(runs)
        indices = range(run.first, run.first + len(run.blocks))
        assert loaded.isdisjoint(indices)
        assert not set(indices) & set(window)
        loaded.update(indices)
        node.table.unpin(run.pinned())
    assert not any(block.pins for block in node.table.snapshot() if block.key != node.chain[slow] and block.dram is not None)
    node.slab.gate.set()
    (last,) = runs
    assert range(last.first, last.first + len(last.blocks)) == window
    assert last.outcomes == [Outcome.HIT] * len(window)
    node.table.unpin(last.pinned())


def test_load_of_block_never_completed_delays_no_other(node: SlowNode) -> None:
    """More loads wait for the block of a store that does not complete than the loader has threads."""
    grant = node.prepare("store", 0, 1)
    keys = [*grant.slots, node.chain[0]]
    waiting = [
        threading.Thread(target=lambda: outcomes.append(node.outcomes(node.loader.load(node.request(keys, WAIT_S)), 2)))
        for _ in range(12)
    ]
    outcomes: list[list[Outcome | None]] = []
    for thread in waiting:
        thread.start()
    loaded = node.outcomes(node.loader.load(node.request(node.chain, WAIT_S)), BLOCKS)
    assert loaded == [Outcome.HIT] * BLOCKS
    assert all(thread.is_alive() for thread in waiting)
    node.write(grant)
    node.complete(grant)
    for thread in waiting:
        thread.join(WAIT_S)
    assert outcomes == [[Outcome.HIT] * 2] * 12


@pytest.mark.parametrize("waiters", [2, 0], ids=["loader's thread", "caller's thread"])
def test_load_of_block_given_up_by_its_writer_fetches_it(node: SlowNode, waiters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the loader waits for the block, or, if none may wait any more, the caller's own."""
    keys = node.chain[:8]
    monkeypatch.setattr(node.loader, "_waiters", threading.Semaphore(waiters))
    claim = node.table.claim(node.namespace, keys)
    call = CancellableCall(lambda: list(node.loader.load(node.request(keys, WAIT_S)))).waiting()
    node.table.unclaim(keys, claim.durable.values())
    runs = call.answer.result(WAIT_S)
    assert isinstance(runs, list)
    assert node.outcomes(iter(runs), 8) == [Outcome.HIT] * 8


def test_load_counts_bytes_while_another_brings_its_block(node: SlowNode) -> None:
    """Those of a store's block do not count: the store may never complete."""
    keys, waits = node.chain[:8], PeerWaits(node.clock)

    def load() -> list[LoadedRun]:
        waits.record_in_context()
        return list(node.loader.load(node.request(keys, WAIT_S)))

    def received() -> bool:
        node.counters.add(transport_metrics.PEER_BYTES_RECEIVED)
        return waits.received_bytes > 0

    claim = node.table.claim(node.namespace, keys)
    call = CancellableCall(load).waiting()
    wait_until(received)
    node.table.unclaim(keys, claim.durable.values())
    node.outcomes(iter(call.answer.result(WAIT_S)), 8)  # type: ignore[arg-type]
    (stored,) = node.prepare("store", 0, 1).slots
    assert not node.table.is_loading(stored)


def test_run_extend_joins_runs_of_one_source_only(node: SlowNode) -> None:
    first, *others = list(node.loader.load(node.request(node.chain[:8], WAIT_S)))
    far = LoadedRun(first.first + len(first.blocks), [Outcome.MISS], [None], first.tier, first.node)
    assert first.extend(far)
    assert not first.extend(far), "it does not follow"
    for run in (first, *others):
        node.table.unpin(run.pinned())


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), Internal("a wrong slot")], ids=repr)
def test_load_volume_read_fails_frees_its_slots(node: SlowNode, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(node.slab, "read_with_checksums", raising(error))
        outcomes = node.outcomes(node.loader.load(node.request(node.chain, WAIT_S)), BLOCKS)
    assert outcomes == [Outcome.UNAVAILABLE] * BLOCKS
    assert node.arena.usage().blocks == 0
    assert node.outcomes(node.loader.load(node.request(node.chain, WAIT_S)), BLOCKS) == [Outcome.HIT] * BLOCKS


def test_load_volume_read_bug_frees_slots_of_all_volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeHarness(tmp_path, volumes=[MIB, MIB], clock=MonotonicClock())
    node.store("chain", 0, BLOCKS)
    node.write_back(batch_blocks=1)
    assert evict_tier(node.table, Tier.DRAM) == BLOCKS
    keys = node.keys("chain", BLOCKS)
    assert {block.nvme_volume for block in node.table.snapshot()} == set(node.volumes)
    for slab in node.slabs:
        monkeypatch.setattr(slab, "read_with_checksums", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        list(node.loader.load(node.request(keys, WAIT_S)))
    wait_until(lambda: node.arena.usage().blocks == 0)
    node.close()


def test_load_volume_dropped_rest_is_read_from_its_mount(node: SlowNode) -> None:
    section = MountSection(volume=node.slab.volume_id, path=node.slab.path)
    with closing(Mount(section, io_threads=2, counters=node.counters, clock=node.clock)) as mount:
        mounts = Mounts([mount])
        loader = Loader(NODE_ID, node.table, node.peers, mounts, node.counters, node.clock, window_bytes=MIB, threads=4)
        runs = loader.load(node.request(node.chain, WAIT_S), ahead=True)  # a window at a time
        first = next(runs)
        node.table.unpin(first.pinned())
        assert drop_blocks(node.table, node.volumes[0]) == 0
        node.volumes[0].guard.close()
        rest = BLOCKS - len(first.blocks)
        assert node.outcomes(runs, BLOCKS)[-rest:] == [Outcome.HIT] * rest
        assert node.counters.get("mount_read_blocks_total") == rest
        loader.close()


def test_load_volume_dropped_windows_that_wait_are_answered(node: SlowNode) -> None:
    """All reader threads are busy when the volume is dropped. The only other node that holds the blocks has ended."""
    guard, proceed = node.volumes[0].guard, threading.Event()
    for _ in range(READERS):
        guard.submit(lambda: proceed.wait(WAIT_S))
    gone = PeerAddress(NodeId("gone"), "", f"127.0.0.1:{free_ports(1)[0]}")
    request = node.request(node.chain, WAIT_S, sources=(SourceRange(0, BLOCKS, gone),))
    call = CancellableCall(lambda: node.outcomes(node.loader.load(request), BLOCKS)).waiting()
    wait_until(lambda: guard.windows == READERS + BLOCKS // 8)
    assert drop_blocks(node.table, node.volumes[0]) == 0
    closing_guard = threading.Thread(target=guard.close)
    closing_guard.start()
    assert call.answer.result(WAIT_S) == [Outcome.UNAVAILABLE] * BLOCKS
    assert node.counters.get("peer_fetch_failed_total") > 0
    proceed.set()
    closing_guard.join(WAIT_S)


def raising(error: Exception) -> Callable[[object], NoReturn]:
    """Return a function that raises an error."""

    def fail(_: object) -> NoReturn:
        raise error

    return fail
