"""Recovery of a node's volumes at its start."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.core.clock import MonotonicClock
from kvstore.core.types import BlockKey, Outcome
from kvstore.node.durability.recovery import recover_while_running
from kvstore.node.state.model import NodeVolume
from kvstore.tiers.contract import BlockRecord, Slot
from kvstore.tiers.nvme.slab import NvmeSlab
from support.chains import payload_of
from support.node_harness import MIB, SHAPE, NodeHarness, volume_id


class FailingSlab(NvmeSlab):
    """A volume whose catalog cannot be changed."""

    def commit(self, stored: Sequence[tuple[Slot, BlockRecord]], removed: Sequence[BlockKey]) -> None:
        raise OSError(5, "the disk is broken")


@pytest.fixture
def keys(tmp_path: Path) -> list[BlockKey]:
    """Four blocks that two volumes hold."""
    with closing(NodeHarness(tmp_path, volumes=[MIB])) as node:
        keys = node.store_durably("c", 4)
        records = [block.record() for block in map(node.block, keys)]
    with closing(NvmeSlab.open(tmp_path / "nvme1", volume_id=volume_id(1), capacity_bytes=MIB, io_threads=1)) as slab:
        assert list(slab.recover()) == []
        slots = slab.allocate(SHAPE, len(keys))
        assert slots is not None
        payloads = [memoryview(payload_of(key, SHAPE)) for key in keys]
        assert slab.write(list(zip(slots, records, payloads, strict=True))) == [None] * len(keys)
        slab.commit(list(zip(slots, records, strict=True)), [])
    return keys


def rot(volume: Path, key: BlockKey) -> None:
    """Flip bits of a block."""
    content = bytearray((volume / "slab.kv").read_bytes())
    at = content.index(payload_of(key, SHAPE)[:256])
    content[at] ^= 0xFF
    (volume / "slab.kv").write_bytes(content)


def entries(node: NodeHarness, folder: Path) -> list[int]:
    """Number of blocks in each catalog."""
    return [len(node.after_restart(number, folder / f"copy{number}")) for number in range(2)]


def load(node: NodeHarness, keys: Sequence[BlockKey]) -> list[Outcome | None]:
    return node.outcomes(node.loader.load(node.request(keys, 60.0)), len(keys))


def test_recover_duplicates_stay_on_the_first_volume(tmp_path: Path, keys: list[BlockKey]) -> None:
    with closing(NodeHarness(tmp_path, volumes=[MIB, MIB])) as node:
        assert [node.block(key).nvme_volume for key in keys] == [node.volumes[0]] * len(keys)
        assert [slab.usage().blocks for slab in node.slabs] == [len(keys), 0]
        assert node.after_restart(1, tmp_path / "again") == {}


def test_recover_duplicates_kept_are_not_used(tmp_path: Path, keys: list[BlockKey]) -> None:
    with closing(NodeHarness(tmp_path, volumes=[MIB, MIB], slab=FailingSlab)) as node:
        assert [node.block(key).nvme_volume for key in keys] == [node.volumes[0]] * len(keys)
        assert node.counters.get("recovery_duplicates_kept_total") == len(keys)
        assert node.slabs[1].usage().blocks == len(keys), "their slots stay out of use"


def test_recover_duplicate_replaces_a_corrupt_replica(tmp_path: Path, keys: list[BlockKey]) -> None:
    rot(tmp_path / "nvme0", keys[2])
    with closing(NodeHarness(tmp_path, volumes=[MIB, MIB], clock=MonotonicClock())) as node:
        first, second = node.volumes
        assert [node.block(key).nvme_volume for key in keys] == [first, first, second, first]
        assert load(node, keys) == [Outcome.HIT] * len(keys)
        assert entries(node, tmp_path) == [len(keys) - 1, 1]
        assert node.counters.get("quarantined_blocks_total") == 1


def test_recover_corrupt_duplicate_is_removed(tmp_path: Path, keys: list[BlockKey]) -> None:
    rot(tmp_path / "nvme1", keys[2])
    with closing(NodeHarness(tmp_path, volumes=[MIB, MIB], clock=MonotonicClock())) as node:
        assert load(node, keys) == [Outcome.HIT] * len(keys)
        assert entries(node, tmp_path) == [len(keys), 0]


def test_recover_duplicates_both_corrupt_are_kept(tmp_path: Path, keys: list[BlockKey]) -> None:
    for name in ("nvme0", "nvme1"):
        rot(tmp_path / name, keys[2])
    with closing(NodeHarness(tmp_path, volumes=[MIB, MIB], clock=MonotonicClock())) as node:
        assert entries(node, tmp_path) == [len(keys), 1]
        assert node.counters.get("recovery_duplicates_kept_total") == 1


def test_recover_duplicate_is_used_on_a_failing_volume(tmp_path: Path, keys: list[BlockKey]) -> None:
    rot(tmp_path / "nvme0", keys[2])
    with closing(NodeHarness(tmp_path, volumes=[MIB, MIB], clock=MonotonicClock(), slab=FailingSlab)) as node:
        assert load(node, keys) == [Outcome.HIT] * len(keys)
        assert node.counters.get("recovery_duplicates_kept_total") == len(keys) - 1
        assert node.slabs[1].usage().blocks == len(keys), "slots of blocks in a catalog stay out of use"


def test_adopt_duplicate_replaces_a_corrupt_replica(tmp_path: Path, keys: list[BlockKey]) -> None:
    rot(tmp_path / "nvme0", keys[2])
    slab = NvmeSlab.open(tmp_path / "nvme1", volume_id=volume_id(1), capacity_bytes=MIB, io_threads=1)
    with closing(slab), closing(NodeHarness(tmp_path, volumes=[MIB], clock=MonotonicClock())) as node:
        adopted = NodeVolume(slab)
        with node.table.residency.lock:
            node.table.residency.expect_volume(adopted)
        assert recover_while_running(node.table, adopted, node.registry, node.counters) == 1
        with node.table.residency.lock:
            node.table.residency.add_volume(adopted)
        assert load(node, keys) == [Outcome.HIT] * len(keys)
        adopted.guard.close()
