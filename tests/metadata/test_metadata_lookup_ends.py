"""Tests of the guessed ends in a lookup: they save records to read, and never change an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from metadata_harness import run_of, serve

from kvstore.index import lmdb
from kvstore.index.contract import VolumeEpoch
from kvstore.index.record import decode
from kvstore.metadata.membership.node_table import NodeTable, VolumeLocation
from support.chains import chain

LENGTH = 1_600
KEYS = chain("a", LENGTH)
WRONG = {
    "far too short": [1, 2, 3],
    "one less and one more": [1_199, 1_201, 1_499, 1_501],
    "at the bounds": [0, 1, LENGTH - 1, LENGTH],
    "beyond the request": [LENGTH + 1, 2**31, 2**32 - 1],
    "the same again and again": [700] * 8,
    "unordered": [1_500, 20, 1_200, 900, 5, 1_400, 3, 2],
}


@contextmanager
def records_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Collect the records that are read."""
    read: list[bytes] = []

    def count(value: bytes) -> tuple[int, ...]:
        read.append(value)
        return decode(value)

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "decode", count)
        yield read


@pytest.fixture
async def index_path(tmp_path: Path) -> Path:
    """Make an index of a chain whose first 1,200 blocks are in DRAM and whose first 1,500 are on NVMe."""
    async with serve(tmp_path / "index") as running:
        peer = running.peer()
        await peer.register()
        await peer.publish(peer.dram, run_of(KEYS, 0, 1_200))
        await peer.publish(peer.nvme, run_of(KEYS, 0, 1_500))
    return tmp_path / "index"


async def test_lookup_with_ends_reads_few_records_after_a_start(index_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(index_path) as running:
        with records_read(monkeypatch) as searched:
            expected = await running.peer().lookup(KEYS)
    async with serve(index_path) as running:
        with records_read(monkeypatch) as read:
            assert await running.peer().lookup(KEYS, ends=[1_200, 1_500]) == expected
    assert expected.hit_blocks == 1_500
    assert len(read) == 4, "the head, and on both sides of both ends, except for the absent record"
    assert len(searched) > 10


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("case", WRONG)
async def test_lookup_with_wrong_ends_has_the_same_answer(
    index_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, known: bool
) -> None:
    async with serve(index_path) as running:
        expected = await running.peer().lookup(KEYS)
        assert expected.hit_blocks == 1_500
    async with serve(index_path) as running:
        peer = running.peer()
        if known:
            await peer.lookup(KEYS)
        with records_read(monkeypatch) as read:
            for length in (LENGTH, 1_300, 7):
                answer = await peer.lookup(KEYS[:length], ends=WRONG[case])
                assert answer.hit_blocks == min(length, 1_500)
                assert length < LENGTH or answer == expected
        assert len(read) <= 3 * (2 * len(WRONG[case]) + 30)
        assert (await peer.lookup(chain("b", 10), ends=WRONG[case])).hit_blocks == 0


async def test_lookup_overtaken_by_registrations_is_a_miss(index_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_nodes: NodeTable, volume_epoch: VolumeEpoch) -> VolumeLocation:
        raise KeyError(volume_epoch)

    async with serve(index_path) as running:
        peer = running.peer()
        with monkeypatch.context() as patch:
            patch.setattr(NodeTable, "server_of", gone)
            assert (await peer.lookup(KEYS)).hit_blocks == 0
        assert (await peer.lookup(KEYS)).hit_blocks == 1_500
