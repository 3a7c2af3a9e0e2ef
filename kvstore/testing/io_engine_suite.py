"""Conformance suite of I/O engines: what every ``IoEngine`` must do.

Subclass it, name the class ``Test…``, and give it an ``open_engine``::

    class TestMyEngine(IoEngineSuite):
        def open_engine(self, path: Path, counters: Counters) -> IoEngine:
            return MyEngine(path)
"""

from __future__ import annotations

import mmap
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.observe.counters import Counters
from kvstore.tiers.io_engines.contract import DeviceMemory, IoEngine

FILE_BYTES = 6 << 20
PAGE = 4096


def page_memory(nbytes: int) -> memoryview:
    """Zeroed memory, aligned to 4096 bytes."""
    return memoryview(mmap.mmap(-1, nbytes))


class HostDeviceMemory:
    """Device memory backed by host memory."""

    def __init__(self, nbytes: int) -> None:
        self.memory = page_memory(nbytes)
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        address = np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0]
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}

    def fill(self, source: memoryview) -> None:
        """See ``DeviceMemory``."""
        self.memory[:] = source

    def fetch(self, target: memoryview) -> None:
        """See ``DeviceMemory``."""
        target[:] = self.memory


class IoEngineSuite(ABC):
    """Behaviour that every I/O engine must have."""

    @abstractmethod
    def open_engine(self, path: Path, counters: Counters) -> IoEngine:
        """Open a file."""

    def device_memory(self, nbytes: int) -> DeviceMemory:
        """Memory for ``read_device``."""
        return HostDeviceMemory(nbytes)

    @pytest.fixture
    def content(self, tmp_path: Path) -> bytes:
        """Content of the file."""
        content = random.Random(5).randbytes(FILE_BYTES)  # noqa: S311
        (tmp_path / "file").write_bytes(content)
        return content

    @pytest.fixture
    def engine(self, tmp_path: Path, content: bytes) -> Iterator[IoEngine]:  # noqa: ARG002  # written first
        """The engine, with the file open."""
        engine = self.open_engine(tmp_path / "file", Counters())
        yield engine
        engine.close()

    @pytest.mark.parametrize(
        "sizes",
        [[1], [1, 1, 1], [256], [1, 300, 1], [257, 511, 3], [1] * 40, [1, 32] * 12],
        ids=lambda sizes: f"{len(sizes)} pieces of {sum(sizes)} pages",
    )
    @pytest.mark.parametrize("position", [0, PAGE, 300 * PAGE])
    def test_read_pieces_are_filled_in_order(self, engine: IoEngine, content: bytes, sizes: list[int], position: int) -> None:
        pieces = [page_memory(pages * PAGE) for pages in sizes]
        total = sum(sizes) * PAGE
        assert engine.read(pieces, position) == total
        assert b"".join(bytes(piece) for piece in pieces) == content[position : position + total]

    def test_read_memory_beside_pieces_is_unchanged(self, engine: IoEngine, content: bytes) -> None:
        memory = page_memory(8 * PAGE)
        assert engine.read([memory[PAGE : 2 * PAGE], memory[4 * PAGE : 6 * PAGE]], 7 * PAGE) == 3 * PAGE
        assert bytes(memory[PAGE : 2 * PAGE]) == content[7 * PAGE : 8 * PAGE]
        assert bytes(memory[4 * PAGE : 6 * PAGE]) == content[8 * PAGE : 10 * PAGE]
        assert not any(bytes(memory[:PAGE]) + bytes(memory[2 * PAGE : 4 * PAGE]) + bytes(memory[6 * PAGE :]))

    @pytest.mark.parametrize("beyond", [1, 3, 600])
    def test_read_past_end_of_file_is_not_complete(self, engine: IoEngine, beyond: int) -> None:
        pieces = [page_memory(PAGE), page_memory(beyond * PAGE)]
        assert engine.read(pieces, FILE_BYTES - PAGE) < (1 + beyond) * PAGE
        assert engine.read([page_memory(PAGE)], FILE_BYTES + 4 * PAGE) <= 0

    def test_read_of_truncated_file_is_not_complete(self, engine: IoEngine, tmp_path: Path) -> None:
        os.truncate(tmp_path / "file", 3 * PAGE)
        assert engine.read([page_memory(2 * PAGE), page_memory(2 * PAGE)], PAGE) < 4 * PAGE

    def test_read_returns_writes_of_others(self, engine: IoEngine, tmp_path: Path) -> None:
        fresh = bytes([7]) * (4 * PAGE)
        with (tmp_path / "file").open("r+b") as file:
            file.seek(20 * PAGE)
            file.write(fresh)
            file.flush()
            os.fsync(file.fileno())
        memory = page_memory(len(fresh))
        assert engine.read([memory], 20 * PAGE) == len(fresh)
        assert bytes(memory) == fresh

    def test_read_by_many_threads_is_correct(self, engine: IoEngine, content: bytes) -> None:
        wrong: list[int] = []

        def read(seed: int) -> None:
            draw = random.Random(seed)  # noqa: S311
            for _ in range(30):
                pages = draw.randint(1, 40)
                position = draw.randrange(FILE_BYTES // PAGE - pages) * PAGE
                memory = page_memory(pages * PAGE)
                if engine.read([memory], position) != pages * PAGE or memory != content[position : position + pages * PAGE]:
                    wrong.append(seed)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    @pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE + 1000, 1 << 20, (2 << 20) + PAGE])
    def test_device_memory_is_filled_or_declined(self, engine: IoEngine, content: bytes, nbytes: int) -> None:
        memory = self.device_memory(nbytes)
        if engine.read_device(memory, 5 * PAGE):
            found = page_memory(nbytes)
            memory.fetch(found)
            assert bytes(found) == content[5 * PAGE : 5 * PAGE + nbytes]

    def test_device_memory_beyond_the_end_is_declined(self, engine: IoEngine) -> None:
        assert not engine.read_device(self.device_memory(2 << 20), FILE_BYTES - PAGE)

    def test_engine_has_a_description(self, engine: IoEngine) -> None:
        assert engine.name
