"""Rows of the volumes' eviction policy outlive a parent that leaves its volume, and then the table, before its children."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.types import BlockKey
from kvstore.node.eviction.volumes import BlockRows
from kvstore.node.state.model import Block
from kvstore.tiers.eviction.policy import LruPolicy
from support.chains import chain

NAMESPACE: Any = None
"""Not used here."""


def block_of(key: BlockKey, parent: BlockKey | None) -> Block:
    return Block(NAMESPACE, key, parent, 0, b"")


@pytest.mark.parametrize("used_in_dram", [False, True])
def test_parent_leaves_table_before_child(used_in_dram: bool) -> None:
    """A parent without a replica on a volume is used in DRAM, is evicted there, and is stored again later."""
    parent, child = chain("rows", 2)
    blocks = {parent: block_of(parent, None), child: block_of(child, parent)}
    rows = BlockRows(blocks)
    policy = LruPolicy(rows)
    policy.insert(parent, None)
    policy.insert(child, parent)
    policy.remove(parent)
    if used_in_dram:
        policy.touch([parent])
    rows.keep(blocks.pop(parent))
    policy.remove(child)
    rows.keep(blocks.pop(child))
    assert len(policy) == 0
    blocks[parent] = block_of(parent, None)
    policy.insert(parent, None)
    assert list(policy.coldest(lambda key: True)) == [parent]
