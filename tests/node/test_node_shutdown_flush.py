"""Write-back when a node stops: pending blocks are never lost, DRAM-only blocks take free slots, nothing is evicted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.core.errors import Internal
from kvstore.core.types import BlockKey, Tier, VolumeId
from kvstore.node.durability import writeback
from kvstore.node.durability.shutdown_flush import flush_on_shutdown, heat_in_dram
from kvstore.node.durability.writeback import WriteBack, WriteTarget
from kvstore.node.eviction.operator_requests import evict_tier
from kvstore.node.state.model import Block
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.tiers.nvme.slab import NvmeSlab
from support.chains import key_of
from support.session_harness import SessionHarness
from support.wait import wait_until

POLICIES = ("reuse-distance", "s3-fifo", "lru")
DEADLINE_S = 60.0
SMALL, LARGE = 1 << 19, 1 << 21
"""Sizes of a volume: for about 50 blocks, and for more than an arena."""


@contextmanager
def writing(table: BlockTable, target: WriteTarget) -> Iterator[None]:
    writer = WriteBack(table, target, Counters())
    writer.start()
    try:
        yield
    finally:
        writer.stop(10.0)


def never(_seconds: float) -> None:
    raise Internal("nothing fails: there is nothing to wait for")


def flush(node: SessionHarness, sleep: Callable[[float], None] = never) -> tuple[bool, int]:
    with writing(node.table, node.target):
        found = flush_on_shutdown(node.table, node.clock, node.clock.now_s() + DEADLINE_S, sleep)
    node.table.validate()
    return found


def storage_of(node: SessionHarness) -> list[BlockKey]:
    """Let a node write back to a storage node that takes all blocks. Returns the list to which their keys are added."""
    sent: list[BlockKey] = []

    class Storage:
        def persist(self, blocks: Sequence[Block], turn: Callable[[], None]) -> None:
            turn()
            sent.extend(block.key for block in blocks)
            for block in blocks:
                node.table.writeback_done(block, None, None)

    node.target = Storage()  # type: ignore[assignment]
    return sent


def in_dram_only(node: SessionHarness, chains: int, length: int = 10) -> None:
    """Store chains that their volumes refuse: they exist only in DRAM."""
    for slab in node.slabs:
        slab.fails = True
    for chain in range(chains):
        node.turn(chain, length)
    for slab in node.slabs:
        slab.fails = False
    node.clock.advance(10.0)


def use(node: SessionHarness, chain: int, length: int = 10) -> None:
    found = node.table.pin_resident(node.namespace, [key_of(chain, depth) for depth in range(length)])
    node.table.unpin([block for block in found if block is not None])


def chain_keys(*chains: int, length: int = 10) -> set[BlockKey]:
    return {key_of(chain, depth) for chain in chains for depth in range(length)}


def recovered(folder: Path, size: int) -> set[BlockKey]:
    name = VolumeId("n/nvme0")
    slab = NvmeSlab.open(folder / name[2:], volume_id=name, capacity_bytes=size, io_threads=1)
    found = {record.key for _, record in slab.recover()}
    slab.close()
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_flush_free_slots_take_all_dram_only_blocks(tmp_path: Path, policy: str) -> None:
    node = SessionHarness(tmp_path, policy, (LARGE,))
    in_dram_only(node, 8)
    assert node.durable() == {}
    assert flush(node) == (True, 80)
    node.close()
    assert recovered(tmp_path, LARGE) == chain_keys(*range(8))


@pytest.mark.parametrize("policy", POLICIES)
def test_flush_evicted_but_hot_blocks_are_written(tmp_path: Path, policy: str) -> None:
    node = SessionHarness(tmp_path, policy, (LARGE,))
    node.turn(0, 10)
    evict_tier(node.table, Tier.NVME)
    assert node.durable() == {}
    assert flush(node) == (True, 10)
    node.close()
    assert recovered(tmp_path, LARGE) == chain_keys(0)


@pytest.mark.parametrize("policy", POLICIES)
def test_flush_too_few_slots_takes_the_hottest(tmp_path: Path, policy: str) -> None:
    node = SessionHarness(tmp_path, policy, (SMALL,))
    in_dram_only(node, 12)
    for _ in range(4):
        for chain in (3, 7):
            use(node, chain)
    finished, saved = flush(node)
    assert finished
    node.close()
    found = recovered(tmp_path, SMALL)
    assert len(found) == saved
    assert chain_keys(3, 7) <= found < chain_keys(*range(12))
    assert all(depth == 0 or key_of(chain, depth - 1) in found for chain in range(12) for depth in range(10)
               if key_of(chain, depth) in found), "no child without its parent"  # fmt: skip


def test_flush_full_volume_evicts_nothing(tmp_path: Path) -> None:
    node = SessionHarness(tmp_path, "lru", (SMALL,))
    for chain in range(12):
        node.turn(chain, 10)
    before = set(node.durable())
    hot = next(
        chain for chain in range(12) if not before & chain_keys(chain) and node.table.find(node.namespace, [key_of(chain, 0)])[0]
    )
    for _ in range(4):
        use(node, hot)
    assert flush(node)[0]
    assert set(node.durable()) >= before
    node.close()


def test_flush_pending_blocks_evict_to_make_space(tmp_path: Path) -> None:
    """A pending write-back was promised, so it may evict blocks."""
    node = SessionHarness(tmp_path, "lru", (SMALL,))
    for chain in range(12):
        node.turn(chain, 10)
    node.store_only(99, 10)
    assert flush(node)[0]
    assert chain_keys(99) <= set(node.durable())
    node.close()


def test_flush_volume_failing_briefly_is_retried(tmp_path: Path) -> None:
    node = SessionHarness(tmp_path, sizes=(LARGE,))
    in_dram_only(node, 4)
    node.slabs[0].fails = True
    waits = 0

    def wait(seconds: float) -> None:
        nonlocal waits
        waits += 1
        node.clock.advance(seconds)
        node.slabs[0].fails = waits < 12

    assert flush(node, wait) == (True, 40)
    node.close()
    assert waits >= 12
    assert recovered(tmp_path, LARGE) == chain_keys(*range(4))


def test_flush_volume_failing_permanently_ends_at_deadline(tmp_path: Path) -> None:
    node = SessionHarness(tmp_path, sizes=(LARGE,))
    in_dram_only(node, 4)
    node.slabs[0].fails = True
    began_s = node.clock.now_s()
    assert flush(node, node.clock.advance) == (False, 0)
    assert node.clock.now_s() == began_s + DEADLINE_S
    node.close()


def test_flush_storage_node_gets_parents_first(tmp_path: Path) -> None:
    node = SessionHarness(tmp_path, "lru", ())
    for chain in range(6):
        node.turn(chain, 10)
    use(node, 3)
    sent = storage_of(node)
    assert flush(node) == (True, 60)
    node.close()
    assert sent[:10] == [key_of(3, depth) for depth in range(10)]
    assert set(sent) == chain_keys(*range(6))


def test_flush_order_keeps_parents_before_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that the policy does not name are of kept namespaces. A use during the search may move a child behind its parent."""
    node = SessionHarness(tmp_path, "lru", ())
    for chain in range(3):
        node.turn(chain, 2)
    heat = {key_of(0, 0): 0, key_of(0, 1): 9, key_of(1, 1): 1, key_of(1, 0): 2}
    monkeypatch.setattr("kvstore.node.durability.shutdown_flush.heat_in_dram", lambda _table: dict(heat))
    sent = storage_of(node)
    assert flush(node) == (True, 6)
    node.close()
    assert sent == [key_of(chain, depth) for chain in (2, 0, 1) for depth in range(2)]


