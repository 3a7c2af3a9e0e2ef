"""Measure how long another Python thread waits while pieces of 64 KiB are hashed, as an engine beside its loads would.

One thread computes checksums without a pause. Another sleeps for half a millisecond at a time and records how much later it runs
again. The peer is the xxhash library, piece by piece: it keeps the interpreter lock for pieces of up to 64 KiB. The limit is the
same without any hashing.

Four ways to hash are measured: the blocks of a buffer in one call, pieces that a read by NIXL has left in memory, and pieces that
are received from a socket or sent over one, segment by segment. The other end of the socket is ``cat``.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import xxhash

import harness
from harness import Figure, Reference, Target
from kvstore import native
from kvstore.core.buffers import DenseBlocks
from kvstore.core.checksum import block_checksums, piece_checksums
from kvstore.transport.tcp.receive import ChecksummedSend, receive_and_hash
from kvstore.transport.wire import PlainWire

PIECE_BYTES = 64 << 10
PIECES = 512
BLOCK_BYTES = 1 << 20
CHUNK_BLOCKS = 8
"""Blocks that NIXL moves before they are verified."""
SLEEP_S = 0.0005
CALL_S = 60.0


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


@contextmanager
def wire_to_cat(path: str, *, reads: bool) -> Iterator[PlainWire]:
    """Connect to a process that sends a file, or writes to it what it receives."""
    ours, theirs = socket.socketpair()
    with theirs, open(path, "rb" if not reads else "wb") as file:
        ends = (theirs.fileno(), file.fileno()) if reads else (file.fileno(), theirs.fileno())
        process = subprocess.Popen(["cat"], stdin=ends[0], stdout=ends[1], stderr=subprocess.DEVNULL)
    wire = PlainWire(ours)
    try:
        yield wire
    finally:
        wire.close()
        process.wait(CALL_S)


def send_hashed(wire: PlainWire, views: list[memoryview]) -> None:
    """Send pieces as a writer does, which hashes the first ones before the grant."""
    sending = ChecksummedSend(views, PIECE_BYTES)
    sending.hash_ahead()
    sending.run(wire, b"", time.monotonic() + CALL_S)


def main() -> None:
    """Measure all."""
    options = harness.options("interpreter_wait", __doc__)
    samples = options.pick(full=2_000, quick=500, smoke=20)
    memory = np.random.default_rng(options.seed).integers(0, 256, (PIECES, 1, PIECE_BYTES), np.uint8)
    blocks, views = DenseBlocks(memory), [row.data for row in memory[:, 0]]
    received = [block.data for block in memory.reshape(-1, BLOCK_BYTES)]
    chunks = [received[at : at + CHUNK_BLOCKS] for at in range(0, len(received), CHUNK_BLOCKS)]
    digest = xxhash.xxh3_64_intdigest
    with wire_to_cat("/dev/zero", reads=False) as source, wire_to_cat("/dev/null", reads=True) as sink:
        work: dict[str, Callable[[], object] | None] = {
            "buffer": lambda: block_checksums(blocks, range(PIECES)),
            "xxhash": lambda: [digest(view) for view in views],
            "idle": None,
            "NIXL": lambda: [piece_checksums(chunk, PIECE_BYTES) for chunk in chunks],
            "receive": lambda: receive_and_hash(source, views, PIECE_BYTES, time.monotonic() + CALL_S),
            "send": lambda: send_hashed(sink, views),
        }
        waits = harness.interleave(
            {name: partial(p99_wait_ms, hash_all, samples) for name, hash_all in work.items()}, options.repetitions
        )
    for what in ("buffer", "NIXL", "receive", "send"):
        options.keep(
            Figure(
                "interpreter_wait",
                "Wait of another thread while pieces are hashed, p99",
                {"piece_bytes": PIECE_BYTES} | ({} if what == "buffer" else {"what": what}),
                "ms",
                lower_is_better=True,
            ),
            waits[what],
            peer=Reference("xxhash, piece by piece", waits["xxhash"]),
            limit=Reference("no hashing", waits["idle"]),
            target=Target("value", 0.3),
            notes=f"kernel {native.kernel_name()}",
        )


if __name__ == "__main__":
    main()
