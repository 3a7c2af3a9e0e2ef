"""Adoption of a shared volume, with real processes: its owner is killed or paused, and no durable block is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Store
from kvstore.core.types import Tier
from kvstore.embedded.cluster import NodeSpec
from support.wait import wait_until

MIB = 1 << 20
MakeStore = Callable[..., Store]
VOLUME = "owner/nvme0"


def shared(make_store: MakeStore, tmp_path: Path, *, adopters: int = 1, after: str = "1s") -> Store:
    """A storage node, and nodes that adopt its volume."""
    settings = (
        ("mounts", f"{VOLUME}={tmp_path / '0' / 'owner-nvme'}"),
        ("adopt_mounts", "true"),
        ("adopt_after", after),
    )
    owner = NodeSpec("owner", roles=("storage",), nvme_bytes=64 * MIB, dram_bytes=64 * MIB)
    return make_store(owner, *(NodeSpec(f"a{at}", nvme_bytes=16 * MIB, settings=settings) for at in range(adopters)))


def volumes(store: Store, node: str) -> list[str]:
    return [tier.volume_id for tier in store.node_stats(node).tiers]


def counter(store: Store, node: str, name: str) -> int:
    return store.node_stats(node).counters[name]


def wait_adopted(store: Store, *nodes: str) -> str:
    """Wait until one of some nodes has the volume. Returns it."""
    found: list[str] = []

    def adopted() -> bool:
        found[:] = [node for node in nodes if counter(store, node, "volumes_adopted_total")]
        return bool(found)

    wait_until(adopted, "the volume is adopted", 30)
    return found[0]


def test_adoption_owner_killed_durable_blocks_are_served(make_store: MakeStore, tmp_path: Path) -> None:
    store = shared(make_store, tmp_path)
    assert store.engine("owner").store("c", 50, durable=True).durable
    store.cluster.kill("owner")
    wait_adopted(store, "a0")
    reader = store.engine("a0")
    wait_until(lambda: reader.client.lookup(reader.keys("c", 50)).hit_blocks == 50, "its blocks are found")
    result = reader.load("c", 50)
    assert result.bytes_by_tier == {Tier.NVME: 50 * reader.spec.block_bytes}
