"""Tests of the guessed ends in a lookup: they save records to read, and never change an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from metadata_harness import Peer, Running, run_of

from kvstore.index import lmdb
from kvstore.index.record import decode
from kvstore.index.run_end_cache import RunEndCache
from support.chains import chain

LENGTH = 1_600
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


async def publish(running: Running) -> tuple[Peer, list[bytes]]:
    """Publish a chain whose first 1,200 blocks are in DRAM and whose first 1,500 are on NVMe."""
    peer, keys = running.peer(), chain("a", LENGTH)
    await peer.register()
    await peer.publish(peer.dram, run_of(keys, 0, 1_200))
    await peer.publish(peer.nvme, run_of(keys, 0, 1_500))
    restart(running)
    return peer, list(keys)


def restart(running: Running) -> None:
    """Make the server forget what it learned about ends, as a restart does."""
    index = running.server._index
    assert isinstance(index, lmdb.LmdbIndex)
    index._run_ends = RunEndCache()


async def test_lookup_with_ends_reads_few_records_after_a_restart(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, keys = await publish(running)
    with records_read(monkeypatch) as searched:
        expected = await peer.lookup(keys)
    restart(running)
    with records_read(monkeypatch) as read:
        assert await peer.lookup(keys, ends=[1_200, 1_500]) == expected
    assert expected.hit_blocks == 1_500
    assert len(read) <= 4, "the head and both sides of both ends, without the absent ones"
    assert len(searched) > 10


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("case", WRONG)
async def test_lookup_with_wrong_ends_has_the_same_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch, case: str, known: bool
) -> None:
    peer, keys = await publish(running)
    expected = await peer.lookup(keys)
    if not known:
        restart(running)
    with records_read(monkeypatch) as read:
        for length in (LENGTH, 1_300, 7):
            answer = await peer.lookup(keys[:length], ends=WRONG[case])
            assert answer.hit_blocks == min(length, 1_500)
            if length == LENGTH:
                assert answer == expected
    assert len(read) <= 3 * (2 * len(WRONG[case]) + 30)
    assert (await peer.lookup(chain("b", 10), ends=WRONG[case])).hit_blocks == 0
