"""Faults of the store under SGLang: a miss or a page not stored, in bounded time, never an exception or a wrong byte."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_cases import MIB, PAGE, backend_extra, contents, hashes, positions, prefixed, randomise

from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.lab.sglang_bed import Tree, host_pool, storage_config
from support.wait import wait_until

PAGES = 16
QUICK = {"lookup_deadline_s": 0.5, "load_deadline_s": 2.0, "store_deadline_s": 2.0}
BOUND_S = 50.0
"""Many times the deadline of two seconds, for slow machines: longer is a hang."""


@pytest.fixture
def frail(tmp_path: Path) -> Iterator[LocalCluster]:
    """A store that a test may break: a node with an NVMe volume."""
    with LocalCluster([NodeSpec("n", dram_bytes=64 * MIB, nvme_bytes=64 * MIB)], tmp_path) as cluster:
        yield cluster


def opened(cluster: LocalCluster, pool: Any, **changes: object) -> Any:
    from kvclient.engines.sglang.backend import KVStoreHiCache

    backend = KVStoreHiCache(storage_config(backend_extra(cluster, "faults", **{**QUICK, **changes})), {})
    backend.register_mem_pool_host(pool)
    return backend


def filled(cluster: LocalCluster, **changes: object) -> tuple[Any, Any, list[str], torch.Tensor]:
    """A backend with pages in the store: (backend, pool, their hashes, their bytes)."""
    pool, names = host_pool("page_first", tokens=1024, page=PAGE), hashes("f", PAGES)
    backend = opened(cluster, pool, **changes)
    randomise(pool, 1)
    want = contents(pool, range(PAGES))
    assert all(backend.batch_set_v1(names, positions(range(PAGES)), prefixed([])))
    assert backend.flush()
    wait_until(lambda: backend.batch_exists(names) == PAGES, "all pages can be looked up")
    return backend, pool, names, want


def assert_true_or_missing(pool: Any, loaded: list[bool], want: torch.Tensor, first: int) -> None:
    """Check that each loaded page has its own bytes. Page 0 was loaded into host page ``first``."""
    have = contents(pool, range(first, first + len(loaded)))
    for page, there in enumerate(loaded):
        assert not there or torch.equal(have[page], want[page]), f"page {page} has other bytes"


def corrupt(volume: Path) -> None:
    """Flip bits of every block on a volume but not of its headers: a byte per half KiB after the first MiB."""
    for slab in volume.rglob("*"):
        if slab.is_file() and slab.stat().st_size > 4 * MIB:
            with slab.open("r+b") as file:
                data = bytearray(file.read())
                for at in range(MIB, len(data), 512):
                    if data[at]:
                        data[at] ^= 0xFF
                file.seek(0)
                file.write(data)


@pytest.mark.parametrize("in_place", [1, 0])
def test_corrupt_pages_are_misses(frail: LocalCluster, in_place: int) -> None:
    backend, pool, names, want = filled(frail, **({} if in_place else {"interface_v1": 1, "chained": False}))
    backend.close()
    frail.stop("n")
    corrupt(frail.volume_path("n"))
    frail.start_node("n")
    again = opened(frail, pool, **({} if in_place else {"chained": False}))
    wait_until(lambda: again.batch_exists(names) > 0, "the node announces what it has")
    loaded = again.batch_get_v1(names, positions(range(20, 20 + PAGES)), prefixed([]))
    assert not all(loaded), "no page was found damaged"
    assert_true_or_missing(pool, loaded, want, 20)
    assert again.counters().get("client_missed_corrupt_blocks_total", 0) > 0
    again.close()


@pytest.mark.slow
def test_node_killed_and_restarted(frail: LocalCluster) -> None:
    backend, pool, names, want = filled(frail)
    frail.kill("n")
    began_s = time.monotonic()
    assert backend.batch_get_v1(names, positions(range(20, 20 + PAGES)), prefixed([])) == [False] * PAGES
    assert backend.batch_set_v1(hashes("g", 2), positions([0, 1]), prefixed([])) == [False, False]
    assert backend.batch_exists(names) in {0, PAGES}, "the index notices after some heartbeats"
    assert time.monotonic() - began_s < BOUND_S
    frail.start_node("n")
    # its socket or its boot id changed: the backend must find it again
    wait_until(
        lambda: all(backend.batch_get_v1(names, positions(range(20, 20 + PAGES)), prefixed([]))), "durable pages are served"
    )
    assert_true_or_missing(pool, [True] * PAGES, want, 20)
    backend.close()


def test_metadata_server_killed(frail: LocalCluster) -> None:
    """Pages of this host's node are still loaded, nothing hangs, and the backend recovers afterwards."""
    backend, pool, names, want = filled(frail)
    frail.kill("metadata")
    began_s = time.monotonic()
    assert backend.batch_exists(hashes("unknown", 3)) == 0
    loaded = backend.batch_get_v1(names, positions(range(20, 20 + PAGES)), prefixed([]))
    assert loaded == [True] * PAGES
    assert_true_or_missing(pool, loaded, want, 20)
    assert backend.batch_set_v1(hashes("g", 2), positions([0, 1]), prefixed([])) == [True, True]
    assert time.monotonic() - began_s < BOUND_S
    backend.close()


