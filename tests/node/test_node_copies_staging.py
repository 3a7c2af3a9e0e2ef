"""Blocks that are in DRAM only to be copied leave it again; blocks in use stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.node_harness import NodeHarness

SLAB_BYTES = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeHarness]:
    made = NodeHarness(tmp_path, volumes=[SLAB_BYTES])
    yield made
    made.close()


def test_drop_staged_keeps_replicas_on_volumes(node: NodeHarness) -> None:
    keys = node.store_durably("chain", 4)
    node.table.drop_staged([node.block(key) for key in keys[2:]])
    assert node.is_resident(keys) == [True, True, False, False]
    assert node.table.are_durable(keys) == [True] * 4


def test_drop_staged_skips_blocks_in_use_or_not_durable(node: NodeHarness) -> None:
    keys = node.store_durably("chain", 2)
    node.store("dirty", 0, 2)
    dirty = node.keys("dirty", 2)
    pinned = node.table.pin_resident(node.namespace, keys[:1])
    node.table.drop_staged([node.block(key) for key in (*keys, *dirty)])
    assert node.is_resident([*keys, *dirty]) == [True, False, True, True]
    node.table.unpin([block for block in pinned if block is not None])
