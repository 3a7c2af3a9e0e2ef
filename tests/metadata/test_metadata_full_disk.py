"""Tests of a metadata server on a full disk: it starts, answers lookups, and accepts changes after there is space."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from metadata_harness import Peer, run_of, server_process

from kvstore.core.errors import CapacityExceeded
from kvstore.core.types import BootId, NodeId, Tier, VolumeId
from kvstore.index.lmdb import LmdbIndex
from kvstore.observe.counters import Counters
from kvstore.rpc.client import connect_aio
from support.chains import chain
from support.small_disk import mounted

TTL_MS = 60_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder whose ``index`` is a file system of two megabytes."""
    with mounted(tmp_path / "index", "2m") as is_mounted:
        if not is_mounted:
            pytest.skip("mounting a file system is not permitted here")
        yield tmp_path


def fill(disk: Path) -> Path:
    """Use all free space."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return filler


async def test_server_start_disk_full_answers_and_recovers(small_disk: Path) -> None:
    keys, more = chain("a", 200), chain("b", 50)
    with server_process(small_disk, ttl_ms=TTL_MS) as server:
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            await peer.publish(peer.nvme, run_of(keys), sync_end=True)
        assert server.stop() == 0
        filler = fill(small_disk / "index")
        server.start()
        async with connect_aio(server.address) as channel:
            again = Peer(channel)
            again.boot_id, again.sequence = peer.boot_id, peer.sequence
            assert await again.hit(keys) == 200
            with pytest.raises(CapacityExceeded) as refused:
                await again.register()
            assert refused.value.retryable
            assert (await again.counters())["index_read_only_total"] == 1
            assert "no space on disk" in server.log()
            assert await again.hit(keys) == 200
            filler.unlink()
            assert await again.register() == {again.dram: True, again.nvme: False}
            await again.publish(again.nvme, run_of(more))
            assert await again.hit(more) == 50
            assert await again.hit(keys) == 200
            assert (await again.counters())["index_writable_again_total"] == 1
        assert server.stop() == 0


def test_disk_full_index_only_read_stays_clean(small_disk: Path) -> None:
    place, counters = small_disk / "index", Counters()
    index = LmdbIndex.open(place, map_bytes=64 << 20, count=counters.add)
    epoch = index.epoch
    index.close()
    state = (place / "state.json").read_bytes()
    filler = fill(place)
    index = LmdbIndex.open(place, map_bytes=64 << 20, count=counters.add)
    with pytest.raises(CapacityExceeded):
        index.open_volume_epoch(VolumeId("v"), NodeId("n"), Tier.DRAM, BootId(bytes(16)))
    index.close()
    assert (place / "state.json").read_bytes() == state
    filler.unlink()
    index = LmdbIndex.open(place, map_bytes=64 << 20, count=counters.add)
    assert index.epoch == epoch
    index.close()
    assert "index_dropped_total" not in counters.snapshot()


def test_server_start_disk_full_without_lock_file_fails(small_disk: Path) -> None:
    """LMDB maps that file: a page without space would be a SIGBUS, so this is refused instead."""
    place = small_disk / "index"
    LmdbIndex.open(place, map_bytes=64 << 20).close()
    (place / "lock.mdb").unlink()
    fill(place)
    with pytest.raises(CapacityExceeded):
        LmdbIndex.open(place, map_bytes=64 << 20)
