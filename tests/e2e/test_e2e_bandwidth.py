"""Bandwidths without configuration: assumed on a fresh store, measured once its volumes hold blocks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from conftest import Store
from kvstore.embedded.cluster import NodeSpec
from nursery import cli
from support.wait import wait_until

MIB = 1 << 20


def links(store: Store) -> dict[str, dict[str, Any]]:
    """The links of node a, by network."""
    words = ["nodes", "show", "a", "-o", "json", "--metadata", store.cluster.metadata_address]
    command = [*cli(), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {nic["network"]: nic for nic in json.loads(done.stdout)["nics"]}


def shown(store: Store) -> str:
    command = [*cli(), "nodes", "show", "a", "--metadata", store.cluster.metadata_address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_bandwidth_is_assumed_until_volumes_are_read(make_store: Callable[..., Store]) -> None:
    store = make_store(NodeSpec("a", dram_bytes=128 * MIB, nvme_bytes=256 * MIB))
    if "O_DIRECT" not in "".join(line for line in store.node_stats("a").io_engines if line.startswith("a/nvme0")):
        pytest.skip("this file system lacks O_DIRECT: read rates of volumes were NOT tested")
    wait_until(lambda: links(store)["storage"]["planned_source"] == "assumed", "the planner knows the node")
    assert links(store)["compute"]["planned_source"] == "assumed"
    assert "bandwidth 3.1GB/s (assumed: neither configured nor measured)" in shown(store)
    engine = store.engine("a", layers=4, layer_bytes=256 << 10)
    assert engine.store("chain", 72).bytes_stored == 72 * MIB
    assert store.flush("a")
    wait_until(lambda: links(store)["storage"]["planned_source"] == "measured", "the volume is read")
    storage = links(store)["storage"]
    assert storage["configured_bytes_per_s"] == 0
    assert storage["planned_bytes_per_s"] > 0
    assert "(measured)" in shown(store)


def test_bandwidth_configured_is_kept(make_store: Callable[..., Store]) -> None:
    settings = (("storage_bandwidth", "2GB"), ("compute_bandwidth", "4GB"))
    store = make_store(NodeSpec("a", dram_bytes=16 * MIB, settings=settings))
    wait_until(lambda: links(store)["storage"]["planned_source"] == "configured", "the planner knows the node")
    assert links(store)["storage"]["planned_bytes_per_s"] == 2e9
    assert links(store)["compute"]["planned_source"] == "configured"
