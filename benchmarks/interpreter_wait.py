"""Measure how long another Python thread waits while pieces of 64 KiB are hashed, as an engine beside its loads would.

One thread computes checksums without a pause. Another sleeps for half a millisecond at a time and records how much later it runs
again. The peer is the xxhash library, piece by piece: it keeps the interpreter lock for pieces of up to 64 KiB. The limit is the
same without any hashing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import xxhash

import harness
from harness import Figure, Reference, Target
from kvstore import native
from kvstore.core.buffers import DenseBlocks
from kvstore.core.checksum import block_checksums

PIECE_BYTES = 64 << 10
PIECES = 512
SLEEP_S = 0.0005


def p99_wait_ms(hash_all: Callable[[], object] | None, samples: int) -> float:
    """Return the 99th percentile of the waits beside a thread that calls ``hash_all`` without a pause; None: no thread."""
    stopped = threading.Event()

    def keep_hashing() -> None:
        while not stopped.is_set():
            if hash_all is not None:
                hash_all()

    hasher = threading.Thread(target=keep_hashing) if hash_all is not None else None
    if hasher is not None:
        hasher.start()
    waits_s = []
    for _ in range(samples):
        began_s = time.perf_counter()
        time.sleep(SLEEP_S)
        waits_s.append(time.perf_counter() - began_s - SLEEP_S)
    stopped.set()
    if hasher is not None:
        hasher.join()
    return sorted(waits_s)[samples * 99 // 100] * 1e3


def main() -> None:
    """Measure all three."""
    options = harness.options("interpreter_wait", __doc__)
    samples = options.pick(full=2_000, quick=500, smoke=20)
    memory = np.random.default_rng(options.seed).integers(0, 256, (PIECES, 1, PIECE_BYTES), np.uint8)
    blocks, views = DenseBlocks(memory), [row.data for row in memory[:, 0]]
    digest = xxhash.xxh3_64_intdigest
    waits = harness.interleave(
        {
            "ours": lambda: p99_wait_ms(lambda: block_checksums(blocks, range(PIECES)), samples),
            "xxhash": lambda: p99_wait_ms(lambda: [digest(view) for view in views], samples),
            "idle": lambda: p99_wait_ms(None, samples),
        },
        options.repetitions,
    )
    options.keep(
        Figure(
            "interpreter_wait",
            "Wait of another thread while pieces are hashed, p99",
            {"piece_bytes": PIECE_BYTES},
            "ms",
            lower_is_better=True,
        ),
        waits["ours"],
        peer=Reference("xxhash, piece by piece", waits["xxhash"]),
        limit=Reference("no hashing", waits["idle"]),
        target=Target("value", 0.3),
        notes=f"kernel {native.kernel_name()}",
    )


if __name__ == "__main__":
    main()
