"""A store that goes wrong on purpose, under an engine that must not mind."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc
from kvstore.core.errors import KVStoreError
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.process.node_id import check_node_id
from kvstore.rpc.client import call
from kvstore.testing.connector.driver import StoreAddress
from kvstore.testing.fault_proxy import FaultProxy, Faults

NODE = check_node_id("kit-node")
METADATA = "metadata"
MIB = 1 << 20
_PAGE = 4096
_SLAB_BEGIN = MIB
"""End of the superblock."""
_CALL_S = 20.0
_STALL_S = (0.1, 1.5)
_DELAY_S = 0.3


class StoreFault(StrEnum):
    """Faults of a store."""

    NODE_KILLED = "node killed"
    METADATA_KILLED = "metadata server killed"
    ALL_KILLED = "node and metadata server killed"
    NODE_STALLED = "node stalled"
    METADATA_STALLED = "metadata server stalled"
    METADATA_SLOW = "metadata server behind a slow network"
    METADATA_CUT = "connections to the metadata server cut"
    MEMORY_CORRUPTED = "bytes in the node's memory changed"
    DISK_CORRUPTED = "bytes on the node's disk changed"
    EVICTED = "all blocks evicted from memory"


class FaultyStore:
    """A metadata server (behind a proxy) and one node with memory and disk. A context manager.

    Args:
        folder: folder for data and logs.
        dram_bytes: of the node; if small, blocks are evicted while they are used.
        nvme_bytes: of the node; if small, the volume fills up.
    """

    def __init__(self, folder: Path, dram_bytes: int = 64 * MIB, nvme_bytes: int = 64 * MIB) -> None:
        self.cluster = LocalCluster([NodeSpec(NODE, dram_bytes=dram_bytes, nvme_bytes=nvme_bytes)], folder)
        self._proxy: FaultProxy | None = None
        self._stalled: list[threading.Timer] = []
        self._down: set[str] = set()

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        self._proxy = FaultProxy(self.cluster.metadata_address)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_stalls()
        if self._proxy is not None:
            self._proxy.stop()
        self.cluster.close()

    @property
    def address(self) -> StoreAddress:
        """For engines. It holds over restarts."""
        assert self._proxy is not None
        return StoreAddress(self._proxy.address, self.cluster.node(NODE).local_socket)

    # ---- what goes wrong ----
    def strike(self, fault: StoreFault, dice: random.Random) -> None:
        """Begin the fault; ``heal`` ends it."""
        assert self._proxy is not None
        match fault:
            case StoreFault.NODE_KILLED:
                self._kill(NODE)
            case StoreFault.METADATA_KILLED:
                self._kill(METADATA)
            case StoreFault.ALL_KILLED:
                self._kill(NODE)
                self._kill(METADATA)
            case StoreFault.NODE_STALLED:
                self._stall(NODE, dice.uniform(*_STALL_S))
            case StoreFault.METADATA_STALLED:
                self._stall(METADATA, dice.uniform(*_STALL_S))
            case StoreFault.METADATA_SLOW:
                self._proxy.to_client = Faults(delay_s=dice.uniform(0, _DELAY_S))
            case StoreFault.METADATA_CUT:
                self._proxy.cut()
            case StoreFault.MEMORY_CORRUPTED:
                self.corrupt_memory(dice)
            case StoreFault.DISK_CORRUPTED:
                self.corrupt_disk(dice)
                self.evict_memory()
            case StoreFault.EVICTED:
                self.evict_memory()

    def heal(self) -> None:
        """Restart everything; corrupt blocks remain corrupt."""
        assert self._proxy is not None
        self._end_stalls()
        self._proxy.to_client = Faults()
        for name in sorted(self._down):  # the metadata server before the node
            self.start(name)

    def _kill(self, name: str) -> None:
        if name not in self._down:
            self._down.add(name)
            self.cluster.kill(name)

    def start(self, name: str) -> None:
        """Start a daemon that was killed."""
        self._down.discard(name)
        if name == METADATA:
            self.cluster.start_metadata()
        else:
            self.cluster.start_node(name)

    def restart(self, name: str) -> None:
        """Kill a daemon and start it again."""
        self._kill(name)
        self.start(name)

    def _stall(self, name: str, seconds: float) -> None:
        process = self.cluster.node(name).process
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, process.send_signal, (signal.SIGCONT,))
        timer.start()
        self._stalled.append(timer)

    def _end_stalls(self) -> None:
        for timer in self._stalled:
            timer.join()
        self._stalled.clear()

    # ---- bytes ----
    def corrupt_memory(self, dice: random.Random) -> None:
        """Change bytes all over the node's arena, as failing memory would."""
        with self._arena() as memory:
            for page in _used_pages(memory):
                memory[page + dice.randrange(_PAGE)] ^= 1 << dice.randrange(8)

    def roll_memory(self, by: int = 64) -> None:
        """Rotate the bytes of each page of the node's arena: valid numbers in the wrong places."""
        with self._arena() as memory:
            for page in _used_pages(memory):
                content = memory[page : page + _PAGE]
                memory[page : page + _PAGE] = content[by:] + content[:by]

    def corrupt_disk(self, dice: random.Random) -> None:
        """Change bytes all over the node's volume, if it has one."""
        path = self.cluster.volume_path(NODE) / "slab.kv"
        if not path.exists():
            return
        with path.open("r+b") as slab:
            size = os.fstat(slab.fileno()).st_size
            for place in range(_SLAB_BEGIN, size, 16 * _PAGE):
                slab.seek(place + dice.randrange(16 * _PAGE))
                byte = slab.read(1)
                if byte:
                    slab.seek(-1, os.SEEK_CUR)
                    slab.write(bytes([byte[0] ^ (1 << dice.randrange(8))]))
            slab.flush()
            os.fsync(slab.fileno())

    @contextmanager
    def _arena(self) -> Iterator[mmap.mmap]:
        """The node's memory, mapped from outside."""
        folder = Path(f"/proc/{self.cluster.node(NODE).process.pid}/fd")
        arenas = set()
        for fd in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed concurrently
                if os.readlink(fd).startswith("/memfd:"):
                    arenas.add(fd)
        with min(arenas).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            yield memory

    # ---- the node's doors ----
    def flush(self) -> None:
        """All that the node holds is durable, or given up."""
        self._call(lambda node: call(node.Flush, node_pb2.FlushRequest(timeout_ms=int(_CALL_S * 1000)), _CALL_S + 1))

    def evict_memory(self) -> None:
        """Evict all durable blocks from the node's memory."""
        request = node_pb2.EvictRequest(operation_id=bytes(16), tier=common_pb2.TIER_DRAM)
        self._call(lambda node: call(node.Evict, request, _CALL_S))

    def _call(self, what: Callable[[node_pb2_grpc.NodeStub], object]) -> None:
        if NODE in self._down:
            return
        with grpc.insecure_channel(self.cluster.node(NODE).address) as channel:
            try:
                what(node_pb2_grpc.NodeStub(channel))
            except KVStoreError:
                if self.cluster.node(NODE).process.poll() is None:
                    raise


def _used_pages(memory: mmap.mmap) -> Iterator[int]:
    """Offsets of pages that hold anything but zeros."""
    empty = bytes(_PAGE)
    return (place for place in range(0, len(memory), _PAGE) if memory[place : place + _PAGE] != empty)
