"""Loads from a node's own volume: runs that are ready do not wait for slow ones."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Internal
from kvstore.core.types import Outcome, Tier
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.loads.runs import LoadedRun
from support.callers import CancellableCall
from support.node_harness import MIB, NodeHarness
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


def raising(error: Exception) -> Callable[[object], NoReturn]:
    """Return a function that raises an error."""

    def fail(_: object) -> NoReturn:
        raise error

    return fail
