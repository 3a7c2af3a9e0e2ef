"""Bare NIXL between two processes, with the same memory and descriptors as the store's transport.

No keys, no checksums, no pins: one side has all addresses, and moves batch after batch. ``pull``: the client reads the child's
memory. ``push``: the child writes into the client's, which lets its agent make progress for as long as that takes.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from select import select
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from kvstore.core.checksum import piece_checksums
from kvstore.transport.nixl.address_table import Rows, consecutive_blocks
from kvstore.transport.nixl.agent import WAIT_S, NixlAgent, NixlOptions, Region

BATCH_BYTES = 64 << 20
"""Descriptors handed to NIXL at once: larger batches are not faster."""

SUMMED_BYTES = 8 << 20
"""Bytes that are moved and then summed together."""

HEAR_S = 60.0
"""Timeout of any command of the child, in seconds."""

Way = Literal["pull", "push"]


def address_of(memory: np.ndarray) -> int:
    """Address of an array."""
    return int(memory.__array_interface__["data"][0])


class BareNixl:
    """A child process that holds ``len(memory)`` bytes, and an agent here.

    Args:
        memory: here, uint8.
        block_bytes: of one descriptor.
        transports: as ``NixlOptions``.
        way: the side that moves the bytes.
    """

    def __init__(self, memory: np.ndarray, block_bytes: int, transports: str, way: Way) -> None:
        self._way = way
        self._memory = memory
        self._port = NixlAgent(
            NixlOptions(transports=transports), name="bare", regions=[Region(address_of(memory), memory.nbytes)]
        )
        self._epoch, metadata = self._port.metadata()
        command = [sys.executable, __file__, str(memory.nbytes), str(block_bytes), transports or "auto"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        count = memory.nbytes // block_bytes
        self._ours = consecutive_blocks(address_of(memory), count, 1, block_bytes).rows(1, contiguous=True)
        self._say({"agent": base64.b64encode(metadata).decode(), "address": address_of(memory)})
        told = self._hear()
        self._theirs = consecutive_blocks(told["address"], count, 1, block_bytes).rows(1, contiguous=True)
        self._name = self._port.add_remote(self._epoch, base64.b64decode(told["agent"]))
        self._batch = max(1, BATCH_BYTES // block_bytes)

    def load(self, layer_bytes: int = 0) -> None:
        """Move everything once. ``layer_bytes``: compute a checksum per piece of this size, chunk by chunk if this side pulls."""
        self._say({"do": self._way})
        if self._way == "pull":
            batch = min(self._batch, max(1, SUMMED_BYTES // int(self._ours[0, 1]))) if layer_bytes else self._batch
            for start in range(0, len(self._ours), batch):
                these = slice(start, start + batch)
                move(self._port, self._epoch, "READ", self._ours[these], self._theirs[these], self._name, batch)
                self._sum(these, layer_bytes)
            self._say({"do": "done"})
            self._hear()
            return
        assert self._child.stdout is not None
        end_s = time.monotonic() + HEAR_S
        while not select([self._child.stdout], [], [], 0)[0] and time.monotonic() < end_s:
            self._port.progress(self._epoch)
            time.sleep(WAIT_S)
        self._hear()
        self._sum(slice(None), layer_bytes)

    def _sum(self, rows: slice, layer_bytes: int) -> None:
        if layer_bytes:
            begin = int(self._ours[rows][0, 0]) - address_of(self._memory)
            piece = self._memory.data[begin : begin + int(self._ours[rows][:, 1].sum())]
            piece_checksums([piece], layer_bytes)

    def _say(self, what: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        if not select([self._child.stdout], [], [], HEAR_S)[0]:  # it says one line to each of ours: none waits in a buffer
            raise TimeoutError(f"the child process did not answer within {HEAR_S:g} s")
        told: dict[str, Any] = json.loads(self._child.stdout.readline())
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(timeout=10)
        self._child.stdout.close()
        self._port.close()


def move(
    port: NixlAgent, epoch: int, operation: Literal["READ", "WRITE"], ours: Rows, theirs: Rows, name: str, batch: int
) -> None:
    """Batch after batch. Between two looks it sleeps as the store does: on two cores a loop that spins is half as fast."""
    for start in range(0, len(ours), batch):
        transfer = port.start(epoch, operation, ours[start : start + batch], theirs[start : start + batch], name)
        while transfer is not None and not port.is_done(transfer):
            time.sleep(WAIT_S)


def serve(total: int, block_bytes: int, transports: str) -> None:
    """Run the child: hold bytes and move them or help to, until stdin closes."""
    memory = np.random.default_rng(1).integers(0, 256, total, np.uint8)
    port = NixlAgent(NixlOptions(transports=transports), name="bare-child", regions=[Region(address_of(memory), total)])
    epoch, metadata = port.metadata()
    orders = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 - a line in a buffer is not seen by select
    told = json.loads(orders.readline())
    name = port.add_remote(epoch, base64.b64decode(told["agent"]))
    count = total // block_bytes
    ours = consecutive_blocks(address_of(memory), count, 1, block_bytes).rows(1, contiguous=True)
    theirs = consecutive_blocks(told["address"], count, 1, block_bytes).rows(1, contiguous=True)
    print(json.dumps({"agent": base64.b64encode(metadata).decode(), "address": address_of(memory)}), flush=True)
    for line in orders:
        do = json.loads(line)["do"]
        if do == "push":
            move(port, epoch, "WRITE", ours, theirs, name, max(1, BATCH_BYTES // block_bytes))
        elif do == "pull":
            while not select([orders], [], [], 0)[0]:
                port.progress(epoch)
                time.sleep(1e-3)  # a pulling reader needs this agent only to connect
            orders.readline()
        print("{}", flush=True)
    port.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), "" if sys.argv[3] == "auto" else sys.argv[3])
