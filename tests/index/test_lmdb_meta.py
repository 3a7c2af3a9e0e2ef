"""The check of an LMDB file's length, while another transaction makes the file longer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvstore.process.lmdb_meta import is_whole


class GrowingFile:
    """An LMDB file in which a transaction ends after each of the first ``commits`` reads."""

    def __init__(self, path: Path, commits: int) -> None:
        self._env = lmdb.open(str(path), map_size=1 << 28, sync=False)
        self._path = path / "data.mdb"
        self._commits = commits
        self.commit()

    def commit(self) -> None:
        with self._env.begin(write=True) as transaction:
            for _ in range(50):
                transaction.put(os.urandom(32), bytes(2_000))

    def length(self) -> int:
        return self._path.stat().st_size

    def read(self, offset: int, size: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(offset)
            found = file.read(size)
        if self._commits:
            self._commits -= 1
            self.commit()
        return found

    def close(self) -> None:
        self._env.close()


@pytest.fixture(params=[0, 1, 2, 7])
def growing(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GrowingFile]:
    made = GrowingFile(tmp_path, request.param)
    yield made
    made.close()


def test_file_is_whole_while_it_grows(growing: GrowingFile) -> None:
    assert is_whole(growing.length, growing.read)


def test_file_short_is_looked_at_again_after_commit(growing: GrowingFile) -> None:
    short = [growing.length()]

    def length() -> int:
        if not short:
            return growing.length()
        growing.commit()
        return short.pop() - 4_096

    assert is_whole(length, growing.read)


def test_file_short_is_not_whole(growing: GrowingFile) -> None:
    length = growing.length()
    assert not is_whole(lambda: length // 2, growing.read)
