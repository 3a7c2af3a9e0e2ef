"""Eviction on request: to a fill level, of a namespace, or invalidation. Never blocks in use, never a hole in a chain."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from kvproto.v1 import admin_pb2
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Unavailable
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Tier
from kvstore.node.eviction.operator_requests import evict_down_to, evict_namespace, evict_tier, invalidate
from kvstore.node.rpc.admin_service import NodeAdminServicer
from kvstore.tiers.nvme.catalog import invalid_namespaces
from kvstore.tiers.nvme.fsck import check_volume
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.slab_io import SlabFile
from support.chains import key_of
from support.node_harness import NodeHarness, volume_id
from support.wait import wait_until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeHarness]:
    made = NodeHarness(tmp_path, volumes=[1 << 20], shapes=(BlockShape(2, 2048), BlockShape(3, 4096)), arena_bytes=1 << 19)
    made.table.clock = MonotonicClock()
    yield made
    made.table.validate()
    made.close()


def stored(node: NodeHarness, chain: int, count: int, namespace: int = 0, *, durable: bool = True) -> list[BlockKey]:
    node.store(chain, 0, count, namespace)
    if durable:
        node.write_back()
    return [key_of(chain * 2 + namespace, depth) for depth in range(count)]


def tiers(node: NodeHarness, keys: list[BlockKey]) -> list[str]:
    """Where each block is: d(ram), n(vme), both, or - for nowhere."""
    found = {block.key: block for block in node.table.snapshot()}
    return [
        "-" if key not in found else "d" * (found[key].dram is not None) + "n" * (found[key].nvme is not None) for key in keys
    ]


def test_evict_to_fill_level_takes_coldest_and_keeps_prefixes(node: NodeHarness) -> None:
    old, new = stored(node, 1, 8), stored(node, 2, 8)
    node_volume, used = node.table.node_volumes[0], node.slabs[0].usage().used_bytes
    done = evict_down_to(node.table, node_volume, used // 4)
    assert (done.blocks, done.kept) == (12, 0)
    assert node.slabs[0].usage().used_bytes == used // 4
    assert tiers(node, old) == ["d"] * 8, "the coldest chain has left the volume"
    assert tiers(node, new) == ["dn"] * 4 + ["d"] * 4, "children leave before their parents"
    assert evict_down_to(node.table, node_volume, used).blocks == 0


def test_evict_arena_keeps_blocks_that_are_not_durable(node: NodeHarness) -> None:
    durable, waiting = stored(node, 1, 8), stored(node, 2, 8, durable=False)
    done = evict_down_to(node.table, None, 0)
    assert (done.blocks, done.kept) == (8, 8)
    assert tiers(node, durable) == ["n"] * 8
    assert tiers(node, waiting) == ["d"] * 8


def test_evict_namespace_keeps_other_namespaces(node: NodeHarness) -> None:
    mine, other = stored(node, 1, 6), stored(node, 1, 6, namespace=1)
    done = evict_namespace(node.table, node.namespaces[0], None, dram=True, nvme=True)
    assert (done.blocks, done.kept) == (12, 0)
    assert tiers(node, mine) == ["-"] * 6
    assert tiers(node, other) == ["dn"] * 6
    assert node.store(1, 0, 6), "it may be stored again"


def test_evict_block_in_use_keeps_its_ancestors(node: NodeHarness) -> None:
    keys = stored(node, 1, 6)
    (pinned,) = node.table.pin_resident(node.namespaces[0], [keys[3]])
    assert pinned is not None
    done = evict_namespace(node.table, node.namespaces[0], None, dram=True, nvme=False)
    assert (done.blocks, done.kept) == (2, 4)
    assert tiers(node, keys) == ["dn"] * 4 + ["n"] * 2
    node.table.unpin([pinned])


def test_invalidate_ends_in_time_during_an_adoption(node: NodeHarness) -> None:
    """Blocks of a volume that is being adopted are in the table before the volume is."""
    stored(node, 1, 4)
    [volume] = node.volumes
    node.table.node_volumes.remove(volume)
    assert invalidate(node.table, node.namespace, node.table.clock.now_s() + 0.05).kept == 4
    node.table.residency.add_volume(volume)
    assert invalidate(node.table, node.namespace, node.table.clock.now_s() + 30) == (4, 0)


def test_invalidate_drops_dirty_blocks_and_waits_for_use(node: NodeHarness) -> None:
    other = stored(node, 1, 4, namespace=1)
    keys = stored(node, 1, 4) + stored(node, 3, 4, durable=False)
    (pinned,) = node.table.pin_resident(node.namespaces[0], [keys[0]])
    assert pinned is not None
    table, now_s = node.table, MonotonicClock().now_s
    assert invalidate(table, node.namespaces[0], now_s()).kept == 5, "one pinned, four on their way to the volume"
    assert tiers(node, keys) == ["dn"] + ["-"] * 3 + ["d"] * 4

    def let_go() -> None:
        node.write_back()
        table.unpin([pinned])

    late = threading.Timer(0.05, let_go)
    late.start()
    done = invalidate(table, node.namespaces[0], now_s() + 30)
    late.join()
    assert (done.blocks, done.kept) == (5, 0)
    assert tiers(node, keys) == ["-"] * 8
    assert tiers(node, other) == ["dn"] * 4
    assert node.slabs[0].usage().blocks == 4, "slots of what left are free"


def test_invalidated_blocks_stay_away_after_rebuild(node: NodeHarness, tmp_path: Path) -> None:
    evicted, dropped = stored(node, 1, 4), stored(node, 2, 4)
    other = stored(node, 1, 4, namespace=1)
    evict_namespace(node.table, node.namespaces[0], None, dram=True, nvme=True)
    assert tiers(node, evicted + dropped) == ["-"] * 8
    dropped = stored(node, 2, 4)
    assert invalidate(node.table, node.namespaces[0], node.table.clock.now_s() + 30) == (4, 0)
    later = stored(node, 3, 4)
    copy = shutil.copytree(tmp_path / "nvme0", tmp_path / "rebuilt")
    shutil.rmtree(copy / "catalog")
    check_volume(copy, repair=True)
    with closing(NvmeSlab.open(copy, volume_id=volume_id(0), capacity_bytes=1 << 20, io_threads=1)) as slab:
        assert {record.key for _, record in slab.recover()} == {*other, *later}


def test_blocks_stored_during_invalidation_stay(node: NodeHarness, tmp_path: Path) -> None:
    """Also after a restart."""
    keys = stored(node, 1, 4)
    (pinned,) = node.table.pin_resident(node.namespaces[0], keys[:1])
    assert pinned is not None
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(invalidate, node.table, node.namespaces[0], MonotonicClock().now_s() + 30)
        wait_until(lambda: tiers(node, keys) == ["dn", "-", "-", "-"])
        later = stored(node, 2, 4)
        node.table.unpin([pinned])
        assert done.result() == (4, 0)
    assert node.after_restart(0, tmp_path).keys() == set(later)


def test_invalidate_not_noted_fails(node: NodeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair could bring evicted blocks back, so the invalidation is not reported as complete."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(node.slabs[0], "note_invalid", refuse)
    with pytest.raises(OSError, match="No space"):
        invalidate(node.table, node.namespaces[0], 0.0)


@pytest.mark.parametrize("method", ["commit", "note_invalid"])
def test_invalidate_volume_fails_reaches_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def refuse(*_: object) -> None:
        raise Unavailable("this volume is read-only")

    with closing(NodeHarness(tmp_path, volumes=[1 << 20, 1 << 20])) as node:
        keys = [key for chain in range(8) for key in node.store_durably(chain, 4)]
        held = {volume: [key for key in keys if node.block(key).nvme_volume is volume] for volume in node.volumes}
        assert all(held.values())
        failing, healthy = node.table.node_volumes
        monkeypatch.setattr(failing.volume, method, refuse)
        with pytest.raises(Unavailable, match="read-only"):
            invalidate(node.table, node.namespace, node.clock.now_s())
        assert tiers(node, held[healthy]) == ["-"] * len(held[healthy])
        assert tiers(node, held[failing]) == ["dn" if method == "commit" else "-"] * len(held[failing])
        noted = [invalid_namespaces(tmp_path / f"nvme{number}", slab.uid).keys() for number, slab in enumerate(node.slabs)]
        assert noted[node.volumes.index(healthy)] == {node.namespace.namespace_id}


def test_invalidate_namespace_unknown_to_the_node_is_noted(node: NodeHarness, tmp_path: Path) -> None:
    """All its blocks were evicted before the node started, but their bytes are still on the volume."""
    unknown = NamespaceId(b"not in the table")
    parts = MagicMock(table=node.table, namespaces=node.registry)
    parts.config.load_threads = 1
    admin = NodeAdminServicer(parts)
    request = admin_pb2.InvalidateNamespaceRequest(operation_id=bytes(16), namespace_id=unknown)
    assert asyncio.run(admin.InvalidateNamespace(request, MagicMock())).dropped_blocks == 0
    admin.close()
    assert invalid_namespaces(tmp_path / "nvme0", node.slabs[0].uid).keys() == {unknown}


def test_evict_catalog_fails_keeps_its_blocks(node: NodeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = stored(node, 1, 4)

    def refuse(*_: object) -> None:
        raise Unavailable("the disk is full")

    monkeypatch.setattr(node.slabs[0], "commit", refuse)
    with pytest.raises(Unavailable):
        invalidate(node.table, node.namespaces[0], 0.0)
    with pytest.raises(Unavailable):
        evict_down_to(node.table, node.table.node_volumes[0], 0)
    assert tiers(node, keys) == ["dn"] * 4
    assert not any(block.evicting for block in node.table.snapshot())


def test_evict_claims_unreadable_counts_removal(node: NodeHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = stored(node, 1, 4)

    def stale(_path: Path, _token: int) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as failing:
        failing.setattr("kvstore.tiers.nvme.slab.is_claimed", stale)
        assert evict_tier(node.table, Tier.NVME) == 4
    assert tiers(node, keys) == ["d"] * 4, "what the catalog has removed is not called durable"
    assert not node.after_restart(0, tmp_path)


def test_store_after_failed_sync_evicts_no_durable_block(node: NodeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[BlockKey] = []
    while not node.counters.get("evicted_nvme_blocks_total"):  # until the volume is full
        keys += stored(node, len(keys), 12)
        evict_tier(node.table, Tier.DRAM)

    def fail(_file: SlabFile) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SlabFile, "sync", fail)
    stored(node, 1000, 12)
    durable = node.table.are_durable(keys)
    assert any(durable)
    node.table.node_volumes[0].resting_until_s = 0.0
    for chain in range(1001, 1007):
        stored(node, chain, 12, durable=False)
    node.write_back(batch_blocks=72)  # more than there is space for
    assert node.table.are_durable(keys) == durable
    assert not node.table.node_volumes[0].takes_changes(node.clock.now_s())
