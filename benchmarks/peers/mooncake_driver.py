"""Runs inside the peer's own interpreter: one Mooncake Store client, or a process that only lends its memory.

Speaks JSON lines: one request on stdin, one answer on stdout (which the library's own chatter must not reach: it goes to
stderr). Ends when stdin does. Started by ``peers.mooncake`` as ``python -I mooncake_driver.py CONFIG_JSON``.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from mooncake.store import MooncakeDistributedStore


class Driver:
    """One client with one registered buffer."""

    def __init__(self, config: dict[str, object]) -> None:
        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            config["hostname"],
            config["metadata"],
            config["segment_bytes"],
            config["local_buffer_bytes"],
            "tcp",
            "",
            config["master"],
        )
        if code:
            raise SystemExit(f"setup answered {code}")
        self.memory = np.zeros(0, np.uint8)

    def buffer(self, nbytes: int, seed: int) -> dict[str, object]:
        """Makes and registers the caller's memory, filled with bytes that a get must bring back."""
        self.memory = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        return {"code": self.store.register_buffer(self.memory.ctypes.data, nbytes)}

    def _batches(self, names: list[str], block_bytes: int, batch: int) -> list[tuple[list[str], list[int], list[int]]]:
        at = self.memory.ctypes.data
        pointers = [at + i * block_bytes for i in range(len(names))]
        return [
            (names[i : i + batch], pointers[i : i + batch], [block_bytes] * len(names[i : i + batch]))
            for i in range(0, len(names), batch)
        ]

    def put(self, names: list[str], block_bytes: int, batch: int) -> dict[str, object]:
        """Puts blocks from the buffer."""
        batches = self._batches(names, block_bytes, batch)
        start = time.perf_counter()
        codes = [code for part in batches for code in self.store.batch_put_from(*part)]
        return {"seconds": time.perf_counter() - start, "bad": sum(code != 0 for code in codes)}

    def get(self, names: list[str], block_bytes: int, batch: int) -> dict[str, object]:
        """Gets blocks into the buffer, wiped before, and compares them afterwards, outside of the time."""
        expected = self.memory.copy()
        self.memory[:] = 0
        batches = self._batches(names, block_bytes, batch)
        start = time.perf_counter()
        sizes = [size for part in batches for size in self.store.batch_get_into(*part)]
        elapsed = time.perf_counter() - start
        wrong = int(not np.array_equal(expected, self.memory))
        self.memory[:] = expected
        return {"seconds": elapsed, "bad": sum(size != block_bytes for size in sizes) + wrong}

    def exist(self, names: list[str], calls: int) -> dict[str, object]:
        """Asks for the presence of all names, several times; every call's time."""
        times = []
        present = 0
        for _ in range(calls):
            start = time.perf_counter()
            answers = self.store.batch_is_exist(names)
            times.append(time.perf_counter() - start)
            present = sum(answer == 1 for answer in answers)
        return {"seconds": times, "present": present}

    def remove(self, names: list[str]) -> dict[str, object]:
        """Drops blocks, also those under the lease of a get, so that the next put has space."""
        return {"bad": sum(self.store.remove(name, True) != 0 for name in names)}


def main() -> None:
    """Serves requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    driver = Driver(json.loads(sys.argv[1]))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(driver, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers, flush=True)
    driver.store.close()


if __name__ == "__main__":
    main()