@pytest.mark.parametrize("policy", POLICIES)
def test_heat_in_dram_loads_and_stores_meanwhile(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is read in slices of the lock. Uses between two slices do not end it; a new block begins it again."""
    monkeypatch.setattr("kvstore.node.durability.shutdown_flush.ORDER_SLICE", 8)
    node = SessionHarness(tmp_path, policy, (LARGE,))
    for chain in range(6):
        node.turn(chain, 10)
    calls = 0

    def meanwhile(_seconds: float) -> None:
        nonlocal calls
        calls += 1
        use(node, calls % 6)
        if calls == 3:
            node.turn(50, 1)

    monkeypatch.setattr("kvstore.node.durability.shutdown_flush.time.sleep", meanwhile)
    heat = heat_in_dram(node.table)
    assert calls > 3
    assert sorted(heat) == sorted(chain_keys(*range(6)) | {key_of(50, 0)})
    node.close()


def test_idle_write_back_stopped_ends_its_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wait that is longer than the test may take."""
    monkeypatch.setattr(writeback, "IDLE_WAIT_S", 1e6)
    node = SessionHarness(tmp_path)
    before = set(threading.enumerate())
    writer = WriteBack(node.table, node.target, Counters())
    writer.start()
    threads = set(threading.enumerate()) - before

    def ended() -> bool:
        writer.stop(0.0)  # again if the thread has not waited yet
        return not any(thread.is_alive() for thread in threads)

    wait_until(ended, "the threads of write-back end")
    assert threads
    node.close()
