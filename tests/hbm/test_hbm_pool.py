"""A pool alone: kept blocks are found with right bytes, evictions are in order, and failures are misses."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hbm_chains import SPEC, Below, Chain, allocate, chain, in_time

from kvclient import CacheSpec, InvalidArgument
from kvclient.hbm import HbmPool
from kvclient.hbm.namespace_view import NamespaceView
from kvstore.core.buffers import DenseBlocks
from kvstore.core.errors import Unavailable
from kvstore.core.types import BlockKey


@pytest.fixture
def below() -> Below:
    return Below()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pool(request: pytest.FixtureRequest) -> Iterator[HbmPool]:
    with HbmPool(request.param, capacity_bytes=40 * SPEC.block_bytes, space_wait_s=5.0) as pool:
        yield pool
        pool.state.table.validate()


@pytest.fixture
def near(pool: HbmPool, below: Below) -> NamespaceView:
    return pool.attach(SPEC, below)


def test_pool_fetch_returns_kept_blocks(near: NamespaceView) -> None:
    keys, data = chain(10, 1)
    assert near.insert(keys, None, 0, data, None, checksums=True) == 10
    assert near.insert(keys, None, 0, data, None, checksums=True) == 0
    other, _ = chain(3, 2)
    out = allocate(12)
    assert near.fetch([*keys, *other[:2]], out, in_time(), verify=True) == 10
    assert np.array_equal(out.array[:10], data.array)
    assert not out.array[10:].any()
    assert near.fetch([other[0], *keys], allocate(11), in_time(), verify=False) == 0


def test_pool_keep_leaves_no_gaps(near: NamespaceView) -> None:
    keys, data = chain(6, 1)
    assert near.insert(keys[2:4], keys[1], 2, DenseBlocks(data.array[2:4]), None, checksums=True) == 2
    assert near.insert(keys, None, 0, data, None, checksums=True) == 2  # up to the pool's blocks; the rest is kept later
    assert near.insert(keys, None, 0, data, None, checksums=True) == 2
    out = allocate(6)
    assert near.fetch(keys, out, in_time(), verify=True) == 6
    assert np.array_equal(out.array, data.array)


def test_pool_smaller_than_chain_keeps_its_head(pool: HbmPool, near: NamespaceView) -> None:
    keys, data = chain(60, 1)
    kept = near.insert(keys, None, 0, data, None, checksums=False)
    assert 30 <= kept <= 40
    out = allocate(60)
    assert near.fetch(keys, out, in_time(), verify=False) == kept
    assert np.array_equal(out.array[:kept], data.array[:kept])


def test_eviction_demotes_parents_first(pool: HbmPool, near: NamespaceView, below: Below) -> None:
    chains = [chain(12, seed) for seed in range(8)]
    for keys, data in chains:
        assert near.insert(keys, None, 0, data, None, checksums=False) == 12
    for keys, data in chains:
        out = allocate(12)
        found = near.fetch(keys, out, in_time(), verify=False)
        assert np.array_equal(out.array[:found], data.array[:found])
        for at in range(found, 12):  # evicted blocks are in the tier below, byte for byte
            assert below.held[keys[at]] == data.array[at].tobytes()
            assert below.parents[keys[at]] == (keys[at - 1] if at else None)
    stats = pool.stats()
    assert stats["hbm_demoted_blocks_total"] >= 8 * 12 - 40
    assert below.calls < stats["hbm_demoted_blocks_total"]  # whole runs at a time


@pytest.mark.parametrize("how", ["refuses", "fails", "is gone"])
def test_pool_without_demotion_target_keeps_working(pool: HbmPool, below: Below, how: str) -> None:
    near = pool.attach(SPEC, below)
    if how == "refuses":
        below.answer = False
    elif how == "fails":
        below.error = Unavailable("away")
    else:
        near.detach()
    for seed in range(8):
        keys, data = chain(12, seed)
        assert near.insert(keys, None, 0, data, None, checksums=False) == 12
        out = allocate(12)
        assert near.fetch(keys, out, in_time(), verify=False) == 12
        assert np.array_equal(out.array, data.array)


def _place(one: Chain) -> tuple[list[BlockKey], None, int, DenseBlocks]:
    return one[0], None, 0, one[1]


def test_pool_without_demotion_drops_blocks(below: Below) -> None:
    with HbmPool("cpu", capacity_bytes=40 * SPEC.block_bytes, demote=False) as pool:
        near = pool.attach(SPEC, below)
        for seed in range(8):
            assert near.insert(*_place(chain(12, seed)), None, checksums=False) == 12
        assert below.calls == 0


def test_namespaces_in_one_pool_are_isolated(pool: HbmPool, below: Below) -> None:
    other_spec = CacheSpec(model="pool", block_tokens=4, layers=1, layer_block_bytes=5000)
    one, two = pool.attach(SPEC, below), pool.attach(other_spec, below)
    keys, data = chain(4, 1)
    one.insert(keys, None, 0, data, None, checksums=False)
    assert two.fetch(keys, allocate(4, other_spec), in_time(), verify=False) == 0
    for seed in range(20):
        small = chain(30, seed, other_spec)
        assert two.insert(small[0], None, 0, small[1], None, checksums=False) == 30
        out = allocate(30, other_spec)
        assert two.fetch(small[0], out, in_time(), verify=False) == 30
        assert np.array_equal(out.array, small[1].array)
    assert pool.usage().blocks
    with pytest.raises(InvalidArgument):  # full or not
        pool.attach(CacheSpec(model="huge", block_tokens=4, layers=8, layer_block_bytes=1 << 20), below)


def test_pool_resize_releases_and_takes_memory(pool: HbmPool, near: NamespaceView, below: Below) -> None:
    keys, data = chain(20, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    assert pool.resize(4096)
    assert pool.usage().capacity_bytes == 4096
    assert set(below.held) == set(keys)  # it was offered below before
    assert near.fetch(keys, allocate(20), in_time(), verify=False) == 0
    assert near.insert(keys, None, 0, data, None, checksums=False) == 0
    assert pool.resize(40 * SPEC.block_bytes)
    assert near.insert(keys, None, 0, data, None, checksums=False) == 20
    with near.pinned(keys[:1]):
        assert not pool.resize(4096, timeout_s=0.02)
    assert near.fetch(keys[:1], allocate(1), in_time(), verify=False) == 1
    for wrong in (0, 4095, True, 1.5):
        with pytest.raises(InvalidArgument):
            pool.resize(wrong)  # type: ignore[arg-type]


def test_cancelled_operation_stops_the_copy(near: NamespaceView) -> None:
    keys, data = chain(4, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    operation = in_time()
    operation.cancel()
    assert near.fetch(keys, allocate(4), operation, verify=False) == 0


def test_pool_is_thread_safe(pool: HbmPool, near: NamespaceView) -> None:
    chains = [chain(12, seed) for seed in range(6)]
    wrong: list[str] = []

    def work(mine: int) -> None:
        for turn in range(30):
            keys, data = chains[(mine + turn) % 6]
            near.insert(keys, None, 0, data, None, checksums=False)
            out = allocate(12)
            found = near.fetch(keys, out, in_time(), verify=False)
            if not np.array_equal(out.array[:found], data.array[:found]):
                wrong.append(f"thread {mine}, turn {turn}")

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_closed_pool_rejects_clients_and_misses(below: Below) -> None:
    pool = HbmPool("cpu", capacity_bytes=1 << 20)
    near = pool.attach(SPEC, below)
    keys, data = chain(4, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    pool.close()
    pool.close()
    assert near.fetch(keys, allocate(4), in_time(), verify=False) == 0
    assert near.insert(keys, None, 0, data, None, checksums=False) == 0
    with pytest.raises(InvalidArgument):
        pool.attach(SPEC, below)


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity_bytes": 1 << 20, "policy": "best"},
        {"capacity_bytes": 1 << 20, "node_id": "../x"},
        {"capacity_bytes": 1 << 20, "space_wait_s": -1},
        {"capacity_bytes": 1 << 20, "metadata": "127.0.0.1:1", "listen": "0.0.0.0:0"},
        {"capacity_bytes": 1 << 20, "metadata": "127.0.0.1:1", "listen": "nonsense"},
        {"capacity_bytes": 1 << 20, "metadata": "nonsense"},
        {"capacity_bytes": 1 << 20, "metadata": "127.0.0.1:1", "anti_entropy_interval_s": 0},
    ],
    ids=str,
)
def test_invalid_settings_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        HbmPool("cpu", **settings)  # type: ignore[arg-type]