@pytest.mark.slow
def test_store_absent_at_the_start(frail: LocalCluster) -> None:
    """The engine starts without the store and uses it later; with ``require_store`` the start fails."""
    pool, names = host_pool("page_first", tokens=1024, page=PAGE), hashes("f", 4)
    extra = backend_extra(frail, "faults", **QUICK)
    frail.kill("n")
    from kvclient import KVStoreError
    from kvclient.engines.sglang.backend import KVStoreHiCache

    backend = KVStoreHiCache(storage_config(extra), {})
    backend.register_mem_pool_host(pool)
    assert backend.batch_exists(names) == 0
    assert backend.batch_set_v1(names, positions(range(4)), prefixed([])) == [False] * 4
    required = KVStoreHiCache(storage_config({**extra, "require_store": True}), {})
    with pytest.raises(KVStoreError):
        required.register_mem_pool_host(pool)
    frail.start_node("n")
    wait_until(lambda: all(backend.batch_set_v1(names, positions(range(4)), prefixed([]))), "stores once the node is there")
    backend.close()


def test_a_full_node_evicts_and_serves_on(tmp_path: Path) -> None:
    """Twice as many pages as there is space for: some leave, none is wrong."""
    with LocalCluster([NodeSpec("n", dram_bytes=16 * MIB)], tmp_path) as cluster:
        pool = host_pool("page_first", tokens=1024, page=PAGE, heads=4, head_dim=128)
        backend = opened(cluster, pool)
        expected: dict[str, torch.Tensor] = {}
        for round_ in range(10):
            randomise(pool, round_)
            expected[f"r{round_}"] = contents(pool, range(PAGES))
            backend.batch_set_v1(hashes(f"r{round_}", PAGES), positions(range(PAGES)), prefixed([]))
        hits = 0
        for chain, want in expected.items():
            loaded = backend.batch_get_v1(hashes(chain, PAGES), positions(range(20, 20 + PAGES)), prefixed([]))
            assert_true_or_missing(pool, loaded, want, 20)
            hits += sum(loaded)
        assert 0 < hits < 10 * PAGES
        backend.close()


def test_tree_lives_through_the_death_of_the_store(frail: LocalCluster) -> None:
    """SGLang's own threads: prefetches end, with nothing, and nothing is raised in them."""
    extra = backend_extra(frail, "tree", prefetch_threshold=1, hicache_storage_pass_prefix_keys=True, **QUICK)
    tokens = list(range(8 * PAGE))
    with Tree(extra) as tree:
        node = tree.insert(tokens, 1)
        tree.back_up(node)
    with Tree(extra) as tree:
        frail.kill("n")
        frail.kill("metadata")
        began_s = time.monotonic()
        assert tree.prefetch(tokens) == 0
        node = tree.insert(tokens, 2)
        want = tree.snapshot(node)
        tree.back_up(node)
        assert time.monotonic() - began_s < BOUND_S
        assert all(torch.equal(a, b) for a, b in zip(tree.snapshot(node), want, strict=True))
