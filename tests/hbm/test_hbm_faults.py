"""Failures of a pool are misses or skips: wrong bytes, a dead device, short memory, hung demotion, close during use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hbm_chains import SPEC, Below, allocate, chain, in_time

from kvclient.hbm import HbmPool, memory
from kvclient.hbm.namespace_view import NamespaceView
from kvclient.hbm.provider import PoolProvider
from kvclient.hbm.volume import STAGING_BYTES, HbmVolume
from kvclient.memory.device_buffer import DeviceHung
from kvstore.core.buffers import BlockBuffer, DenseBlocks
from kvstore.core.errors import CapacityExceeded, Internal
from kvstore.core.types import BlockKey, Outcome
from kvstore.transport.contract import ReadRequest
from kvstore.transport.tcp.peer import TcpPeer
from kvstore.transport.tcp.server import TcpServer
from support.wait import wait_until

WAIT_S = 20.0


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


def flip(pool: HbmPool, near: NamespaceView, keys: Sequence[BlockKey], at: int) -> None:
    with near.pinned(keys) as found:
        pool.state.volume.memory[int(found.offsets[at]) + 9000] ^= 1


def fails(*_: object) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


def request_for(keys: Sequence[BlockKey], within_s: float = WAIT_S) -> ReadRequest:
    return ReadRequest(SPEC.namespace, keys, 0, SPEC.layers, 0, time.monotonic() + within_s)


# ---- wrong bytes ----
def test_flipped_bit_is_found_and_block_dropped(pool: HbmPool, near: NamespaceView, below: Below) -> None:
    keys, data = chain(5, 1)
    near.insert(keys, None, 0, data, None, checksums=True)
    flip(pool, near, keys, 3)
    assert near.fetch(keys, allocate(5), in_time(), verify=True) == 3
    assert pool.stats()["hbm_corrupt_blocks_total"] == 1
    assert near.fetch(keys, allocate(5), in_time(), verify=False) == 3  # it is no longer here
    assert near.insert(keys, None, 0, data, None, checksums=True) == 1
    assert near.fetch(keys, allocate(5), in_time(), verify=True) == 5
    assert below.calls == 0


def test_verified_fetch_misses_blocks_without_checksums(pool: HbmPool, near: NamespaceView) -> None:
    keys, data = chain(5, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    assert near.fetch(keys, allocate(5), in_time(), verify=True) == 0
    near.insert(keys, None, 0, data, None, checksums=True)  # verified bytes of the same blocks: now there are checksums
    assert near.fetch(keys, allocate(5), in_time(), verify=True) == 5
    flip(pool, near, keys, 2)
    assert near.fetch(keys, allocate(5), in_time(), verify=True) == 2


def test_flipped_bit_is_not_demoted(pool: HbmPool, near: NamespaceView, below: Below) -> None:
    """The tier below would compute a checksum of the wrong bytes."""
    keys, data = chain(5, 1)
    near.insert(keys, None, 0, data, None, checksums=True)
    flip(pool, near, keys, 3)
    pool.evict()
    assert set(below.held) == set(keys[:3])
    assert all(below.held[key] == data.array[at].tobytes() for at, key in enumerate(keys[:3]))
    assert pool.stats()["hbm_corrupt_blocks_total"] == 1


def test_flipped_bit_is_detected_by_peer(pool: HbmPool, near: NamespaceView) -> None:
    keys, data = chain(5, 1)
    near.insert(keys, None, 0, data, None, checksums=True)
    flip(pool, near, keys, 3)
    server = TcpServer(PoolProvider(pool.namespaces, pool.state))
    server.start()
    peer = TcpPeer(server.address)
    out = allocate(5)
    outcomes = peer.read(request_for(keys), out).outcomes
    assert list(outcomes) == [Outcome.HIT] * 3 + [Outcome.CORRUPT, Outcome.HIT]
    assert np.array_equal(out.array[:3], data.array[:3])
    peer.close()
    server.stop()


# ---- a device that fails ----
def test_failed_device_is_a_miss_and_disables_pool(pool: HbmPool, near: NamespaceView, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, data = chain(4, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    with monkeypatch.context() as patch, near.pinned(keys[:2]):
        patch.setattr(pool.state.volume, "copy_out", fails)
        assert near.fetch(keys, allocate(4), in_time(), verify=False) == 0
        assert pool.stats()["hbm_blocks"] == 2  # a pinned block is evicted with its last unpin
    assert near.fetch(keys, allocate(4), in_time(), verify=False) == 0
    assert near.insert(keys, None, 0, data, None, checksums=False) == 0
    stats = pool.stats()
    assert (stats["hbm_device_errors_total"], stats["hbm_lost"], stats["hbm_blocks"]) == (1, 1, 0)


def test_failed_device_is_a_miss_for_peers(pool: HbmPool, near: NamespaceView, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, data = chain(4, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    provider = PoolProvider(pool.namespaces, pool.state)
    monkeypatch.setattr("kvclient.hbm.provider.host_views", fails)
    for _ in range(2):
        parts = list(provider.read(request_for(keys)))
        assert [outcome for part in parts for outcome in part.outcomes] == [Outcome.MISS] * 4
        for part in parts:
            part.release()
    assert pool.stats()["hbm_blocks"] == 0


def test_failed_write_leaks_no_slot(pool: HbmPool, near: NamespaceView, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, data = chain(4, 1)
    monkeypatch.setattr(pool.state.volume, "copy_in", fails)
    assert near.insert(keys, None, 0, data, None, checksums=False) == 0
    assert pool.usage().used_bytes == 0


def test_transient_out_of_memory_keeps_the_pool(pool: HbmPool, near: NamespaceView, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, data = chain(4, 1)
    near.insert(keys, None, 0, data, None, checksums=False)

    def short(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(pool.state.volume, "copy_out", short)
        assert near.fetch(keys, allocate(4), in_time(), verify=False) == 0
    assert near.fetch(keys, allocate(4), in_time(), verify=False) == 4
    assert (pool.stats()["hbm_out_of_memory_total"], pool.stats()["hbm_lost"]) == (1, 0)


class Gpu:
    """Torch's calls for a GPU, in front of a pool in host memory. While it hangs, no event of it is reached."""

    def __init__(self, pool: HbmPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs = False
        monkeypatch.setattr(HbmVolume, "host_view", None)
        monkeypatch.setattr(pool.state.volume, "device", torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)
        monkeypatch.setattr("kvclient.hbm.volume.COPY_S", 0.02)
        monkeypatch.setattr(memory, "kept", [])

    def record(self, _: object) -> None:
        pass

    def query(self) -> bool:
        return not self.hangs


@pytest.mark.parametrize("way", ["fetch", "insert", "peer", "demotion"])
def test_hung_gpu_ends_copies_through_the_host(below: Below, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    keys, data = chain(4, 1)
    pool = HbmPool("cpu", capacity_bytes=40 * SPEC.block_bytes)
    near, volume = pool.attach(SPEC, below), pool.state.volume
    gpu = Gpu(pool, monkeypatch)
    assert near.insert(keys, None, 0, data, None, checksums=True) == 4
    assert near.fetch(keys, out := allocate(4), in_time(), verify=True) == 4
    assert np.array_equal(out.array, data.array)
    gpu.hangs = True
    if way == "fetch":
        assert near.fetch(keys, allocate(4), in_time(), verify=True) == 0
    elif way == "insert":
        assert near.insert(*_more(), None, checksums=True) == 0
        assert pool.usage().blocks == 4, "slots that the GPU may still write to were given back"
    elif way == "peer":
        (part,) = PoolProvider(pool.namespaces, pool.state).read(request_for(keys))
        assert list(part.outcomes) == [Outcome.MISS] * 4
        part.release()
    else:
        pool.evict()
        assert not below.held
    assert (pool.stats()["hbm_lost"], pool.stats()["hbm_device_errors_total"]) == (1, 1)
    assert [one.nbytes for one in memory.kept] == [volume.memory.nbytes, STAGING_BYTES]
    assert any(one is volume.memory for one in memory.kept)
    with pytest.raises(DeviceHung, match="hung earlier"):
        volume.copy_in(np.array([0]), DenseBlocks(data.array[:1]))
    assert not volume.resize(4096)
    monkeypatch.setattr("kvclient.hbm.pool._STOP_S", 0.05)
    pool.close()


def _more() -> tuple[Sequence[BlockKey], None, int, BlockBuffer]:
    keys, data = chain(4, 2)
    return keys, None, 0, data


@pytest.mark.parametrize("way", ["read", "write"])
def test_hung_gpu_ends_copies_of_tensors(pool: HbmPool, near: NamespaceView, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def hangs(_: object) -> None:
        raise DeviceHung("copies of the pool did not end in time")

    keys, data = chain(4, 1)
    source = torch.tensor(data.array)
    assert near.insert_tensor(keys, None, 0, source.to(pool.state.volume.device)) == 4
    monkeypatch.setattr(memory, "kept", [])
    monkeypatch.setattr("kvclient.hbm.namespace_view.until_done", hangs)
    if way == "read":
        assert near.copy_to_tensor(keys, torch.zeros_like(source, device=pool.state.volume.device)) == 0
        assert pool.usage().blocks == 0
    else:
        more, _ = chain(4, 2)
        assert near.insert_tensor(more, None, 0, source.to(pool.state.volume.device)) == 0
        assert pool.usage().blocks == 4, "slots that the GPU may still write to were given back"
    assert pool.stats()["hbm_lost"] == 1
    assert any(one is pool.state.volume.memory for one in memory.kept)
    monkeypatch.setattr("kvclient.hbm.pool._STOP_S", 0.05)
    pool.close()


def test_pool_resize_beyond_memory_keeps_blocks(pool: HbmPool, near: NamespaceView, below: Below) -> None:
    keys, data = chain(4, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    before = pool.usage()
    with pytest.raises(CapacityExceeded):
        pool.resize(1 << 50)
    assert pool.usage() == before
    assert not below.calls
    assert near.fetch(keys, allocate(4), in_time(), verify=False) == 4


def test_failed_pool_growth_leaves_one_page(pool: HbmPool, near: NamespaceView, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, data = chain(4, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    with monkeypatch.context() as patch:
        patch.setattr("kvclient.hbm.memory.free_bytes", lambda _: 1 << 61)  # it was free, and others were quicker
        with pytest.raises(CapacityExceeded):
            pool.resize(1 << 60)
    assert pool.usage().capacity_bytes == 4096
    assert near.insert(keys, None, 0, data, None, checksums=False) == 0
    assert pool.stats()["hbm_too_small_total"] == 1
    assert pool.resize(1 << 20)
    assert near.insert(keys, None, 0, data, None, checksums=False) == 4


def test_demotion_bug_is_not_a_device_failure(pool: HbmPool) -> None:
    def broken(keys: Sequence[BlockKey], parent: BlockKey | None, depth: int, blocks: BlockBuffer) -> bool:
        raise RuntimeError("cannot schedule new futures after shutdown")

    near = pool.attach(SPEC, broken)
    for seed in range(6):
        keys, data = chain(12, seed)
        assert near.insert(keys, None, 0, data, None, checksums=False) == 12
    assert pool.stats()["hbm_demotion_bugs_total"] > 0
    assert pool.stats()["hbm_lost"] == 0


# ---- tiers below that hang ----
class HungTier:
    """A tier that stores nothing and does not answer until the test releases it."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.gate = threading.Event()

    def __call__(self, keys: Sequence[BlockKey], parent: BlockKey | None, depth: int, blocks: BlockBuffer) -> bool:
        self.asked.set()
        return self.gate.wait(WAIT_S)


@pytest.fixture
def stuck() -> Iterator[HungTier]:
    stuck = HungTier()
    yield stuck
    stuck.gate.set()


def test_hung_demotion_wait_is_bounded(stuck: HungTier) -> None:
    with HbmPool("cpu", capacity_bytes=40 * SPEC.block_bytes, space_wait_s=0.01) as pool:
        near = pool.attach(SPEC, stuck)
        for seed in range(4):
            keys, data = chain(12, seed)
            near.insert(keys, None, 0, data, None, checksums=False)
        assert pool.stats()["hbm_no_space_blocks_total"] > 0
        assert stuck.asked.wait(WAIT_S)
        waiting = pool.state.table.counts()[1]
        assert not pool.resize(4096, timeout_s=0.05)  # a run is being copied at this moment
        assert 0 < pool.usage().blocks <= waiting  # all other blocks are evicted
        stuck.gate.set()
        assert pool.resize(4096)


def test_close_waits_for_readers_for_a_bounded_time(below: Below) -> None:
    """A pool that is closed during a read keeps the memory; the reader gets the block's bytes."""
    pool = HbmPool("cpu", capacity_bytes=40 * SPEC.block_bytes)
    near = pool.attach(SPEC, below)
    keys, data = chain(4, 1)
    near.insert(keys, None, 0, data, None, checksums=False)
    with near.pinned(keys) as found:
        closing = threading.Thread(target=pool.close)
        closing.start()
        wait_until(lambda: not near.fetch(keys, allocate(4), in_time(), verify=False))
        assert closing.is_alive()
        size = SPEC.block_bytes
        for at, offset in enumerate(found.offsets.tolist()):
            assert pool.state.volume.memory[offset : offset + size].numpy().tobytes() == data.array[at].tobytes()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    with pytest.raises(Internal, match="closed"):
        pool.state.volume.memory  # noqa: B018  # it raises


# ---- memory wanted back while in use ----
def test_peer_readers_do_not_block_resize(pool: HbmPool, near: NamespaceView) -> None:
    """Peers read all the time while the pool is emptied, made smaller, larger and filled again: each hit has its bytes."""
    keys, data = chain(30, 1)
    server = TcpServer(PoolProvider(pool.namespaces, pool.state))
    server.start()
    wrong: list[str] = []
    hits = [0, 0]
    ending = threading.Event()

    def read(mine: int) -> None:
        peer = TcpPeer(server.address)
        while not ending.is_set():
            out = allocate(30)
            outcomes = np.array(peer.read(request_for(keys), out).outcomes)
            good = np.flatnonzero(outcomes == Outcome.HIT)
            hits[mine] += len(good)
            if not np.array_equal(out.array[good], data.array[good]) or (outcomes == Outcome.CORRUPT).any():
                wrong.append("wrong bytes")
        peer.close()

    readers = [threading.Thread(target=read, args=(mine,)) for mine in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(12):
            near.insert(keys, None, 0, data, None, checksums=False)
            before = list(hits)
            wait_until(lambda before=before: all(now > then for now, then in zip(hits, before, strict=True)))  # type: ignore[misc]
            if turn % 2:
                assert pool.resize((64 if turn % 4 == 1 else 40) * SPEC.block_bytes, timeout_s=WAIT_S)
            else:
                pool.evict()
    finally:
        ending.set()
        for reader in readers:
            reader.join(WAIT_S)
        server.stop()
    assert wrong == []
    stats = pool.stats()
    assert stats["hbm_lost"] == stats.get("hbm_failed_operations_total", 0) == 0


def test_concurrent_resizes_leave_the_pool_open(pool: HbmPool, near: NamespaceView) -> None:
    keys, data = chain(8, 1)
    ending = threading.Event()

    def use() -> None:
        while not ending.is_set():
            near.insert(keys, None, 0, data, None, checksums=False)
            near.fetch(keys, allocate(8), in_time(), verify=False)

    def resize(size: int) -> None:
        for _ in range(10):
            pool.resize(size * SPEC.block_bytes, timeout_s=WAIT_S)

    user = threading.Thread(target=use)
    user.start()
    threads = [threading.Thread(target=resize, args=(size,)) for size in (20, 40, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    ending.set()
    user.join(WAIT_S)
    near.insert(keys, None, 0, data, None, checksums=False)
    out = allocate(8)
    assert near.fetch(keys, out, in_time(), verify=False) == 8
    assert np.array_equal(out.array, data.array)


def test_closed_pool_resize_is_rejected(below: Below) -> None:
    pool = HbmPool("cpu", capacity_bytes=1 << 20)
    pool.close()
    assert not pool.resize(1 << 21)
    with pytest.raises(Internal, match="closed"):
        pool.state.volume.memory  # noqa: B018  # it raises


def test_free_host_memory_includes_reclaimable_caches() -> None:
    assert memory.free_bytes(torch.device("cpu")) > 0
